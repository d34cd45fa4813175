"""Episodic memory: a graph of states and transitions, and a spatial graph of objects and places (3.2.2, B.1 and B.2).

States are merged by room and summary, transitions by both states and action. A refused action is a failed transition
from a state to itself. The spatial graph stores an episode's first view of each place without objects that the agent
had moved: object categories and receptacle names. A visit that does not find an object counts against the relation.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from envs.base import Task
from envs.command_reader import AgentState, CommandReader, PlaceView, kind
from memory.protocol import Record, Trace

State = tuple[str, str]  # room, summary
MOST_FACTS, HINTS = 10, 3  # relations shown per room, actions shown per object
PATTERNS, PATTERN_ACTIONS = 2, 12  # patterns shown per room, actions shown per pattern
RECALLED = 2.0  # minimal task similarity of a pattern


@dataclass(frozen=True, slots=True)
class Topic:
    """Features of a task for retrieval: Q of section 3.3."""

    room: str
    task_type: str
    objects: frozenset[str]


@dataclass(frozen=True, slots=True)
class Transition:
    before: State
    action: str
    after: State
    won: Counter[str] = field(default_factory=Counter)  # successes by task
    lost: Counter[str] = field(default_factory=Counter)  # refusals by task

    @property
    def n_success(self) -> int:
        return self.won.total()


@dataclass(frozen=True, slots=True)
class Trajectory:
    task_id: str
    topic: Topic
    done: tuple[str, ...]  # successful actions


@dataclass(frozen=True, slots=True)
class GraphPosition:
    """An attempt's current state in the graph, and the agent's."""

    state: State
    agent: AgentState
    reader: CommandReader

    @classmethod
    def start(cls, task: Task, first: str, reader: CommandReader) -> GraphPosition:
        """Return s_0, whose summary includes the goal: only episodes of one instruction share it."""
        agent = AgentState().after(reader.look(first))
        return cls((task.scene, f"{task.goal} | {state_summary(first, agent, reader)}"), agent, reader)

    def after(self, record: Record) -> GraphPosition:
        """Return the position after a step; a refused step leaves the graph's state unchanged."""
        agent = self.agent.after(self.reader.read(self.agent, record))
        if record.refused:
            return replace(self, agent=agent)
        return replace(self, state=(self.state[0], state_summary(record.feedback, agent, self.reader)), agent=agent)


def state_summary(text: str, agent: AgentState, reader: CommandReader) -> str:
    """Write a state in canonical form (B.2.2): place, sorted visible entities, held things."""
    seen = ", ".join(sorted(reader.look(text).entities)) or ("" if reader.pictures else " ".join(text.split()))
    return " | ".join([f"at {agent.at or 'start'}", *([f"sees: {seen}"] if seen else []), agent.holding])


def walk(trace: Trace, reader: CommandReader) -> Iterator[tuple[State, str, State, bool]]:
    """Yield (state, action, next state, executed) of each step of an attempt."""
    now = GraphPosition.start(trace.task, trace.first, reader)
    for record in trace.records:
        then = now.after(record)
        yield now.state, record.action, then.state, not record.refused
        now = then


@dataclass
class TrajectoryGraph:
    """Transitions and trajectories of all episodes, indexed by room and word to bound the time of a query."""

    reader: CommandReader
    transitions: dict[tuple[State, str, State], Transition] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    # Successful trajectories with their index, by room and topic.
    _won: dict[str, dict[Topic, list[tuple[int, Trajectory]]]] = field(default_factory=dict)
    # Successful actions by word in order of first use, and their counts, in all and by (action, task).
    _named: dict[str, dict[str, None]] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _of_task: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def states(self) -> set[State]:
        return {state for before, _, after in self.transitions for state in (before, after)}

    def learn(self, trace: Trace, topic: Topic) -> None:
        """Add an attempt."""
        steps = list(walk(trace, self.reader))
        for before, action, after, ok in steps:
            known = self.transitions.setdefault((before, action, after), Transition(before, action, after))
            (known.won if ok else known.lost)[trace.task.id] += 1
        trajectory = Trajectory(trace.task.id, topic, tuple(action for _, action, _, ok in steps if ok))
        if trace.success:
            self._won.setdefault(topic.room, {}).setdefault(topic, []).append((len(self.trajectories), trajectory))
        self.trajectories.append(trajectory)
        for action in trajectory.done:
            for word in action.split():
                self._named.setdefault(kind(word), {})[action] = None
            self._times[action] += 1
            self._of_task[action, trace.task.id] += 1

    def failed(self, state: State, task_id: str) -> list[str]:
        """List the actions that a task's earlier attempts failed to execute in a state."""
        tried = (t for t in self.transitions.values() if t.before == state and task_id in t.lost)
        return [t.action for t in tried]

    def recalled(self, topic: Topic, own: str = "") -> Iterator[Trajectory]:
        """Yield successful trajectories of similar tasks in this room except `own`, most similar first, then latest."""
        alike = lambda other: similarity(other, topic)
        there = self._won.get(topic.room, {})
        for score, topics in groupby(sorted(there, key=alike, reverse=True), alike):
            if score < RECALLED:
                return
            latest_first = heapq.merge(*(reversed(there[each]) for each in topics), key=lambda won: -won[0])
            yield from (t for _, t in latest_first if t.task_id != own)

    def patterns(self, topic: Topic, own: str = "") -> list[str]:
        """Format successful trajectories of this room: task type and actions (C.2)."""
        texts = dict[str, None]()
        for t in self.recalled(topic, own):
            texts[f"{t.topic.task_type}: {'; '.join(t.done[:PATTERN_ACTIONS])}"] = None
            if len(texts) >= PATTERNS:
                break
        return list(texts)

    def hints(self, topic: Topic, own: str = "") -> list[str]:
        """Format the most frequent successful actions on each object of the task, in order of first use."""
        lines = list[str]()
        for thing in sorted(topic.objects):
            named = self._actions_on(thing)
            counts = {a: times for a in named if (times := self._times[a] - self._of_task[a, own])}
            if best := heapq.nsmallest(HINTS, counts, key=lambda action: (-counts[action], action)):
                lines.append(f"{thing}: {'; '.join(action for action in named if action in best)}")
        return lines

    def _actions_on(self, thing: str) -> list[str]:
        """List the successful actions that name a thing, by all words of its name, in order of first use."""
        first, *others = (self._named.get(word, {}) for word in thing.split())
        return [action for action in first if all(action in other for other in others)]


