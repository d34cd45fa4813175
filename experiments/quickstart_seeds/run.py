"""Run the quickstart, or another of its configurations, for several seeds and pool the episodes by delivery.

A seed is another SFT run and, on generated homes, another set of scenes. Intervals are over tasks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agent.deliveries import AFTER_GRPO
from agent.records import Episode, read_episodes
from eval.metrics import budgets_of, results
from eval.plots import results_plots
from eval.runs import EPISODES, RESULTS, read_results
from eval.table import to_markdown
from experiments.stages import run_once, seeds_and_settings
from runtime.store import to_json, write_atomically


def main(
    arguments: Annotated[list[str], typer.Argument(help="Seeds, then settings of `memcompiler quickstart` as a.b=c.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs and of results.json.")],
    config: Annotated[str, typer.Option(help="Configuration of `memcompiler quickstart`.")] = "quickstart",
) -> None:
    """Run all seeds, and print their pooled table and the success of each seed."""
    seeds, settings = seeds_and_settings(arguments)
    pooled: dict[str, list[Episode]] = {}
    success: dict[str, dict[int, float]] = {}
    budgets: dict[str, list[int]] = {}
    summary: dict = {}
    for seed in seeds:
        run = out / str(seed)
        command = ["quickstart", "-c", config, f"seed={seed}", *settings, "--out", str(run)]
        run_once(out, str(seed), *command)
        summary = read_results(run)
        for part in ("eval", "eval-grpo"):
            for episode in read_episodes(run / part / EPISODES) if (run / part / EPISODES).exists() else ():
                episode.task_id = f"{summary['scene_seed']}/{episode.task_id}"
                name = AFTER_GRPO if part == "eval-grpo" else episode.delivery
                pooled.setdefault(name, []).append(episode)
        for name, row in summary["results"].items():
            success.setdefault(name, {})[seed] = row["success"]["mean"]
            budgets[name] = budgets_of([row])
    meta = {name: summary[name] for name in ("environment", "split")}
    table = results(pooled, {**meta, "seed": seeds, "success_by_seed": success}, budgets=budgets)
    write_atomically(out / RESULTS, to_json(table, indent=1))
    print(*results_plots(table, out / "plots"), to_markdown(table), json.dumps(success, indent=1), sep="\n")


if __name__ == "__main__":
    typer.run(main)
