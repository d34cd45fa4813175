"""The interface of memory systems and the records they exchange with their callers.

A session accompanies one attempt at a task: it observes every step and recalls entries before every decision. A system
is written to by traces, one per attempt, and decides itself what to store of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from envs.base import Task, TaskSequence
from memory.entry import MemoryEntry, WriteResult
from memory.words import word_tokens

Isolation = Literal["task", "scene"]
"""What an episode recalls nothing from: episodes of its own task, or all episodes of its scene."""

ReadingModels = tuple[Literal["api", "embed"], ...]  # of the settings memory.api, memory.embed or memory.embed_api


class BankError(RuntimeError):
    """A bank is missing, damaged, read-only or of another kind. The message names the next step."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step of an attempt, or one turn, entry or frame of another history such as a dialogue.

    Attributes:
        t: index of the step.
        observation: what the agent saw before it.
        action: the command, or the text of a turn.
        feedback: the environment's answer.
        refused: whether the command was invalid or impossible.
        progress: towards the goal, after the step.
        id, actor, when: a turn's id, speaker and time.
        picture: path of a turn's picture; its caption is part of the texts.
    """

    t: int
    observation: str
    action: str
    feedback: str
    refused: bool = False
    progress: float = 0.0
    id: str = ""
    actor: str = ""
    when: str = ""
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """One attempt at a task, or another history such as a dialogue, named by its task.

    Attributes:
        views: PNG bytes of views that may be stored.
        shown: ids of the entries that were recalled in it.
    """

    task: Task
    records: tuple[Record, ...]
    success: bool
    attempt: int = 0
    rationale: str = ""
    views: tuple[bytes, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """Return the first observation; "" without records."""
        return self.records[0].observation if self.records else ""

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(record.action for record in self.records)


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """A reader's tokens: a function for texts (an estimate without a tokenizer), and a number per picture."""

    text: Callable[[str], float] = word_tokens
    picture: int = 0  # 0: the reader sees no pictures


ESTIMATED = TokenCosts()


@dataclass(frozen=True, slots=True)
class Query:
    """A request for entries outside a session.

    Attributes:
        k: maximal number of entries.
        text: a question about the committed traces. Systems that answer no questions use the task's goal.
        tokens: budget of the answer to a question, counted by `costs`.
        isolation: episodes that nothing is recalled from.

    Raises:
        ValueError: isolation by scene for a task without one, which would leave nothing out.
    """

    task: Task
    k: int = 4
    text: str = ""
    tokens: int | None = None
    costs: TokenCosts = ESTIMATED
    isolation: Isolation = "task"

    def __post_init__(self) -> None:
        if self.isolation == "scene" and not self.task.scene:
            raise ValueError(f"isolation by scene: task {self.task.id!r} has no scene to leave out; use isolation=task")

    @classmethod
    def question(
        cls,
        text: str,
        tokens: int | None = None,
        id: str = "",
        scene: str = "",
        k: int = 1_000,
        costs: TokenCosts = ESTIMATED,
    ) -> Query:
        """Create a query for a question without an episode."""
        return cls(Task(id, text, scene=scene, split="", kind="question"), k, text, tokens, costs)


@dataclass(frozen=True, slots=True)
class Recall:
    """Entries in reading order.

    Attributes:
        generated: the entries were created for this step and cannot be looked up later, so episode records store them.
        record_ids: for each entry the ids of the records behind it, if the system knows them.
    """

    entries: tuple[MemoryEntry, ...] = ()
    generated: bool = False
    record_ids: tuple[tuple[str, ...], ...] = ()


class Session(Protocol):
    """Memory during one attempt at a task."""

    def recall(self, observation: str) -> Recall:
        """Recall entries for the next decision."""
        ...

    def observe(self, record: Record) -> None:
        """Update the session with a finished step."""


@dataclass(frozen=True, slots=True)
class FixedSession:
    """A session that recalls the same entries at every step."""

    recalled: Recall

    def recall(self, observation: str) -> Recall:
        return self.recalled

    def observe(self, record: Record) -> None:
        pass