def similarity(one: Topic, other: Topic) -> float:
    """Return [room equal] + [task type equal] + Jaccard index of the objects, 0 to 3."""
    both, either = one.objects & other.objects, one.objects | other.objects
    alike = len(both) / len(either) if either else 0.0
    return (one.room == other.room) + (one.task_type == other.task_type) + alike


@dataclass(slots=True)
class Relation:
    """Visit counts of an object category in a receptacle of a room."""

    n_seen: int = 0  # episodes that saw the object there
    n_visits: int = 0  # episodes that looked there
    seen: Counter[str] = field(default_factory=Counter)  # by task
    visits: Counter[str] = field(default_factory=Counter)
    last_seen: dict[str, int] = field(default_factory=dict)  # latest episode by task, latest last

    def count_visit(self, task: str, episode: int, found: bool) -> None:
        """Count an episode that looked into the receptacle."""
        self.n_visits += 1
        self.visits[task] += 1
        if found:
            self.n_seen += 1
            self.seen[task] += 1
            self.last_seen.pop(task, None)
            self.last_seen[task] = episode

    def counts(self, own: str) -> tuple[int, int, int]:
        """Return (seen, visits, last episode) without the episodes of task `own`."""
        last = next((episode for task, episode in reversed(self.last_seen.items()) if task != own), -1)
        return self.n_seen - self.seen[own], self.n_visits - self.visits[own], last


class SpatialFact(NamedTuple):
    """An object category in a receptacle, with the number of visits that saw it."""

    thing: str
    place: str
    seen: int
    visits: int

    def __str__(self) -> str:
        return f"{self.thing} in {self.place} ({self.seen} of {self.visits} visits)"


@dataclass
class SpatialGraph:
    reader: CommandReader
    rooms: dict[str, dict[tuple[str, str], Relation]] = field(default_factory=dict)

    def learn(self, attempts: Sequence[Trace], episode: int) -> None:
        """Add an episode's first view of each place."""
        if not attempts:
            return
        known, task = self.rooms.setdefault(attempts[0].task.scene, {}), attempts[0].task.id
        for place, seen in first_sights(attempts, self.reader).items():
            found = {kind(entity) for entity in seen}
            for thing in found:
                known.setdefault((thing, place), Relation())
            for (thing, where), relation in known.items():
                if where == place:
                    relation.count_visit(task, episode, thing in found)

    def facts(self, place: str, wanted: frozenset[str], most: int = MOST_FACTS, own: str = "") -> list[SpatialFact]:
        """List relations of a room from tasks other than `own`: wanted objects first, then by share of visits, then
        latest."""
        counted = [(thing, where, *known.counts(own)) for (thing, where), known in self.rooms.get(place, {}).items()]
        ranked = sorted(
            (each for each in counted if each[2]), key=lambda e: (e[0] not in wanted, -e[2] / e[3], -e[4], e[:2])
        )
        return [SpatialFact(*each[:4]) for each in ranked[:most]]


def first_sights(attempts: Iterable[Trace], reader: CommandReader) -> Mapping[str, tuple[str, ...]]:
    """Return the contents of each place at its first view, without objects that were moved before. Where views do not
    list contents, those are the things that were found there."""
    found, shifted = dict[str, tuple[str, ...]](), set[str]()
    for trace in attempts:
        views = list(reader.look(trace.first).views)
        for _, reading, _ in reader.follow(trace.first, trace.records):
            done = reading.effect
            if done is not None and done.verb == "take" and done.place:
                views.append(PlaceView(done.place, (done.thing,), complete=False))
            for view in (*views, *reading.views):
                seen = tuple(entity for entity in view.seen if entity not in shifted)
                known = found.setdefault(view.at, seen)
                if not view.complete:
                    found[view.at] = (*known, *(entity for entity in seen if entity not in known))
            shifted |= {done.thing} if done is not None and done.verb in ("take", "put") else set()
            views = []
    return found


def topic_of(task: Task, reader: CommandReader, first: str = "") -> Topic:
    """Return a task's retrieval features; `first` is its first observation."""
    return Topic(task.scene, task.kind, reader.goal_things(task.goal, map(kind, reader.look(first).places)))
