"""Episodic memory: a graph of states and transitions over all episodes with the trajectories that run through it, and a
graph of what is where (section 3.2.2, B.1 and B.2).

States are merged by room and summary, transitions by both ends and action; a refused action is a transition that
failed, from a state to itself. Of space is kept what an episode saw first, and not what it moved itself: objects by
category, receptacles by name, for these persist in a room. A place that was looked at, and did not hold what it held
before, counts against the relation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from envs.base import Task
from memory.brainmem.reading import Body, kind, moved, objects, room, summary, views
from memory.protocol import Record, Trace

State = tuple[str, str]  # room, summary
MOST_FACTS, HINTS = 10, 3  # relations that are shown of a room, actions that are shown of an object
RECALLED = 2.0  # similarity of a task from which on its trajectory is recalled


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

    @property
    def tagged_failed(self) -> bool:
        return self.lost.total() > 0


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
    transitions: dict[tuple[State, str, State], Transition] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)

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
        self.trajectories.append(
            Trajectory(trace.task.id, topic, actions, ok, trace.success, trace.attempt, episode)
        )  # fmt: skip

    def failed(self, state: State, task_id: str) -> list[str]:
        """List the actions that failed in a state in earlier attempts at the task."""
        tried = (t for t in self.transitions.values() if t.before == state and task_id in t.lost)
        return [t.action for t in tried]

    def recalled(self, topic: Topic, own: str = "") -> list[Trajectory]:
        """Return trajectories of like tasks but of `own`, the most alike first, then the latest."""
        ranked = sorted(enumerate(self.trajectories), key=lambda pair: (-similarity(pair[1].topic, topic), -pair[0]))
        return [t for _, t in ranked if similarity(t.topic, topic) >= RECALLED and t.task_id != own]

    def patterns(self, topic: Topic, most: int, longest: int, own: str = "") -> list[str]:
        """Write what succeeded in this very room: task type and the actions that succeeded (C.2)."""
        won = [t for t in self.recalled(topic, own) if t.success and t.topic.room == topic.room]
        texts = dict.fromkeys(f"{t.topic.task_type}: {'; '.join(t.done[:longest])}" for t in won)
        return list(texts)[:most]

    def hints(self, topic: Topic, own: str = "") -> list[str]:
        """Write for each object of the task what was done with it most often, in the order in which it was done."""
        lines, order = [], [action for t in self.trajectories for action in t.done]
        for thing in sorted(topic.objects):
            counts = Counter[str]()
            for transition in self.transitions.values():
                if thing in transition.action.split():
                    counts[transition.action] += transition.n_success - transition.won[own]
            best = sorted(+counts, key=lambda action: (-counts[action], action))[:HINTS]
            if best:
                lines.append(f"{thing}: {'; '.join(sorted(best, key=order.index))}")
        return lines


def similarity(one: Topic, other: Topic) -> float:
    """[room equal] + [task type equal] + Jaccard index of the objects: 0 to 3."""
    both, either = one.objects & other.objects, one.objects | other.objects
    alike = len(both) / len(either) if either else 0.0
    return (one.room == other.room) + (one.task_type == other.task_type) + alike


@dataclass(frozen=True, slots=True)
class Relation:
    """An object category in a receptacle of a room, by the episodes that looked there."""

    seen: Counter[str] = field(default_factory=Counter)  # episodes that saw it there, by task
    absent: Counter[str] = field(default_factory=Counter)  # and that saw it was not
    last_seen: dict[str, int] = field(default_factory=dict)  # the last of those episodes, by task

    def counts(self, own: str) -> tuple[int, int, int]:
        """Return (seen, visits, last seen) without the episodes of a task."""
        seen = self.seen.total() - self.seen[own]
        last = max((episode for task, episode in self.last_seen.items() if task != own), default=-1)
        return seen, seen + self.absent.total() - self.absent[own], last


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
                relation = known.setdefault((thing, place), Relation())
                relation.seen[task] += 1
                relation.last_seen[task] = episode
            for (thing, where), relation in known.items():
                if where == place and thing not in found:
                    relation.absent[task] += 1

    def lines(self, place: str, wanted: frozenset[str], most: int = MOST_FACTS, own: str = "") -> list[str]:
        """Write where things are in a room, as episodes of other tasks than `own` saw them: those that are wanted
        first, then the surest, then the latest."""
        told = [(thing, where, *known.counts(own)) for (thing, where), known in self.rooms.get(place, {}).items()]
        ranked = sorted(
            (each for each in told if each[2]), key=lambda e: (e[0] not in wanted, -e[2] / e[3], -e[4], e[:2])
        )
        return [f"{thing} in {where} ({seen} of {visits} visits)" for thing, where, seen, visits, _ in ranked[:most]]


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
