"""The contract that every memory system meets, so that any of them can feed every delivery."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from envs.base import Task
from memory.entry import MemoryEntry


@dataclass(frozen=True, slots=True)
class Written:
    """What one `write` did. `ignored` entries carried an id that memory already held (or the same write twice)."""

    added: int
    ignored: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(self.added + other.added, self.ignored + other.ignored)


@runtime_checkable
class Memory(Protocol):
    """Append, look up, and go back to what was known at an earlier time."""

    def write(self, entries: MemoryEntry | Iterable[MemoryEntry]) -> Written:
        """Append one entry or several. An id that is known already is ignored and counted, never overwritten."""
        ...

    def retrieve(self, task: Task, k: int = 4) -> list[MemoryEntry]:
        """M = Retrieve(bank, goal): at most `k` entries, best first, the same for the same contents."""
        ...

    def snapshot(self) -> int:
        """The version that stands for everything written so far; `at` takes it, checkpoints record it."""
        ...

    def at(self, version: int) -> Memory:
        """A read-only view: what is written after `version` is never seen through it."""
        ...
