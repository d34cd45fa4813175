"""What stays in a memory of bounded size (KARMA, section 3.6): FIFO with merging, LRU, W-TinyLFU, or everything.

A cache holds one value by id. `write` puts one in, `use` says that it served; which of them leaves is the policy's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from memory.karma.settings import KarmaSettings
from memory.karma.sketch import CountMin, Exact, Frequencies

V = TypeVar("V")
PROTECTED = 0.8  # of the main segment


class Cache(Protocol[V]):
    def write(self, id: str, value: V) -> None: ...

    def use(self, id: str) -> None: ...

    def revise(self, id: str, value: V) -> None:
        """Replace what an id that is held stands for; nobody uses it thereby."""
        ...

    def drop(self, id: str) -> None:
        """Forget what an id stands for, if it is there."""
        ...

    def items(self) -> list[tuple[str, V]]:
        """List what is held, the next to leave first as far as there is an order."""
        ...

    def __contains__(self, id: object) -> bool: ...

    def __len__(self) -> int: ...


class Fifo(Generic[V]):
    """The earliest entry leaves. `merge`: a new unit of an object takes the place of the one there is (always, or only
    where nothing else makes room), and keeps it unless it is to `refresh`."""

    def __init__(self, capacity: int, merge: str = "always", refresh: bool = False) -> None:
        self.capacity, self.merge, self.refresh = capacity, merge, refresh
        self._entries = list[tuple[str, V]]()

    def write(self, id: str, value: V) -> None:
        full = len(self._entries) >= self.capacity
        at = next((n for n, (held, _) in enumerate(self._entries) if held == id), None)
        if at is not None and (self.merge == "always" or (self.merge == "when_full" and full)):
            self._entries.pop(at)
            self._entries.insert(len(self._entries) if self.refresh else at, (id, value))
            return
        if full:
            self._entries.pop(0)
        self._entries.append((id, value))

    def use(self, id: str) -> None:
        pass

    def revise(self, id: str, value: V) -> None:
        self._entries = [(held, value if held == id else old) for held, old in self._entries]

    def drop(self, id: str) -> None:
        self._entries = [entry for entry in self._entries if entry[0] != id]

    def items(self) -> list[tuple[str, V]]:
        return list(self._entries)

    def __contains__(self, id: object) -> bool:
        return any(held == id for held, _ in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Lru(Generic[V]):
    """The one that was used or written longest ago leaves; without a capacity none does."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity, self._entries = capacity, OrderedDict[str, V]()

    def write(self, id: str, value: V) -> None:
        self._entries[id] = value
        self._entries.move_to_end(id)
        if self.capacity is not None and len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def use(self, id: str) -> None:
        self._entries.move_to_end(id)

    def revise(self, id: str, value: V) -> None:
        self._entries[id] = value

    def drop(self, id: str) -> None:
        self._entries.pop(id, None)

    def items(self) -> list[tuple[str, V]]:
        return list(self._entries.items())

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class WTinyLfu(Generic[V]):
    """Window and main segment, the latter in two parts, protected and elimination, each an LRU list. New units enter
    the window. When one must go:

    pool  (the paper) all of window and elimination are compared, but for the newcomer, and the one that was used least
          goes, of several the one that was used longest ago
    duel  (TinyLFU) the window's oldest goes, unless it was used more than elimination's oldest, whose place it takes
    """

    def __init__(
        self, window: int, main: int, frequencies: Frequencies, victim: str = "pool", age_on: str = "write"
    ) -> None:
        self._sizes, self._protects = (window, main), int(PROTECTED * main)
        self._victim, self._age_on, self.frequencies = victim, age_on, frequencies
        self.window, self.elimination, self.protected = (OrderedDict[str, V]() for _ in range(3))
        self._last_use, self._clock = dict[str, int](), 0

    def write(self, id: str, value: V) -> None:
        if (segment := self._segment(id)) is not None:
            segment[id] = value
            self.use(id)
        else:
            self._count(id)
            self.window[id] = value
            if len(self) > sum(self._sizes):
                self._evict(id)
            window, main = self._sizes
            while len(self.window) > window and len(self.elimination) + len(self.protected) < main:
                self._move(self.window, self.elimination)
        if self._age_on == "write":
            self.frequencies.tick()

    def use(self, id: str) -> None:
        self._count(id)
        if id in self.elimination:
            self.protected[id] = self.elimination.pop(id)
            while len(self.protected) > self._protects:
                self._move(self.protected, self.elimination)
        elif (segment := self._segment(id)) is not None:
            segment.move_to_end(id)

    def _count(self, id: str) -> None:
        self.frequencies.add(id)
        self._clock += 1
        self._last_use[id] = self._clock
        if self._age_on == "use":
            self.frequencies.tick()

    def _evict(self, newcomer: str) -> None:
        if self._victim == "duel":
            candidate, victim = next(iter(self.window)), next(iter(self.elimination), None)
            wins = victim is not None and self.frequencies.estimate(candidate) > self.frequencies.estimate(victim)
            self.drop(victim if wins and victim is not None else candidate)
            if wins:
                self.elimination[candidate] = self.window.pop(candidate)
            return
        pool = [id for id in (*self.window, *self.elimination) if id != newcomer] or [newcomer]
        self.drop(min(pool, key=lambda id: (self.frequencies.estimate(id), self._last_use[id])))

    def _segment(self, id: str) -> OrderedDict[str, V] | None:
        return next((part for part in (self.window, self.elimination, self.protected) if id in part), None)

    @staticmethod
    def _move(source: OrderedDict[str, V], target: OrderedDict[str, V]) -> None:
        """Move the oldest of a segment to the recent end of another."""
        id, value = source.popitem(last=False)
        target[id] = value

    def revise(self, id: str, value: V) -> None:
        if (segment := self._segment(id)) is not None:
            segment[id] = value

    def drop(self, id: str) -> None:
        if (segment := self._segment(id)) is not None:
            del segment[id], self._last_use[id]

    def items(self) -> list[tuple[str, V]]:
        return [*self.elimination.items(), *self.window.items(), *self.protected.items()]

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._segment(id) is not None

    def __iter__(self) -> Iterator[str]:
        return (id for id, _ in self.items())

    def __len__(self) -> int:
        return len(self.window) + len(self.elimination) + len(self.protected)


def make_cache(settings: KarmaSettings) -> Cache:
    """Make the cache that the settings describe, empty."""
    match settings.policy:
        case "fifo":
            return Fifo(settings.capacity, settings.merge, settings.refresh)
        case "lru":
            return Lru(settings.capacity)
        case "unlimited":
            return Lru(None)
    window, main = settings.segments
    counts = Exact() if settings.sketch == "exact" else CountMin(settings.capacity)
    frequencies = Frequencies(counts, settings.sample or 10 * settings.capacity, settings.doorkeeper)
    return WTinyLfu(window, main, frequencies, settings.victim, settings.age_on)
