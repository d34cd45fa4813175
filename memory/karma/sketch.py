"""How often things were used lately: counts of four bits that are halved now and then (TinyLFU, arXiv 1512.00727)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

MOST = 15  # of a counter of four bits
ROWS, NARROWEST = 4, 64


class Counts(Protocol):
    def add(self, key: str) -> None: ...

    def estimate(self, key: str) -> int: ...

    def halve(self) -> None: ...


@dataclass
class Exact:
    """Counts as they are: where a few dozen things are counted, collisions would be noise."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, key: str) -> None:
        self.counts[key] = min(MOST, self.counts[key] + 1)

    def estimate(self, key: str) -> int:
        return self.counts[key]

    def halve(self) -> None:
        self.counts = Counter({key: count // 2 for key, count in self.counts.items() if count > 1})


class CountMin:
    """A count-min sketch with conservative update: between two halvings and below `MOST` it never says too little."""

    def __init__(self, capacity: int) -> None:
        self.width = max(NARROWEST, 1 << (capacity - 1).bit_length())
        self.rows = [bytearray(self.width) for _ in range(ROWS)]

    def _cells(self, key: str) -> list[tuple[bytearray, int]]:
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=4 * ROWS).digest()
        numbers = (int.from_bytes(digest[4 * row : 4 * row + 4], "big") for row in range(ROWS))
        return [(row, number % self.width) for row, number in zip(self.rows, numbers, strict=True)]

    def add(self, key: str) -> None:
        cells, least = self._cells(key), self.estimate(key)
        for row, at in cells if least < MOST else ():
            row[at] = max(row[at], least + 1)

    def estimate(self, key: str) -> int:
        return min(row[at] for row, at in self._cells(key))

    def halve(self) -> None:
        self.rows = [bytearray(count // 2 for count in row) for row in self.rows]


@dataclass
class Frequencies:
    """Counts that age: at every `sample` ticks all are halved. With a doorkeeper, the first sighting since then is
    noted there alone."""

    counts: Counts
    sample: int
    doorkeeper: bool = False
    ticks: int = 0
    _seen: set[str] = field(default_factory=set)

    def add(self, key: str) -> None:
        """Count a use."""
        if self.doorkeeper and key not in self._seen:
            self._seen.add(key)
        else:
            self.counts.add(key)

    def tick(self) -> None:
        """Count towards the next halving."""
        self.ticks += 1
        if self.ticks >= self.sample:
            self.counts.halve()
            self._seen.clear()
            self.ticks //= 2

    def estimate(self, key: str) -> int:
        return self.counts.estimate(key) + (key in self._seen)
