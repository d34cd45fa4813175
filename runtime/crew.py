"""Workers that come and go: units of work are handed to them, and what they finish is written down by the caller.

    with Crew(fleet, settings) as crew:
        crew.play(units, record, broken)

A unit is some items and what a worker must know to do them. A worker answers item by item, with a line of text each.
Whatever ends a worker (its process, its node, its silence) costs what it had not answered yet: that goes to another
one, `retries` times, the last time item by item, so that an item that kills whoever has it takes no other with it; then
`broken` says what is recorded in its place. Nothing is handed out again that was answered.

Where the workers are is the fleet's business: `runtime.ray_fleet` has them on Ray.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

from runtime.cluster import ClusterError, RaySettings

log = logging.getLogger("memcompiler.cluster")
EVERY_S = 2.0  # between two looks at what resources there are
TURN_S = 1.0  # that one waits for workers at most, before one looks at the clock
Line = tuple[str, str]  # an item's key, and what was made of it


class Worker(Protocol):
    """Does units, in a process of its own; made there."""

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        """Do all items of a unit, and say each one's line as soon as it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Unit:
    """Some items by their keys, and what a worker must know to do them. `lost`: why those who had them are gone."""

    what: Any
    items: Mapping[str, Any]
    lost: tuple[str, ...] = ()


# -- what a fleet says of its workers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker is there, and free."""


@dataclass(frozen=True, slots=True)
class Answered:
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Finished:
    """Its unit is over, and it is free."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It is gone, for this reason, and what it had not answered with it."""

    why: str


Event = Ready | Answered | Finished | Lost


class Fleet(Protocol):
    """Where workers come from. A handle is hashable, and stands for one worker."""

    def room(self) -> int:
        """Say how many workers the resources that are there now have room for."""
        ...

    def hire(self) -> Any:
        """Ask for a worker, who comes (`Ready`) when there is room. Returns its handle."""
        ...

    def begin(self, handle: Any, unit: Unit) -> None:
        """Hand a unit to a free worker."""
        ...

    def wait(self, timeout_s: float) -> Iterator[tuple[Any, Event]]:
        """Yield what has happened since, once something has. Raises: what a worker raised."""
        ...

    def dismiss(self, handle: Any) -> None:
        """End a worker, or withdraw the request for one."""
        ...


# -- the driver --------------------------------------------------------------------------------------------------------

Broken = Callable[[Any, str, Any, str], str]  # from a unit's `what`, an item's key, the item, and reasons: its line


@dataclass(slots=True)
class _Hand:
    """A worker as the driver knows it: asked for, or there, with what is left of its unit."""

    heard: float  # when it was last heard of
    there: bool = False
    unit: Unit | None = None
    left: dict[str, Any] = field(default_factory=dict)


