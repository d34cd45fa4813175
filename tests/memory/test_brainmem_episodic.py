"""BrainMem's graphs: merging, failed transitions, recall, and what is where."""

from __future__ import annotations

from envs.base import Task
from envs.household.command_reader import HouseholdReader
from memory.brainmem.episodic import SpatialGraph, Topic, TrajectoryGraph, first_sights, similarity, topic_of, walk
from memory.protocol import Record, Trace

READER = HouseholdReader()
HEAT = "heat"
FIRST = "You are in the middle of a room. Looking quickly around you, you see a desk 1, and a shelf 1."
ARRIVED = "You arrive at shelf 1. On the shelf 1, you see a mug 1, and a pen 2."
TAKEN = "You pick up the mug 1 from the shelf 1."


def trace(
    *steps: tuple[str, str],
    task: str = "t1",
    room: str = "FloorPlan1",
    success: bool = True,
    refused: int = -1,
    attempt: int = 0,
) -> Trace:
    views = [FIRST, *(feedback for _, feedback in steps)]
    records = tuple(Record(t, views[t], a, f, t == refused) for t, (a, f) in enumerate(steps))
    return Trace(Task(task, "put a hot mug in desk", room, "train", HEAT), records, success, attempt)


TWO = (("go to shelf 1", ARRIVED), ("take mug 1 from shelf 1", TAKEN))


def learned(*traces: Trace) -> TrajectoryGraph:
    graph = TrajectoryGraph(READER)
    for each in traces:
        graph.learn(each, topic_of(each.task, READER, each.first))
    return graph


def test_an_episode_that_is_played_twice_merges() -> None:
    twice = learned(trace(*TWO), trace(*TWO, task="t2"))
    assert len(twice.states) == 3 and len(twice.trajectories) == 2
    assert [t.n_success for t in twice.transitions.values()] == [2, 2]
    other = learned(trace(*TWO), trace(*TWO, room="FloorPlan2"))
    assert len(other.states) == 6 and [t.n_success for t in other.transitions.values()] == [1] * 4


def test_a_refused_action_is_tagged_and_told_to_the_next_attempt_at_this_task_alone() -> None:
    refused = trace(("take pen 2 from desk 1", "Nothing happens."), refused=0, success=False)
    graph = learned(refused)
    [transition] = graph.transitions.values()
    assert transition.lost.total() == 1 and transition.before == transition.after and not transition.n_success
    [(state, _, _, ok)] = walk(refused, READER)
    assert not ok and graph.failed(state, "t1") == ["take pen 2 from desk 1"] and graph.failed(state, "t2") == []
    assert graph.failed(("FloorPlan1", "elsewhere"), "t1") == []


def test_similarity_and_patterns_of_the_room() -> None:
    mug = Topic("FloorPlan1", HEAT, frozenset({"mug"}))
    assert similarity(mug, mug) == 3.0 and similarity(mug, Topic("FloorPlan2", HEAT, frozenset({"mug", "pen"}))) == 1.5
    graph = learned(
        trace(*TWO),
        trace(*TWO[:1], success=False),
        trace(*TWO, room="FloorPlan2"),
        trace(*TWO, ("heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1."), task="t4"),
    )
    long = "heat: go to shelf 1; take mug 1 from shelf 1; heat mug 1 with microwave 1"
    assert graph.patterns(mug) == [long, "heat: go to shelf 1; take mug 1 from shelf 1"]
    assert graph.patterns(Topic("FloorPlan9", HEAT, frozenset({"mug"}))) == []  # other rooms' feed the hints
    assert graph.hints(mug) == ["mug: take mug 1 from shelf 1; heat mug 1 with microwave 1"]


def test_what_is_where_is_what_was_seen_first() -> None:
    put = ("move mug 1 to desk 1", "You move the mug 1 to the desk 1.")
    back = ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a book 1, and a mug 1.")
    sights = first_sights([trace(*TWO, put, back)], READER)
    assert sights == {"shelf 1": ("mug 1", "pen 2"), "desk 1": ("book 1",)}  # the mug was brought there


def test_counts_are_of_visits() -> None:
    graph = SpatialGraph(READER)
    empty = ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pen 2.")
    for episode, each in enumerate((trace(TWO[0]), trace(empty), trace(TWO[0]), trace(("go to desk 1", "x")))):
        graph.learn([each], episode)
    lines = lambda *asked: list(map(str, graph.facts(*asked)))
    assert lines("FloorPlan1", frozenset({"mug"})) == [
        "mug in shelf 1 (2 of 3 visits)",
        "pen in shelf 1 (3 of 3 visits)",
    ]
    assert lines("FloorPlan1", frozenset(), 1) == ["pen in shelf 1 (3 of 3 visits)"]
    assert lines("FloorPlan2", frozenset()) == []
