"""KARMA as a memory system (arXiv 2409.14908): a lasting scene graph and a small cache of object units.

A recall returns long-term memory as one entry, the units of short-term memory nearest to the instruction as one entry
each and, in a living world, the outcome of the task before. In a living world
(`memory.protocol.SupportsWorldSessions`) short-term memory starts empty and lasts from task to task. Otherwise it is
folded from the journal's episodes of the same scene.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from envs.base import FloorPlan, Task, TaskSequence
from envs.command_reader import CommandReader, StepEffect
from memory.entry import MemoryEntry, Provenance
from memory.journal import JournalMemory
from memory.karma.graph import SceneGraph, build_graph
from memory.karma.recall import nearest
from memory.karma.settings import KarmaSettings
from memory.karma.units import HAND, ObjectUnit, ShortTerm, ask_states, goal_words
from memory.protocol import Edge, Graph, Query, ReadingModels, Recall, Record, Table, Trace, refuse_isolation
from memory.registry import MemorySpec, MemoryTools, required_reader
from memory.trajectory import one_line

NAME = "karma"
LONG, SHORT, BEFORE = f"{NAME}/long", f"{NAME}/short", f"{NAME}/before"  # `Provenance.source` of its entries
STATES_TOKENS = 256


@dataclass
class HomeMemory:
    """Both memories of one world. `world` names it in entry ids, `scene` is the origin of its entries."""

    world: str
    scene: str
    settings: KarmaSettings
    tools: MemoryTools
    reader: CommandReader
    plan: FloorPlan = field(default_factory=FloorPlan)
    short: ShortTerm = field(init=False)
    finished: int = 0  # tasks
    before: str = ""  # goal and outcome of the task before
    _graph: SceneGraph | None = None

    def __post_init__(self) -> None:
        self.short = ShortTerm(self.settings, self.reader, self.plan)

    @property
    def graph(self) -> SceneGraph:
        if self._graph is None:
            self._graph = build_graph(self.plan, self.settings.grid)
        return self._graph

    def enter(self, observation: str) -> None:
        """Read a task's first observation, which lists the places if there is no floor plan."""
        self.short.begin(observation)
        if not self.plan.things and (places := self.reader.look(observation).places):
            self.plan = FloorPlan(dict.fromkeys(places))
            self.short.plan, self._graph = self.plan, None

    def observe(self, record: Record, task: Task) -> StepEffect | None:
        """Update short-term memory with a step, and return the step's effect."""
        return self.short.observe(record, task.id, goal_words(task.goal))

    def finish(self, task: Task, success: bool) -> None:
        """Record the outcome of a task for the next one."""
        self.finished += 1
        self.before = f"The task before was: {one_line(task.goal)} ({'done' if success else 'not done'})"

    def units(self, goal: str) -> list[ObjectUnit]:
        """Return the k units nearest to an instruction, nearest first."""
        return nearest(goal, self.short.held(), self.settings.k, self.tools.embed) if self.settings.short else []

    def entries(self, units: Sequence[ObjectUnit]) -> tuple[MemoryEntry, ...]:
        """Return the entries of both memories and of the task before."""
        entries = [self._entry(LONG, f"{self.world}/long", self.graph.text)] if self.settings.long else []
        entries += [self._entry(SHORT, f"{self.world}/{u.id}@{u.version}", u.text, u) for u in units]
        entries += [self._entry(BEFORE, f"{self.world}/{self.finished}", self.before)]
        return tuple(entry for entry in entries if entry.text)

    def _entry(self, source: str, id: str, text: str, unit: ObjectUnit | None = None) -> MemoryEntry:
        """Create an entry. A unit's entry has the commands that fetch its object, which teachers read."""
        task_id, actions = "", tuple[str, ...]()
        if unit is not None:
            task_id, _ = unit.written
            actions = self.reader.fetch(unit.id, unit.place) if unit.place not in ("", HAND) else ()
        return MemoryEntry(
            f"{source}/{id}",
            text,
            Provenance(task_id, self.scene, goal="", split="", success=True, actions=actions, source=source),
        )


def object_of(id: str) -> str:
    """Return the object of a short-term entry's id; "" for other entries."""
    return id.rpartition("/")[2].partition("@")[0] if id.startswith(f"{SHORT}/") else ""


@dataclass
class KarmaWorldSession:
    """KARMA's memory in one living world (`memory.protocol.ObjectLife`)."""

    home: HomeMemory
    failures: Counter[str] = field(default_factory=Counter)  # unusable answers about states

    @property
    def capacity(self) -> int:
        return self.home.settings.capacity

    @property
    def shows_units(self) -> bool:
        return self.home.settings.short

    @property
    def units(self) -> list[ObjectUnit]:
        return self.home.short.held()

    def unit_of(self, entry_id: str) -> str:
        return object_of(entry_id)

    def session(self, query: Query) -> LivingSession:
        refuse_isolation(query)
        return LivingSession(self.home, query.task)

    def end(self, trace: Trace) -> None:
        self.home.finish(trace.task, trace.success)
        ask, part = self.home.tools.ask, self.home.tools.message_part
        if self.home.settings.states == "vlm" and ask is not None:
            short = self.home.short
            used = [unit for unit in short.held() if unit.source == "used" and unit.written[0] == trace.task.id]

            def chat(system: str, text: str) -> str | None:
                user = [part(text), *map(part, trace.views)] if part and trace.views else text
                messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
                return ask(messages, "states", STATES_TOKENS)

            found = ask_states(used, trace.records, chat)
            if used and not found:
                self.failures["states"] += 1
            for id, states in found.items():
                short.restate(id, states)


