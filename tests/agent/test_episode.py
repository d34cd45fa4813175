"""The loop: order of events, named failures, deliveries, and batching that does not depend on timing."""

import json
import threading
from dataclasses import replace

import pytest

from agent.deliveries import Delivery, ShuffledSoft, find, recorded_step
from agent.episode import EpisodeLimits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import compile_request, episode_from_json, executor_request
from data_gen.rows import episode_rows
from envs.base import EnvironmentFailure
from lm.answer_cache import EndpointStop
from memory.protocol import BankError, Recall
from runtime.errors import StopReason, is_failure
from tests.fakes import COMMANDS, CountingEnv, Recorder, spec
from tests.memory.entries import by_id


class NotingEnv(CountingEnv):
    """An environment that notes beliefs at its first two observations."""

    def reset(self, task):
        return replace(super().reset(task), beliefs=(("places", "desk 1, desk 2"), ("holding", "mug 1")))

    def step(self, action):
        moved = super().step(action)
        return replace(moved, observation=replace(moved.observation, beliefs=(("places", "desk 2"), ("holding", ""))))


class Forgets:
    """A session that fails at its third recall or observation."""

    def __init__(self, asked: bool, error: Exception):
        self.left, self.told, self.asked, self.error = 3, 3, asked, error

    def recall(self, observation):
        self.left -= 1
        if self.asked and not self.left:
            raise self.error
        return Recall(())

    def observe(self, record):
        self.told -= 1
        if not self.asked and not self.told:
            raise self.error


def run(specs, delivery=None, executor=None, **kwargs):
    recorder = Recorder()
    delivery = delivery or Delivery("compiled", "compiled", recorder)
    return run_episodes(
        CountingEnv, specs, delivery, executor or recorder, EpisodeLimits(max_steps=5), **kwargs
    ), recorder


def test_the_environment_notes_beliefs_before_the_compiler_reads_the_brief_state():
    recorder = Recorder()
    [episode] = run_episodes(
        NotingEnv, [spec(3)], Delivery("compiled", "compiled", recorder), recorder, EpisodeLimits(max_steps=5)
    )
    assert episode.steps[0].brief_before == "goal: in home 1: goal 3\nnote: places = desk 1, desk 2 ; holding = mug 1"
    assert episode.steps[1].brief_before == "goal: in home 1: goal 3\nnow: a\nnext: b\nnote: places = desk 2"


def test_the_executor_reads_b_t_and_operations_apply_after_it_acts():
    [episode], recorder = run([spec(3)])
    assert recorder.seen[0].delivered.state == "" and recorder.seen[0].delivered.guidance == "go north"
    assert recorder.seen[1].delivered.state == "now: a\nnext: b"
    assert episode.steps[0].brief_before == "goal: in home 1: goal 3"
    assert episode.steps[0].brief_after == episode.steps[1].brief_before == "goal: in home 1: goal 3\nnow: a\nnext: b"
    assert episode.steps[1].op_errors == ("create: key exists: x",)
    assert [s.emission_kind for s in episode.steps] == ["HYBRID", "BRIEF", "BRIEF"]
    assert (episode.success, episode.progress, episode.stop_reason) == (True, 1.0, StopReason.SUCCESS)
    assert (episode.bank_version, episode.memory_ids) == (7, ("e1",))
    assert episode.steps[1].feedback == episode.steps[2].observation == "after north"
    assert episode.steps[0].tokens == {"compiler_in": 3, "compiler_out": 2, "executor_in": 2, "executor_out": 1}


@pytest.mark.parametrize("asked", [True, False])
def test_a_memory_that_fails_costs_its_episode_only(asked):
    broken = replace(spec(4), open_session=lambda: Forgets(asked, KeyError("a node that is not there")))
    nothing = replace(spec(2), open_session=lambda: 1 / 0)
    first, whole, none = run([broken, spec(3), nothing])[0]
    assert (str(first.stop_reason), first.error) == ("memory_failure", "KeyError: 'a node that is not there'")
    assert [bool(step.action) for step in first.steps] == [True, True, not asked] and is_failure(first.stop_reason)
    assert whole.success and not none.steps and none.error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("error", [EndpointStop("budget spent"), BankError("no such version")])
def test_a_memory_that_no_episode_can_ask_any_more_ends_the_run(error):
    with pytest.raises(type(error)):
        run([replace(spec(4), open_session=lambda: Forgets(True, error)), spec(2)])


def test_step_limit():
    [episode], _ = run([spec(9)])
    assert (episode.success, episode.stop_reason, len(episode.steps)) == (False, StopReason.STEP_LIMIT, 5)


def test_failures_end_their_own_episode_only():
    episodes, _ = run([spec(2), spec(2, "broken"), spec(3, "crash"), spec(4)])
    assert [str(e.stop_reason) for e in episodes] == [
        "success",
        "environment_failure",
        "environment_failure",
        "success",
    ]
    assert episodes[1].error == "the simulator is gone" and not episodes[1].steps

    class Broken(Recorder):
        def act(self, requests):
            raise TimeoutError("no answer")

    [episode], _ = run([spec(2)], executor=Broken())
    assert episode.stop_reason is StopReason.EXECUTOR_FAILURE and "no answer" in episode.error


