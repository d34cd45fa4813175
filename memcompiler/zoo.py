"""`memcompiler zoo`: make the tiny models that the repository ships from nothing, and test a compiler base."""

from __future__ import annotations

from pathlib import Path

import torch

from lm.loading import model_path, quiet
from zoo.household.gate import THRESHOLD, gate
from zoo.household.recipes import train_compiler, train_executor


def run_gate(model: str, scenes: int, seed: int) -> int:
    """Print the look-up gate's result; 0 if the base passes."""
    result = gate(model_path(model), scenes, seed)
    passed = result.accuracy > THRESHOLD
    print(
        f"look-up on {result.n} questions in {scenes} held-out scenes: {result.accuracy:.1%} "
        f"(chance {result.chance:.1%}, threshold {THRESHOLD:.0%}): {'passed' if passed else 'FAILED'}"
    )
    return 0 if passed else 1


def run_recipe(name: str, out: Path, work: Path, seed: int) -> None:
    """Make the model `name`, with one thread: its recipe gives the same weights again only with as many threads."""
    quiet()
    torch.set_num_threads(1)
    recipe = {"compiler": train_compiler, "executor": train_executor}[name]
    recipe(out, work / f"seed-{seed}", seed)
