"""The expert teacher over whole episodes: what it writes into the Brief State applies, lasts, and stays true."""

import hashlib
import json
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode, EpisodeContext
from compiler.brief_state import BriefState, Create, Delete, Fold, Update
from compiler.language import Emission, Kind
from compiler.records import CompileRequest
from data_gen.experience import collect_experience
from data_gen.rows import episode_rows
from data_gen.tasks import episode_specs
from envs.alfworld.environment import AlfworldEnvironment
from envs.base import Environment, Task
from envs.command_reader import CommandReader
from envs.household.command_reader import AlfworldReader, HouseholdReader
from envs.household.environment import HouseholdEnvironment
from envs.household.world import KINDS
from executor.prompt import ExecutorRequest, MemoryBlock
from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from tests.memory.entries import by_id


def played(env: Environment, tasks: list[Task], steps: int) -> list[Episode]:
    delivery = Delivery("teacher", "compiled", ExpertTeacher(reader=AlfworldReader()), soft=False)
    specs = [EpisodeSpec(task) for task in tasks]
    return run_episodes(lambda: env, specs, delivery, ExpertExecutor(0.3), EpisodeLimits(steps), concurrency=1)


def test_no_operation_fails_over_whole_household_episodes() -> None:
    env = HouseholdEnvironment(scenes={"train": 6}, images=False, kinds=KINDS)
    episodes = played(env, env.tasks("train"), 60)
    assert {episode.kind for episode in episodes} == set(KINDS) and all(episode.success for episode in episodes)
    assert [step.op_errors for e in episodes for step in e.steps if step.op_errors] == []
    assert any("note:" in e.steps[-1].brief_after and "done:" in e.steps[-1].brief_after for e in episodes)


def test_no_operation_fails_over_whole_alfworld_episodes(shared_data: Path) -> None:
    env = AlfworldEnvironment(shared_data / "alfworld", images=False)
    episodes = played(env, env.tasks("valid_seen")[::5], 60)
    assert len(episodes) == 28 and all(episode.success for episode in episodes)
    assert [step.op_errors for e in episodes for step in e.steps if step.op_errors] == []


def emission(state: BriefState, observation: str, *history: str, plan: tuple[str, ...]):
    request = CompileRequest("put two mugs in cabinet", (), state, observation, None, history)
    return ExpertTeacher(reader=AlfworldReader()).emission(request, plan).ops


@pytest.mark.parametrize(
    ("obeys", "said", "done"),
    [
        (True, "go to desk 1", "go to desk 1"),
        (True, "search elsewhere", "go to shelf 1"),  # no command
        (True, "", "go to shelf 1"),
        (False, "go to desk 1", "go to shelf 1"),
    ],
)
def test_an_expert_that_obeys_does_what_guidance_says_where_that_is_possible(obeys: bool, said: str, done: str) -> None:
    commands, plan = ("go to desk 1", "go to shelf 1", "look"), ["go to shelf 1", "take mug 1 from shelf 1"]
    request = ExecutorRequest("put a mug", MemoryBlock(guidance=said), (), "a room", commands)
    [action] = ExpertExecutor(obeys=obeys).act([request], [EpisodeContext(plan)])
    assert (action.action, action.text) == (done, done)


MUG = ("go to desk 1", "take mug 2 from desk 1", "move mug 2 to cabinet 3")
STATE = BriefState("put two mugs in cabinet").apply(Create("plan", "find mug; put mug in cabinet"))


def test_what_a_place_lacks_is_written_once_and_beside_what_it_lacked_before() -> None:
    view = "On the shelf 1, you see a pen 1."
    assert emission(STATE, view, plan=MUG) == (Create("shelf 1", "no mug"),)
    assert emission(STATE.apply(Create("shelf 1", "no mug")), view, plan=MUG) == ()
    known = STATE.apply(Create("shelf 1", "no apple"))
    assert emission(known, view, plan=MUG) == (Update("shelf 1", "no apple, no mug"),)


def test_a_place_that_lacked_a_thing_does_so_no_longer_when_it_is_put_there() -> None:
    state = STATE.apply(Update("plan", "put mug in cabinet; find mug; put mug in cabinet"))
    state = state.apply(Create("cabinet 3", "no mug"))
    put = "move mug 1 to cabinet 3"
    ops = emission(state, "You move the mug 1 to the cabinet 3.", put, plan=MUG)
    assert ops == (Fold(put), Delete("cabinet 3"))


