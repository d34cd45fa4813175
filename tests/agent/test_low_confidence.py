"""Compiling only where the executor alone has low confidence."""

import json
from dataclasses import replace

import pytest

from agent.deliveries import find, recorded_step
from agent.episode import EpisodeLimits, run_episodes
from agent.records import episode_from_json, executor_request
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from eval.matrix import cells
from eval.metrics import summarise
from executor.records import PAPER_VIEW
from runtime.errors import StopReason
from tests.fakes import CountingEnv, Recorder, spec


class Doubting(Recorder):
    """Reports a confidence by the step."""

    reads = PAPER_VIEW

    def __init__(self, *sure):
        super().__init__()
        self.sure = sure

    def act(self, requests):
        return [
            replace(made, confidence=self.sure[len(r.history)])
            for made, r in zip(super().act(requests), requests, strict=True)
        ]


def play(executor, steps=3, **limits):
    delivery = find("compiled_low_confidence").create(executor, 0)
    [episode] = run_episodes(CountingEnv, [spec(steps)], delivery, executor, EpisodeLimits(5, **limits))
    return episode


def test_a_confident_executor_acts_without_a_compiler():
    executor = Doubting(0.5, 0.95, 0.2)
    episode = play(executor)
    assert [step.emission_kind for step in episode.steps] == ["HYBRID", "", "BRIEF"]
    assert [step.confidence for step in episode.steps] == [0.5, 0.95, 0.2]
    # The last emission tells this executor nothing: what it would read once more, it has answered.
    told = [(len(r.history), r.delivered.guidance) for r in executor.seen]
    assert told == [(0, ""), (0, "go north"), (1, ""), (2, "")]
    assert episode.steps[0].tokens == {"executor_in": 4, "executor_out": 2, "compiler_in": 3, "compiler_out": 2}
    assert (
        episode.steps[1].tokens == {"executor_in": 2, "executor_out": 1} and "compiler" not in episode.steps[1].seconds
    )
    assert episode.steps[1].brief_after == episode.steps[0].brief_after == episode.steps[2].brief_before
    made = summarise([episode])
    assert (made["usage"]["compiler"]["calls"], made["usage"]["compiler"]["tokens_in"]) == (2, 6)
    assert made["emission_mix"]["HYBRID"] == 0.5 and made["steps"] == 3


def test_the_confidence_threshold_is_a_setting_between_the_deliveries_none_and_compiled():
    sometimes = (0.5, 0.95, 0.2)
    assert not any(step.emission_kind for step in play(Doubting(*sometimes), min_confidence=0.1).steps)
    assert all(step.emission_kind for step in play(Doubting(*sometimes), min_confidence=1.0).steps)
    assert load_config(EvalConfig, None, []).min_confidence == EpisodeLimits().min_confidence


def test_its_record_says_what_the_executor_read():
    executor = Doubting(0.5, 0.95, 0.2)
    back = episode_from_json(json.loads(json.dumps(play(executor).to_json())))
    read = [executor_request(recorded_step(back, t, spec(3).memory), executor) for t in range(3)]
    assert read == executor.seen[1:4]
    assert [step.confidence for step in back.steps] == [0.5, 0.95, 0.2]


def test_an_executor_without_confidence_is_refused():
    episode = play(Recorder())
    assert episode.stop_reason is StopReason.EXECUTOR_FAILURE and "reports no confidence" in episode.error
    for wrong in ("executor.mode=generate", "executor.engine=scripted"):
        with pytest.raises(ConfigError, match="compiled_low_confidence needs an executor that reports"):
            cells(load_config(EvalConfig, None, ["deliveries=[compiled_low_confidence]", wrong]))
