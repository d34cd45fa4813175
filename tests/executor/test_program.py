"""The planner of programs: what it reads, the program that it writes, and how that is carried out in open loop."""

from __future__ import annotations

import json
from dataclasses import replace

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode
from envs.base import FloorPlan
from envs.household.environment import HouseholdEnvironment
from envs.household.placement_prior import counts, likelihood
from executor.program import (
    PlannerInput,
    ProgramExecutor,
    SkillPlan,
    alike,
    plan_by_rule,
    plan_prompt,
    read_plan,
)
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.skills import SKILLS, Skill, program_progress, read_program
from memory.entry import MemoryEntry, Provenance
from memory.karma.graph import build_graph
from runtime.errors import StopReason

HOMES = {"images": False, "visual_share": 0.0, "fixed_objects": 12, "wandering_objects": 0, "scenes": {"test": 6}}
KINDS = [
    "pick_two_obj_and_place",
    "look_at_obj_in_light",
    "pick_heat_then_place_in_recep",
    "pick_clean_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_and_place_simple",
]
COMMANDS = ("examine desk 1", "go to cabinet 1", "go to cabinet 2", "go to fridge 1", "go to microwave 1", "look")


def now(goal: str, memory: str = "", commands: tuple[str, ...] = COMMANDS) -> PlannerInput:
    return PlannerInput(goal, memory, commands)


def texts(goal: str, memory: str = "") -> list[str]:
    return [skill.text for skill in plan_by_rule(now(goal, memory)).program]


def request(goal: str, memory: str, history: tuple[str, ...] = (), commands: tuple[str, ...] = COMMANDS):
    return ExecutorRequest(goal, MemoryBlock(memory=memory), history, "You are facing the desk 1.", commands)


def test_a_program_explores_what_memory_does_not_know() -> None:
    assert texts("put a hot mug in cabinet") == [
        "Explore(mug)",
        "PickupObject(mug)",
        "GoToObject(microwave)",
        "HeatObject(mug)",
        "GoToObject(cabinet)",
        "PutObject(mug, cabinet)",
    ]


def test_a_program_goes_where_memory_says_and_leaves_out_what_is_done() -> None:
    memory = "mug 2 is in fridge 1; mug 2 is heated\n\nThe task before was: put a mug in fridge (done)"
    assert texts("put a hot mug in cabinet", memory) == [
        "GoToObject(fridge 1)",
        "PickupObject(mug 2)",
        "GoToObject(cabinet)",
        "PutObject(mug 2, cabinet)",
    ]
    assert texts("look at mug under the desklamp", memory)[2:] == ["Explore(desklamp)", "SwitchOn(desklamp)"]
    assert texts("put two mug in cabinet", memory)[4] == "Explore(mug)"


def test_trajectories_and_citations_say_where_things_are_too() -> None:
    pasted = "in home 1: put a mug in fridge\ngo to desk 1 ; take mug 1 from desk 1 ; move mug 1 to fridge 1"
    assert texts("put a mug in cabinet", pasted)[0] == "GoToObject(fridge 1)"
    assert texts("put a mug in cabinet", "in home 1 the mug was in cabinet 2")[0] == "GoToObject(cabinet 2)"
    raw = (
        "in home 1: put a mug in fridge\nYou are in a room.\n> take mug 1 from desk 1\nYou pick up the mug 1.\n"
        "> move mug 1 to fridge 1\nYou move the mug 1.\nbecause in home 1 the mug was in desk 1"
    )
    other = "in home 1: put a pen in desk\n> take pen 1 from safe 1\nYou pick up the pen 1.\n> look\nA room."
    units = [(unit.id, unit.place) for unit in now("put a mug in cabinet", f"{raw}\n\n{other}").units]
    assert units == [("mug 1", "fridge 1"), ("mug", "desk 1"), ("pen 1", "safe 1")]


