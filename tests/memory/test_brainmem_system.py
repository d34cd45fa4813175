"""BrainMem as a memory system: journal, versions, sections, switches, sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor
from data_gen.experience import episode_traces
from envs.base import Task
from envs.household.environment import HouseholdEnvironment
from memory.brainmem.settings import BrainMemSettings
from memory.brainmem.system import BrainMem
from memory.protocol import MemorySystem, Query, Recall, Record, Trace
from tests.memory.test_brainmem_episodic import ARRIVED, FIRST, HEAT, READER, TAKEN, TWO, trace

HEATED = ("heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1.")
TASK = Task("new", "put a hot mug in desk", "FloorPlan1", "train", HEAT)


def taught(path: Path, *traces: Trace, **settings) -> BrainMem:
    memory = BrainMem(path, BrainMemSettings.model_validate(settings), reader=READER)
    memory.commit([[each] for each in traces])
    return memory


def told(memory: BrainMem, task: Task = TASK) -> dict[str, str]:
    [recalled] = memory.recall([Query(task)])
    return {entry.text.split("\n")[0].rstrip(":"): entry.text for entry in recalled.entries}


EPISODES = (trace(*TWO, HEATED), trace(*TWO, HEATED, task="t2"), trace(*TWO[:1], task="t3", success=False))


def test_it_is_a_memory_system_whose_sections_come_in_the_papers_order(tmp_path: Path) -> None:
    memory = taught(tmp_path / "bank", *EPISODES)
    assert isinstance(memory, MemorySystem) and memory.snapshot() == 3
    sections = told(memory)
    assert list(sections) == [
        "Valuable Guidelines",
        "Room Successful Patterns",
        "Relevant Experiences",
        "Real-time Action Hints",
        "Spatial Reasoning Guidance",
    ]
    assert (
        "1. for heat: take the mug, then heat the mug with the microwave (Validated 2 times, 100% confidence) [heat]"
        in (sections["Valuable Guidelines"])
    )
    assert "Avoid: the steps ran out" in sections["Relevant Experiences"]
    assert "mug in shelf 1 (3 of 3 visits)" in sections["Spatial Reasoning Guidance"]
    assert sections["Real-time Action Hints"].endswith("mug: take mug 1 from shelf 1; heat mug 1 with microwave 1")


def test_teachers_read_the_spatial_graph_the_surest_place_first(tmp_path: Path) -> None:
    empty = ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pen 2.")
    there = ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a mug 3.")
    memory = taught(tmp_path, trace(TWO[0]), trace(empty, task="t2"), trace(there, task="t3"))
    [recalled] = memory.recall([Query(TASK)])
    told = [action for entry in recalled.entries for action in entry.provenance.actions if "mug" in action]
    assert told == ["take mug 1 from desk 1", "take mug 1 from shelf 1"]  # seen on 1 of 1 visits, on 1 of 2


def test_an_experts_walks_never_contradict_themselves(tmp_path: Path) -> None:
    """Section 7, check 8, on generated homes; real games: docs/experiments/brainmem.md."""
    env = HouseholdEnvironment(scenes={"train": 40})
    played = run_episodes(
        lambda: env,
        [EpisodeSpec(task) for task in env.tasks("train")[:140]],
        Delivery("expert", "none"),
        ExpertExecutor(),
        EpisodeLimits(50),
        1,
    )
    memory, steps = taught(tmp_path), 0
    for [walk] in episode_traces(played):
        session = memory.session(Query(walk.task), Recall())
        for record in walk.records:
            session.recall(record.observation)
            session.observe(record)
            assert "CONSISTENCY WARNING" not in str(session.recall(record.feedback).entries), (walk.task.id, record)
            steps += 1
    assert len(played) == 140 and steps > 500


def test_an_empty_memory_says_its_fixed_advice_alone(tmp_path: Path) -> None:
    assert list(told(taught(tmp_path))) == ["Spatial Reasoning Guidance"]
    off = {tier: {"enabled": False} for tier in ("working", "episodic", "semantic", "evolve")}
    memory = taught(tmp_path / "off", *EPISODES, **off)
    assert told(memory) == {} and not list(memory)
    session = memory.session(Query(TASK), memory.recall([Query(TASK)])[0])
    session.observe(EPISODES[0].records[0])
    assert session.recall(ARRIVED) == Recall(generated=True)


@pytest.mark.parametrize(
    ("switch", "gone"),
    [
        ({"semantic": {"enabled": False}}, {"Valuable Guidelines", "Relevant Experiences"}),
        ({"episodic": {"trajectory": False}}, {"Room Successful Patterns", "Real-time Action Hints"}),
        ({"episodic": {"spatial": False}}, {"Spatial Reasoning Guidance"}),
        ({"semantic": {"k": 0}}, {"Relevant Experiences"}),
        ({"semantic": {"guidelines": 0}}, {"Valuable Guidelines"}),
    ],
)
def test_each_switch_changes_its_own_sections_and_no_other_byte(switch: dict, gone: set[str], tmp_path: Path) -> None:
    whole = told(taught(tmp_path / "whole", *EPISODES))
    part = told(taught(tmp_path / "part", *EPISODES, **switch))
    assert part == {name: text for name, text in whole.items() if name not in gone}


def test_nothing_of_the_task_itself_is_told(tmp_path: Path) -> None:
    memory = taught(tmp_path, trace(*TWO, HEATED, task="new"))
    assert list(told(memory)) == ["Spatial Reasoning Guidance"]
    assert "mug" not in told(memory)["Spatial Reasoning Guidance"]
    assert (
        "mug in shelf 1"
        in told(memory, Task("other", TASK.goal, TASK.scene, "train", HEAT))["Spatial Reasoning Guidance"]
    )


def test_versions_twice_and_again_elsewhere_give_the_same_bytes(tmp_path: Path) -> None:
    memory = taught(tmp_path / "one", *EPISODES[:2])
    before, version = told(memory), memory.snapshot()
    assert memory.commit([[EPISODES[0]]]).ignored == 1 and told(memory) == before
    memory.commit([[EPISODES[2]]])
    assert told(memory) != before and told(memory.at(version)) == before == told(
        taught(tmp_path / "two", *EPISODES[:2])
    )
    other = BrainMem(tmp_path / "three", reader=READER)
    other.merge_from(memory)
    assert told(other) == told(memory) and other.origins() == memory.origins()
    assert {entry.id for entry in other} == {entry.id for entry in memory}


def test_a_session_adds_working_memory_after_the_first_step(tmp_path: Path) -> None:
    memory = taught(tmp_path, *EPISODES)
    [first] = memory.recall([Query(TASK)])
    session = memory.session(Query(TASK), first)
    assert session.recall(FIRST) == first
    session.observe(Record(0, FIRST, "go to shelf 1", ARRIVED))
    session.observe(Record(1, ARRIVED, "take mug 1 from shelf 1", TAKEN))
    *sections, last = session.recall(TAKEN).entries
    assert tuple(sections) == first.entries and last.text.startswith("Working Memory:\nStep 1: Action: go to shelf 1")
    assert "CURRENT ROBOT STATE: holding mug 1" in last.text and last.id.startswith("brainmem/working-memory/")


def test_a_guideline_is_counted_where_it_was_shown(tmp_path: Path) -> None:
    memory = taught(tmp_path, *EPISODES[:2])
    [guideline] = [g for g in memory.knowledge.guidelines if g.text.startswith("for heat")]
    ids = tuple(entry.id for entry in memory.recall([Query(TASK)])[0].entries)
    lost = trace(*TWO[:1], task="t4", success=False)
    memory.commit([[lost]])
    assert memory.knowledge.guidelines[0].n_total == guideline.n_total  # nobody was shown it
    memory.commit([[replace(trace(*TWO[:1], task="t5", success=False), shown=ids), trace(*TWO, task="t5", attempt=1)]])
    after = memory.knowledge.guidelines[0]
    assert (after.n_success, after.n_total) == (guideline.n_success, guideline.n_total + 1)
    assert not memory.knowledge.experiences[-1].success and len(memory.knowledge.graph.trajectories) == 5
