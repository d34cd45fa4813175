"""What callers use of a memory system, so that any of them can feed every delivery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    """Append, look up, and say which version that was."""

    def write(self, entries: MemoryEntry | Iterable[MemoryEntry]) -> Written:
        """Append one entry or several. An id that is known already is ignored and counted, never overwritten."""
        ...

    def retrieve(self, tasks: Sequence[Task], k: int = 4) -> list[list[MemoryEntry]]:
        """Retrieve M = Retrieve(bank, goal) for each task: at most `k` entries, best first, the same for the same
        contents and none that an episode of this very task wrote."""
        ...

    def snapshot(self) -> int:
        """Return the version that stands for everything written so far; checkpoints and results record it."""
        ...

    def origins(self) -> Counter[tuple[str, str]]:
        """Count entries by (task id, split), for audits."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MemoryEntry]: ...
