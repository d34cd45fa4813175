"""Caches of short-term memory (KARMA, section 3.6): FIFO, LRU, W-TinyLFU and one without a limit.

A cache holds one value per id. `write` stores a value and `use` records a use; the policy decides which entry to evict.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

from memory.karma.settings import KarmaSettings

V = TypeVar("V")
PROTECTED_SHARE = 0.8  # of the main segment
MAX_COUNT = 15  # of a counter of four bits


class Cache(Generic[V]):
    """Entries in ordered segments, oldest first. Each id is in at most one segment."""

    def __init__(self, segments: int = 1) -> None:
        self._segments = tuple(OrderedDict[str, V]() for _ in range(segments))

    def write(self, id: str, value: V) -> None:
        """Store a value and evict an entry if the cache is full."""
        raise NotImplementedError

    def use(self, id: str) -> None:
        """Record a use of an entry. FIFO ignores uses."""

    def revise(self, id: str, value: V) -> None:
        """Replace the value of a cached id without counting a use."""
        if (segment := self._segment(id)) is not None:
            segment[id] = value

    def drop(self, id: str) -> None:
        """Remove an entry if it is cached."""
        if (segment := self._segment(id)) is not None:
            del segment[id]

    def items(self) -> list[tuple[str, V]]:
        """List (id, value) by segment, oldest first."""
        return [item for segment in self._segments for item in segment.items()]

    def _segment(self, id: str) -> OrderedDict[str, V] | None:
        return next((segment for segment in self._segments if id in segment), None)

    def __contains__(self, id: str) -> bool:
        return self._segment(id) is not None

    def __len__(self) -> int:
        return sum(map(len, self._segments))


class Fifo(Cache[V]):
    """Evict the entry that was inserted first. Writing a cached id replaces its value in place."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity, [self._entries] = capacity, self._segments

    def write(self, id: str, value: V) -> None:
        if id not in self._entries and len(self._entries) >= self.capacity:
            self._entries.popitem(last=False)
        self._entries[id] = value


class Lru(Fifo[V]):
    """Evict the entry that was used or written least recently."""

    def write(self, id: str, value: V) -> None:
        super().write(id, value)
        self.use(id)

    def use(self, id: str) -> None:
        self._entries.move_to_end(id)


class AgingCounts:
    """Use counts of four bits, all halved once every `sample` ticks (TinyLFU, arXiv 1512.00727)."""

    def __init__(self, sample: int) -> None:
        self.sample, self.ticks, self._counts = sample, 0, Counter[str]()

    def add(self, key: str) -> None:
        self._counts[key] = min(MAX_COUNT, self._counts[key] + 1)

    def tick(self) -> None:
        """Advance the clock and halve all counts when it reaches `sample`."""
        self.ticks += 1
        if self.ticks >= self.sample:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self.ticks //= 2

    def estimate(self, key: str) -> int:
        return self._counts[key]


class WTinyLfu(Cache[V]):
    """W-TinyLFU: a window and a main segment of two LRU lists, protected and elimination. New entries enter the window.

    Args:
        window: entries of the window segment.
        main: entries of the main segment.
        frequencies: use counts, aged at every write.
        victim: "pool" evicts the least used entry of window and elimination except the newcomer, of equal ones the
            least recently used (the paper's rule). "duel" evicts the oldest entry of the window unless it was used
            more often than the oldest of elimination, whose place it then takes (TinyLFU's rule).
    """

    def __init__(self, window: int, main: int, frequencies: AgingCounts, victim: str = "pool") -> None:
        super().__init__(segments=3)
        self.elimination, self.window, self.protected = self._segments
        self._sizes, self._protected_size = (window, main), int(PROTECTED_SHARE * main)
        self._victim, self.frequencies = victim, frequencies
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
                self._move_oldest(self.window, self.elimination)
        self.frequencies.tick()

    def use(self, id: str) -> None:
        self._count(id)
        if id in self.elimination:
            self.protected[id] = self.elimination.pop(id)
            while len(self.protected) > self._protected_size:
                self._move_oldest(self.protected, self.elimination)
        elif (segment := self._segment(id)) is not None:
            segment.move_to_end(id)

    def drop(self, id: str) -> None:
        super().drop(id)
        self._last_use.pop(id, None)

    def _count(self, id: str) -> None:
        self.frequencies.add(id)
        self._clock += 1
        self._last_use[id] = self._clock

    def _evict(self, newcomer: str) -> None:
        if self._victim == "duel":
            candidate, victim = next(iter(self.window)), next(iter(self.elimination), None)
            if victim is not None and self.frequencies.estimate(candidate) > self.frequencies.estimate(victim):
                self.drop(victim)
                self.elimination[candidate] = self.window.pop(candidate)
            else:
                self.drop(candidate)
            return
        pool = [id for id in (*self.window, *self.elimination) if id != newcomer] or [newcomer]
        self.drop(min(pool, key=lambda id: (self.frequencies.estimate(id), self._last_use[id])))

    @staticmethod
    def _move_oldest(source: OrderedDict[str, V], target: OrderedDict[str, V]) -> None:
        id, value = source.popitem(last=False)
        target[id] = value


def make_cache(settings: KarmaSettings) -> Cache:
    """Create an empty cache from the settings."""
    match settings.policy:
        case "fifo":
            return Fifo(settings.capacity)
        case "lru":
            return Lru(settings.capacity)
        case "unlimited":
            return Lru(math.inf)
    frequencies = AgingCounts(settings.sample or 10 * settings.capacity)
    return WTinyLfu(*settings.segments, frequencies, settings.victim)
