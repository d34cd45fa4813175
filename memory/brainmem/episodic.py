"""Episodic memory: a graph of states and transitions over all episodes with the trajectories that run through it, and a
graph of what is where (section 3.2.2, B.1 and B.2).

States are merged by room and summary, transitions by both ends and action; a refused action is a transition that
failed, from a state to itself. Of space is kept what an episode saw first, and not what it moved itself: objects by
category, receptacles by name, for these persist in a room. A place that was looked at, and did not hold what it held
before, counts against the relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memory.brainmem.reading import Body, kind, moved, objects, room, summary, views
from memory.protocol import Trace

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
    n_success: int = 0
    n_failure: int = 0
    tasks_failed: frozenset[str] = frozenset()  # whose attempts it failed in

    @property
    def tagged_failed(self) -> bool:
        return self.n_failure > 0


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


def walk(trace: Trace) -> Iterator[tuple[State, str, State, bool]]:
    """Yield each step of an attempt: state, action, next state, whether it was executed."""
    place, body = trace.task.scene, Body()
    first = trace.records[0].observation if trace.records else ""
    state = place, f"{trace.task.goal} | {summary(first, body)}"  # s_0 merges within one instruction only
    for record in trace.records:
        after = state
        if not record.refused:
            body = body.after(record.action, record.feedback)
            after = place, summary(record.feedback, body)
        yield state, record.action, after, not record.refused
        state = after


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
            known = self.transitions.get((before, action, after), Transition(before, action, after))
            failed = known.tasks_failed if ok else known.tasks_failed | {trace.task.id}
            self.transitions[before, action, after] = replace(
                known, n_success=known.n_success + ok, n_failure=known.n_failure + (not ok), tasks_failed=failed
            )
        actions, ok = tuple(action for _, action, _, _ in steps), tuple(ok for *_, ok in steps)
        self.trajectories.append(
            Trajectory(trace.task.id, topic, actions, ok, trace.success, trace.attempt, episode)
        )  # fmt: skip

    def failed(self, state: State, task_id: str) -> list[str]:
        """List the actions that failed in a state in earlier attempts at the task."""
        tried = (t for t in self.transitions.values() if t.before == state and task_id in t.tasks_failed)
        return [t.action for t in tried]

    def recalled(self, topic: Topic) -> list[Trajectory]:
        """Return trajectories of like tasks, the most alike first, then the latest."""
        ranked = sorted(enumerate(self.trajectories), key=lambda pair: (-similarity(pair[1].topic, topic), -pair[0]))
        return [t for _, t in ranked if similarity(t.topic, topic) >= RECALLED]

    def patterns(self, topic: Topic, most: int, longest: int) -> list[str]:
        """Write what succeeded in this very room: task type and the actions that succeeded (C.2)."""
        won = [t for t in self.recalled(topic) if t.success and t.topic.room == topic.room]
        texts = dict.fromkeys(f"{t.topic.task_type}: {'; '.join(t.done[:longest])}" for t in won)
        return list(texts)[:most]

    def hints(self, topic: Topic) -> list[str]:
        """Write for each object of the task what was done with it most often, in the order in which it was done."""
        lines = []
        for thing in sorted(topic.objects):
            counts = dict[str, int]()
            for transition in self.transitions.values():
                if transition.n_success and _mentions(transition.action, thing):
                    counts[transition.action] = counts.get(transition.action, 0) + transition.n_success
            best = sorted(counts, key=lambda action: (-counts[action], action))[:HINTS]
            order = [action for t in self.trajectories for action in t.done]
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

    n_seen: int = 0
    n_absent: int = 0
    last_seen: int = -1

    @property
    def share(self) -> float:
        return self.n_seen / (self.n_seen + self.n_absent)


@dataclass
class SpatialGraph:
    rooms: dict[str, dict[tuple[str, str], Relation]] = field(default_factory=dict)

    def learn(self, attempts: Sequence[Trace], episode: int) -> None:
        """Take in what an episode saw first of each place, without what it had moved."""
        if not attempts:
            return
        known = self.rooms.setdefault(attempts[0].task.scene, {})
        for place, seen in first_sights(attempts).items():
            found = {kind(entity) for entity in seen}
            for thing in found:
                was = known.get((thing, place), Relation())
                known[thing, place] = replace(was, n_seen=was.n_seen + 1, last_seen=episode)
            for (thing, where), was in known.items():
                if where == place and thing not in found:
                    known[thing, where] = replace(was, n_absent=was.n_absent + 1)

    def lines(self, place: str, wanted: frozenset[str], most: int = MOST_FACTS) -> list[str]:
        """Write where things are in a room: those that are wanted first, then the surest, then the latest."""
        known = self.rooms.get(place, {})
        ranked = sorted(known, key=lambda key: (key[0] not in wanted, -known[key].share, -known[key].last_seen, key))
        return [
            f"{thing} in {where} ({known[thing, where].n_seen} of "
            f"{known[thing, where].n_seen + known[thing, where].n_absent} visits)"
            for thing, where in ranked[:most]
        ]


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


def topic_of(trace: Trace) -> Topic:
    first = trace.records[0].observation if trace.records else ""
    known = {kind(entity) for entity in room(first)}
    return Topic(trace.task.scene, trace.task.kind, objects(trace.task, known))


def _mentions(action: str, thing: str) -> bool:
    return thing in action.split()