# What M supports ------------------------------------------------------------------------------------------------------


def remembered(scene: str, *actions: str, goal: str = "put a mug in desk", success: bool = True) -> MemoryEntry:
    return MemoryEntry(f"{scene}{actions}", "", Provenance("", scene, goal, "train", success, actions))


def found(scene: str, place: str) -> MemoryEntry:
    return remembered(scene, f"go to {place}", f"take mug 1 from {place}", "go to desk 1", "move mug 1 to desk 1")


ROOM = "You are in the middle of a room. Looking quickly around you, you see a desk 1, a shelf 2, a shelf 1, a safe 1."
FIND = ("go to safe 1", "open safe 1", "take mug 1 from safe 1", "move mug 1 to desk 1")


def said(
    memory: tuple[MemoryEntry, ...],
    view: str = ROOM,
    history: tuple[str, ...] = (),
    state: BriefState | None = None,
    plan: tuple[str, ...] = FIND,
    teacher: ExpertTeacher | None = None,
) -> Emission:
    goal = "in FloorPlan1: put a mug in desk"
    request = CompileRequest(goal, memory, state, view, None, history)
    return (teacher or ExpertTeacher(reader=AlfworldReader())).emission(request, plan)


def test_it_says_nothing_of_what_memory_does_not_hold() -> None:
    pen = remembered("FloorPlan1", "go to safe 1", "open safe 1", "take pen 1 from safe 1")
    assert said(()).kind is said((pen,)).kind is Kind.NOACTION  # the plan knows the safe; memory does not


def test_this_scenes_places_come_first_in_the_order_of_memory() -> None:
    here = (found("FloorPlan1", "shelf 1"), found("FloorPlan1", "safe 1"), found("FloorPlan1", "safe 1"))
    elsewhere = tuple(found(f"FloorPlan{n}", "desk 7") for n in range(2, 6))
    assert said((*here, *elsewhere)).guidance == "go to shelf 1"
    assert said((*elsewhere, *here[:1])) == Emission("go to shelf 1", "in FloorPlan1 the mug was in shelf 1")


def test_a_place_of_another_scene_is_named_as_this_one_names_its_kind_and_noted_for_later_views() -> None:
    memory = (found("FloorPlan2", "shelf 9"), found("FloorPlan3", "sofa 1"))
    state = BriefState("goal").apply(Create("plan", "find mug; put mug in desk"))
    first = said(memory, state=state)
    assert first == Emission(
        "go to shelf 2", "in FloorPlan2 the mug was in shelf 9", (Create("mug", "maybe shelf 2, shelf 1"),)
    )
    state = state.apply(first.ops[0])
    later = said(memory, "On the shelf 2, you see nothing.", ("go to shelf 2",), state)
    assert later.guidance == "go to shelf 1" and later.ops == (Update("mug", "maybe shelf 1"),)
    assert said(memory, "On the desk 1, you see nothing.", ("go to desk 1",)).guidance == ""  # nothing was noted


def test_beside_this_scenes_own_places_count_those_on_which_two_other_scenes_agree() -> None:
    state = BriefState("goal").apply(Create("plan", "find mug; put mug in desk"))
    here, desk, sofa = found("FloorPlan1", "safe 1"), found("FloorPlan2", "shelf 9"), found("FloorPlan3", "desk 1")
    noted = lambda *memory: said(memory, state=state).ops
    assert noted(here, desk, sofa) == (Create("mug", "maybe safe 1"),)
    assert noted(here, desk, sofa, found("FloorPlan4", "shelf 2")) == (Create("mug", "maybe safe 1, shelf 2, shelf 1"),)
    assert noted(desk, sofa) == (Create("mug", "maybe shelf 2, shelf 1, desk 1"),)


def test_that_memory_knows_no_more_is_said_once() -> None:
    state = BriefState("goal").apply(Create("plan", "find mug; put mug in desk"))
    view, history, memory = "On the shelf 1, you see nothing.", ("go to shelf 1",), (found("FloorPlan1", "shelf 1"),)
    last = said(memory, view, history, state)
    assert last.guidance == "search elsewhere" and last.ops[-1] == Create("mug", "not where memory says")
    for op in last.ops:
        state = state.apply(op)
    assert said(memory, view, history, state).kind is Kind.NOACTION
    assert said(memory, "On the desk 1, you see a pen 1.", (*history, "go to desk 1"), state).kind is Kind.BRIEF
    wandered = said(memory, "You arrive at safe 1. The safe 1 is closed.", ("go to shelf 1", "go to safe 1"))
    assert wandered.guidance == ""  # history says that it was looked into, not that nothing was there