class WorldSession(Protocol):
    """Memory of a sequence of tasks in one world that is never reset."""

    def session(self, query: Query) -> Session:
        """Begin the world's next task. Raises: ValueError, for isolation by scene (`refuse_isolation`)."""
        ...

    def end(self, trace: Trace) -> None:
        """Update memory with a finished task."""


def refuse_isolation(query: Query) -> None:
    """Raise ValueError if a query of a living world is isolated by scene: its memory is about that scene."""
    if query.isolation == "scene":
        raise ValueError(f"task {query.task.id!r} of a living world: memory of one scene cannot leave that scene out")


@runtime_checkable
class SupportsWorldSessions(Protocol):
    """A memory system with a separate memory for worlds that are never reset (`open_world_session`)."""

    def life(self, world: TaskSequence) -> WorldSession: ...


@runtime_checkable
class ObjectLife(WorldSession, Protocol):
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


class EntryStore(Protocol):
    """Entries by id."""

    def __getitem__(self, id: str, /) -> MemoryEntry:
        """Return an entry. Raises: KeyError, for an unknown id."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a memory's contents for display."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Edge:
    start: str
    end: str
    weight: float  # confidence, 0 to 1
    label: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of a memory's contents for display."""

    title: str
    edges: tuple[Edge, ...]


@runtime_checkable
class DisplaysContents(Protocol):
    """A memory system that can display its contents."""

    def tables(self) -> list[Table]: ...

    def graphs(self) -> list[Graph]: ...


@runtime_checkable
class ReadsWithModels(Protocol):
    """A memory system that says with which models it recalls."""

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models of the settings that a recall asks; () if it goes by rule."""
        ...

    @property
    def recall_failures(self) -> Counter[str]:
        """Count unusable answers to recalls of this object, by role."""
        ...


@runtime_checkable
class MemorySystem(EntryStore, Protocol):
    """The interface of every memory system. Its state is a function of the committed traces, named by a version."""

    name: ClassVar[str]

    @property
    def path(self) -> Path:
        """Return the system's folder."""
        ...

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        """Add episodes atomically, each the attempts at one task in order. Known traces are ignored and counted."""
        ...

    def merge_from(self, other: Any) -> WriteResult:
        """Add everything that another memory of the same system holds."""
        ...

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        """Recall entries for each query before the first observation, without the task's own episodes.

        With `isolation="scene"`, nothing is recalled that any episode of the task's scene contributed to, and no entry
        names that scene as its origin: the result equals that of a memory without these episodes. Equal contents give
        equal results."""
        ...

    def session(self, query: Query, first: Recall) -> Session:
        """Begin an attempt at a task. `first`: the result of `recall` for the query."""
        ...

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> Session | None:
        """Begin another attempt, never scored, after all `attempts` failed; None to learn from no further attempt."""
        ...

    def snapshot(self) -> int:
        """Return the version of the current contents, which checkpoints and results record."""
        ...

    def at(self, version: int) -> MemorySystem:
        """Open a read-only view of a version."""
        ...

    def origins(self) -> Counter[tuple[str, str]]:
        """Count committed traces by (task id, split), for audits and resumption."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Iterate over all stored entries."""
        ...


@dataclass(frozen=True, slots=True)
class _CommittedLife:
    """Commits every finished task to an ordinary memory system."""

    memory: MemorySystem

    def session(self, query: Query) -> Session:
        refuse_isolation(query)
        [first] = self.memory.recall([query])
        return self.memory.session(query, first)

    def end(self, trace: Trace) -> None:
        self.memory.commit([[trace]])


def open_world_session(world: TaskSequence, memory: MemorySystem) -> WorldSession:
    """Open memory for a world that is never reset. A system without world sessions must be empty; each finished task is
    committed to it."""
    return memory.life(world) if isinstance(memory, SupportsWorldSessions) else _CommittedLife(memory)
