"""`memcompiler bench cost RUN`: the cost of a solved task in an evaluation, by delivery.

Tokens, seconds and FLOPs of all episodes, failed ones included, are divided by the number of solved episodes. A token
costs two FLOPs per parameter of its model. Cached tokens count like others, because not every engine reports them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from agent.records import Episode
from configs.load import read_yaml
from configs.run_folder import CONFIG
from eval.metrics import ROLES, display_name, grouped, succeeded, usage
from eval.runs import load_run
from eval.table import markdown_table

RESAMPLES = 2000
ENGINES_WITHOUT_MODEL = ("scripted", "program")


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens, seconds and FLOPs of a delivery within a number of steps."""

    delivery: str
    usage: dict[str, dict[str, Any]]  # by role, see `eval.metrics.usage`
    flops: dict[str, float]  # by task, over all its episodes
    solved: dict[str, int]  # by task, number of solved episodes

    @property
    def successes(self) -> int:
        return sum(self.solved.values())

    def per_solved(self, value: float) -> str:
        return f"{value / self.successes:,.1f}" if self.successes else "-"


def run_cost(
    run: Path, steps: int | None, delivery: str, over: str, parameters: Mapping[str, float | None] | None = None
) -> None:
    """Print costs per solved task; the last line is `cost ratio: R`, FLOPs of `delivery` over those of `over`.

    Args:
        steps: steps of each episode that count (default: all).
        parameters: model sizes by role; a size that is None is counted from the run's settings.

    Raises:
        ValueError: the run is a matrix, lacks a delivery, has fewer steps than `steps`, or a model's size is
            unknown.
    """
    results, episodes = load_run(run)
    if "cells" in results:
        raise ValueError(f"{run} is a matrix whose cells may have different models: name one cell, {run}/cells/...")
    budget = results["max_steps"] if steps is None else steps
    if not 1 <= budget <= results["max_steps"]:
        raise ValueError(f"--steps {budget}: the run gave its episodes {results['max_steps']} steps")
    by_delivery = grouped(episodes(False), lambda episode: episode.delivery)
    if missing := [name for name in (delivery, over) if name not in by_delivery]:
        raise ValueError(f"{run} has no episodes under {missing[0]}, but under {', '.join(by_delivery)}")
    sizes = _parameters(run, parameters or {})
    costs = {name: cost_of(name, of, sizes, budget) for name, of in by_delivery.items()}
    typer.echo(f"{run}: within {budget} steps, per solved task\n" + "\n".join(_table(costs, sizes)))
    shown = ", ".join(f"{role} {size / 1e6:,.1f} M" for role, size in sizes.items())
    typer.echo(f"parameters: {shown}; FLOPs: two per parameter and token, cached tokens included")
    typer.echo(f"cost ratio: {_ratio(costs[delivery], costs[over])}")


def cost_of(name: str, episodes: Sequence[Episode], parameters: dict[str, float], budget: int) -> Cost:
    """Sum tokens, seconds and FLOPs over the first `budget` steps of every episode."""
    flops, solved = defaultdict[str, float](float), Counter[str]()
    for episode in episodes:
        for step in episode.steps[:budget]:
            counts = {role: step.tokens.get(f"{role}_in", 0) + step.tokens.get(f"{role}_out", 0) for role in ROLES}
            flops[episode.task_id] += sum(2 * parameters[role] * counts[role] for role in ROLES)
        solved[episode.task_id] += succeeded(episode, budget)
    steps = [step for episode in episodes for step in episode.steps[:budget]]
    return Cost(name, {role: usage(steps, role) for role in ROLES}, flops, solved)


def ratio_of(cost: Cost, other: Cost) -> tuple[float, float, float]:
    """Divide FLOPs per solved task over the tasks of both, with a 95 % bootstrap interval over tasks.

    The interval's ends may be 0 or infinite when few tasks are solved.
    """
    tasks = [task for task in cost.flops if task in other.flops]
    table = np.array([[c.flops[t], c.solved[t]] for c in (cost, other) for t in tasks]).reshape(2, len(tasks), 2)

    def ratio(of: np.ndarray) -> float:
        (spent, solved), (others, others_solved) = of.sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.float64(spent) * others_solved / (np.float64(others) * solved))

    draws = np.random.default_rng(0).integers(len(tasks), size=(RESAMPLES, len(tasks)))
    low, high = np.nanquantile([ratio(table[:, draw]) for draw in draws], (0.025, 0.975), method="nearest")
    return ratio(table), float(low), float(high)


def _ratio(cost: Cost, other: Cost) -> str:
    if unsolved := [c.delivery for c in (cost, other) if not c.successes]:
        return f"undefined ({' and '.join(unsolved)} solved nothing)"
    value, low, high = ratio_of(cost, other)
    typer.echo(f"95 % interval of the ratio, over {len(cost.flops)} tasks: [{low:.2f}, {high:.2f}]")
    return f"{value:.2f}"


def _parameters(run: Path, given: Mapping[str, float | None]) -> dict[str, float]:
    """Return each role's number of parameters: the given one, or that of the model in the run's settings."""
    settings = read_yaml(run / CONFIG)
    return {role: float(given.get(role) or parameters_of(settings[role])) for role in ROLES}


def parameters_of(settings: dict[str, Any]) -> int:
    """Count a model's parameters without loading its weights; 0 for an executor without a model."""
    if settings["engine"] in ENGINES_WITHOUT_MODEL:
        return 0
    if settings["engine"] == "api":
        raise ValueError("the size of a closed model is unknown: give --executor-parameters")
    import torch

    from lm.architecture import untrained

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in untrained(settings["model"], torch.float32).parameters())


def _table(costs: dict[str, Cost], parameters: dict[str, float]) -> list[str]:
    heads = ["delivery", "solved", *(f"{role} {what}" for role in ROLES for what in ("in (cached)", "out", "s"))]
    rows = list[list[str]]()
    for cost in costs.values():
        cells = [display_name(cost.delivery), f"{cost.successes} of {len(cost.flops)}"]
        for role in ROLES:
            used = cost.usage[role]
            cached = "?" if used["tokens_cached"] is None else cost.per_solved(used["tokens_cached"])
            cells += [f"{cost.per_solved(used['tokens_in'])} ({cached})", cost.per_solved(used["tokens_out"])]
            cells.append(cost.per_solved(used["seconds"]))
        flops, size = sum(cost.flops.values()), parameters["executor"]
        rows.append([*cells, cost.per_solved(flops / 1e9), cost.per_solved(flops / (2 * size)) if size else "-"])
    return markdown_table([*heads, "GFLOP", "executor tokens"], rows)