class Crew:
    """Workers of a fleet: as many as the settings allow, as the resources have room for, and as there is work for; one
    more is always asked for, for room that comes later. They are kept from one `play` to the next."""

    def __init__(self, fleet: Fleet, settings: RaySettings) -> None:
        self._fleet, self._settings = fleet, settings
        self._hands: dict[Any, _Hand] = {}
        self._free: deque[Any] = deque()  # of these the ones that are there without a unit
        self._busy = 0  # and how many have one
        self._waiting: deque[Unit] = deque()
        self._looked = float("-inf")  # when we last looked around
        self._heard = 0.0  # when anybody was last heard of
        self._stillborn = 0  # workers that were lost before they had ever been there, one after another

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in list(self._hands):
            self._dismiss(handle)

    def play(self, units: Sequence[Unit], record: Callable[[Sequence[Line]], None], broken: Broken) -> None:
        """Have units done; returns when all are.

        Args:
            record: writes down what was answered, some lines at a time.
            broken: says what is recorded of an item over which worker after worker was lost.

        Raises:
            ClusterError: there is nobody to do them.
            Exception: what a worker raised.
        """
        self._waiting, self._heard, self._looked = deque(units), time.monotonic(), float("-inf")
        while self._waiting or self._busy:
            lines = self._look_around(broken)
            while self._waiting and self._free:
                self._begin(self._free.popleft(), self._waiting.popleft())
            try:
                for handle, event in self._fleet.wait(TURN_S):
                    if handle in self._hands:  # not dismissed meanwhile
                        lines += self._note(handle, event, broken)
            finally:  # whatever one worker raises, what others have said is not lost
                if lines:
                    record(lines)
        for handle in [handle for handle, hand in self._hands.items() if not hand.there]:
            self._dismiss(handle)  # nobody has to come any more

    def ask(self, what: Any) -> str:
        """Have one worker answer one question."""
        answers: list[Line] = []
        self.play([Unit(what, {"": None})], answers.extend, _unanswered)
        return answers[0][1]

    def _begin(self, handle: Any, unit: Unit) -> None:
        hand = self._hands[handle]
        hand.unit, hand.left, hand.heard = unit, dict(unit.items), time.monotonic()
        self._busy += 1
        self._fleet.begin(handle, unit)

    def _note(self, handle: Any, event: Event, broken: Broken) -> list[Line]:
        """Take in what a worker says; returns what is to be recorded."""
        hand = self._hands[handle]
        hand.heard = self._heard = time.monotonic()
        match event:
            case Ready():
                hand.there, self._stillborn = True, 0
                self._free.append(handle)
            case Answered(lines):
                for key, _ in lines:
                    del hand.left[key]
                return list(lines)
            case Finished():
                if hand.left:
                    raise ClusterError(
                        f"a worker left {len(hand.left)} of its items undone, {next(iter(hand.left))} first"
                    )
                hand.unit = None
                self._busy -= 1
                self._free.append(handle)
            case Lost(why):
                return self._lose(handle, why, broken)
        return []

    def _lose(self, handle: Any, why: str, broken: Broken) -> list[Line]:
        """Forget a worker. What it leaves goes first in the queue or, returned here, on record."""
        hand, retries = self._hands.pop(handle), self._settings.retries
        log.warning("a worker is lost: %s", why)
        if hand.unit is None:
            self._stillborn += not hand.there
            if hand.there:
                self._free.remove(handle)
            if self._stillborn > retries:
                raise ClusterError(
                    f"{self._stillborn} workers in a row were lost before they were ready, the last: {why}"
                )
            return []
        self._busy -= 1
        lost = (*hand.unit.lost, why)
        if len(lost) > retries:
            reasons = f"{len(lost)} workers were lost over it: {'; '.join(lost)}"
            return [(key, broken(hand.unit.what, key, item, reasons)) for key, item in hand.left.items()]
        size = 1 if len(lost) == retries else max(1, len(hand.left))
        self._waiting.extendleft(reversed(list(units_of(hand.unit.what, hand.left, size, lost))))
        return []

    def _look_around(self, broken: Broken) -> list[Line]:
        """Now and then, ask for the workers that there is room and work for, and give up those that are silent."""
        if (now := time.monotonic()) - self._looked < EVERY_S:
            return []
        self._looked, silence = now, self._settings.silence_s
        wanted = min(self._busy + len(self._waiting), self._settings.workers or self._fleet.room() + 1)
        for _ in range(wanted - len(self._hands)):
            self._hands[self._fleet.hire()] = _Hand(now)
        if not self._busy and not self._free and now - self._heard > silence:
            raise ClusterError(
                f"no worker came in {silence:g} s: one takes {self._settings.cpus:g} CPUs (ray.cpus) and "
                f"{self._settings.gpus:g} GPUs (ray.gpus), and no node has them free"
            )
        lines: list[Line] = []
        for handle in [h for h, hand in self._hands.items() if hand.unit is not None and now - hand.heard > silence]:
            self._fleet.dismiss(handle)
            lines += self._lose(handle, f"it said nothing for {silence:g} s", broken)
        return lines

    def _dismiss(self, handle: Any) -> None:
        self._hands.pop(handle)
        self._fleet.dismiss(handle)


def _unanswered(what: Any, key: str, item: Any, reasons: str) -> str:
    raise ClusterError(f"nobody could answer: {reasons}")


def units_of(what: Any, items: Mapping[str, Any], size: int, lost: tuple[str, ...] = ()) -> Iterator[Unit]:
    """Cut items into units of `size`, in their order."""
    pairs = iter(items.items())
    while some := dict(islice(pairs, size)):
        yield Unit(what, some, lost)
