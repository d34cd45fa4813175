"""Decoding held to the commands: the same as masking each step of a full forward pass, and one pass per branch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.models import ExecutorConfig
from executor.decoding import CommandWalk, FreeWalk, follow
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Grounding
from tests import command_sets, tiny_models


def executor(**settings: Any) -> FrozenExecutor:
    return FrozenExecutor(tiny_models.lm_backbone(), mode="constrained", **settings)


def request(i: int, commands: Sequence[str] | None) -> ExecutorRequest:
    soft = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if i % 3 else None
    delivered = MemoryBlock(guidance=f"go to shelf {i}", soft=soft)
    listed = None if commands is None else tuple(commands)
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * (i % 4), "You see nothing.", listed)


def test_it_takes_the_likeliest_token_that_continues_a_command() -> None:
    model, rng = executor(), random.Random(0)
    asked = [request(i, command_sets.drawn(rng)) for i in range(60)]
    made = model.act(asked)
    for action, one in zip(made, asked, strict=True):
        assert one.admissible and action.how is Grounding.CHOICE and action.text == action.action
        assert action.chosen is not None and one.admissible[action.chosen] == action.action
        ids = command_sets.masked(model, model.encode(one), one.admissible)
        assert (model.action_ids(action.action), action.tokens_out) == (ids, len(ids))
    assert model.act(asked[7:8]) == made[7:8]
    by_score = FrozenExecutor(model.backbone).act(asked)
    assert [a.action for a in by_score] != [a.action for a in made]  # why `choice` scores whole commands


def test_a_command_that_begins_another_one_is_chosen_by_its_end_of_turn() -> None:
    walk = CommandWalk([(4, 9), (4, 5, 6, 9), (4, 5, 7, 9)])
    assert (walk.path, walk.allowed, walk.done) == ((4,), (5, 9), False)
    walk.take(5)
    assert (walk.path, walk.allowed) == ((4, 5), (6, 7))
    with pytest.raises(ValueError, match="token 9 continues no listed command"):
        CommandWalk([(4, 9), (3, 9)]).take(9)
    walk.take(7)
    assert walk.done and walk.path == (4, 5, 7, 9)
    assert CommandWalk([(4, 9), (4, 9)]).done  # the same command twice
    ended = CommandWalk([(4, 9), (4, 5, 6, 9)])
    ended.take(9)
    assert ended.done and ended.path == (4, 9)


def test_of_equally_likely_tokens_the_lowest_is_taken() -> None:
    model = executor()
    model.backbone.logits = lambda hidden: torch.zeros(len(hidden), 2000)  # type: ignore[method-assign]
    commands = ["go to shelf 1", "look", "go to cabinet 2", "open cabinet 2"]
    [action] = model.act([request(0, commands)])
    assert model.action_ids(action.action) == min(map(model.action_ids, commands))


def test_only_branches_cost_a_pass_and_requests_without_commands_decode_freely() -> None:
    model, passes = executor(max_new_tokens=5), []
    hidden = model.backbone.hidden
    model.backbone.hidden = lambda batch, *rest, **more: (  # type: ignore[method-assign]
        passes.append(batch.tokens.shape[1]) or hidden(batch, *rest, **more)
    )
    [only] = model.act([request(1, ["open cabinet 2"])])
    assert only.action == "open cabinet 2" and not passes
    model.act([request(1, ["take mug 1 from shelf 1", "take mug 1 from shelf 2"])])
    assert len(passes) == 2 and passes[1] == len(model.action_ids("take mug 1 from shelf 1")) - 2
    model.backbone.hidden = hidden  # type: ignore[method-assign]
    free = FrozenExecutor(model.backbone, mode="generate", max_new_tokens=5)
    mixed = [request(0, None), request(1, ["look", "go to shelf 1"]), request(2, None)]
    made = model.act(mixed)
    assert made[::2] == free.act(mixed[::2]) and made[0].how is Grounding.FREE
    assert made[1] == model.act(mixed[1:2])[0] and model.act([]) == []
    walk = FreeWalk(9, 3)
    follow([walk], lambda rows: [5])
    assert walk.path == (5, 5, 5)


COMMANDS = ("go to shelf 1", "go to shelf 10", "go to shelf 2", "look", "look at shelf 1", "take mug 1 from shelf 1")


def test_drawn_commands_come_as_often_as_their_branches_say() -> None:
    model, asked = executor(temperature=3.0), request(1, COMMANDS)
    prompt = model.encode(asked)
    expected = command_sets.masked_logprobs(model, prompt, COMMANDS)
    assert float(expected.exp().sum()) == pytest.approx(1, abs=1e-4)
    every = range(len(COMMANDS))
    scored = model.chosen_logprobs([prompt] * len(COMMANDS), [COMMANDS] * len(COMMANDS), list(every))
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=0)
    made = model.act([asked] * 400)
    for at, logprob in enumerate(expected.tolist()):
        of_it = [action for action in made if action.chosen == at]
        probability = math.exp(logprob)
        assert abs(len(of_it) / 400 - probability) < 4 * (probability * (1 - probability) / 400) ** 0.5
        assert all(action.logprob == pytest.approx(logprob, abs=1e-4) for action in of_it)
    assert model.act([asked] * 20, seeds=range(20)) == model.act([asked] * 20, seeds=range(20))
    assert executor().act([asked])[0].logprob is None


def test_the_gradient_of_a_drawn_command_is_the_same_with_a_prefix_cache() -> None:
    gradients = []
    for mib in (0, 64):
        model = executor(temperature=0.7, prefix_mib=mib)
        prompts = [model.encode(request(i, COMMANDS)) for i in (1, 2, 4)]
        soft = [prompt.soft.clone().requires_grad_() for prompt in prompts if prompt.soft is not None]
        given = [replace(prompt, soft=own) for prompt, own in zip(prompts, soft, strict=True)]
        logprobs = model.chosen_logprobs(
            [*given, given[0]], [COMMANDS, COMMANDS[:3], COMMANDS, ("look",)], [5, 0, 3, 0]
        )
        assert logprobs[3] == 0  # the only command
        logprobs.sum().backward()
        gradients.append(torch.stack([own.grad for own in soft if own.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)
    assert all(row.abs().max() > 1e-4 for row in gradients[0])


def test_settings_of_engines() -> None:
    for engine in ("hf", "vllm"):
        assert not ExecutorConfig(engine=engine, mode="constrained").reports_confidence
    assert ExecutorConfig(engine="http", url="http://127.0.0.1:8000", mode="constrained").mode == "constrained"
    with pytest.raises(ValueError, match="mode"):
        ExecutorConfig.model_validate({"mode": "guided"})
    with pytest.raises(ValueError, match=r"mode choice or constrained"):
        ExecutorConfig(mode="generate", temperature=1.0)
