"""BrainMem's parts do what they are for (checks 7 and 8 of its specification): generated homes, scripted planners."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.records import Episode, read_episodes
from configs.evaluation import EvalConfig
from eval.error_analysis import analyse
from eval.evaluate import ModelCache, evaluate
from eval.intervals import bootstrap_mean
from eval.matrix import Cell
from executor.prompt import ExecutorRequest, executor_text
from executor.records import PAPER_VIEW, Action, Grounding
from executor.scripted import ScriptedPlanner
from memory.brainmem.knowledge import Knowledge, Section

OFF = {"enabled": False}
SPACE_ALONE = {"working": OFF, "semantic": OFF, "episodic": {"trajectory": False}, "evolve": OFF}


def played(out: Path, settings: dict[str, Any], planner: Any, homes: int, steps: int, **more: Any) -> list[Episode]:
    config = EvalConfig.model_validate(
        {
            "env": {"name": "household", "scenes": {"test": homes}, "visual_share": 0.0, "images": False},
            "deliveries": ["live"],
            "split": "test",
            "max_steps": steps,
            "memory": {"system": "brainmem", "protocol": "online", "settings": settings, "pictures": 0},
            **more,
        }
    )
    with ModelCache.preloaded(config, planner, None) as loaded:
        evaluate(Cell({}, config), out, loaded, "overwrite")
    return list(read_episodes(out / "episodes.jsonl"))


def steps_by_turn(episodes: Sequence[Episode]) -> dict[int, list[int]]:
    """Steps of each home's first episode, second, ..."""
    turns, found = defaultdict[str, int](int), defaultdict[int, list[int]](list)
    for episode in episodes:
        found[turns[episode.scene]].append(len(episode.steps))
        turns[episode.scene] += 1
    return found


@pytest.mark.seconds
def test_spatial_memory_shortens_search_from_a_home_s_second_episode_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lambda name, settings: played(tmp_path / name, settings, ScriptedPlanner(), 8, 40)
    knows = run("with", SPACE_ALONE)
    without = run("without", {**SPACE_ALONE, "episodic": OFF})
    assert [e.task_id for e in knows] == [e.task_id for e in without] and len({e.scene for e in knows}) == 8
    assert steps_by_turn(knows)[0] == steps_by_turn(without)[0]
    later = lambda episodes: [n for turn, steps in steps_by_turn(episodes).items() if turn for n in steps]
    saved = lambda episodes: bootstrap_mean([b - a for a, b in zip(later(episodes), later(without), strict=True)])
    assert saved(knows).low > 0, saved(knows)
    asked = Knowledge.sections

    def of_another_home(self: Knowledge, topic: Any, own: str) -> dict[str, Section]:
        rooms = sorted(self.spatial.rooms)
        other = rooms[(rooms.index(topic.room) + 1) % len(rooms)] if topic.room in rooms else topic.room
        told = asked(self, type(topic)(other, topic.task_type, topic.objects), own)
        return {
            name: section._replace(text=section.text.replace(f"In {other}:", f"In {topic.room}:"))
            for name, section in told.items()
        }

    monkeypatch.setattr(Knowledge, "sections", of_another_home)
    misled = run("shuffled", SPACE_ALONE)
    assert saved(misled).low <= 0 and saved(misled).mean < saved(knows).low, saved(misled)


class Stubborn:
    """Goes to the first place that the prompt does not say it was at lately, and does nothing else."""

    batched, accepts_soft, sees_images, reads = False, False, False, PAPER_VIEW

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        return [self._act(request) for request in requests]

    def _act(self, request: ExecutorRequest) -> Action:
        visited = re.search(r"^Recently Visited Locations: (.*)$", executor_text(request, ""), re.MULTILINE)
        been = visited[1].split(", ") if visited else []
        ways = [c for c in request.admissible or () if c.startswith("go to ")]
        text = next((c for c in ways if c.removeprefix("go to ") not in been), ways[0])
        return Action(text, Grounding.CHOICE, text, (), 0, 0)

    def hash(self) -> str:
        return "stubborn"


def test_working_memory_stops_loops(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"episodic": OFF, "semantic": OFF, "evolve": OFF}
    history = {"executor": {"engine": "scripted", "history": 0}, "limit": 8}
    knows = played(tmp_path / "with", alone, Stubborn(), 4, 12, **history)
    without = played(tmp_path / "without", {**alone, "working": OFF}, Stubborn(), 4, 12, **history)
    rates = [analyse(episodes)["repeated_action_rate"] for episodes in (knows, without)]
    assert rates[0] + 0.2 < rates[1], rates