@dataclass
class LivingSession:
    """One task in a living world. Only the first recall counts as a use of its units."""

    home: HomeMemory
    task: Task
    begun: bool = False

    def recall(self, observation: str) -> Recall:
        if not self.begun:
            self.home.enter(observation)
        units = self.home.units(self.task.goal)
        for unit in () if self.begun else units:
            self.home.short.units.use(unit.id)
        self.begun = True
        return Recall(self.home.entries(units), generated=True)

    def observe(self, record: Record) -> None:
        self.home.observe(record, self.task)


@dataclass
class EpisodeSession:
    """One task in a world that is reset before it. The first step copies the memory, so that other sessions never see
    this one's observations."""

    home: HomeMemory
    task: Task
    first: Recall
    _own: LivingSession | None = None

    def recall(self, observation: str) -> Recall:
        return self.first if self._own is None else self._own.recall(observation)

    def observe(self, record: Record) -> None:
        if self._own is None:
            self._own = LivingSession(copy.deepcopy(self.home), self.task)
            self._own.home.enter(record.observation)
        self._own.observe(record)


class Karma(JournalMemory):
    """KARMA as a `MemorySystem`, folded from the rows of its journal, which `tools.reader` reads."""

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: KarmaSettings | None = None,
        until: int | None = None,
        tools: MemoryTools | None = None,
    ) -> None:
        super().__init__(path, until)
        self.settings, self._tools = settings or KarmaSettings(), tools or MemoryTools()
        self._scenes, self._folded = dict[str, tuple[HomeMemory, list[Trace]]](), 0
        self._failures = Counter[str]()  # unusable answers about states, in living worlds

    @property
    def reader(self) -> CommandReader:
        """Return the reader of the environment's views. Raises: BankError, if the environment is not known."""
        return required_reader(self.name, self.path, self._tools.reader)

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models that a recall asks."""
        return ("embed",) if self._tools.embed is not None and self.settings.short else ()

    @property
    def failures(self) -> Counter[str]:
        """Count the language model's unusable answers about states, in the living worlds that this object opened."""
        return self._failures

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        homes = [(query.task, self._home(query)) for query in queries]
        return [Recall(home.entries(home.units(task.goal)), generated=True) for task, home in homes]

    def session(self, query: Query, first: Recall) -> EpisodeSession:
        return EpisodeSession(self._home(query), query.task, first)

    def life(self, world: TaskSequence) -> KarmaWorldSession:
        """Open a living world with its floor plan and an empty short-term memory."""
        home = HomeMemory(world.id, world.scene, self.settings, self._tools, self.reader, plan=world.plan)
        return KarmaWorldSession(home, self._failures)

    def at(self, version: int) -> Karma:
        return Karma(self.path, self.settings, version, self._tools)

    def _known(self) -> dict[str, tuple[HomeMemory, list[Trace]]]:
        """Fold new rows; return each scene's memory and the traces behind it."""
        for row in self._journal.since(self._folded):
            for trace in row.attempts:
                home, traces = self._scenes.setdefault(trace.task.scene, (self._empty(trace.task), []))
                _learn(home, trace)
                traces.append(trace)
            self._folded += 1
        return self._scenes

    def _home(self, query: Query) -> HomeMemory:
        """Return the memory of a task's scene without the task's own episodes.

        All of KARMA is about one scene, so isolation by scene starts it empty: it holds what this episode sees.
        """
        task = query.task
        if query.isolation == "scene":
            return HomeMemory(one_line(task.scene), "", self.settings, self._tools, self.reader)
        home, traces = self._known().get(task.scene, (None, []))
        if home is not None and all(trace.task.id != task.id for trace in traces):
            return home
        home = self._empty(task)
        for trace in traces:
            if trace.task.id != task.id:
                _learn(home, trace)
        return home

    def _empty(self, task: Task) -> HomeMemory:
        return HomeMemory(one_line(task.scene), task.scene, self.settings, self._tools, self.reader)

    def tables(self) -> list[Table]:
        rows = [
            (scene, unit.id, unit.place, ", ".join(unit.states) or "-", unit.source)
            for scene, (home, _) in sorted(self._known().items())
            for unit in home.short.held()
        ]
        return [Table("short-term memory", ("scene", "object", "place", "state", "source"), tuple(rows))]

    def graphs(self) -> list[Graph]:
        edges = lambda graph: tuple(Edge(a.name, thing, 1.0, "contains") for a in graph.areas for thing in a.contains)
        known = sorted(self._known().items())
        return [Graph(f"places of {scene}", edges(home.graph)) for scene, (home, _) in known if home.graph.areas]

    def __iter__(self) -> Iterator[MemoryEntry]:
        for _, (home, _) in sorted(self._known().items()):
            yield from home.entries(home.short.held() if self.settings.short else [])


def _learn(home: HomeMemory, trace: Trace) -> None:
    """Fold an episode of a world that is reset before every task."""
    home.enter(trace.first)
    for id in dict.fromkeys(filter(None, map(object_of, trace.shown))):
        if id in home.short.units:
            home.short.units.use(id)
    origins = dict[str, str]()
    for record in trace.records:
        if (done := home.observe(record, trace.task)) and done.verb == "take":
            origins.setdefault(done.thing, done.place)
    home.short.reset_world(origins)


def _open(path: Path, settings: KarmaSettings, tools: MemoryTools) -> Karma:
    return Karma(path, settings, tools=tools)


KARMA = MemorySpec(NAME, KarmaSettings, _open, reads_views=True)