def test_a_thing_that_is_not_named_is_told_by_what_was_done_to_it() -> None:
    assert {"apple", "tomato"} <= set(alike("red food")) < set(alike("food"))
    memory = "tomato 1 is in desk 1\n\napple 1 is in fridge 1; apple 1 is cleaned"
    assert texts("put the clean red food in cabinet", memory)[:2] == ["GoToObject(fridge 1)", "PickupObject(apple 1)"]
    assert texts("put the hot red food in cabinet", memory)[0] == "Explore(apple|tomato)"


def test_a_program_is_read_from_calls_and_strange_ones_are_left_out() -> None:
    lines = ['GoToObject(robot, "Desk 1"); PickupObject(robot, "mug 1")', "import os", "Fly(robot, 'mug')", "Explore()"]
    assert read_program(lines) == (Skill("GoToObject", "desk 1"), Skill("PickupObject", "mug 1"))
    assert len(SKILLS) == 16  # the paper's thirteen, and heating, cooling and cleaning


def test_how_far_a_program_is_follows_from_the_actions() -> None:
    program = plan_by_rule(now("put two mug in cabinet")).program
    assert program_progress(program, (), "").deed == program[1]
    went = ("go to desk 1", "take mug 1 from desk 1")
    assert (
        program_progress(program, went, "mug 1").deed == program[3]
        and program_progress(program, went, "mug 1").since == ()
    )
    put = (*went, "go to cabinet 1", "open cabinet 1", "move mug 1 to cabinet 1", "go to fridge 1")
    second = program_progress(program, put, "")
    assert (second.leading, second.deed, second.since) == (program[4], program[5], ("go to fridge 1",))
    assert second.put == {"cabinet 1"}
    all_of_it = (*put, "take mug 2 from fridge 1", "go to cabinet 1", "move mug 2 to cabinet 1")
    assert program_progress(program, all_of_it, "").deed is None
    assert program_progress(program, (), "mug 3").deed == program[3]  # it is in hand already


def test_areas_are_explored_by_how_likely_they_hold_the_thing() -> None:
    plan = FloorPlan({"fridge 1": (0.0, 0.0, 0.0), "bed 1": (3.0, 0.0, 0.0), "desk 1": (6.0, 0.0, 0.0)})
    graph, executor = build_graph(plan), ProgramExecutor(homes="alfworld")
    assert executor.order(["bed 1", "desk 1", "fridge 1"], "lettuce", graph, "desk 1", "g")[0] == "fridge 1"
    assert executor.order(["bed 1", "desk 1", "fridge 1"], "laptop", graph, "fridge 1", "g")[0] == "bed 1"
    assert executor.order(["bed 1", "desk 1"], "laptop", graph, "", "g", ("area 3",))[0] == "desk 1"
    shuffled = executor.order(["bed 1", "desk 1", "fridge 1"], "laptop", build_graph(FloorPlan()), "", "g")
    assert sorted(shuffled) == ["bed 1", "desk 1", "fridge 1"]
    assert ProgramExecutor(likely=True).order(["bed 1", "fridge 1"], "egg", build_graph(FloorPlan()), "", "g")[0] == (
        "fridge 1"
    )


def test_what_lies_where_is_counted_on_training_worlds_and_smoothed() -> None:
    assert counts("household").keys() and counts("nowhere") == {}
    odds = likelihood("alfworld", "pillow", ["bed", "fridge", "bed"])
    assert 0 < sum(odds.values()) < 1 and odds["bed"] > 10 * odds["fridge"] > 0
    assert likelihood("nowhere", "pillow", ["bed", "fridge"]) == {"bed": 0.5, "fridge": 0.5}


def test_where_memory_was_wrong_it_explores_or_is_stuck() -> None:
    asked = request("in home 1: put a mug in cabinet", "mug 1 is in desk 1")
    [on] = ProgramExecutor().act([asked])
    [off] = ProgramExecutor(feedback=False).act([asked])
    assert on.action.startswith("go to ") and on.text.startswith("Explore(mug 1): ") and off.action == "look"


