"""Workers without Ray: a fleet in this very process, whose workers die when they are told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.worker_pool import Answered, Event, Finished, Lost, Ready, Worker, WorkUnit


class InProcessBackend:
    """Workers, numbered from 0 in the order in which they are asked for, one line of whom is heard at a time.

    Args:
        make: makes one.
        rooms: for how many there is room, each time that one asks; the last stays.
        deaths: after how many lines a worker is lost, by its number; -1: before it is there.
        mute: those who never say anything.
    """

    def __init__(
        self,
        make: Callable[[], Worker],
        rooms: tuple[int, ...] = (2,),
        deaths: Mapping[int, int] | None = None,
        mute: tuple[int, ...] = (),
    ) -> None:
        self.make, self.deaths, self.mute = make, dict(deaths or {}), mute
        self.rooms, self.hired, self.asked = deque(rooms), 0, 0  # asked: most workers at a time
        self.workers: dict[int, Worker] = {}
        self.told: dict[int, deque[Event]] = {}
        self.begun: list[tuple[int, WorkUnit]] = []
        self.dismissed: list[int] = []

    def capacity(self) -> int:
        return self.rooms.popleft() if len(self.rooms) > 1 else self.rooms[0]

    def start(self) -> int:
        number, self.hired = self.hired, self.hired + 1
        self.told[number] = deque()
        if self.deaths.get(number) == -1:
            self.told[number].append(Lost("died at birth"))
        self.asked = max(self.asked, len(self.told))
        return number

    def _let_in(self) -> None:
        """Have those who were asked for come, as far as there is room."""
        for number in [n for n, events in self.told.items() if n not in self.workers and not events]:
            if sum(n in self.workers for n in self.told) < self.rooms[0]:
                self.workers[number] = self.make()
                self.told[number].append(Ready())

    def submit(self, handle: int, unit: WorkUnit) -> None:
        self.begun.append((handle, unit))
        if handle in self.mute:
            return
        events, lines = self.told[handle], list[Any]()
        failure: list[BaseException] = []
        try:
            self.workers[handle].play(unit, lambda key, line: lines.append((key, line)))
        except Exception as error:
            failure.append(error)
        for line in lines:
            if handle in self.deaths and self.deaths[handle] == 0:
                break
            self.deaths[handle] = self.deaths.get(handle, 1 << 30) - 1
            events.append(Answered([line]))
        if self.deaths.get(handle) == 0:
            events.append(Lost("killed"))
        else:
            events.append(failure[0] if failure else Finished())  # type: ignore[arg-type]

    def wait(self, timeout_s: float) -> Iterator[tuple[int, Event]]:
        self._let_in()
        for number in [number for number, events in self.told.items() if events]:
            if isinstance(event := self.told[number].popleft(), BaseException):
                raise event
            if isinstance(event, Lost):
                del self.told[number]
            yield number, event

    def stop(self, handle: int) -> None:
        self.dismissed.append(handle)
        self.told.pop(handle, None)


class Echo:
    """Answers with the item; `bad` items kill whoever plays them (a InProcessBackend is told so), "raise" raises."""

    def play(self, unit: WorkUnit, done: Callable[[str, str], None]) -> None:
        for key, item in unit.items.items():
            if item == "raise":
                raise ValueError("a worker's own error")
            done(key, f"{unit.context}: {item}")
