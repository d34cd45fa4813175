"""KARMA as a memory system (arXiv 2409.14908): a scene graph that lasts, and a small cache of objects that does not.

What is recalled for an instruction is the whole of long-term memory, one entry; the units of short-term memory that are
nearest to the instruction, one entry each; and, in a living world, what the task before was. In a living world
(`memory.protocol.Lasting`) short-term memory begins empty and lasts from task to task. Over a stream of episodes that
each start afresh, it is a fold of what episodes in the same scene saw, from a journal.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from envs.base import FloorPlan, Task, TaskSequence
from envs.household.telling import deed, room
from envs.household.trajectories import fetching
from memory.entry import MemoryEntry, Provenance, Written
from memory.journal import Journal, Row
from memory.karma.graph import SceneGraph, build_graph
from memory.karma.recall import nearest
from memory.karma.settings import KarmaSettings
from memory.karma.units import HAND, ShortTerm, Unit, asked_states, said
from memory.protocol import Edge, Graph, Query, Recall, Record, Table, Trace
from memory.registry import MemorySpec, Tools
from memory.trajectory import one_line

NAME = "karma"
LONG, SHORT, BEFORE = f"{NAME}/long", f"{NAME}/short", f"{NAME}/before"  # sources of its entries
STATES_TOKENS = 256


@dataclass
class Home:
    """What is known of one world: both memories, and what was asked there so far. `world` names it in ids, `scene` to
    people."""

    world: str
    scene: str
    settings: KarmaSettings
    tools: Tools
    plan: FloorPlan = field(default_factory=FloorPlan)
    short: ShortTerm = field(init=False)
    visited: set[str] = field(default_factory=set)
    asked: list[frozenset[str]] = field(default_factory=list)  # the words of earlier instructions
    before: str = ""  # the task before, and how it ended
    _graph: SceneGraph | None = None

    def __post_init__(self) -> None:
        self.short = ShortTerm(self.settings, self.plan)

    @property
    def graph(self) -> SceneGraph:
        if self._graph is None:
            self._graph = build_graph(self.plan, self.settings.grid, self.settings.radius)
        return self._graph if self.settings.build == "given" else self._graph.only(self.visited)

    def enter(self, observation: str) -> None:
        """See the world for the first time: without a plan of it, its places are what this says that it holds."""
        if not self.plan.things and (places := room(observation)):
            self.plan = FloorPlan(dict.fromkeys(places))
            self.short.plan, self._graph = self.plan, None

    def observe(self, record: Record, task: Task) -> None:
        """Take in a step."""
        self.short.observe(record, task.id, said(task.goal))
        if at := self.short.body.at:
            self.visited.add(at)

    def finish(self, task: Task, success: bool) -> None:
        """Note that a task is over."""
        self.asked.append(said(task.goal))
        self.before = f"The task before was: {one_line(task.goal)} ({'done' if success else 'not done'})"

    def units(self, goal: str) -> list[Unit]:
        """Return the units that serve an instruction, the nearest first."""
        if not self.settings.short or not self._open(goal):
            return []
        return nearest(goal, self.short.held(), self.settings.k, self.tools.embed)

    def _open(self, goal: str) -> bool:
        """Tell whether short-term memory is shown at all: an earlier instruction was about a thing of this one."""
        if self.settings.gate == "always":
            return True
        things = {unit.type for unit in self.short.held()} & said(goal)
        return any(things & earlier for earlier in self.asked)

    def entries(self, units: Sequence[Unit]) -> tuple[MemoryEntry, ...]:
        """Make the entries of both memories, and of the task before."""
        made = [self._entry(LONG, f"{self.world}/long", self.graph.text)] if self.settings.long else []
        made += [self._entry(SHORT, f"{self.world}/{u.id}@{u.version}", u.text, u) for u in units]
        made += [self._entry(BEFORE, f"{self.world}/{len(self.asked)}", self.before)]
        return tuple(entry for entry in made if entry.text)

    def _entry(self, source: str, id: str, text: str, unit: Unit | None = None) -> MemoryEntry:
        """Make an entry; of a unit with the command that fetches its object, which is what teachers read."""
        if unit is None:
            return MemoryEntry(f"{source}/{id}", text, Provenance("", self.scene, "", "", True, source=source))
        fetched = (fetching(unit.id, unit.place),) if unit.place not in ("", HAND) else ()
        origin = Provenance(unit.written[0], self.scene, "", "", True, fetched, source)
        return MemoryEntry(f"{source}/{id}", text, origin)


def object_of(id: str) -> str:
    """Return the object that the id of an entry of short-term memory is of; "" for another entry."""
    return id.rpartition("/")[2].partition("@")[0] if id.startswith(f"{SHORT}/") else ""


@dataclass
class KarmaLife:
    """An agent's time in one living world (`memory.protocol.ObjectLife`)."""

    home: Home

    @property
    def capacity(self) -> int:
        return self.home.settings.capacity

    @property
    def shows_units(self) -> bool:
        return self.home.settings.short

    @property
    def units(self) -> list[Unit]:
        return self.home.short.held()

    def unit_of(self, entry_id: str) -> str:
        return object_of(entry_id)

    def session(self, query: Query) -> Attempt:
        return Attempt(self.home, query.task)

    def end(self, trace: Trace) -> None:
        self.home.finish(trace.task, trace.success)
        ask, part = self.home.tools.ask, self.home.tools.part
        if self.home.settings.states == "vlm" and ask is not None:
            short = self.home.short
            used = [unit for unit in short.held() if unit.source == "used" and unit.written[0] == trace.task.id]

            def chat(told: str, text: str) -> str | None:
                seen = [part(text), *map(part, trace.views)] if part and trace.views else text
                return ask(
                    [{"role": "system", "content": told}, {"role": "user", "content": seen}], "states", STATES_TOKENS
                )

            for id, states in asked_states(used, trace.records, chat).items():
                short.restate(id, states)


