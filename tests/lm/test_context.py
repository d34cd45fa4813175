"""Prompts longer than the model's context: every engine refuses them alike, by name and before any work."""

import time
from dataclasses import replace

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from compiler.records import Decoding
from envs.base import Observation, Task, Transition
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.prompt import ContextLengthError
from tests import tiny_models

COMMANDS = ("go to shelf 1", "take mug 1 from shelf 1", "look")
LONG = "cabinet 1 " * 80_000  # 800 kB, for a context of 4,096 tokens


def executor(**kwargs):
    return FrozenExecutor(tiny_models.lm_backbone(), **kwargs)


def request(observation="You see nothing."):
    return ExecutorRequest("put a mug in cabinet", MemoryBlock(), (), observation, COMMANDS)


def unused(backbone, monkeypatch):
    monkeypatch.setattr(backbone.model, "forward", lambda *_, **__: pytest.fail("the model was run"))
    monkeypatch.setattr(backbone.body, "forward", lambda *_, **__: pytest.fail("the model was run"))


@pytest.mark.parametrize("vlm", [True, False])
def test_a_compiler_refuses_before_any_work(vlm, monkeypatch):
    compiler = tiny_models.memory_compiler(vlm)
    unused(compiler.backbone, monkeypatch)
    started = time.monotonic()
    with pytest.raises(ContextLengthError, match=r"the compiler's prompt has 80\d{3} tokens.*a context of 4096"):
        compiler.compile([tiny_models.request(0), replace(tiny_models.request(1), observation=LONG)])
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("mode", ["choice", "generate"])
def test_an_executor_refuses_before_any_work(mode, monkeypatch):
    model = executor(mode=mode)
    unused(model.backbone, monkeypatch)
    with pytest.raises(ContextLengthError, match=r"the executor's prompt has 80\d{3} tokens.*a context of 4096"):
        model.act([request(), request(LONG)])


def test_a_compilers_room_is_for_emission_and_memory_tokens():
    compiler = tiny_models.memory_compiler(False, n_tokens=4, decoding=Decoding(max_new_tokens=12))
    asked = tiny_models.request(0)
    fits = len(compiler.encode(asked).ids) + 12 + 4 + 2
    compiler.context = fits
    compiler.compile([asked])
    compiler.context = fits - 1
    with pytest.raises(ContextLengthError, match="no room for 18 more"):
        compiler.compile([asked])


def test_an_executors_room_is_for_the_longest_command_or_its_answer():
    model = executor(max_new_tokens=30)
    tokens, longest = len(model.encode(request()).ids), max(len(model.action_ids(name)) for name in COMMANDS)
    model.context = tokens + longest + 1
    assert model.act([request()])[0].action in COMMANDS
    model.context -= 1
    with pytest.raises(ContextLengthError, match=f"no room for {longest + 1} more"):
        model.act([request()])
    model.mode, model.context = "generate", tokens + 29
    with pytest.raises(ContextLengthError, match="no room for 30 more"):
        model.act([request()])


class Wordy:
    """One step; the observation of a task of kind `long` is."""

    name = "wordy"

    def reset(self, task):
        return Observation(LONG if task.kind == "long" else "You see nothing.", None, COMMANDS)

    def step(self, action):
        return Transition(Observation("", None, COMMANDS), 1.0, True, True)

    def close(self):
        pass


@pytest.mark.parametrize("role", ["compiler", "executor"])
def test_one_long_prompt_ends_its_own_episode_only(role):
    specs = [EpisodeSpec(Task(f"t{i}", "put a mug", "home 1", "test", "long" if i == 1 else "")) for i in range(3)]
    compiler = tiny_models.memory_compiler(False)
    delivery = Delivery("compiled", "compiled", compiler) if role == "compiler" else Delivery("none", "none")
    episodes = run_episodes(Wordy, specs, delivery, executor(), EpisodeLimits(2))  # type: ignore[arg-type]
    assert [str(e.stop_reason) for e in episodes] == ["success", f"{role}_failure", "success"]
    assert episodes[1].error.startswith(f"ContextLengthError: the {role}'s prompt has 8")
