"""What BrainMem finds by its indexes is what the definitions give that go through everything."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from envs.base import Task
from envs.household.command_reader import HouseholdReader
from memory.brainmem.episodic import HINTS, RECALLED, Relation, Topic, TrajectoryGraph, similarity
from memory.brainmem.semantic import AGREE, Experience, Experiences
from memory.protocol import Record, Trace

ROOMS, TYPES, THINGS = ("kitchen", "bath", ""), ("heat", "look"), ("mug", "pan", "egg")


def topic(rng: random.Random) -> Topic:
    return Topic(rng.choice(ROOMS), rng.choice(TYPES), frozenset(rng.sample(THINGS, rng.randint(0, 2))))


def trace(rng: random.Random, room: str) -> Trace:
    actions = [f"take {rng.choice(THINGS)} 1 from shelf {rng.randint(1, 2)}" for _ in range(rng.randint(1, 4))]
    records = tuple(Record(t, "x", action, "y", rng.random() < 0.3) for t, action in enumerate(actions))
    return Trace(Task(f"t{rng.randint(1, 4)}", "g", room, "train", ""), records, rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(8))
def test_patterns_and_hints(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, graph, succeeded = random.Random(seed), TrajectoryGraph(HouseholdReader()), list[bool]()
    for _ in range(60):
        graph.learn(played := trace(rng, (about := topic(rng)).room), about)
        succeeded.append(played.success)
    monkeypatch.setattr("memory.brainmem.episodic.PATTERN_ACTIONS", 2)
    for own in ("", "t1", "t2"):
        asked = topic(rng)
        ranked = sorted(enumerate(graph.trajectories), key=lambda p: (-similarity(p[1].topic, asked), -p[0]))
        won = [t for n, t in ranked if succeeded[n] and t.task_id != own and t.topic.room == asked.room]
        won = [t for t in won if similarity(t.topic, asked) >= RECALLED]
        texts = dict.fromkeys(f"{t.topic.task_type}: {'; '.join(t.done[:2])}" for t in won)
        for most in (1, 3, 100):
            monkeypatch.setattr("memory.brainmem.episodic.PATTERNS", most)
            assert graph.patterns(asked, own) == list(texts)[:most]
        order, lines = [action for t in graph.trajectories for action in t.done], list[str]()
        for thing in sorted(asked.objects):
            counts = Counter[str]()
            for t in graph.transitions.values():
                if thing in t.action.split():
                    counts[t.action] += t.n_success - t.won[own]
            best = sorted(+counts, key=lambda action: (-counts[action], action))[:HINTS]
            lines += [f"{thing}: {'; '.join(sorted(best, key=order.index))}"] * bool(best)
        assert graph.hints(asked, own) == lines


@pytest.mark.parametrize("seed", range(8))
def test_experiences(seed: int) -> None:
    rng = random.Random(seed)
    words = ("the", "mug", "is", "in", "shelf", "desk", "often")
    made = []
    for i in range(60):
        about, said = topic(rng), [" ".join(rng.sample(words, rng.randint(2, 5))) for _ in range(rng.randint(0, 2))]
        insights, task = tuple(said), f"t{rng.randint(1, 9)}"
        made.append(
            Experience(f"e{i}", task, about.room, about.task_type, about.objects, True, learning_insights=insights)
        )
    known = Experiences(made)
    assert list(known) == made and known.of_ids(["e7", "none", "e3"]) == [made[3], made[7]]
    for own in ("", "t1"):
        asked = topic(rng)

        def score(e: Experience, asked: Topic = asked) -> float:
            return 2.0 * (e.task_type == asked.task_type) + len(e.objects & asked.objects) / max(1, len(asked.objects))

        others = [(i, e) for i, e in enumerate(made) if e.task_id != own and score(e) > 0]
        ranked = [e for _, e in sorted(others, key=lambda p: (-score(p[1]), p[1].room != asked.room, -p[0]))]
        for k in (0, 1, 5, 99):
            assert known.recalled(asked.room, asked.task_type, asked.objects, k, own) == ranked[:k]
    agree = lambda a, b: len(a & b) >= AGREE * len(a | b)
    for new in made[:20]:
        text = "the mug is in shelf"
        expected = {
            e.id
            for e in made
            if e.task_id != new.task_id
            and e.task_type == new.task_type
            and (not e.objects or not new.objects or e.objects & new.objects)
            and any(agree(set(text.split()), set(other.split())) for other in e.texts())
        }
        found = known.saying(text, new)
        assert {e.id for e in found} == expected and len(found) == len(expected)


def test_a_relation_counts_without_the_episodes_of_a_task() -> None:
    relation = Relation()
    for episode, (task, found) in enumerate([("a", True), ("b", True), ("b", False), ("a", True), ("c", False)]):
        relation.count_visit(task, episode, found)
    assert [relation.counts(own) for own in ("", "a", "b", "c")] == [(3, 5, 3), (1, 3, 1), (2, 3, 3), (3, 4, 3)]
    assert Relation().counts("") == (0, 0, -1)
