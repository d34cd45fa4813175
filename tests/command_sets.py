"""Random sets of commands that share beginnings, some of which begin another one, and decoding held to them, slowly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest
from lm.prompt import Prompt

PLACES = ("fridge", "cabinet", "shelf", "desk")
THINGS = ("mug", "apple", "mug 1", "mug 10")


def drawn(rng: random.Random, most: int = 14) -> list[str]:
    """Draw different commands in random order."""
    numbers = (1, 2, 10, 12)
    every = ["look", "look at", "go to", "open fridge", "inventory"]
    for place in PLACES:
        for number in numbers:
            every += [f"go to {place} {number}", f"open {place} {number}", f"look at {place} {number}"]
            every += [f"take {thing} from {place} {number}" for thing in THINGS]
    return rng.sample(every, rng.randint(1, most))


def asked(requests: Sequence[ExecutorRequest], seed: int = 0) -> list[ExecutorRequest]:
    """Give each request a random set."""
    rng = random.Random(seed)
    return [replace(request, admissible=tuple(drawn(rng))) for request in requests]


@torch.no_grad()
def masked(model: FrozenExecutor, prompt: Prompt, commands: Sequence[str]) -> tuple[int, ...]:
    """Greedy decoding by a full forward pass per token, whose logits are masked to what continues a command."""
    every, path = [model.action_ids(command) for command in commands], ()
    while path not in every:
        path = (*path, int(_masked_logits(model, prompt, every, path).argmax()))
    return path


@torch.no_grad()
def masked_logprobs(model: FrozenExecutor, prompt: Prompt, commands: Sequence[str]) -> torch.Tensor:
    """Return the log-probability of drawing each command token by token, at the model's temperature, the same way."""
    every = [model.action_ids(command) for command in commands]
    sums = torch.zeros(len(every))
    for i, ids in enumerate(every):
        for k, token in enumerate(ids):
            logits = _masked_logits(model, prompt, every, ids[:k])
            sums[i] += (logits / model.temperature).log_softmax(0)[token]
    return sums


def _masked_logits(
    model: FrozenExecutor, prompt: Prompt, every: Sequence[tuple[int, ...]], path: tuple[int, ...]
) -> torch.Tensor:
    row = prompt.extended(path)
    logits = model.model(inputs_embeds=model.embed(torch.tensor([row.ids]), [row])).logits[0, -1]
    mask = torch.full_like(logits, -torch.inf)
    mask[[ids[len(path)] for ids in every if ids[: len(path)] == path]] = 0
    return logits + mask
