"""What an executor reads of a compilation: the Brief State or not, soft tokens with guidance or always."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from agent.deliveries import Delivery, find, recorded_step
from agent.episode import EpisodeLimits, run_episodes
from agent.records import StepInput, delivered, episode_from_json, executor_request
from compiler import checkpoint
from compiler.brief_state import BriefState, Create
from compiler.build import warn_about_compiler_inputs, warn_about_executor_inputs
from compiler.language import Emission, Kind
from configs.models import CompilerConfig, ExecutorConfig
from data_gen.rows import episode_rows
from envs.spec import ExecutorInstructions
from executor.build import executor_view
from executor.prompt import Turn, executor_text
from executor.records import FULL_VIEW, PAPER_VIEW, ExecutorView
from tests.fakes import COMMANDS, CountingEnv, Recorder, spec
from tests.memory.entries import by_id

GUIDANCE = {"guidance": "go north", "reason": "it is there"}
EMISSIONS = {
    Kind.EXPERIENCE: Emission(**GUIDANCE),
    Kind.HYBRID: Emission(**GUIDANCE, ops=(Create("x", "1"),)),
    Kind.BRIEF: Emission(ops=(Create("x", "1"),)),
    Kind.NOACTION: Emission(),
}
STATE = BriefState("g").apply(Create("plan", "a; b"))
PAST = tuple(Turn(f"view {action}", action) for action in "abc")
TURNS = ExecutorView(context="turns")
READS = [
    PAPER_VIEW,
    FULL_VIEW,
    ExecutorView(state=True),
    ExecutorView(soft_on="always"),
    ExecutorView(first_view=True),
    TURNS,
    replace(TURNS, past_guidance=False, state=True),
]


class Reader(Recorder):
    """Compiles soft tokens whose values are the step number."""

    def __init__(self, reads: ExecutorView) -> None:
        super().__init__()
        self.reads = reads

    def compile(self, requests):
        soft = [torch.full((4, 2), float(len(request.history))) for request in requests]
        return [replace(made, soft=z) for made, z in zip(super().compile(requests), soft, strict=True)]


@pytest.mark.parametrize("kind", EMISSIONS)
@pytest.mark.parametrize("reads", READS, ids=str)
def test_what_is_delivered_by_kind_and_setting(reads: ExecutorView, kind: Kind) -> None:
    soft = torch.ones(4, 2)
    shown = delivered(StepInput("g", "see", state=STATE, emission=EMISSIONS[kind], soft=soft), Reader(reads))
    guided = kind in (Kind.EXPERIENCE, Kind.HYBRID)
    assert (shown.guidance, shown.reason) == (("go north", "it is there") if guided else ("", ""))
    assert shown.state == ("now: a\nnext: b" if reads.state else "")
    assert (shown.soft is soft) == (guided or reads.soft_on == "always") and shown.memory == ""


def test_by_default_noaction_and_brief_leave_the_executor_without_memory() -> None:
    config = ExecutorConfig()
    assert ExecutorView(config.reads_state, config.soft_on, config.history) == PAPER_VIEW == ExecutorView()
    alone = delivered(StepInput("g", "see"), Reader(PAPER_VIEW))
    for kind in (Kind.BRIEF, Kind.NOACTION):
        step = StepInput("g", "see", state=STATE, emission=EMISSIONS[kind], soft=torch.ones(4, 2))
        assert delivered(step, Reader(PAPER_VIEW)) == alone


@pytest.mark.parametrize("reads", READS, ids=str)
def test_loop_records_and_rows_ask_alike_under_every_setting(reads: ExecutorView) -> None:
    asked = Reader(reads)
    [episode] = run_episodes(CountingEnv, [spec(4)], find("compiled").create(asked, 0), asked, EpisodeLimits(5))
    assert [step.emission_kind for step in episode.steps] == ["HYBRID", "BRIEF", "BRIEF", "BRIEF"]
    heard = [True, False, False, False] if reads.soft_on == "guidance" else [True] * 4
    back = episode_from_json(json.loads(json.dumps(episode.to_json())))
    assert [step.soft_read for step in back.steps] == [step.soft_read for step in episode.steps] == heard
    rows = episode_rows(back, by_id(spec(4).memory))
    for t, seen in enumerate(asked.seen):
        again = executor_request(recorded_step(back, t, soft=torch.full((4, 2), float(t))), asked)
        row = executor_request(rows[t].step_input(4), asked)
        for made in (again, replace(row, admissible=COMMANDS)):
            assert made.delivered.n_soft == seen.delivered.n_soft == (4 if heard[t] else 0)
            bare = replace(seen.delivered, soft=None)
            assert replace(made, delivered=bare) == replace(seen, delivered=bare)
            assert replace(made.delivered, soft=None) == bare


def test_how_many_of_its_last_actions_it_is_shown_is_a_setting() -> None:
    for shown, did in ((0, ""), (2, "\ndid: b ; c"), (9, "\ndid: a ; b ; c")):
        step, reader = StepInput("g", "see", past=PAST), Reader(ExecutorView(history=shown))
        assert executor_text(executor_request(step, reader), "") == f"goal: g{did}\nsee: see"


def test_the_first_view_stays_in_the_prompt_where_asked() -> None:
    reader = Reader(ExecutorView(first_view=True))
    begin = StepInput("g", "a room", first="a room")
    later = StepInput("g", "a shelf", past=PAST[:1], first="a room")
    shown = [executor_text(executor_request(step, reader), "") for step in (begin, later)]
    assert shown == ["goal: g\nsee: a room", "goal: g\nfirst: a room\ndid: a\nsee: a shelf"]
    assert executor_text(executor_request(later, Reader(PAPER_VIEW)), "") == "goal: g\ndid: a\nsee: a shelf"
    assert (
        executor_view(ExecutorConfig(first_view=True, context="rebuilt"), ExecutorInstructions("")).first_view
        and not PAPER_VIEW.first_view
    )


def test_the_goal_ends_the_prompt_where_asked() -> None:
    reader = Reader(ExecutorView(first_view=True, goal_last=True))
    step = StepInput("g", "see", past=PAST[:1], first="a room", pasted_memory="m")
    assert executor_text(executor_request(step, reader), "") == "first: a room\nmemory:\nm\n\ndid: a\nsee: see\ngoal: g"
    assert (
        executor_view(ExecutorConfig(goal_last=True, context="rebuilt"), ExecutorInstructions("")).goal_last
        and not PAPER_VIEW.goal_last
    )
    with pytest.raises(ValueError, match="begin with the goal"):
        ExecutorConfig(goal_last=True, engine="scripted")


def test_an_executor_that_cannot_read_soft_tokens_never_gets_any() -> None:
    closed = Reader(FULL_VIEW)
    closed.accepts_soft = False
    [episode] = run_episodes(CountingEnv, [spec(2)], Delivery("compiled", "compiled", closed), closed, EpisodeLimits(5))
    assert not any(request.delivered.n_soft for request in closed.seen) and not episode.steps[0].soft_read


class Asked(Reader):
    """Notes where soft tokens are said to be read."""

    def compile(self, requests):
        self.soft_on = {request.soft_on for request in requests}
        return super().compile(requests)


@pytest.mark.parametrize(
    ("delivery", "reads", "accepts", "said"),
    [
        ("compiled", PAPER_VIEW, True, "guidance"),
        ("compiled", FULL_VIEW, True, "always"),
        ("compiled", FULL_VIEW, False, "never"),
        ("compiled_text", FULL_VIEW, True, "never"),
        ("compiled_shuffled_soft", PAPER_VIEW, True, "always"),  # others read them
    ],
)
def test_the_compiler_is_told_which_soft_tokens_are_read(delivery, reads, accepts, said) -> None:
    asked = Asked(reads)
    asked.accepts_soft = accepts
    run_episodes(CountingEnv, [spec(2)], find(delivery).create(asked, 0), asked, EpisodeLimits(5))
    assert asked.soft_on == {said}


def test_an_executor_that_reads_otherwise_than_in_training_is_reported(tmp_path, caplog) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"executor_reads": ExecutorConfig().reading}))
    trained = checkpoint.executor_inputs(tmp_path)
    assert trained == {
        "context": "turns",
        "past_guidance": "kept",
        "reads_state": False,
        "soft_on": "guidance",
        "history": 20,
        "first_view": False,
        "goal_last": False,
    }
    with caplog.at_level(logging.WARNING):
        warn_about_executor_inputs(trained, ExecutorConfig(), "here")
        old = {"reads_state": False, "soft_on": "guidance"}
        warn_about_executor_inputs(old, ExecutorConfig(context="rebuilt"), "of before")
        assert not caplog.records
        warn_about_executor_inputs(trained, ExecutorConfig(soft_on="always"), "runs/sft")
        warn_about_executor_inputs(None, ExecutorConfig(), "runs/old")
    other, silent = [record.getMessage() for record in caplog.records]
    assert "runs/sft was trained with executor.context=turns" in other and "executor.soft_on=guidance" in other
    assert "this run has executor.context=turns" in other and "executor.soft_on=always" in other
    assert "runs/old does not say what its executor read" in silent


def test_a_compiler_that_reads_other_past_commands_than_in_training_is_reported(tmp_path, caplog) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"compiler_reads": CompilerConfig().reading}))
    trained = checkpoint.compiler_inputs(tmp_path)
    assert trained == {"history": 1, "entries": "whole"}
    with caplog.at_level(logging.WARNING):
        warn_about_compiler_inputs(trained, CompilerConfig(), "here")
        warn_about_compiler_inputs(None, CompilerConfig(history=0), "of before")
        assert not caplog.records
        warn_about_compiler_inputs(trained, CompilerConfig(history="all"), "runs/sft")
        warn_about_compiler_inputs(None, CompilerConfig(), "runs/old")
    other, old = [record.getMessage() for record in caplog.records]
    assert other == (
        "the compiler of runs/sft was trained with compiler.history=1 compiler.entries=whole; "
        "this run has compiler.history=all compiler.entries=whole"
    )
    assert "runs/old was trained with compiler.history=0" in old


@pytest.mark.parametrize("damaged", ["", '{"step": 3', "[]", "\x00\x00"])
def test_a_damaged_state_of_a_checkpoint_is_named(tmp_path, damaged) -> None:
    (tmp_path / "state.json").write_text(damaged)
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.json is damaged"):
        checkpoint.environments(tmp_path)
