"""Episodic memory: a graph of states and transitions over all episodes with the trajectories that run through it, and a
graph of what is where (section 3.2.2, B.1 and B.2).

States are merged by room and summary, transitions by both ends and action; a refused action is a transition that
failed, from a state to itself. Of space is kept what an episode saw first, and not what it moved itself: objects by
category, receptacles by name, for these persist in a room. A place that was looked at, and did not hold what it held
before, counts against the relation.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from envs.base import Task
from envs.household.telling import Body, kind, moved, objects, room, summary, views
from memory.protocol import Record, Trace

State = tuple[str, str]  # room, summary
MOST_FACTS, HINTS = 10, 3  # relations that are shown of a room, actions that are shown of an object
RECALLED = 2.0  # similarity of a task from which on its trajectory is a pattern


@dataclass(frozen=True, slots=True)
class Topic:
    """What a task is about: Q of section 3.3."""

    room: str
    task_type: str
    objects: frozenset[str]


@dataclass(frozen=True, slots=True)
class Transition:
    before: State
    action: str
    after: State
    won: Counter[str] = field(default_factory=Counter)  # times that it succeeded, by task
    lost: Counter[str] = field(default_factory=Counter)  # times that it was refused, by task

    @property
    def n_success(self) -> int:
        return self.won.total()


@dataclass(frozen=True, slots=True)
class Trajectory:
    task_id: str
    topic: Topic
    actions: tuple[str, ...]
    ok: tuple[bool, ...]
    success: bool
    attempt: int
    episode: int

    @property
    def done(self) -> list[str]:
        """List the actions that succeeded."""
        return [action for action, ok in zip(self.actions, self.ok, strict=True) if ok]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an attempt stands: the state of the graph, and the agent's body."""

    state: State
    body: Body = field(default_factory=Body)

    @classmethod
    def at_first(cls, task: Task, first: str) -> Standing:
        """Return s_0, which merges within one instruction only."""
        return cls((task.scene, f"{task.goal} | {summary(first, Body())}"))

    def after(self, record: Record) -> Standing:
        """Return it after a step; one that was refused leaves it."""
        if record.refused:
            return self
        body = self.body.after(record.action, record.feedback)
        return Standing((self.state[0], summary(record.feedback, body)), body)


def walk(trace: Trace) -> Iterator[tuple[State, str, State, bool]]:
    """Yield each step of an attempt: state, action, next state, whether it was executed."""
    now = Standing.at_first(trace.task, trace.first)
    for record in trace.records:
        then = now.after(record)
        yield now.state, record.action, then.state, not record.refused
        now = then


@dataclass
class TrajectoryGraph:
    """What is asked of it is found by room and word, so that asking takes no longer as episodes go by."""

    transitions: dict[tuple[State, str, State], Transition] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    # Successes by room and topic, with their place among the trajectories.
    _won: dict[str, dict[Topic, list[tuple[int, Trajectory]]]] = field(default_factory=dict)
    # What succeeded: its actions by word, in the order in which they were first done; how often each was, in all and in
    # episodes of each task.
    _named: dict[str, dict[str, None]] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _of_task: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def states(self) -> set[State]:
        return {state for before, _, after in self.transitions for state in (before, after)}

    def learn(self, trace: Trace, topic: Topic, episode: int) -> None:
        """Take in an attempt: a step counts for its transition."""
        steps = list(walk(trace))
        for before, action, after, ok in steps:
            known = self.transitions.setdefault((before, action, after), Transition(before, action, after))
            (known.won if ok else known.lost)[trace.task.id] += 1
        actions, ok = tuple(action for _, action, _, _ in steps), tuple(ok for *_, ok in steps)
        made = Trajectory(trace.task.id, topic, actions, ok, trace.success, trace.attempt, episode)
        if trace.success:
            self._won.setdefault(topic.room, {}).setdefault(topic, []).append((len(self.trajectories), made))
        self.trajectories.append(made)
        for action in made.done:
            for word in action.split():
                self._named.setdefault(word, {})[action] = None
            self._times[action] += 1
            self._of_task[action, trace.task.id] += 1

    def failed(self, state: State, task_id: str) -> list[str]:
        """List the actions that failed in a state in earlier attempts at the task."""
        tried = (t for t in self.transitions.values() if t.before == state and task_id in t.lost)
        return [t.action for t in tried]

    def recalled(self, topic: Topic, own: str = "") -> Iterator[Trajectory]:
        """Yield what succeeded at like tasks in this room, but for `own`: the most alike first, then the latest."""
        alike = lambda other: similarity(other, topic)
        there = self._won.get(topic.room, {})
        for score, topics in groupby(sorted(there, key=alike, reverse=True), alike):
            if score < RECALLED:
                return
            latest_first = heapq.merge(*(reversed(there[each]) for each in topics), key=lambda won: -won[0])
            yield from (t for _, t in latest_first if t.task_id != own)

    def patterns(self, topic: Topic, most: int, longest: int, own: str = "") -> list[str]:
        """Write what succeeded in this very room: task type and the actions that succeeded (C.2)."""
        texts = dict[str, None]()
        for t in self.recalled(topic, own):
            texts[f"{t.topic.task_type}: {'; '.join(t.done[:longest])}"] = None
            if len(texts) >= most:
                break
        return list(texts)[:most]

    def hints(self, topic: Topic, own: str = "") -> list[str]:
        """Write for each object of the task what was done with it most often, in the order in which it was done."""
        lines = list[str]()
        for thing in sorted(topic.objects):
            named = self._named.get(thing, {})
            counts = {a: times for a in named if (times := self._times[a] - self._of_task[a, own])}
            if best := heapq.nsmallest(HINTS, counts, key=lambda action: (-counts[action], action)):
                lines.append(f"{thing}: {'; '.join(action for action in named if action in best)}")
        return lines


