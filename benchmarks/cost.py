"""`memcompiler bench cost RUN`: what a solved task costs in an evaluation, by delivery.

What both roles read, wrote and took in all episodes, failed ones too, is divided by the tasks that were solved. Tokens
weigh what a model does for one, two FLOPs a parameter, so that a compiler of another size than the executor counts as
much as it costs. The ratio counts every token that was read, as if no cache had held any: not every engine says what
its own held, and a ratio of one that does to one that does not would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from agent.records import Episode
from eval.metrics import ROLES, display_name, grouped, succeeded, usage
from eval.runs import load_run

console = Console(width=150)
RESAMPLES = 2000
ENGINES_WITHOUT_MODEL = ("scripted", "program")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a delivery took within a number of steps: by task FLOPs and whether it was solved, in all by role."""

    delivery: str
    used: dict[str, dict[str, Any]]  # see `eval.metrics.usage`
    flops: dict[str, float]  # of each task, over all its episodes
    solved: dict[str, int]  # of each task, its episodes that were solved

    @property
    def successes(self) -> int:
        return sum(self.solved.values())

    def per_solved(self, value: float) -> str:
        return f"{value / self.successes:,.1f}" if self.successes else "-"


def run_bench_cost(
    run: Path,
    steps: int | None,
    delivery: str,
    over: str,
    compiler_parameters: float | None,
    executor_parameters: float | None,
) -> None:
    """Print one table; end with `cost ratio: R`, FLOPs per solved task of `delivery` over those of `over`, both within
    `steps` steps (default: all that the run gave).

    Raises:
        ValueError: a run that is a matrix or has no such delivery, or more steps than it gave.
        ConfigError: a model whose size nobody knows.
    """
    results, episodes = load_run(run)
    if "cells" in results:
        raise ValueError(f"{run} is a matrix, whose cells may have other models: name one, {run}/cells/...")
    given = int(results["max_steps"])
    budget = given if steps is None else steps
    if not 1 <= budget <= given:
        raise ValueError(f"--steps {budget}: the run gave its episodes {given} steps")
    parameters = _parameters(run, {"compiler": compiler_parameters, "executor": executor_parameters})
    played = grouped(episodes(False), lambda episode: episode.delivery)
    if missing := [name for name in (delivery, over) if name not in played]:
        raise ValueError(f"{run} has no episodes under {missing[0]}, but under {', '.join(played)}")
    costs = {name: cost_of(name, of, parameters, budget) for name, of in played.items()}
    console.print(_table(f"{run}: within {budget} steps, per solved task", costs, parameters))
    sizes = ", ".join(f"{role} {parameters[role] / 1e6:,.1f} M" for role in ROLES)
    console.print(f"  parameters: {sizes}; FLOPs: two a parameter and token, every token counted", highlight=False)
    console.print(f"cost ratio: {_ratio(costs[delivery], costs[over])}", highlight=False)


def cost_of(name: str, episodes: Sequence[Episode], parameters: dict[str, float], budget: int) -> Cost:
    """Add up what the first `budget` steps of every episode took."""
    flops: dict[str, float] = {}
    solved: dict[str, int] = {}
    for episode in episodes:
        task, steps = episode.task_id, episode.steps[:budget]
        spent = sum(
            2 * parameters[role] * step.tokens.get(f"{role}_{way}", 0)
            for step in steps
            for role in ROLES
            for way in ("in", "out")
        )
        flops[task] = flops.get(task, 0.0) + spent
        solved[task] = solved.get(task, 0) + succeeded(episode, budget)
    steps = [step for episode in episodes for step in episode.steps[:budget]]
    return Cost(name, {role: usage(steps, role) for role in ROLES}, flops, solved)


def ratio_of(cost: Cost, other: Cost) -> tuple[float, float, float]:
    """Divide FLOPs per solved task over the tasks that both played, with the 95 % interval of a bootstrap over these;
    its ends may be 0 or infinite, where few tasks were solved."""
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
    if not cost.successes or not other.successes:
        nothing = " and ".join(c.delivery for c in (cost, other) if not c.successes)
        return f"undefined ({nothing} solved nothing)"
    value, low, high = ratio_of(cost, other)
    console.print(f"  95 % of the ratio, over {len(cost.flops)} tasks: [{low:.2f}, {high:.2f}]", highlight=False)
    return f"{value:.2f}"


def _parameters(run: Path, said: dict[str, float | None]) -> dict[str, float]:
    """Say how large each role's model is: as it is told, or as the run's settings name it."""
    settings = yaml.safe_load((run / "config.resolved.yaml").read_text(encoding="utf-8"))
    told = ((role, said[role]) for role in ROLES)
    return {role: float(size_of(settings[role]) if size is None else size) for role, size in told}


def size_of(settings: dict[str, Any]) -> int:
    """Count a model's parameters, which are never loaded; 0 for an executor without a model."""
    if settings["engine"] in ENGINES_WITHOUT_MODEL:
        return 0
    if settings["engine"] == "api":
        raise ValueError("nobody knows how large a closed model is: say --executor-parameters")
    import torch

    from lm.architecture import untrained

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in untrained(settings["model"], torch.float32).parameters())


def _table(title: str, costs: dict[str, Cost], parameters: dict[str, float]) -> Table:
    table = Table(title=title)
    names = (
        "delivery",
        "solved",
        *(f"{role} {what}" for role in ROLES for what in ("in (cached)", "out", "s")),
        "GFLOP",
        "executor tokens",
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    for cost in costs.values():
        cells = [display_name(cost.delivery), f"{cost.successes} of {len(cost.flops)}"]
        for role in ROLES:
            used = cost.used[role]
            cached = "?" if used["tokens_cached"] is None else cost.per_solved(used["tokens_cached"])
            read = f"{cost.per_solved(used['tokens_in'])} ({cached})"
            cells += [read, cost.per_solved(used["tokens_out"]), cost.per_solved(used["seconds"])]
        spent = sum(cost.flops.values())
        worth = cost.per_solved(spent / (2 * parameters["executor"])) if parameters["executor"] else "-"
        table.add_row(*cells, cost.per_solved(spent / 1e9), worth)
    return table
