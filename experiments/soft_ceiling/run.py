"""Measure how far any soft tokens can steer a frozen executor: optimise free ones for single states.

A state is an SFT row: the executor's prompt with its guidance, and the right action. For each state, N soft tokens that
nothing constrains are optimised by gradient descent to make that action likely. The share of states in which the
executor then takes it bounds what soft tokens of a compiler can reach at N; without soft tokens it is what the text
alone reaches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from agent.records import StepInput, executor_request
from configs.models import ExecutorConfig
from data_gen.rows import SftRow, SftRowDataset
from envs.alfworld.environment import AlfworldSettings
from envs.registry import executor_instructions_for
from eval.intervals import wilson
from eval.table import interval, markdown_table
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from runtime.progress import progress

RATE = 0.1  # Adam's, in standard deviations of the executor's embeddings


def drawn_rows(folder: Path, number: int, seed: int) -> list[SftRow]:
    """Draw rows with guidance."""
    rows = [row for row in SftRowDataset(folder) if row.step_input(0).emission.guidance]  # type: ignore[union-attr]
    return random.Random(seed).sample(rows, min(number, len(rows)))


def optimised(
    executor: FrozenExecutor, steps: Sequence[StepInput], actions: Sequence[str], n: int, passes: int, std: float
):
    """Optimise soft tokens (B, n, d) of states by Adam."""
    soft = (std * torch.randn(len(steps), n, executor.embedding_table.shape[1])).requires_grad_()
    adam = torch.optim.Adam([soft], lr=RATE * std)
    asked = [executor_request(replace(step, soft=soft[i].detach()), executor) for i, step in enumerate(steps)]
    prompts = [replace(executor.encode(request), soft=None) for request in asked]
    wanted = [executor.action_ids(action) for action in actions]
    for _ in range(passes):
        adam.zero_grad()
        executor.action_nll(prompts, soft.to(executor.embedding_table.dtype), wanted)[0].sum().backward()
        adam.step()
    return soft.detach()


def count_right(
    executor: FrozenExecutor, steps: Sequence[StepInput], actions: Sequence[str], soft: torch.Tensor | None
) -> int:
    """Count the states in which the executor takes the right action."""
    own = [None] * len(steps) if soft is None else list(soft)
    asked = [executor_request(replace(step, soft=own[i]), executor) for i, step in enumerate(steps)]
    return sum(made.action == right for made, right in zip(executor.act(asked), actions, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimise free soft tokens for single states of a frozen executor.")
    parser.add_argument("--rows", type=Path, required=True, help="folder of SFT rows of real ALFWorld games")
    parser.add_argument("--executor", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--states", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--passes", type=int, default=60, help="gradient steps per state")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    settings = ExecutorConfig(model=given.executor, dtype=given.dtype, mode="constrained", prefix_mib=1000)
    executor = load_frozen(settings, executor_instructions_for(AlfworldSettings()))
    std = float(executor.embedding_table.float().std())
    rows = drawn_rows(given.rows, given.states, given.seed)
    right = dict.fromkeys(["text alone", *map(str, given.tokens)], 0)
    with progress("states", len(rows)) as done:
        for at in range(0, len(rows), given.batch):
            part = rows[at : at + given.batch]
            steps, actions = [row.step_input(0) for row in part], [row.action for row in part]
            right["text alone"] += count_right(executor, steps, actions, None)
            for n in given.tokens:
                soft = optimised(executor, steps, actions, n=n, passes=given.passes, std=std)
                right[str(n)] += count_right(executor, steps, actions, soft)
            for _ in part:
                done(None)
    table = [
        [name, f"{count} of {len(rows)}", interval(asdict(wilson(count, len(rows))))] for name, count in right.items()
    ]
    print("\n".join(markdown_table(["soft tokens", "right action", "%"], table, left=1)))


if __name__ == "__main__":
    main()
