"""S3Mem as the memory of episodes: what each delivery makes of its units, frozen and online, on generated homes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.records import Episode, read_episodes
from configs.evaluation import EvalConfig
from data_gen.memory_factory import open_memory
from eval.evaluate import ModelCache, evaluate
from eval.matrix import Cell
from executor.scripted import ScriptedPlanner
from memory.s3mem.system import S3Mem
from memory.s3mem.units import EventUnit, StateChange, UnitOrigin

DELIVERIES = ("none", "static", "live", "disclosure", "expert_compiler")


def config(protocol: str, executor: dict[str, Any] | None = None) -> EvalConfig:
    return EvalConfig.model_validate(
        {
            "env": {"name": "household", "scenes": {"train": 2, "test": 6}, "visual_share": 0.0, "images": False},
            "executor": executor or {},
            "deliveries": DELIVERIES,
            "split": "test",
            "max_steps": 30,
            "limit": 24,
            "memory": {"system": "s3mem", "protocol": protocol, "pictures": 0},
        }
    )


def played(of: EvalConfig, out: Path, executor: Any) -> tuple[dict[str, Any], dict[str, list[Episode]]]:
    with ModelCache.preloaded(of, executor, None) as loaded:
        results = evaluate(Cell({}, of), out, loaded, "overwrite")["results"]
    episodes = list(read_episodes(out / "episodes.jsonl"))
    return results, {name: [e for e in episodes if e.delivery == name] for name in DELIVERIES}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[Episode]]]:
    return played(config("frozen"), tmp_path_factory.mktemp("frozen"), ScriptedPlanner())


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, list[Episode]]]:
    out = tmp_path_factory.mktemp("online")
    return out, *played(config("online"), out, ScriptedPlanner())


def test_a_unit_s_provenance_says_what_was_done_and_nothing_of_what_was_refused() -> None:
    of = lambda event, kind="step": EventUnit(0, "", event, UnitOrigin("h", kind), ("p",)).entry().provenance.actions
    assert of("take mug 1 from shelf 3") == ("take mug 1 from shelf 3",)
    assert of("look at picture: It is red.") == ("look at picture",)
    assert of("fly (refused)") == () and of("I went home.", "turn") == ()


def test_what_was_seen_at_a_place_is_told_as_what_would_take_it() -> None:
    seen = EventUnit(
        0, "", "go to desk 1", UnitOrigin("h", "step"), ("p",), objects=("desk 1", "pen 2", "fog"), place="desk 1"
    )
    assert seen.entry().provenance.actions == ("go to desk 1", "take pen 2 from desk 1")
    put = replace(seen, event="move pen 2 to desk 1", changes=(StateChange("pen 2.location", "hand", "desk 1"),))
    assert put.entry().provenance.actions == ("move pen 2 to desk 1",)  # where it has been brought, not found
    assert replace(seen, place="kitchen").entry().provenance.actions == ("go to desk 1",)


def test_compiled_deliveries_read_the_units_that_are_pasted_elsewhere(
    frozen: tuple[dict[str, Any], dict[str, list[Episode]]],
) -> None:
    _, by = frozen
    assert all(len(episodes) == 24 for episodes in by.values())
    told = [{episode.task_id: episode.memory_ids for episode in by[name]} for name in DELIVERIES[1:]]
    assert all(each == told[0] for each in told) and any(told[0].values())
    for episode in (each for name in DELIVERIES[1:] for each in by[name]):
        assert {step.memory_ids for step in episode.steps} <= {
            None,
            episode.memory_ids,
        }  # it follows from the goal alone
    shown = [(step.guidance, e.memory_text) for e in by["disclosure"] for step in e.steps if step.guidance]
    assert len(shown) > 24 and all(piece in told for guidance, told in shown for piece in guidance.split(" / "))


def test_it_saves_steps_pasted_and_compiled_by_the_teacher(
    frozen: tuple[dict[str, Any], dict[str, list[Episode]]],
) -> None:
    """What is recalled is a view of the thing, most of the time; the teacher reads it as the command that takes it."""
    results, by = frozen
    steps = {name: sum(len(episode.steps) for episode in by[name]) for name in DELIVERIES}
    assert steps["static"] == steps["live"] < 0.7 * steps["none"], steps  # it recalls the same all along
    assert steps["expert_compiler"] < 0.7 * steps["none"], steps
    said = [step.guidance for episode in by["expert_compiler"] for step in episode.steps if step.guidance]
    assert len(said) >= 16 and all(guidance.startswith("go to ") for guidance in said)
    assert all(results[name]["success"]["mean"] >= results["none"]["success"]["mean"] for name in DELIVERIES)


@pytest.mark.seconds
def test_online_it_knows_what_earlier_episodes_left_and_nothing_later(
    online: tuple[Path, dict[str, Any], dict[str, list[Episode]]],
) -> None:
    out, results, by = online
    for name in DELIVERIES[1:]:
        assert results[name]["stream"]["leaked"] == 0
        assert by[name][0].memory_ids == () and any(episode.memory_ids for episode in by[name])
        memory: Any = open_memory(config("online").memory, out / "memory" / name)
        assert isinstance(memory, S3Mem) and sum(memory.origins().values()) == 24
        for at, episode in enumerate(by[name]):
            before = {each.task_id for each in by[name][:at]}
            assert {memory[id].provenance.task_id for id in episode.memory_ids} <= before - {episode.task_id}
