"""A closed model as executor: text only, grounded answers, and failures that cost one episode."""

import base64
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from compiler.language import Emission, render
from compiler.records import Compilation
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from envs.base import Observation, Task, Transition
from envs.household.environment import INSTRUCTIONS
from envs.spec import ExecutorInstructions
from executor.api import ApiExecutor
from executor.build import load_executor
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Grounding
from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint
from runtime.errors import StopReason
from tests.faulty_server import FaultyServer

COMMANDS = ("go to shelf 1", "open fridge 1", "look")


class Rooms:
    """Goes on for ever; each task's observations are its own."""

    name = "rooms"

    def reset(self, task):
        self.task = task
        return Observation(f"room of {task.id}", Image.new("RGB", (8, 8)), COMMANDS)

    def step(self, action):
        return Transition(Observation(f"{self.task.id} after {action}", None, COMMANDS), 0.0, False, False)

    def expert(self):
        return None

    def close(self):
        pass


class Guide:
    def compile(self, requests):
        emission = Emission("open the fridge", "it is there")
        return [Compilation(render(emission), emission, soft=torch.zeros(4, 8)) for _ in requests]


def specs(n):
    return [EpisodeSpec(Task(f"task {i}", "put a mug in cabinet", "home 1", "test", "")) for i in range(n)]


def play(server, n=2, delivery=None, **settings):
    executor = ApiExecutor(Endpoint(server.config(**settings)), "Answer with a command.")
    delivery = delivery or Delivery("none", "none")
    return run_episodes(Rooms, specs(n), delivery, executor, EpisodeLimits(max_steps=2), n), executor


def test_soft_tokens_are_dropped_and_the_record_says_so():
    with FaultyServer(answer=lambda messages: "open the fridge 1") as server:
        [episode], executor = play(server, 1, Delivery("compiled", "compiled", Guide()))
        system, user = server.bodies[0]["messages"]
    assert not executor.accepts_soft and system == {"role": "system", "content": "Answer with a command."}
    assert "guide: it is there | open the fridge" in user["content"] and "soft" not in user["content"]
    assert all(command not in user["content"] for command in COMMANDS)  # they are not part of the prompt
    [step, _] = episode.steps
    assert (step.action, step.grounding, step.executor_text) == ("open fridge 1", "fuzzy", "open the fridge 1")
    assert step.executor_prompt == user["content"]
    assert step.tokens == {"compiler_in": 0, "compiler_out": 0, "executor_in": 100, "executor_out": 10}


@pytest.mark.parametrize(
    "answer",
    [
        "<think>\nI open fridge 1?\n</think>\n\nlook",
        "I open fridge 1?</think>look",
        "Thought: fridge 1?\nAction: look",
    ],
)
def test_an_actor_does_what_it_answers_not_what_it_thinks(answer):
    with FaultyServer(answer=lambda messages: answer) as server:
        [episode], _ = play(server, 1)
    assert [(step.action, step.grounding) for step in episode.steps] == [("look", "exact")] * 2
    assert all("think>" not in step.executor_text for step in episode.steps)


def test_a_picture_is_shown_where_the_settings_say_so():
    picture = Image.new("RGB", (8, 8), (200, 0, 0))
    request = ExecutorRequest("goal", MemoryBlock(), (), "a room", COMMANDS, image=picture)
    with FaultyServer() as server:
        seeing, blind = (ApiExecutor(Endpoint(server.config(images=images))) for images in (True, False))
        before, image, after = seeing.messages(request)[0]["content"]
        assert blind.messages(request) == seeing.messages(replace(request, image=None))
    assert base64.b64decode(image["image_url"]["url"].partition("base64,")[2]).startswith(b"\x89PNG")
    assert before["text"].endswith("view: ") and after["text"] == "\nsee: a room"
    assert json.dumps(blind.messages(request)).count("image_url") == 0


def test_a_failure_after_all_attempts_costs_its_episode_only():
    answer = lambda messages: "look"
    with FaultyServer(["500", "500", "500"], answer) as server:  # the first request, its two attempts more
        [first, second], executor = play(server, 2, retries=2, concurrency=1)
    assert (first.stop_reason, first.steps[0].action) == (StopReason.EXECUTOR_FAILURE, "")
    assert "no usable answer in 3 attempts" in first.error
    assert second.stop_reason == StopReason.STEP_LIMIT and [s.action for s in second.steps] == ["look"] * 2
    assert executor.endpoint.account()["faults"] == {"server_error": 3}


def test_a_spent_budget_ends_the_run_and_no_episode_is_blamed():
    with FaultyServer() as server, pytest.raises(EndpointStop, match=r"api\.budget_tokens"):
        play(server, 3, budget_tokens=300, concurrency=1)
    assert server.requests == 3  # the budget was spent by the third


def test_garbage_is_sent_as_it_is_and_counted():
    with FaultyServer(["garbage"] * 2) as server:
        [episode], _ = play(server, 1)
    assert [step.grounding for step in episode.steps] == [Grounding.FAILED] * 2


def test_settings():
    with pytest.raises(ConfigError, match=r"api\.model"):
        load_config(EvalConfig, None, ["executor.engine=api"])
    config = load_config(EvalConfig, None, ["executor={engine: api, api: {model: m, key_env: null}}"])
    executor = load_executor(config.executor, ExecutorInstructions(INSTRUCTIONS))
    assert isinstance(executor, ApiExecutor) and executor.hash() == "m at https://api.openai.com/v1"
