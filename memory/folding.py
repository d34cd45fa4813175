"""Base of memory systems whose state learns a journal's rows one by one, by rule or with a language model's answers.

A commit asks the model about each new row, with the state before it at hand, and stores the answers in the row. The
fold itself calls no language model, so that every version, resumption and copy of the journal gives the same state.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from envs.command_reader import CommandReader
from memory.entry import MemoryEntry, WriteResult
from memory.journal import JournalMemory, Row
from memory.protocol import FixedSession, Query, ReadingModels, Recall, Record, Session, Trace
from memory.registry import ChatFunction, MemoryTools, required_reader
from memory.similarity import CachedEmbed
from runtime.settings import Settings
from runtime.store import to_json

QueryText = Literal["task", "step"]
MAX_SCENES = 16  # scenes whose state without them is kept
MOST_OBSERVATION = 2_000  # characters of an observation in a query


class State(Protocol):
    """What a memory knows after some rows."""

    learned: int  # rows

    def learn(self, row: Row) -> None:
        """Add the next row."""


class RecallSettings(Settings):
    """Settings that all memories of this kind have."""

    query: QueryText = "task"
    """What is searched for. task: the goal, once per episode. step: goal and observation, at every step."""


S = TypeVar("S", bound=State)
C = TypeVar("C", bound=RecallSettings)


class FoldedMemory(JournalMemory, Generic[S, C]):
    """A memory system with a state per journal version. Subclasses define `new_state`, `recalled` and, if they ask a
    model, `answers` and `without_neighbours`."""

    def __init__(
        self, path: str | Path, settings: C, until: int | None = None, tools: MemoryTools | None = None
    ) -> None:
        super().__init__(path, until)
        self.settings, self._tools = settings, tools or MemoryTools()
        self._embed = CachedEmbed(self._tools.embed, self.path) if self._tools.embed else None
        self._state: S | None = None
        self._elsewhere = OrderedDict[str, tuple[S, int]]()  # by scene: state without its rows; journal rows read

    # what a subclass defines -----------------------------------------------------------------------------------------

    def new_state(self) -> S:
        """Return the state of an empty journal."""
        raise NotImplementedError

    def recalled(self, state: S, query: Query, text: str) -> Recall:
        """Recall entries for a query. `text`: the observation of a step, "" before the first."""
        raise NotImplementedError

    def answers(self, state: S, row: Row, ask: ChatFunction) -> dict[str, Any]:
        """Ask a model about the next row, and return JSON for it; unusable answers are counted by role in
        `failures`."""
        return {}

    def without_neighbours(self, answers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answers that depend on their own row alone: others may tell of any scene, so isolation by scene
        leaves them out."""
        return {}

    # the memory protocol ---------------------------------------------------------------------------------------------

    @property
    def reader(self) -> CommandReader:
        """Return the reader of the environment's views. Raises: BankError, if the environment is not known."""
        return required_reader(str(getattr(self, "name", "")), self.path, self._tools.reader)

    @property
    def state(self) -> S:
        """The state after all rows of the journal."""
        state = self.new_state() if self._state is None else self._state
        self._state = None  # a row that raises leaves no half-learned state
        for row in self._journal.since(state.learned):
            state.learn(row)
        self._state = state
        return state

    def state_outside(self, scene: str) -> S:
        """Return the state that other scenes' episodes give, as if none of `scene` had been committed."""
        state, read = self._elsewhere.pop(scene, None) or (self.new_state(), 0)
        for row in (rows := self._journal.since(read)):
            if row.attempts[0].task.scene != scene:
                state.learn(replace(row, answers=self.without_neighbours(row.answers)))
        self._elsewhere[scene] = state, read + len(rows)
        while len(self._elsewhere) > MAX_SCENES:
            self._elsewhere.popitem(last=False)
        return state

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        ask = self._tools.ask
        if ask is None or self._journal.until is not None:  # a read-only view refuses before it asks
            return super().commit(episodes)
        state = self.state
        known, fresh = state.learned, self._journal.unknown([Row(tuple(attempts), {}) for attempts in episodes])
        self._state = None  # it learns rows before they are stored
        written = self._journal.append([self._answered(state, row, ask) for row in fresh])
        if written.added == len(fresh) and len(self._journal) == known + len(fresh):
            self._state = state  # no other writer came between
        return written + WriteResult(0, len(episodes) - len(fresh))

    def _answered(self, state: S, row: Row, ask: ChatFunction) -> Row:
        """Add a model's answers about the next row, as the journal will hold them, and learn it."""
        row = replace(row, answers=json.loads(to_json(self.answers(state, row, ask))))
        state.learn(row)
        return row

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        recalled = dict[int, Recall]()
        scene_of = lambda n: queries[n].task.scene if queries[n].isolation == "scene" else ""
        for n in sorted(range(len(queries)), key=scene_of):  # each scene's state is built once
            recalled[n] = self.recall_text(queries[n], "")
        return [recalled[n] for n in range(len(queries))]

    def recall_text(self, query: Query, text: str) -> Recall:
        """Recall entries for a query and the observation of a step, "" before the first.

        With isolation by scene the entries come from a state of their own, in which items have other numbers.
        """
        apart = query.isolation == "scene"
        state = self.state_outside(query.task.scene) if apart else self.state
        entries = self.recalled(state, query, text).entries
        return Recall(entries if query.tokens is None else _fitting(entries, query, query.tokens), generated=apart)

    def session(self, query: Query, first: Recall) -> Session:
        return StepSession(self, query) if self.settings.query == "step" else FixedSession(first)

    def at(self, version: int) -> Self:
        return type(self)(self.path, self.settings, version, self._tools)

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models that a recall asks: the embedding model, if there is one."""
        return ("embed",) if self._embed is not None else ()


def _fitting(entries: Sequence[MemoryEntry], query: Query, tokens: float) -> tuple[MemoryEntry, ...]:
    """Leave out entries that exceed what is left of a question's budget, in order."""
    fitting = list[MemoryEntry]()
    for entry in entries:
        if (cost := query.costs.text(entry.text)) <= tokens:
            tokens -= cost
            fitting.append(entry)
    return tuple(fitting)


@dataclass
class StepSession:
    """An attempt in which memory is searched anew with each observation."""

    memory: FoldedMemory[Any, Any]
    query: Query

    def recall(self, observation: str) -> Recall:
        return self.memory.recall_text(self.query, observation[:MOST_OBSERVATION])

    def observe(self, record: Record) -> None:
        pass
