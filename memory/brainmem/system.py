"""BrainMem as a memory system (arXiv 2604.16331): working, episodic and semantic memory, folded from a journal.

A recall returns the planner's memory context in the paper's order (C.5), one entry per non-empty section: guidelines,
patterns of the room, experiences, action hints, spatial guidance, working memory. Sections are written anew at every
step; the stored entries are guidelines, experiences and relations.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from envs.command_reader import CommandReader
from memory.brainmem import agent, overview, working
from memory.brainmem.episodic import GraphPosition, State, TrajectoryGraph, state_summary, topic_of
from memory.brainmem.knowledge import NAME, Knowledge, id_of
from memory.brainmem.semantic import agreeing_texts
from memory.brainmem.settings import BrainMemSettings
from memory.brainmem.working import WorkStep
from memory.entry import MemoryEntry, Provenance, WriteResult
from memory.journal import JournalMemory, Row
from memory.protocol import Graph, Query, Recall, Record, Table, Trace
from memory.registry import ChatFunction, MemorySpec, MemoryTools, required_reader

MAX_SCENES = 16  # scenes whose knowledge without them is kept


class BrainMem(JournalMemory):
    """BrainMem as a `MemorySystem`, folded from the rows of its journal.

    Args:
        reader: reads the environment's views and commands; None: only what reads none of them works.
    """

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: BrainMemSettings | None = None,
        until: int | None = None,
        ask: ChatFunction | None = None,
        reader: CommandReader | None = None,
    ) -> None:
        super().__init__(path, until)
        self.settings, self._ask, self._reader = settings or BrainMemSettings(), ask, reader
        self._known: Knowledge | None = None
        self._elsewhere = OrderedDict[str, tuple[Knowledge, int]]()  # by scene: without its episodes; rows read

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        if self._ask is None or not self.settings.semantic.enabled:
            return super().commit(episodes)
        fresh = self._journal.unknown([Row(tuple(attempts), {}) for attempts in episodes])
        try:
            written = self._journal.append([self._answered(row, self._ask) for row in fresh])
        finally:  # `_answered` learned rows before they were stored
            if self._known is not None and self._known.episodes != len(self._journal):
                self._known = None
        return written + WriteResult(0, len(episodes) - len(fresh))

    def _answered(self, row: Row, ask: ChatFunction) -> Row:
        """Add the language model's answers about the next episode (L3 to L5) and learn it."""
        known, topic = self.knowledge, topic_of(row.attempts[0].task, self.reader, row.attempts[0].first)
        answers = agent.ask_about_episode(row.attempts, topic, self.reader, ask)
        row = replace(row, answers=answers.to_json())
        new, ids = known.experience_of(row, topic), {g.id for g in known.guidelines}
        for g in known.guidelines_with(new):
            if g.id not in ids:
                support = [*known.experiences.of_ids(g.support), *([new] if new.id in g.support else [])]
                if text := agent.ask_guideline(agreeing_texts(support, g.basis), ask):
                    answers.guidelines[g.basis] = text
                else:
                    answers.failed(agent.GUIDELINE)
        row = replace(row, answers=answers.to_json())
        known.learn(row)
        return row

    @property
    def reader(self) -> CommandReader:
        """Return the reader of the environment's views. Raises: BankError, if the environment is not known."""
        return required_reader(self.name, self.path, self._reader)

    @property
    def knowledge(self) -> Knowledge:
        known = self._known = self._known or Knowledge(self.settings, self.reader)
        for row in self._journal.since(known.episodes):
            known.learn(row)
        return known

    def knowledge_outside(self, scene: str) -> Knowledge:
        """Return the knowledge that other scenes' episodes give, as if none of `scene` had been committed.

        A language model's wordings of guidelines are left out, because they may summarise episodes of any scene: the
        rules' texts stand for them.
        """
        known, read = self._elsewhere.pop(scene, None) or (Knowledge(self.settings, self.reader), 0)
        for row in (rows := self._journal.since(read)):
            if row.attempts[0].task.scene != scene:
                known.learn(replace(row, answers={k: v for k, v in row.answers.items() if k != "guidelines"}))
        self._elsewhere[scene] = known, read + len(rows)
        while len(self._elsewhere) > MAX_SCENES:
            self._elsewhere.popitem(last=False)
        return known

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        recalled = dict[int, Recall]()
        scene_of = lambda n: queries[n].task.scene if queries[n].isolation == "scene" else ""
        for n in sorted(range(len(queries)), key=scene_of):  # each scene's knowledge is built once
            known = self.knowledge_outside(scene) if (scene := scene_of(n)) else self.knowledge
            recalled[n] = Recall(_context(known, queries[n]), generated=True)
        return [recalled[n] for n in range(len(queries))]

    def session(self, query: Query, first: Recall) -> BrainSession:
        return BrainSession(query, first, self.settings, self.reader)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> BrainSession | None:
        evolve = self.settings.evolve
        if not evolve.enabled or len(attempts) > evolve.retries:
            return None
        last = attempts[-1]
        lesson = agent.reflection(last, topic_of(query.task, self.reader, last.first), self.reader, self._ask)
        return BrainSession(query, first, self.settings, self.reader, earlier=attempts, lesson=lesson)

    def at(self, version: int) -> BrainMem:
        return BrainMem(self.path, self.settings, version, reader=self._reader)

    def tables(self) -> list[Table]:
        return overview.tables(self.knowledge, self.failures)

    def graphs(self) -> list[Graph]:
        return overview.graphs(self.knowledge)

    def __iter__(self) -> Iterator[MemoryEntry]:
        known = self.knowledge
        for g in known.guidelines:
            yield _entry("guideline", g.text, id=g.id)
        for e in known.experiences:
            text = "\n".join(e.texts())
            yield _entry("experience", text, id=e.id, task=e.task_id, room=e.room, success=e.success)
        for room in known.spatial.rooms:
            for fact in known.spatial.facts(room, frozenset(), most=1_000):
                yield _entry("relation", f"In {room}: {fact}", room=room)