@dataclass
class Attempt:
    """One task in a world. The units that were recalled as it began count as used; what is recalled later is looked
    at."""

    home: Home
    task: Task
    begun: bool = False

    def recall(self, observation: str) -> Recall:
        if not self.begun:
            self.home.enter(observation)
        units = self.home.units(self.task.goal)
        for unit in () if self.begun else units:
            self.home.short.units.use(unit.id)
        self.begun = True
        return Recall(self.home.entries(units), made=True)

    def observe(self, record: Record) -> None:
        self.home.observe(record, self.task)


@dataclass
class Visit:
    """One task in a scene that starts afresh: what was recalled as it began, until a step tells more. What it sees is
    its own: a commit tells it to others."""

    home: Home
    task: Task
    first: Recall
    _own: Attempt | None = None

    def recall(self, observation: str) -> Recall:
        return self.first if self._own is None else self._own.recall(observation)

    def observe(self, record: Record) -> None:
        if self._own is None:
            self._own = Attempt(copy.deepcopy(self.home), self.task)
            self._own.home.enter(record.observation)
        self._own.observe(record)


class Karma:
    """A `MemorySystem`. What it knows of scenes is folded from the first rows of its journal."""

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: KarmaSettings | None = None,
        until: int | None = None,
        tools: Tools | None = None,
    ) -> None:
        self.path, self.settings, self._tools = Path(path), settings or KarmaSettings(), tools or Tools()
        self._journal = Journal(self.path, until)
        self._scenes, self._folded = dict[str, tuple[Home, list[Trace]]](), 0

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> Written:
        return self._journal.append([Row(tuple(attempts), {}) for attempts in episodes])

    def take_over(self, other: Karma) -> Written:
        return self._journal.append(list(other._journal))

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        homes = [(query.task, self._home(query.task)) for query in queries]
        return [Recall(home.entries(home.units(task.goal)), made=True) for task, home in homes]

    def session(self, query: Query, first: Recall) -> Visit:
        return Visit(self._home(query.task), query.task, first)

    def life(self, world: TaskSequence) -> KarmaLife:
        """Begin to live in a world: short-term memory is empty, and of what lasts all that was learned is there."""
        home = Home(world.id, world.scene, self.settings, self._tools, world.plan)
        if world.scene in (known := self._known()):
            home.visited |= known[world.scene][0].visited & world.plan.things.keys()
        return KarmaLife(home)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        return None

    def snapshot(self) -> int:
        return len(self._journal)

    def at(self, version: int) -> Karma:
        return Karma(self.path, self.settings, version, self._tools)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((t.task.id, t.task.split) for row in self._journal for t in row.attempts[:1])

    def _known(self) -> dict[str, tuple[Home, list[Trace]]]:
        """Fold in what was committed since; return what is known, with its traces, by scene."""
        for row in self._journal.since(self._folded):
            for trace in row.attempts:
                home, traces = self._scenes.setdefault(trace.task.scene, (self._empty(trace.task), []))
                _learn(home, trace)
                traces.append(trace)
            self._folded += 1
        return self._scenes

    def _home(self, task: Task) -> Home:
        """Return what is known of a task's scene, but for what its own episodes left."""
        home, traces = self._known().get(task.scene, (None, []))
        if home is not None and all(trace.task.id != task.id for trace in traces):
            return home
        home = self._empty(task)
        for trace in traces:
            if trace.task.id != task.id:
                _learn(home, trace)
        return home

    def _empty(self, task: Task) -> Home:
        return Home(one_line(task.scene), task.scene, self.settings, self._tools)

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

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, id: str) -> MemoryEntry:
        return {entry.id: entry for entry in self}[id]


def _learn(home: Home, trace: Trace) -> None:
    """Take in an episode that started afresh: what was recalled in it served, and what it saw is known now."""
    home.enter(trace.first)
    for id in dict.fromkeys(filter(None, map(object_of, trace.shown))):
        if id in home.short.units:
            home.short.units.use(id)
    origins = dict[str, str]()
    for record in trace.records:
        home.observe(record, trace.task)
        if (done := deed(record.feedback)) and done.verb == "take":
            origins.setdefault(done.thing, done.place)
    home.short.start_afresh(origins)
    home.asked.append(said(trace.task.goal))


def _open(path: Path, settings: KarmaSettings, tools: Tools) -> Karma:
    return Karma(path, settings, tools=tools)


KARMA = MemorySpec(NAME, KarmaSettings, _open)
