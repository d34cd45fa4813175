"""Episodes that `bench memory size` commits."""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks.memory import renamed
from tests.memory.worked_examples import E1, E2


def test_further_rounds_are_the_same_episodes_of_further_tasks_and_homes() -> None:
    told = replace(E1, rationale="in FloorPlan1 the mug was in countertop 2")
    drawn = [trace for [trace] in itertools.islice(renamed([[told], [E2]]), 5)]
    assert [trace.task.id for trace in drawn] == ["t1", "t2", "t1 1", "t2 1", "t1 2"]
    assert [trace.task.scene for trace in drawn] == ["FloorPlan1"] * 2 + ["FloorPlan1 1"] * 2 + ["FloorPlan1 2"]
    assert drawn[4].rationale == "in FloorPlan1 2 the mug was in countertop 2" and drawn[4].records == E1.records