class BrainSession:
    """One attempt at a task: the task's sections, guidance from earlier attempts, and working memory."""

    def __init__(
        self,
        query: Query,
        first: Recall,
        settings: BrainMemSettings,
        reader: CommandReader,
        earlier: Sequence[Trace] = (),
        lesson: str = "",
    ) -> None:
        self._first, self._settings, self._task, self._origin = first, settings, query.task, _origin(query)
        self._reader = reader
        self._window: deque[WorkStep] = deque(maxlen=settings.working.window)
        self._now: GraphPosition | None = None
        self._taken = 0
        self._lesson = lesson
        self._tried = TrajectoryGraph(reader)
        for trace in earlier:
            self._tried.learn(trace, topic_of(query.task, reader, trace.first))

    def recall(self, observation: str) -> Recall:
        self._now = self._now or GraphPosition.start(self._task, observation, self._reader)
        added = {"Retry Guidance": self._guidance(self._now.state), "Working Memory": self._working()}
        entries = [_entry(name, text, room=self._origin) for name, text in added.items() if text]
        return Recall((*self._first.entries, *entries), generated=True) if entries else self._first

    def _guidance(self, state: State) -> str:
        """Explain why the last attempt failed and list the actions refused in this state (section 3.2.3)."""
        if not self._lesson:
            return ""
        failed = self._tried.failed(state, self._task.id)
        lines = [f"Failed here before: {'; '.join(failed)}"] if failed else []
        return "\n".join(["Retry Guidance:", f"The last attempt failed: {self._lesson}", *lines])

    def _working(self) -> str:
        settings = self._settings.working
        if not settings.enabled:
            return ""
        return working.render_section(list(self._window), self._taken, settings, self._reader)

    def observe(self, record: Record) -> None:
        before = self._now or GraphPosition.start(self._task, record.observation, self._reader)
        self._now = after = before.after(record)
        held, held_before = ", ".join(after.agent.held), ", ".join(before.agent.held)
        changed = record.feedback != record.observation or after.agent.at != before.agent.at or held != held_before
        self._taken += 1
        self._window.append(
            WorkStep(
                t=record.t,
                action=record.action,
                ok=not record.refused,
                summary=state_summary(record.observation, before.agent, self._reader),
                at=after.agent.at,
                holds=held,
                held_before=held_before,
                changed=changed,
            )
        )


def _context(known: Knowledge, query: Query) -> tuple[MemoryEntry, ...]:
    """Return an entry per non-empty section of a query's task."""
    sections, origin = known.sections(topic_of(query.task, known.reader), query.task.id), _origin(query)
    return tuple(_entry(name, text, room=origin, actions=done) for name, (text, done) in sections.items())


def _origin(query: Query) -> str:
    """Return the scene that a query's sections are about; "" if they hold nothing of the task's scene."""
    return query.task.scene if query.isolation == "task" else ""


def _entry(
    section: str,
    text: str,
    id: str = "",
    task: str = "",
    room: str = "",
    success: bool = True,
    actions: tuple[str, ...] = (),
) -> MemoryEntry:
    """Create the entry of a section or of a stored item. A section's id is a hash of its text."""
    own = id or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    provenance = Provenance(task, room, goal="", split="", success=success, actions=actions, source=NAME)
    return MemoryEntry(id_of(section) + own, text, provenance)


def _open(path: Path, settings: BrainMemSettings, tools: MemoryTools) -> BrainMem:
    return BrainMem(path, settings, ask=tools.ask, reader=tools.reader)


BRAINMEM = MemorySpec(NAME, BrainMemSettings, _open, reads_views=True)