@pytest.mark.parametrize("role", ["compiler", "executor"])
def test_a_request_that_cannot_be_served_ends_its_own_episode_only(role):
    class Choosy(Recorder):
        def compile(self, requests):
            self.check("compiler", requests)
            return super().compile(requests)

        def act(self, requests):
            self.check("executor", requests)
            return super().act(requests)

        def check(self, mine, requests):
            if role == mine and any("goal 4" in r.goal and len(r.history) == 1 for r in requests):
                raise ValueError("the prompt is too long")

    choosy = Choosy()
    specs = [spec(3), spec(4), spec(2)]
    episodes, _ = run(specs, Delivery("compiled", "compiled", choosy), choosy)
    assert [str(e.stop_reason) for e in episodes] == ["success", f"{role}_failure", "success"]
    assert episodes[1].error == "ValueError: the prompt is too long" and len(episodes[1].steps) == 2


def test_deliveries_show_what_they_should():
    for name in ("none", "static"):
        _, recorder = run([spec(2)], Delivery(name, name))
        assert recorder.seen[0].delivered.memory == ("the memory" if name == "static" else "")
        assert recorder.seen[0].delivered.guidance == ""
    recorder = Recorder()
    run([spec(3)], Delivery("compiled_no_brief", "compiled", recorder, brief_state=False), recorder)
    assert recorder.seen[1].delivered.state == "" and recorder.seen[1].history == ("north",)
    with pytest.raises(ValueError, match="compiler"):
        Delivery("compiled", "compiled")


@pytest.mark.parametrize("name", ["none", "static", "compiled_text", "compiled_no_brief"])
def test_records_and_rows_ask_what_the_loop_asked(name):
    """The requests of every step, rebuilt from JSON records and from SFT rows."""
    asked = Recorder()
    asked.compiled = []
    compile_ = asked.compile
    asked.compile = lambda requests: asked.compiled.extend(requests) or compile_(requests)
    [episode], _ = run([spec(4)], find(name).create(asked, 0), asked)
    back, memory = episode_from_json(json.loads(json.dumps(episode.to_json()))), spec(4).memory
    steps = [recorded_step(back, t, memory) for t in range(4)]
    asked.compiled = [replace(request, soft_on="always") for request in asked.compiled]  # which no prompt says
    assert [executor_request(step, asked) for step in steps] == asked.seen
    if find(name).kind == "compiled":
        assert [compile_request(replace(step, emission=None)) for step in steps] == asked.compiled
    if name == "compiled_text":
        rows = [row.step_input() for row in episode_rows(back, by_id(memory))]
        made = [replace(executor_request(row, asked), admissible=COMMANDS) for row in rows]
        assert made == asked.seen
        texts = [[(e.id, e.text) for e in compile_request(row).memory] for row in rows]
        assert texts == [[(e.id, e.text) for e in memory]] * 4
        assert [replace(compile_request(row), memory=memory) for row in rows] == asked.compiled


def test_batches_depend_on_the_episodes_only():
    specs = [spec(2), spec(4), spec(3), spec(1), spec(2)]
    episodes, recorder = run(specs, concurrency=3)
    again, twin = run(specs, concurrency=3)
    assert [e.task_id for e in episodes] == ["2", "4", "3", "1", "2"]
    assert recorder.batches == twin.batches and max(map(len, recorder.batches)) == 3
    assert [len(e.steps) for e in episodes] == [len(e.steps) for e in again] == [2, 4, 3, 1, 2]


class Planner(CountingEnv):
    """Runs in another process; a plan waits for a second one at the same time."""

    in_process, both = False, threading.Barrier(2)

    def expert(self):
        self.both.wait(10)
        return super().expert()


def test_experts_in_other_processes_plan_side_by_side():
    delivery = Delivery("teacher", "compiled", ExpertTeacher(), soft=False)
    episodes = run_episodes(Planner, [spec(2), spec(2)], delivery, ExpertExecutor(), EpisodeLimits(5), 2)
    assert [episode.success for episode in episodes] == [True, True]


def test_an_environment_that_fails_while_it_plans_is_named():
    class Gone(CountingEnv):
        def expert(self):
            raise EnvironmentFailure("the planner is gone")

    [episode] = run_episodes(Gone, [spec(2)], Delivery("expert", "none"), ExpertExecutor(), EpisodeLimits(5))
    assert (episode.stop_reason, episode.error) == (StopReason.ENVIRONMENT_FAILURE, "the planner is gone")


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("error", [ValueError("no game"), OSError(5, "gone")])
def test_whatever_an_environment_raises_ends_its_episode_alone(monkeypatch, method, error):
    whole = getattr(CountingEnv, method)

    def fails(env, asked):
        env.task = getattr(asked, "id", getattr(env, "task", ""))
        if env.task == "2":
            raise error
        return whole(env, asked)

    monkeypatch.setattr(CountingEnv, method, fails)
    if method == "step":
        reset = CountingEnv.reset
        monkeypatch.setattr(CountingEnv, "reset", lambda env, task: setattr(env, "task", task.id) or reset(env, task))
    broken, fine = run([spec(2), spec(1)])[0]
    assert (str(broken.stop_reason), str(fine.stop_reason)) == ("environment_failure", "success")
    assert (
        broken.error == f"{type(error).__name__}: {error}" and broken.failure == f"environment_failure: {broken.error}"
    )
    assert broken.steps == [] if method == "reset" else len(broken.steps) == 1


def test_shuffled_soft_keeps_text_and_moves_soft():
    import torch

    class Soft(Recorder):
        def compile(self, requests):
            made = super().compile(requests)
            for i, c in enumerate(made):
                c.soft = torch.full((2, 3), float(i))
            return made

    recorder = Soft()
    run([spec(1), spec(2), spec(1)], Delivery("s", "compiled", ShuffledSoft(recorder)), recorder)
    assert [r.delivered.soft[0, 0].item() for r in recorder.seen[:3]] == [1.0, 2.0, 0.0]
