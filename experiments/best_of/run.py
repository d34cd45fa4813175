"""Measure how much success sampling finds beyond the mean: the room that GRPO has.

    python -m experiments.best_of.run --out out/best-of [--samples 16] [--temperature 0.7] [a.b=c ...]

plays `eval/alfworld-frozen` in homes left out, once per sample with sampled text and soft tokens, and resumes after a
kill. A policy-gradient method learns only from tasks that some samples solve and others do not, and cannot gain more
than the best of the samples does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fractions import Fraction
from math import comb
from pathlib import Path

from agent.records import Episode
from eval.intervals import bootstrap_mean
from eval.metrics import succeeded
from eval.runs import load_run
from eval.table import interval, markdown_table
from experiments.stages import run_once

DELIVERY = "compiled"


def solved_by(episodes: Iterable[Episode], steps: int) -> dict[str, int]:
    """Count the samples that solve each task within a number of steps."""
    solved = Counter[str]()
    for episode in episodes:
        solved[episode.task_id] += succeeded(episode, steps)
    return dict(solved)


def best_of(solved: int, samples: int, k: int) -> Fraction:
    """Return the probability that k of the samples, drawn without replacement, solve a task at least once."""
    return 1 - Fraction(comb(samples - solved, k), comb(samples, k))


def table(solved: Mapping[str, int], samples: int) -> list[str]:
    """Format the success of the best of k samples, and the share of tasks that samples solve in part."""
    sizes = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    rows = [(f"best of {k}", [best_of(count, samples, k) for count in solved.values()]) for k in sizes]
    rows += [("solved by some samples and not by others", [Fraction(0 < n < samples) for n in solved.values()])]
    cells = [[name, interval(asdict(bootstrap_mean(values)))] for name, values in rows]
    return markdown_table(["", "% of tasks"], cells, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation, such as limit=35")
    parser.add_argument("--out", type=Path, default=Path("out/best-of"))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--steps", type=int, nargs="+", default=[15, 30])
    a = parser.parse_args()
    seeds = ", ".join(map(str, range(a.samples)))
    own = [f"matrix={{seed: [{seeds}]}}", "select={home: [left_out]}", f"deliveries=[{DELIVERY}]"]
    settings = [*own, f"compiler.temperature={a.temperature}", *a.overrides, "--out", f"{a.out}/eval"]
    run_once(a.out, "eval", "eval", "-c", "eval/alfworld-frozen", *settings)
    episodes = list(load_run(a.out / "eval")[1](False))  # without pictures
    for steps in a.steps:
        print(f"Within {steps} steps:\n", *table(solved_by(episodes, steps), a.samples), sep="\n")


if __name__ == "__main__":
    main()
