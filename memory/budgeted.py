"""A token budget per recall for any memory system. Entries are never cut: one that exceeds it is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory.entry import MemoryEntry, WriteResult
from memory.protocol import MemorySystem, Query, Recall, Record, Session, Trace


@dataclass(frozen=True, slots=True)
class BudgetedMemory:
    """A `MemorySystem` that recalls at most `most` tokens of another one. `count` returns a text's token count."""

    memory: MemorySystem
    most: int
    count: Callable[[str], int]

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def path(self) -> Path:
        return self.memory.path

    def fitting(self, recalled: Recall) -> Recall:
        """Leave out entries that exceed the remaining budget, in order."""
        left, fitting = self.most, list[int]()
        for i, entry in enumerate(recalled.entries):
            if (tokens := self.count(entry.text)) <= left:
                left -= tokens
                fitting.append(i)
        entries, pointers = recalled.entries, recalled.record_ids
        return Recall(
            tuple(entries[i] for i in fitting),
            recalled.generated,
            tuple(pointers[i] for i in fitting) if pointers else (),
        )

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        return [self.fitting(recalled) for recalled in self.memory.recall(queries)]

    def session(self, query: Query, first: Recall) -> Session:
        return _BoundedSession(self.memory.session(query, first), self)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> Session | None:
        session = self.memory.again(query, first, attempts)
        return None if session is None else _BoundedSession(session, self)

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        return self.memory.commit(episodes)

    def merge_from(self, other: object) -> WriteResult:
        return self.memory.merge_from(other.memory if isinstance(other, BudgetedMemory) else other)

    def snapshot(self) -> int:
        return self.memory.snapshot()

    def at(self, version: int) -> BudgetedMemory:
        return BudgetedMemory(self.memory.at(version), self.most, self.count)

    def origins(self) -> Counter[tuple[str, str]]:
        return self.memory.origins()

    def __getitem__(self, id: str) -> MemoryEntry:
        return self.memory[id]

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Iterator[MemoryEntry]:
        return iter(self.memory)


@dataclass(frozen=True, slots=True)
class _BoundedSession:
    session: Session
    memory: BudgetedMemory

    def recall(self, observation: str) -> Recall:
        return self.memory.fitting(self.session.recall(observation))

    def observe(self, record: Record) -> None:
        self.session.observe(record)
