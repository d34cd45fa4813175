"""What a memory system is to those who use it: told of every step, asked before every decision, written to by traces.

A session goes along with one attempt at a task. What is recalled may change from step to step (a working memory, a map
of what was seen where) or follow from the task alone; nobody who calls it asks which. What is written is a trace, one
whole attempt, and every system makes of it what it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from envs.base import Task, TaskSequence
from memory.entry import MemoryEntry, Written
from memory.words import word_tokens


class BankError(RuntimeError):
    """A bank that is missing, damaged, of another kind or read-only. The message names the next step."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step: what was in view, what was done, and what came of it. Of a history that is no episode, a turn, an entry
    or a frame: `action` holds what was said or noted, by `actor`, at `when`; `id` is its name there."""

    t: int
    observation: str
    action: str
    feedback: str
    refused: bool = False  # it was no command, or the environment answered that it is not possible
    progress: float = 0.0  # towards the goal, after it
    id: str = ""
    actor: str = ""
    when: str = ""
    picture: str = ""  # the path of one that belongs to it; what a caption says of it stands in the texts


@dataclass(frozen=True, slots=True)
class Trace:
    """One attempt at a task, or another history: a dialogue, a log (its task says which). `views` are PNG bytes of the
    views that may be kept; `shown`, the ids of what was recalled in it."""

    task: Task
    records: tuple[Record, ...]
    success: bool
    attempt: int = 0
    rationale: str = ""
    views: tuple[bytes, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The view before the first step; "" where there was none."""
        return self.records[0].observation if self.records else ""

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(record.action for record in self.records)


@dataclass(frozen=True, slots=True)
class Costs:
    """How a reader's tokens are counted: those of a text, estimated where its tokenizer is not known, and of a picture,
    0 for a reader that sees none."""

    text: Callable[[str], float] = word_tokens
    picture: int = 0


ESTIMATED = Costs()


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked outside of a session: for a task, as it begins, at most `k` entries. With `text`, a question about
    what was committed, of which at most `tokens` at the reader's `costs` are returned; systems that answer no questions
    take the task's goal."""

    task: Task
    k: int = 4
    text: str = ""
    tokens: int | None = None
    costs: Costs = ESTIMATED

    @classmethod
    def question(
        cls,
        text: str,
        tokens: int | None = None,
        id: str = "",
        scene: str = "",
        k: int = 1_000,
        costs: Costs = ESTIMATED,
    ) -> Query:
        """Ask a question, which no episode is played for."""
        return cls(Task(id, text, scene, "", "question"), k, text, tokens, costs)


@dataclass(frozen=True, slots=True)
class Recall:
    """Entries in the order in which they are read. `made`: they were made for this very step, so that the system's
    `entries` do not hold them and a record has to. `pointers`: for each entry the ids of the records behind it, where
    the system knows them."""

    entries: tuple[MemoryEntry, ...] = ()
    made: bool = False
    pointers: tuple[tuple[str, ...], ...] = ()


class Session(Protocol):
    """Goes along with one attempt at a task."""

    def recall(self, observation: str) -> Recall:
        """Recall what serves the next decision, with `observation` in view."""
        ...

    def observe(self, record: Record) -> None:
        """Take in what was done, and what came of it."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The session of a memory that follows from the task alone."""

    recalled: Recall

    def recall(self, observation: str) -> Recall:
        return self.recalled

    def observe(self, record: Record) -> None:
        pass


class Life(Protocol):
    """An agent's time in one living world, task after task: what it keeps lasts from one to the next, and ends with
    it."""

    def session(self, query: Query) -> Session:
        """Begin the next task of the world."""
        ...

    def end(self, trace: Trace) -> None:
        """Take in how it ended."""
        ...


@runtime_checkable
class Lasting(Protocol):
    """A memory system that has something to keep of a living world while one lives in it (`life_in`)."""

    def life(self, world: TaskSequence) -> Life: ...


@runtime_checkable
class ObjectLife(Life, Protocol):
    """A life whose memory consists of units about single objects, which evaluations inspect."""

    @property
    def capacity(self) -> int:
        """Maximum number of units."""
        ...

    @property
    def shows_units(self) -> bool:
        """Whether units are recalled at all."""
        ...

    @property
    def units(self) -> list[Any]:
        """The stored units."""
        ...

    def unit_of(self, entry_id: str) -> str:
        """Return the unit that a recalled entry is about; "" for other entries."""
        ...


class Kept(Protocol):
    """Entries by id."""

    def __getitem__(self, id: str, /) -> MemoryEntry:
        """Return the entry. Raises: KeyError, where none of this id is kept."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Something that a memory knows, for people to read."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Edge:
    start: str
    end: str
    weight: float  # 0 to 1: how sure
    label: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """Something that a memory knows, to be drawn."""

    title: str
    edges: tuple[Edge, ...]


@runtime_checkable
class Telling(Protocol):
    """A memory system that can tell people what it knows; not all can."""

    def tables(self) -> list[Table]: ...

    def graphs(self) -> list[Graph]: ...


@runtime_checkable
class MemorySystem(Kept, Protocol):
    """Everything that callers use of any memory system. Its state is what was committed, so that a version of it stands
    for all that it will ever say."""

    name: ClassVar[str]

    @property
    def path(self) -> Path:
        """Return its folder."""
        ...

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> Written:
        """Take in episodes, each the attempts at one task in their order: all or nothing. A trace that is known already
        is ignored and counted."""
        ...

    def take_over(self, other: Any) -> Written:
        """Take in all that another one of this very system holds."""
        ...

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        """Recall for each query what its session would recall before anything is in view; nothing that an episode of
        the very task left. The same for the same contents."""
        ...

    def session(self, query: Query, first: Recall) -> Session:
        """Begin an attempt at a task, for which `first` was recalled before anything was in view."""
        ...

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> Session | None:
        """Begin another attempt at a task at which all `attempts` failed; None where no more is to be learned from one.
        It is never scored."""
        ...

    def snapshot(self) -> int:
        """Return the version that stands for everything committed so far; checkpoints and results record it."""
        ...

    def at(self, version: int) -> MemorySystem:
        """Open a read-only view of the system as it was at a version."""
        ...

    def origins(self) -> Counter[tuple[str, str]]:
        """Count the traces that were committed by (task id, split), for audits and for going on after a kill."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Yield every entry that is kept."""
        ...


@dataclass(frozen=True, slots=True)
class _Committed:
    """The life of a system that knows none: it takes in each attempt as it ends, as over any stream of tasks."""

    memory: MemorySystem

    def session(self, query: Query) -> Session:
        [first] = self.memory.recall([query])
        return self.memory.session(query, first)

    def end(self, trace: Trace) -> None:
        self.memory.commit([[trace]])


def life_in(world: TaskSequence, memory: MemorySystem) -> Life:
    """Begin to live in a world. A system that is not `Lasting` is committed to, and has to be the world's own."""
    return memory.life(world) if isinstance(memory, Lasting) else _Committed(memory)
