"""Each kind of error on an episode made by hand, and what must not be called one."""

from __future__ import annotations

from typing import Any

import pytest

from agent.records import Episode, StepRecord
from eval.error_analysis import KINDS, analyse, labels, requirements
from runtime.errors import StopReason

GOAL = "put a hot mug in cabinet"


def primary(episode: Episode) -> str:
    return labels(episode)[0]


def steps(*moves: tuple[str, str], grounding: str = "choice") -> list[StepRecord]:
    """(action, feedback) pairs; each feedback is the next step's observation."""
    seen = ["You are in the middle of a room.", *(feedback for _, feedback in moves)]
    return [
        StepRecord(t, seen[t], None, None, "", action=action, feedback=feedback, grounding=grounding)
        for t, (action, feedback) in enumerate(moves)
    ]


def episode(*moves: tuple[str, str], goal: str = GOAL, grounding: str = "choice", **changes: Any) -> Episode:
    changes = {"stop_reason": StopReason.STEP_LIMIT, **changes}
    return Episode("t", goal, "", "test", "", "", "none", 0, steps=steps(*moves, grounding=grounding), **changes)


WANDERING = (("go to shelf 1", "On the shelf 1, you see a cup 1."), ("go to desk 1", "On the desk 1, you see a pen 1."))
FOUND = (("go to desk 2", "On the desk 2, you see a mug 3."), ("take mug 3 from desk 2", "You pick up the mug 3."))


@pytest.mark.parametrize(
    ("goal", "thing", "wanted"),
    [
        ("put a mug in cabinet", "mug", ("find mug", "put mug in cabinet")),
        ("put some mug on shelf.", "mug", ("find mug", "put mug in shelf")),
        ("clean some mug and put it in cabinet", "mug", ("find mug", "clean mug", "put mug in cabinet")),
        (GOAL, "mug", ("find mug", "heat mug", "put mug in cabinet")),
        ("find two mug and put them in safe", "mug", ("find mug", "put mug in safe") * 2),
        ("put two mug in safe", "mug", ("find mug", "put mug in safe") * 2),
        ("examine the mug with the desklamp", "mug", ("find mug", "use desklamp")),
        ("look at mug under the desklamp", "mug", ("find mug", "use desklamp")),
    ],
)
def test_what_a_goal_needs(goal: str, thing: str, wanted: tuple[str, ...]) -> None:
    found = requirements(goal)
    assert found is not None and (found.thing, found.steps) == (thing, wanted)


def test_goals_of_other_benchmarks_are_not_guessed_at() -> None:
    assert requirements("Rinse off lettuce and put it down on the countertop.") is None
    lost = episode(*WANDERING, goal="Rinse off lettuce and put it down on the countertop.")
    assert labels(lost) == ("step_limit",)
    assert analyse([lost])["undecided"] == 1


def test_a_success_has_no_error() -> None:
    assert labels(episode(*FOUND, success=True, stop_reason=StopReason.SUCCESS)) == ()


def test_broken_is_ours_whatever_else_was_recorded() -> None:
    crashed = episode(*FOUND, success=True, stop_reason=StopReason.EXECUTOR_FAILURE)
    assert labels(crashed) == ("broken",)


def test_wrong_termination() -> None:
    assert primary(episode(*WANDERING, stop_reason=StopReason.DONE)) == "wrong_termination"


def test_never_found_and_found_but_not_finished() -> None:
    assert labels(episode(*WANDERING)) == ("never_found", "step_limit")
    assert labels(episode(*FOUND)) == ("missing_step", "step_limit")
    whole = (
        *FOUND,
        ("heat mug 3 with microwave 1", "You heat it."),
        ("move mug 3 to cabinet 4", "You move the mug 3."),
    )
    assert labels(episode(*whole)) == ("step_limit",)  # all that the goal needs was done, so the record cannot say why
    refused = (*whole[:2], ("heat mug 3 with microwave 1", "Nothing happens."), *WANDERING, ("look", ""), whole[3])
    assert "missing_step" in labels(episode(*refused))  # what was refused was not done


def test_two_of_a_kind_need_two() -> None:
    one = (*FOUND, ("move mug 3 to safe 1", "You move the mug 3 to the safe 1."))
    assert primary(episode(*one, goal="put two mug in safe")) == "missing_step"


def test_partial_progress_is_a_missing_step_in_any_words() -> None:
    assert primary(episode(*WANDERING, goal="Rinse off lettuce", progress=0.5)) == "missing_step"


def test_a_loop_is_the_same_action_before_the_same_view() -> None:
    stuck = [("open drawer 1", "You are in the middle of a room.")] * 3
    assert primary(episode(*stuck)) == "repeated_action"
    assert "repeated_action" not in labels(episode(*stuck[:2], *WANDERING))
    again = analyse([episode(*stuck)])
    assert again["repeated_action_rate"] == pytest.approx(2 / 3)


def test_invalid_actions() -> None:
    refused = ("open safe 1", "Nothing happens.")
    assert primary(episode(refused, *WANDERING, ("look", "A room."))) == "invalid_action"  # 1 of 4
    assert "invalid_action" not in labels(episode(refused, *WANDERING, ("look", "A room."), ("wait", "Time passes.")))
    assert primary(episode(*WANDERING, grounding="failed")) == "invalid_action"
    assert primary(episode(("heat egg", "No known action matches that input."))) == "invalid_action"


def test_the_analysis_adds_up() -> None:
    some = [episode(*WANDERING), episode(*FOUND), episode(*FOUND, success=True, stop_reason=StopReason.SUCCESS)]
    summary = analyse(some)
    assert summary["failed"] == sum(summary["primary"].values()) == 2
    assert set(summary["primary"]) == set(summary["labels"]) == set(KINDS)
    assert summary["labels"]["step_limit"] == 2 and summary["primary"]["step_limit"] == 0
    assert summary["examples"] == {"never_found": ["t"], "missing_step": ["t"]}
    assert summary["invalid_action_rate"] == 0.0
    assert analyse([])["failed"] == 0
