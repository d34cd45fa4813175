"""A worker pool's backend without Ray, in this process, with scripted deaths of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.worker_pool import Answered, Event, Finished, Lost, Ready, Worker, WorkUnit


class InProcessBackend:
    """Workers, numbered from 0 in the order of requests, which send one line at a time.

    Args:
        make: creates a worker.
        rooms: successive values of `capacity()`; the last one repeats.
        deaths: number of lines before a worker is lost, by its number; -1: it never starts.
        mute: numbers of workers that never answer.
    """

    def __init__(
        self,
        make: Callable[[], Worker],
        rooms: tuple[int, ...] = (2,),
        deaths: Mapping[int, int] | None = None,
        mute: tuple[int, ...] = (),
    ) -> None:
        self.make, self.deaths, self.mute = make, dict(deaths or {}), mute
        self.rooms, self.hired, self.most = deque(rooms), 0, 0  # most: largest number of workers at a time
        self.workers: dict[int, Worker] = {}
        self.events: dict[int, deque[Event]] = {}
        self.begun: list[tuple[int, WorkUnit]] = []
        self.dismissed: list[int] = []

    def capacity(self) -> int:
        return self.rooms.popleft() if len(self.rooms) > 1 else self.rooms[0]

    def start(self) -> int:
        number, self.hired = self.hired, self.hired + 1
        self.events[number] = deque()
        if self.deaths.get(number) == -1:
            self.events[number].append(Lost("died at birth"))
        self.most = max(self.most, len(self.events))
        return number

    def _let_in(self) -> None:
        """Start requested workers while there is room."""
        for number in [n for n, events in self.events.items() if n not in self.workers and not events]:
            if sum(n in self.workers for n in self.events) < self.rooms[0]:
                self.workers[number] = self.make()
                self.events[number].append(Ready())

    def submit(self, handle: int, unit: WorkUnit) -> None:
        self.begun.append((handle, unit))
        if handle in self.mute:
            return
        events, lines = self.events[handle], list[Any]()
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
        for number in [number for number, events in self.events.items() if events]:
            if isinstance(event := self.events[number].popleft(), BaseException):
                raise event
            if isinstance(event, Lost):
                del self.events[number]
            yield number, event

    def stop(self, handle: int) -> None:
        self.dismissed.append(handle)
        self.events.pop(handle, None)


class Echo:
    """Answers every item with context and item; the item "raise" raises."""

    def play(self, unit: WorkUnit, done: Callable[[str, str], None]) -> None:
        for key, item in unit.items.items():
            if item == "raise":
                raise ValueError("a worker's own error")
            done(key, f"{unit.context}: {item}")
