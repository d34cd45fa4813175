"""The prefix cache of the Hugging Face executor: growing prompts of several episodes read only what is new."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.prompt import Prompt
from tests import command_sets, tiny_models

RULES = "You are in a home. Answer with a command. " * 4
MIB = 0.15  # room for some of the tokens of three episodes
MODES = ("choice", "constrained", "generate")


def executor(mode: str, mib: float, **settings: Any) -> FrozenExecutor:
    return FrozenExecutor(tiny_models.lm_backbone(), mode, max_new_tokens=6, prefix_mib=mib, **settings)  # type: ignore[arg-type]


class Growing:
    """Requests whose prompts grow from step to step; soft tokens end the newest turn only."""

    def __init__(self, model: FrozenExecutor) -> None:
        self.model, self.prompts = model, dict[int, Prompt]()
        model.encode = lambda request: self.prompts[id(request)]  # type: ignore[method-assign]

    def request(self, episode: int, t: int, rules: str = RULES) -> ExecutorRequest:
        ids = self.model.encoder.ids
        turns = [ids(f"{rules} find mug {episode}.")]
        for step in range(t):
            turns += [ids(f" go to shelf {step}\n"), ids(f" You see a cabinet {step * episode}.")]
        placeholders, soft = (self.model.placeholder,) * 4, torch.randn(4, 64, generator=seeded(100 * episode + t))
        whole = sum((tuple(turn) for turn in turns), ())
        self.open = len(whole)  # tokens before the newest turn's soft tokens
        prompt = Prompt((*whole, *placeholders, *ids(" now: ")), soft)
        commands = command_sets.drawn(random.Random(10 * episode + t))
        made = ExecutorRequest("find", MemoryBlock(), (), str((episode, t)), tuple(commands))
        self.prompts[id(made)] = prompt
        return made


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.seconds
@pytest.mark.parametrize("mode", MODES)
def test_actions_are_the_same_and_only_what_is_new_is_read(mode: str) -> None:
    """Three episodes of different lengths side by side, of which one begins late and one pauses."""
    cached, plain = Growing(executor(mode, 64)), Growing(executor(mode, 0))
    before: dict[int, int] = {}
    for t in range(7):
        running = [e for e in range(3) if not ((e == 2 and t < 2) or (e == 1 and t == 3))]
        asked, opens = [], []
        for e in running:
            asked.append(cached.request(e, t))
            opens.append(cached.open)
        made, same = cached.model.act(asked), plain.model.act([plain.request(e, t) for e in running])
        assert [a.action for a in made] == [a.action for a in same] and [a.how for a in made] == [a.how for a in same]
        assert all(a.tokens_cached is None for a in same)
        for e, action, n in zip(running, made, opens, strict=True):
            if e in before:  # all before the soft tokens of its last prompt
                assert action.tokens_cached == before[e]
            before[e] = n
    assert cached.model.prefixes.held > 0 == plain.model.prefixes.held


@torch.no_grad()
@pytest.mark.parametrize("soft", [False, True])
def test_likelihoods_are_the_same(soft: bool) -> None:
    cached, plain = executor("choice", 64), executor("choice", 0)
    growing = Growing(cached)
    for t in range(4):
        asked = [growing.request(e, t + e) for e in range(3)]
        prompts = [growing.prompts[id(one)] for one in asked]
        if not soft:
            prompts = [Prompt(tuple(id for id in p.ids if id != cached.placeholder)) for p in prompts]
        names = [one.admissible or () for one in asked]
        for a, b in zip(
            cached.candidate_logprobs(prompts, names), plain.candidate_logprobs(prompts, names), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert all(cached.cached_tokens(prompts))


def test_a_prompt_that_shares_nothing_reads_all_and_a_small_budget_holds_some() -> None:
    cached = Growing(executor("constrained", 64))
    cached.model.act([cached.request(0, 0)])
    [other] = cached.model.act([cached.request(0, 0, rules="apple " * 9)])
    assert other.tokens_cached == 0
    small, roomy = Growing(executor("constrained", MIB)), Growing(executor("constrained", 64))
    cached_by = [0, 0]
    for t in range(12):
        actions = []
        for k, growing in enumerate((small, roomy)):
            actions.append(made := growing.model.act([growing.request(e, t) for e in range(3)]))
            cached_by[k] += sum(action.tokens_cached or 0 for action in made)
        assert actions[0] == actions[1] and small.model.prefixes.held <= MIB * 2**20
    assert 0 < cached_by[0] < 0.8 * cached_by[1]


def test_gradients_of_soft_tokens_pass_the_cache_by() -> None:
    cached, plain = Growing(executor("choice", 64)), executor("choice", 0)
    asked = cached.request(1, 2)
    prompt, names = cached.prompts[id(asked)], [asked.admissible or ()]
    cached.model.act([asked])
    grads = []
    for model in (cached.model, plain):
        soft = prompt.soft.clone().requires_grad_()  # type: ignore[union-attr]
        model.candidate_logprobs([replace(prompt, soft=soft)], names)[0].sum().backward()
        grads.append(soft.grad)
    assert torch.equal(*grads) and grads[0].abs().max() > 0