def test_what_is_in_hand_is_laid_aside_first() -> None:
    commands = (*COMMANDS, "examine pen 1", "move pen 1 to desk 1")
    [action] = ProgramExecutor().act([request("in home 1: put a mug in cabinet", "", commands=commands)])
    assert action.action == "move pen 1 to desk 1"


def played(memory: str = "", steps: int = 80, executor: ProgramExecutor | None = None, **homes) -> list[Episode]:
    arguments = {**HOMES, "kinds": KINDS, **homes}
    tasks = HouseholdEnvironment(**arguments).tasks("test")
    entries = (MemoryEntry("m", memory, Provenance("", "", "", "", True)),) if memory else ()
    specs = [EpisodeSpec(task, entries) for task in tasks]
    delivery = Delivery("static", "static") if memory else Delivery("none", "none")
    return run_episodes(
        lambda: HouseholdEnvironment(**arguments), specs, delivery, executor or ProgramExecutor(), EpisodeLimits(steps)
    )


def test_it_solves_every_kind_of_task_where_there_is_time() -> None:
    episodes = played()
    assert len({episode.kind for episode in episodes}) == 6
    assert [episode.task_id for episode in episodes if not episode.success] == []
    assert all(step.grounding == "choice" for episode in episodes for step in episode.steps)


def test_the_same_requests_give_the_same_actions() -> None:
    assert [[s.action for s in e.steps] for e in played()] == [[s.action for s in e.steps] for e in played()]


# by a language model --------------------------------------------------------------------------------------------------


class Model:
    """An endpoint that answers from a list, and records its requests."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), list[list[dict]]()
        self.config = type("Config", (), {"model": "m", "base_url": "here"})

    def ask(self, messages, role: str, most: int) -> str:
        self.asked.append(messages)
        return self.answers.pop(0)

    def run(self, work: list[str]) -> list:
        return [type("Answer", (), {"text": text}) for text in work]


PROGRAM = json.dumps({"areas": ["area 2"], "program": ["Explore(robot, 'mug')", "PickupObject(robot, 'mug')"]})


def test_a_models_plan_is_read_fenced_or_not() -> None:
    read = SkillPlan((Skill("Explore", "mug"), Skill("PickupObject", "mug")), ("area 2",))
    assert read_plan(f"Sure:\n```json\n{PROGRAM}\n```") == read
    for none in (
        "",
        "{",
        "[]",
        '{"areas": []}',
        '{"program": "Explore(mug)"}',
        '{"program": ["Fly(mug)", 3]}',
        "[" * 9999,
    ):
        assert read_plan(none) is None


def test_the_prompt_tells_the_papers_sections_in_their_order() -> None:
    memory = "Areas of this home:\narea 1: type Area, contains [], adjacent [], position none\nmug 1 is in desk 1"
    system, user = plan_prompt(now("put a mug in cabinet", memory))
    assert "explore" in system["content"] and "PutObject" in system["content"]
    order = [
        "instruction: put a mug",
        "{mug 1 is in desk 1}",
        "area 1: type Area",
        "places: cabinet 1",
        "In which areas",
    ]
    found = [user["content"].index(part) for part in order]
    assert found == sorted(found)


def test_a_model_plans_once_for_a_task_and_an_answer_without_a_program_fails_that_episode() -> None:
    model = Model(PROGRAM)
    executor = ProgramExecutor(model)  # type: ignore[arg-type]
    first = request("in home 1: put a mug in cabinet", "")
    [went] = executor.act([first])
    executor.act([replace(first, history=(went.action,))])
    assert len(model.asked) == 1 and went.action.startswith("go to")
    episodes = played(executor=ProgramExecutor(Model(*["no idea"] * 99)), steps=3)  # type: ignore[arg-type]
    assert {episode.stop_reason for episode in episodes} == {StopReason.EXECUTOR_FAILURE}
    assert "holds no program" in episodes[0].error