def similarity(one: Topic, other: Topic) -> float:
    """[room equal] + [task type equal] + Jaccard index of the objects: 0 to 3."""
    both, either = one.objects & other.objects, one.objects | other.objects
    alike = len(both) / len(either) if either else 0.0
    return (one.room == other.room) + (one.task_type == other.task_type) + alike


@dataclass(slots=True)
class Relation:
    """An object category in a receptacle of a room, by the episodes that looked there."""

    n_seen: int = 0  # episodes that saw it there
    n_visits: int = 0  # that looked there
    seen: Counter[str] = field(default_factory=Counter)  # both by task
    visits: Counter[str] = field(default_factory=Counter)
    last_seen: dict[str, int] = field(default_factory=dict)  # the last that saw it, by task, in their order

    def looked(self, task: str, episode: int, found: bool) -> None:
        """Count an episode that looked there."""
        self.n_visits += 1
        self.visits[task] += 1
        if found:
            self.n_seen += 1
            self.seen[task] += 1
            self.last_seen.pop(task, None)
            self.last_seen[task] = episode

    def counts(self, own: str) -> tuple[int, int, int]:
        """Return (seen, visits, last seen) without the episodes of a task."""
        last = next((episode for task, episode in reversed(self.last_seen.items()) if task != own), -1)
        return self.n_seen - self.seen[own], self.n_visits - self.visits[own], last


class SpatialFact(NamedTuple):
    """An object category that episodes saw in a receptacle, on so many of the visits there."""

    thing: str
    place: str
    seen: int
    visits: int

    def __str__(self) -> str:
        return f"{self.thing} in {self.place} ({self.seen} of {self.visits} visits)"


@dataclass
class SpatialGraph:
    rooms: dict[str, dict[tuple[str, str], Relation]] = field(default_factory=dict)

    def learn(self, attempts: Sequence[Trace], episode: int) -> None:
        """Take in what an episode saw first of each place, without what it had moved."""
        if not attempts:
            return
        known, task = self.rooms.setdefault(attempts[0].task.scene, {}), attempts[0].task.id
        for place, seen in first_sights(attempts).items():
            found = {kind(entity) for entity in seen}
            for thing in found:
                known.setdefault((thing, place), Relation())
            for (thing, where), relation in known.items():
                if where == place:
                    relation.looked(task, episode, thing in found)

    def facts(self, place: str, wanted: frozenset[str], most: int = MOST_FACTS, own: str = "") -> list[SpatialFact]:
        """List where things are in a room, as episodes of other tasks than `own` saw them: those that are wanted
        first, then the surest, then the latest."""
        told = [(thing, where, *known.counts(own)) for (thing, where), known in self.rooms.get(place, {}).items()]
        ranked = sorted(
            (each for each in told if each[2]), key=lambda e: (e[0] not in wanted, -e[2] / e[3], -e[4], e[:2])
        )
        return [SpatialFact(*each[:4]) for each in ranked[:most]]


def first_sights(attempts: Iterable[Trace]) -> Mapping[str, tuple[str, ...]]:
    """Give what each place held when it was first looked at, without what had been moved until then."""
    found, shifted = dict[str, tuple[str, ...]](), set[str]()
    for trace in attempts:
        for record in trace.records:
            for text in dict.fromkeys((record.observation, record.feedback)):
                for view in views(text):
                    seen = tuple(entity for entity in view.seen or () if entity not in shifted)
                    found.setdefault(view.at, seen)
                shifted |= {moved(text)} - {""}
    return found


def topic_of(task: Task, first: str = "") -> Topic:
    """Say what a task is about; `first` is its first view, where there is one."""
    return Topic(task.scene, task.kind, objects(task, map(kind, room(first))))
