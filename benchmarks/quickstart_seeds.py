"""The quickstart over several seeds, pooled.

    python -m benchmarks.quickstart_seeds --out out/seeds 101 102 103 [a.b=c ...]

Each seed is another set of scenes and another SFT run. Episodes of all seeds are pooled per delivery (task ids are made
unique by seed), so intervals are over episodes; the success of each seed is printed beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from agent.deliveries import AFTER_GRPO
from agent.records import read_episodes
from eval.metrics import budgets_of, results
from eval.table import print_results, to_markdown
from runtime.store import to_json, write_atomically


def main(out: Annotated[Path, typer.Option()], rest: list[str]) -> None:
    """Take seeds, then overrides for `memcompiler quickstart`."""
    seeds, overrides = [int(x) for x in rest if "=" not in x], [x for x in rest if "=" in x]
    pooled: dict[str, list] = {}
    by_seed: dict[str, dict[int, float]] = {}
    budgets: dict[str, list[int]] = {}
    for seed in seeds:
        run = out / str(seed)
        if not (run / "results.json").exists():
            command = [sys.executable, "-m", "memcompiler", "quickstart", f"seed={seed}", *overrides, "--out", str(run)]
            subprocess.run(command, check=True)
        for folder in ("eval", "eval-grpo"):
            for episode in read_episodes(run / folder / "episodes.jsonl"):
                episode.task_id = f"{seed}/{episode.task_id}"
                name = AFTER_GRPO if folder == "eval-grpo" else episode.delivery
                pooled.setdefault(name, []).append(episode)
        for name, row in json.loads((run / "results.json").read_text())["results"].items():
            by_seed.setdefault(name, {})[seed] = row["success"]["mean"]
            budgets[name] = budgets_of([row])
    meta = {"environment": "household", "split": "test", "seed": seeds, "success_by_seed": by_seed}
    summary = results(pooled, meta, budgets=budgets)
    write_atomically(out / "results.json", to_json(summary, indent=1))
    print_results(summary)
    print(to_markdown(summary))
    print(json.dumps(by_seed, indent=1))


if __name__ == "__main__":
    typer.run(main)