def test_it_stays_silent_where_the_agent_stands_and_when_the_thing_is_in_view() -> None:
    closed = "You arrive at safe 1. The safe 1 is closed."
    memory = (found("FloorPlan1", "safe 1"), found("FloorPlan1", "shelf 1"))
    assert said(memory, closed, ("go to safe 1",), plan=FIND[1:]).guidance == ""
    assert said(memory[1:], "You see a mug 1.", FIND[:2], plan=FIND[2:]).guidance == ""


def test_lamps_and_appliances_are_needs_as_well() -> None:
    lamp = remembered("FloorPlan1", "go to desk 1", "take book 1 from desk 1", "go to shelf 2", "use desklamp 1")
    oven = remembered("FloorPlan1", "go to microwave 1", "heat egg 1 with microwave 1")
    assert said((lamp, oven), plan=("go to shelf 1", "use desklamp 1")) == Emission(
        "go to shelf 2", "in FloorPlan1 the desklamp was in shelf 2"
    )
    assert said((lamp, oven), plan=("go to microwave 2", "heat mug 1 with microwave 2")).guidance == "go to microwave 1"


def test_the_control_says_what_an_entry_says_that_does_not_answer() -> None:
    pen = remembered("FloorPlan1", "go to shelf 1", "take pen 1 from shelf 1")
    control = ExpertTeacher("random", 3, AlfworldReader())
    memory = (found("FloorPlan1", "safe 1"), pen, found("FloorPlan2", "desk 1"))
    assert said(memory, teacher=control) == Emission("go to shelf 1", "in FloorPlan1 the mug was in shelf 1")
    assert said((memory[0], memory[2]), teacher=control).kind is Kind.NOACTION
    listed = BriefState("goal").apply(Create("mug", "maybe safe 1"))
    assert said(memory, "You arrive at desk 1.", ("go to desk 1",), listed, teacher=control).guidance == "go to shelf 1"
    history = ("go to shelf 1", "go to desk 1")
    assert said(memory, "You arrive at desk 1.", history, listed, teacher=control).guidance == ""  # no place is left


def test_without_a_language_of_its_own_an_environment_has_its_recipes_followed() -> None:
    plan = ("press button 4", "pull lever", "leave")
    past = remembered("", "press button 1", "pull lever", "dance")
    teacher = ExpertTeacher(reader=CommandReader())
    tell = lambda done, view="button 4": said((past,), view, plan[:done], plan=plan[done:], teacher=teacher)
    assert tell(0) == Emission("press button 4", "it began with press button 1")
    assert tell(0, "two buttons").guidance == ""  # which button, memory does not say
    assert tell(1) == Emission("pull lever", "after press button 1 came pull lever")
    assert tell(2).guidance == ""  # past episodes danced here
    failed = remembered("", *plan, success=False)
    assert said((failed,), plan=plan, teacher=teacher).guidance == ""


@pytest.mark.parametrize(("entry", "sha256"), [("right", "5fa15e18e6bf590a"), ("random", "15b5a851a61d8f3d")])
def test_rows_of_generated_homes_are_the_same_to_the_byte(entry, sha256: str, tmp_path: Path) -> None:
    """The hash is of the teacher that knew generated homes alone."""
    env, homes = HouseholdEnvironment(scenes={"train": 6}, images=False), HouseholdReader()
    bank = MemoryBank(tmp_path / "bank")
    bank.write([])
    experience = env.tasks("train_experience")
    collect_experience(lambda: env, experience, bank, ExpertTeacher(reader=homes), round_size=1)
    specs = episode_specs(env.tasks("train"), bank, 4)
    delivery = Delivery("teacher", "compiled", ExpertTeacher(entry, 0, homes), soft=False)
    hashed = hashlib.sha256()
    for spec, episode in zip(
        specs, run_episodes(lambda: env, specs, delivery, ExpertExecutor(0.15), EpisodeLimits(20), 1), strict=True
    ):
        for row in episode_rows(episode, by_id(spec.memory)):
            told = (row.goal, row.memory_ids, row.memory_texts, row.state, row.observation, row.history, row.emission)
            hashed.update(json.dumps([row.task_id, row.t, *told, row.action]).encode())
    assert hashed.hexdigest().startswith(sha256)
