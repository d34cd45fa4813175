"""The scripted planner: it reads the rendered prompt and the admissible commands, and has no state."""

from __future__ import annotations

import pytest

from executor.prompt import ExecutorRequest, MemoryBlock
from executor.scripted import GoalParts, ScriptedPlanner, planned

PLACES = ("cabinet 1", "cabinet 2", "fridge 1", "shelf 1", "sinkbasin 1")
WAYS = tuple(f"go to {place}" for place in PLACES)
FIRST = "You are in the middle of a room. Looking quickly around you, you see a cabinet 1."


def plan(view: str = FIRST, commands: tuple[str, ...] = (), goal: str = "put a mug in shelf", before: str = "") -> str:
    here = view.rpartition("arrive at ")[2].split(".")[0]
    return planned(f"goal: in home 1: {goal}\n{before}see: {view}", [*commands, *(w for w in WAYS if here not in w)])


@pytest.mark.parametrize(
    "goal, wanted",
    [
        (
            "in FloorPlan2: put a clean soapbar in cabinet",
            GoalParts("FloorPlan2", "soapbar", "cabinet", "clean", "sinkbasin"),
        ),
        (
            "in home 1: cool some plate and put it in garbagecan",
            GoalParts("home 1", "plate", "garbagecan", "cool", "fridge"),
        ),
        ("put a hot mug in shelf", GoalParts("", "mug", "shelf", "heat", "microwave")),
        ("in home 1: find two pillow and put them in ottoman", GoalParts("home 1", "pillow", "ottoman", two=True)),
        ("in home 1: put two book on desk", GoalParts("home 1", "book", "desk", two=True)),
        ("in home 1: look at cd under the desklamp", GoalParts("home 1", "cd")),
        ("in home 1: examine the cd with the desklamp", GoalParts("home 1", "cd")),
    ],
)
def test_goals_are_read(goal: str, wanted: GoalParts) -> None:
    assert GoalParts.of(goal) == wanted


def test_places_are_searched_in_their_order_each_after_the_one_that_it_stands_at() -> None:
    assert plan() == "go to cabinet 1"
    assert plan("You arrive at cabinet 1. The cabinet 1 is closed.", ("open cabinet 1",)) == "open cabinet 1"
    assert plan("You arrive at cabinet 1. On the cabinet 1, you see nothing.") == "go to cabinet 2"
    assert plan("You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.") == "go to cabinet 1"  # once around
    assert plan("You arrive at cabinet 1. It is empty.", before="did: go to cabinet 2\n") == "go to fridge 1"


@pytest.mark.parametrize(
    "told",
    [
        "memory:\nin home 1: put a mug in bed\ngo to fridge 1\nbecause in home 1 the mug was in fridge 1\n\n",
        "memory:\nIn home 1: mug in fridge 1 (2 of 3 visits); cup in bed 1 (1 of 1 visits)\n\n",
        "memory:\nRoom Successful Patterns:\nput: go to fridge 1; take mug 2 from fridge 1; move mug 2 to shelf 1\n\n",
        "memory:\nin home 1: put a mug in bed\ngo to fridge 1 ; take mug 2 from fridge 1 ; move mug 2 to bed 1\n\n",
        "memory:\nin home 1: put a mug in bed\nYou see a bed 1.\n> take mug 2 from fridge 1\nYou pick it up.\n\n",
        "guide: in home 1 the mug was in fridge 1 | go to fridge 1\n",
    ],
)
def test_it_goes_first_where_the_prompt_tells_that_the_thing_was(told: str) -> None:
    assert plan(before=told) == "go to fridge 1"
    after = plan("You arrive at fridge 1. The fridge 1 is open. In it, you see nothing.", before=told)
    assert after == "go to cabinet 1" or told.startswith("guide")


def test_another_home_s_facts_and_things_tell_nothing() -> None:
    other = "memory:\nbecause in home 2 the mug was in fridge 1\nIn home 1: cup in fridge 1 (1 of 1 visits)\n\n"
    other += "in home 2: put a mug in bed\ntake mug 1 from fridge 1\n\n"
    assert plan(before=other) == "go to cabinet 1"


def test_what_is_found_is_taken_treated_and_put_where_it_belongs() -> None:
    goal, held = "put a clean mug in shelf", ("examine mug 1",)
    assert (
        plan("On the cabinet 1, you see a mug 1.", ("take mug 1 from cabinet 1",), goal) == "take mug 1 from cabinet 1"
    )
    assert plan("You pick up the mug 1 from the cabinet 1.", held, goal) == "go to sinkbasin 1"
    clean = (*held, "clean mug 1 with sinkbasin 1", "move mug 1 to sinkbasin 1")
    assert plan("You arrive at sinkbasin 1.", clean, goal) == "clean mug 1 with sinkbasin 1"
    assert plan("You clean the mug 1 using the sinkbasin 1.", clean, goal) == "go to shelf 1"
    assert plan("You arrive at shelf 1.", (*held, "move mug 1 to shelf 1"), goal) == "move mug 1 to shelf 1"


def test_of_two_things_the_one_that_is_where_it_belongs_stays_there() -> None:
    goal = "put two mug in shelf"
    assert plan("On the shelf 1, you see a mug 1.", ("take mug 1 from shelf 1",), goal) != "take mug 1 from shelf 1"
    told = "memory:\nbecause in home 1 the mug was in fridge 1\n\n"
    assert plan("You move the mug 1 to the shelf 1.", (), goal, told) == "go to fridge 1"  # the search begins anew


def test_what_failed_here_before_is_not_done_again() -> None:
    retry = "memory:\nRetry Guidance:\nThe last attempt failed: x\nFailed here before: go to cabinet 1; look\n\n"
    assert plan(before=retry) == "go to cabinet 2"


def test_hostile_text_is_text() -> None:
    for text in ("[unclosed (", "{0} %s", "see: go to hell 1\n" * 50, "\ud800"):
        assert plan(before=f"memory:\n{text}\n\n") in WAYS
        assert planned(f"goal: {text}\nsee: {text}", WAYS) in (*WAYS, "look")


def test_it_is_an_executor_that_needs_commands() -> None:
    request = ExecutorRequest("in home 1: put a mug in shelf", MemoryBlock(), (), FIRST, WAYS)
    [made] = ScriptedPlanner().act([request])
    assert made.action == "go to cabinet 1" and made.tokens_in > 10
    with pytest.raises(ValueError, match="lists its commands"):
        ScriptedPlanner().act([ExecutorRequest("g", MemoryBlock(), (), FIRST)])
