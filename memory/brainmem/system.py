"""BrainMem as a memory system (arXiv 2604.16331): working, episodic and semantic memory, folded from a journal.

What is recalled is the planner's memory context in the paper's order (C.5), one entry for each section that says
anything: guidelines, patterns of the room, experiences, action hints, spatial guidance, working memory. Sections are
made at every step; what is kept for good are guidelines, experiences and relations.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from envs.base import Task
from envs.household.telling import summary
from memory.brainmem import agent, overview, working
from memory.brainmem.episodic import Standing, State, TrajectoryGraph, topic_of
from memory.brainmem.knowledge import NAME, Knowledge, id_of
from memory.brainmem.semantic import agreeing
from memory.brainmem.settings import BrainMemSettings
from memory.brainmem.working import WorkStep
from memory.entry import MemoryEntry, Provenance, Written
from memory.journal import Journal, Row
from memory.protocol import Graph, Query, Recall, Record, Table, Trace
from memory.registry import Ask, MemorySpec, Tools


class BrainMem:
    """A `MemorySystem`. What it knows is folded from the first rows of its journal, and kept while that only grows."""

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: BrainMemSettings | None = None,
        until: int | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.path, self.settings, self._ask = Path(path), settings or BrainMemSettings(), ask
        self._journal = Journal(self.path, until)
        self._known = Knowledge(self.settings)

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> Written:
        rows = [Row(tuple(attempts), {}) for attempts in episodes]
        if self._ask is None or not self.settings.semantic.enabled:
            return self._journal.append(rows)
        fresh = self._journal.unknown(rows)
        try:
            written = self._journal.append([self._answered(row, self._ask) for row in fresh])
        finally:  # what was learned ahead is what the journal holds, or is forgotten
            if self._known.episodes != len(self._journal):
                self._known = Knowledge(self.settings)
        return written + Written(0, len(rows) - len(fresh))

    def _answered(self, row: Row, ask: Ask) -> Row:
        """Have the language model speak about an episode that comes next (L3 to L5), and learn it."""
        known, topic = self.knowledge, topic_of(row.attempts[0].task, row.attempts[0].first)
        answers = agent.analysed(row.attempts, topic, ask)
        row = replace(row, answers=answers.to_json())
        new, ids = known.experience_of(row, topic), {g.id for g in known.guidelines}
        for g in known.guidelines_with(new):
            if g.id not in ids:
                support = [*known.experiences.of_ids(g.support), *([new] if new.id in g.support else [])]
                if said := agent.merged(agreeing(support, g.basis), ask):
                    answers.guidelines[g.basis] = said
                else:
                    answers.failed(agent.GUIDELINE)
        row = replace(row, answers=answers.to_json())
        known.learn(row)
        return row

    @property
    def failures(self) -> Counter[str]:
        """Count, by role, what language models answered that could not be used."""
        return sum((Counter(row.answers.get("failures", {})) for row in self._journal), Counter())

    def take_over(self, other: BrainMem) -> Written:
        return self._journal.append(list(other._journal))

    @property
    def knowledge(self) -> Knowledge:
        for row in self._journal.since(self._known.episodes):
            self._known.learn(row)
        return self._known

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        known = self.knowledge
        return [Recall(_context(known, query.task), made=True) for query in queries]

    def session(self, query: Query, first: Recall) -> BrainSession:
        return BrainSession(query, first, self.settings)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> BrainSession | None:
        evolve = self.settings.evolve
        if not evolve.enabled or len(attempts) > evolve.retries:
            return None
        last = attempts[-1]
        lesson = agent.reflection(last, topic_of(query.task, last.first), self._ask)
        return BrainSession(query, first, self.settings, attempts, lesson)

    def snapshot(self) -> int:
        return len(self._journal)

    def at(self, version: int) -> BrainMem:
        return BrainMem(self.path, self.settings, version)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((t.task.id, t.task.split) for row in self._journal for t in row.attempts[:1])

    def tables(self) -> list[Table]:
        return overview.tables(self.knowledge, self.failures)

    def graphs(self) -> list[Graph]:
        return overview.graphs(self.knowledge)

    def __len__(self) -> int:
        return sum(1 for _ in self)

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

    def __getitem__(self, id: str) -> MemoryEntry:
        return {entry.id: entry for entry in self}[id]


class BrainSession:
    """One attempt at a task: the sections of its task, what earlier attempts at it teach, and working memory."""

    def __init__(
        self,
        query: Query,
        first: Recall,
        settings: BrainMemSettings,
        earlier: Sequence[Trace] = (),
        lesson: str = "",
    ) -> None:
        self._first, self._settings, self._task = first, settings, query.task
        self._window: deque[WorkStep] = deque(maxlen=settings.working.window)
        self._now: Standing | None = None
        self._taken = 0
        self._lesson = lesson
        self._tried = TrajectoryGraph()
        for trace in earlier:
            self._tried.learn(trace, topic_of(query.task, trace.first), trace.attempt)

    def recall(self, observation: str) -> Recall:
        self._now = self._now or Standing.at_first(self._task, observation)
        added = {"Retry Guidance": self._guidance(self._now.state), "Working Memory": self._working()}
        entries = [_entry(name, text, room=self._task.scene) for name, text in added.items() if text]
        return Recall((*self._first.entries, *entries), made=True) if entries else self._first

    def _guidance(self, state: State) -> str:
        """Say why the last attempt failed, and what was refused before in this very state (section 3.2.3)."""
        if not self._lesson:
            return ""
        failed = self._tried.failed(state, self._task.id)
        lines = [f"Failed here before: {'; '.join(failed)}"] if failed else []
        return "\n".join(["Retry Guidance:", f"The last attempt failed: {self._lesson}", *lines])

    def _working(self) -> str:
        settings = self._settings.working
        return working.rendered(list(self._window), self._taken, settings) if settings.enabled else ""

    def observe(self, record: Record) -> None:
        before = self._now or Standing.at_first(self._task, record.observation)
        self._now = after = before.after(record)
        changed = record.feedback != record.observation or after.body != before.body
        self._taken += 1
        self._window.append(
            WorkStep(
                record.t,
                record.action,
                not record.refused,
                summary(record.observation, before.body),
                after.body.at,
                after.body.holds,
                before.body.holds,
                changed=changed,
            )
        )


def _context(known: Knowledge, task: Task) -> tuple[MemoryEntry, ...]:
    """Make an entry of each section that says anything about a task."""
    sections = known.sections(topic_of(task), task.id)
    return tuple(_entry(name, text, room=task.scene, actions=done) for name, (text, done) in sections.items())


def _entry(
    section: str,
    text: str,
    id: str = "",
    task: str = "",
    room: str = "",
    success: bool = True,
    actions: tuple[str, ...] = (),
) -> MemoryEntry:
    """Make an entry of a section, or of one thing that is kept; a section's id follows from its text."""
    own = id or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    provenance = Provenance(task, room, "", "", success, actions, NAME)
    return MemoryEntry(id_of(section) + own, text, provenance)


def _open(path: Path, settings: BrainMemSettings, tools: Tools) -> BrainMem:
    return BrainMem(path, settings, ask=tools.ask)


BRAINMEM = MemorySpec(NAME, BrainMemSettings, _open)
