"""The quickstart, or another configuration of it, over several seeds, pooled.

    python -m benchmarks.quickstart_seeds --out out/seeds 101 102 103 [a.b=c ...]
    python -m benchmarks.quickstart_seeds --config alfworld --out out/alfworld-seeds 0 1 2

Each seed is another SFT run, and of generated homes another set of scenes. Episodes of all seeds are pooled per
delivery. Intervals are over tasks: those of other scenes are others, while a real game is the same one under all seeds.
The success of each seed is printed beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.deliveries import AFTER_GRPO
from agent.records import read_episodes
from eval.metrics import budgets_of, results
from eval.plots import results_plots
from eval.runs import EPISODES, RESULTS, read_results
from eval.table import print_results, to_markdown
from runtime.store import to_json, write_atomically


def main(out: Annotated[Path, typer.Option()], rest: list[str], config: str = "quickstart") -> None:
    """Take seeds, then overrides for `memcompiler quickstart`."""
    seeds, overrides = [int(x) for x in rest if "=" not in x], [x for x in rest if "=" in x]
    pooled: dict[str, list] = {}
    by_seed: dict[str, dict[int, float]] = {}
    budgets: dict[str, list[int]] = {}
    meta: dict[str, Any] = {}
    for seed in seeds:
        run = out / str(seed)
        if not (run / RESULTS).exists():
            command = ["quickstart", "-c", config, f"seed={seed}", *overrides, "--out", str(run)]
            subprocess.run([sys.executable, "-m", "memcompiler", *command], check=True)
        made = read_results(run)
        for path in filter(Path.exists, (run / "eval" / EPISODES, run / "eval-grpo" / EPISODES)):
            for episode in read_episodes(path):
                episode.task_id = f"{made['scene_seed']}/{episode.task_id}"
                name = AFTER_GRPO if path.parent.name == "eval-grpo" else episode.delivery
                pooled.setdefault(name, []).append(episode)
        for name, row in made["results"].items():
            by_seed.setdefault(name, {})[seed] = row["success"]["mean"]
            budgets[name] = budgets_of([row])
        meta = {"environment": made["environment"], "split": made["split"], "seed": seeds, "success_by_seed": by_seed}
    summary = results(pooled, meta, budgets=budgets)
    write_atomically(out / RESULTS, to_json(summary, indent=1))
    print_results(summary)
    print(*results_plots(summary, out / "plots"), sep="\n")
    print(to_markdown(summary))
    print(json.dumps(by_seed, indent=1))


if __name__ == "__main__":
    typer.run(main)
