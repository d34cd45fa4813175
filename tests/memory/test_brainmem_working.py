"""BrainMem's working memory: window, success rate, warnings, rendering."""

from __future__ import annotations

import pytest

from envs.command_reader import AgentState, kind
from envs.household.command_reader import HouseholdReader
from memory.brainmem.episodic import state_summary
from memory.brainmem.settings import Working
from memory.brainmem.working import WorkStep, render_section, success_rate, warnings
from memory.protocol import Record

READER = HouseholdReader()


def step(t: int, action: str, ok: bool = True, holds: str = "", held: str = "", changed: bool = True) -> WorkStep:
    return WorkStep(t, action, ok, f"view {t}", f"shelf {t}", holds, held, changed=changed)


def test_the_window_and_its_success_rate() -> None:
    steps = [step(t, f"go to shelf {t}", ok=outcome == "S") for t, outcome in enumerate("FSFSSSS")]
    window = steps[-5:]
    assert (
        success_rate(window) == "80.0%"
        and success_rate(steps[:4][-4:]) == "50.0%"
        and success_rate(steps[3:]) == "100.0%"
    )
    assert success_rate([step(0, "a", ok=False), *(step(t, "b") for t in (1, 2, 3))]) == "75.0%"
    text = render_section(window, taken=7, settings=Working(), reader=READER)
    assert [line for line in text.split("\n") if line.startswith("Step ")] == [
        f"Step {t + 1}: Action: go to shelf {t} ({'Failure' if t == 2 else 'Success'})" for t in range(2, 7)
    ]
    assert "view 1" not in text and "shelf 1" not in text and "success rate 80.0%, actions 7" in text
    assert "Recently Visited Locations: shelf 2, shelf 3, shelf 4, shelf 5, shelf 6" in text
    assert render_section([], 0, Working(), READER) == ""


def test_each_switch_takes_its_own_lines_away_and_no_other() -> None:
    window = [
        step(0, "take mug 1 from shelf 1", holds="mug 1"),
        step(1, "take pen 1 from desk 1", False, "mug 1", "mug 1"),
    ]
    whole = render_section(window, 2, Working(), READER).split("\n")
    gone = lambda **off: [
        line for line in whole if line not in render_section(window, 2, Working(**off), READER).split("\n")
    ]
    assert gone(success_state=False) == ["Performance: success rate 50.0%, actions 2"]
    assert gone(agent_state=False)[0] == "CURRENT ROBOT STATE: holding mug 1" and len(gone(agent_state=False)) == 3
    assert len(gone(consistency_check=False)) == 1 and "mug 1 was held" in gone(consistency_check=False)[0]
    assert gone(feedback=False) == [line for line in whole if line.startswith("Step ")]
    assert "Success" not in render_section(window, 2, Working(feedback=False), READER)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ([step(0, "open safe 1", ok=False), step(1, "look"), step(2, "open safe 1", ok=False)], "failed before"),
        ([step(0, "take mug 1 from shelf 1", held="pen 1", holds="pen 1")], "pen 1 was held"),
        ([step(0, "heat mug 1 with microwave 1", ok=False)], "nothing was held"),
        ([step(0, "look"), step(1, "look", changed=False)], "loop"),
        ([step(0, "open safe 1"), step(1, "look"), step(2, "open safe 1", ok=False)], "open already"),
    ],
)
def test_what_contradicts_itself_is_said(window: list[WorkStep], says: str) -> None:
    assert says in " ".join(warnings(window, READER))


def test_what_is_consistent_is_not() -> None:
    right = [
        step(0, "go to safe 1"),
        step(1, "open safe 1"),
        step(2, "take mug 1 from safe 1", holds="mug 1"),
        step(3, "close safe 1", holds="mug 1", held="mug 1"),
        step(4, "open safe 1", holds="mug 1", held="mug 1"),
        step(5, "move mug 1 to safe 1", held="mug 1"),
    ]
    assert [warnings(right[: n + 1], READER) for n in range(len(right))] == [[]] * len(right)
    assert warnings([], READER) == []
    many = [step(0, "take mug 1 from a 1", False, held="pen 1"), step(1, "take mug 1 from a 1", False, held="pen 1")]
    assert len(warnings([*many, many[1]], READER)) == 2  # at most


# reading --------------------------------------------------------------------------------------------------------------


def after(state: AgentState, action: str, feedback: str) -> AgentState:
    return state.after(READER.read(state, Record(0, "", action, feedback, feedback.startswith("Nothing happens"))))


def test_the_agent_s_state_follows_actions_and_feedback() -> None:
    seen = "You arrive at shelf 1. On the shelf 1, you see a mug 1."
    state = after(AgentState(), "go to shelf 1", seen)
    assert state == AgentState("shelf 1", (), {"mug 1": "shelf 1"}) and state.holding == "holding nothing"
    state = after(state, "take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1.")
    assert state == AgentState("shelf 1", ("mug 1",), {}) == after(state, "go to moon 1", "Nothing happens.")
    assert after(state, "heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1.") == state
    put = after(state, "move mug 1 to desk 1", "You move the mug 1 to the desk 1.")
    assert put == AgentState("shelf 1", (), {"mug 1": "desk 1"})
    assert after(put, "go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.").where == {}
    assert after(state, "inventory", "You are not carrying anything.").held == ()
    assert after(AgentState(), "inventory", "You are carrying: a mug 1.").held == ("mug 1",)


def test_views_say_what_is_where() -> None:
    views = lambda text: [(view.at, view.seen) for view in READER.look(text).views]
    text = "You open the safe 1. The safe 1 is open. In it, you see a pen 2, and a mug 1."
    assert views(text) == [("safe 1", ("pen 2", "mug 1"))]
    assert views("On the desk 2, you see nothing.") == [("desk 2", ())] and views("The safe 1 is closed.") == []
    first = "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 2, and a safe 1."
    assert READER.look(first).places == ("bed 1", "desk 2", "safe 1")
    assert kind("mug 12") == "mug" and kind("Mug_2") == "Mug" and kind("home") == "home"


def test_summaries_do_not_depend_on_order_or_white_space() -> None:
    one = state_summary("On the desk 2, you see a pen 1, and a mug 1.", AgentState("desk 2"), READER)
    assert one == state_summary(
        "On the  desk 2, you see a mug 1, and a pen 1.".replace("  ", " "), AgentState("desk 2"), READER
    )
    assert one == "at desk 2 | sees: mug 1, pen 1 | holding nothing"
    summary = state_summary("a  strange\nroom", AgentState(), READER)
    assert summary == "at start | sees: a strange room | holding nothing"


@pytest.mark.parametrize(
    ("goal", "named"),
    [
        ("put a hot mug in cabinet", {"mug"}),
        ("look at cd under the desklamp", {"cd"}),
        ("boil water", set()),
        ("clean some egg and put it in fridge", {"egg"}),
        ("find two pen and put them in desk", {"pen"}),
    ],
)
def test_the_object_of_a_goal(goal: str, named: set[str]) -> None:
    assert READER.goal_things(goal) == named
