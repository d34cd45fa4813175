"""The paper's Tables 3, 4 and 5 at small scale over several seeds, with intervals and wall times.

    python -m benchmarks.small_tables --out out/small-tables --jobs 2 301 302 303
    python -m benchmarks.small_tables --world alfworld --out out/alfworld-tables 0 1 2

A seed is another SFT run of every variant, on generated homes (`household`) of another set of homes and another
collection, too. Each row whose compiler reads or writes something else than the full one's has a run of its own: N = 0
is trained on text alone, the row without Brief State on rows of a teacher without one. Seeds are an axis of each
evaluation's matrix, so that its tables pool them. What stands in --out already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stage import WORLDS, World, run

VARIANTS = {  # name: settings of SFT
    "n0": ["soft=false"],
    "n4": ["compiler.soft.n_tokens=4"],
    "n8": ["compiler.soft.n_tokens=8"],
    "n16": ["compiler.soft.n_tokens=16"],
    "n32": ["compiler.soft.n_tokens=32"],
    "no_orth": ["compiler.soft.n_tokens=16", "weights.orth=0"],
    "linear": ["compiler.soft.n_tokens=16", "compiler.soft.projector=linear"],
}
NO_BRIEF = "no-brief"  # the rows, and the SFT run, without a Brief State
FULL = "n4"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A matrix over the seeds; its cells take the checkpoint that an SFT run of their own seed left."""

    name: str
    deliveries: Sequence[str]
    trained: str = FULL  # the SFT run
    variants: Sequence[str] = ()  # or one for each of these
    settings: Sequence[str] = ()


def table_parts(variants: Sequence[str], limit: int) -> dict[int, list[Evaluation]]:
    """List the evaluations whose results make each table."""
    against = ["baseline={variant: n16, delivery: compiled}"] if "n16" in variants else []
    return {
        3: [
            Evaluation("table3", ("none", "static", "static_top1", "compiled"), settings=("baseline=none",)),
            Evaluation("table3-n0", ("compiled_text",), "n0"),
            Evaluation("table3-no-brief", ("compiled_no_brief",), NO_BRIEF),
        ],
        4: [Evaluation("table4", ("compiled",), variants=variants, settings=against)],
        5: [
            Evaluation(
                "table5",
                ("static", "compiled"),
                settings=("baseline=static", f"limit={max(2, limit // 8)}", "concurrency=1"),
            )
        ],
    }


def evaluate(out: Path, world: World, of: Evaluation, seeds: Sequence[int], limit: int) -> float:
    """Play one evaluation, all seeds in one matrix; return the seconds that it took."""
    checkpoint = f"{out}/${{seed}}/sft-"  # of the cell's own seed
    axes: dict[str, Any] = {"seed": {str(seed): world.of_seed(seed) for seed in seeds}}
    if of.variants:
        axes["variant"] = {name: _level(name, checkpoint) for name in of.variants}
    else:
        for level in axes["seed"].values():
            level["compiler.checkpoint"] = checkpoint + of.trained
    matrix = json.dumps(axes).replace("${", "\\\\${")  # not yet: in the cell
    return run(
        out,
        f"eval-{of.name}",
        "eval",
        "-c",
        f"eval/{world.stage}",
        *world.played,
        f"deliveries={json.dumps(list(of.deliveries))}",
        f"limit={limit}",
        *of.settings,
        f"matrix={matrix}",
        "--on-exists",
        "resume",
        "--out",
        f"{out}/{of.name}",
    )


def _level(name: str, checkpoint: str) -> dict[str, Any]:
    """Say how a variant of Table 4 is evaluated: as it was trained, but for the losses."""
    soft = dict(setting.split("=") for setting in VARIANTS[name] if setting.startswith("compiler."))
    return {**soft, "compiler.checkpoint": checkpoint + name, **({"deliveries": ["compiled_text"]} if not soft else {})}


def train(out: Path, world: World, seed: int, name: str, more: Sequence[str]) -> float:
    rows = NO_BRIEF if name == NO_BRIEF else "collect"
    return world.sft(out, seed, name, *VARIANTS.get(name, VARIANTS[FULL]), *more, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", type=WORLDS.__getitem__, default="household", help=", ".join(WORLDS))
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks of each seed; Table 5 takes an eighth")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; Table 5 has the machine to itself")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--sft", nargs="*", default=(), help="settings of all SFT runs (max_steps=2 for a quick look)")
    parser.add_argument("seeds", nargs="+", type=int)
    a = parser.parse_args()
    started, world = time.perf_counter(), a.world
    parts = table_parts(a.variants, a.limit)
    with ThreadPoolExecutor(a.jobs) as pool:
        for seed in a.seeds:
            world.collect(a.out, seed)
            world.collect(a.out, seed, "brief_state=false", rows=NO_BRIEF)
        runs = dict.fromkeys((FULL, "n0", NO_BRIEF, *a.variants))
        pairs = [(name, seed) for name in runs for seed in a.seeds]
        seconds = list(pool.map(lambda pair: train(a.out, world, pair[1], pair[0], a.sft), pairs))
        side_by_side = [of for number in (3, 4) for of in parts[number]]
        wall = list(pool.map(lambda of: evaluate(a.out, world, of, a.seeds, a.limit), side_by_side))
    wall += [evaluate(a.out, world, of, a.seeds, a.limit) for of in parts[5]]
    for number, evaluations in parts.items():
        folders = [str(a.out / of.name) for of in evaluations]
        subprocess.run([sys.executable, "-m", "memcompiler", "report", "paper", "--table", str(number), *folders])
    for of, taken in zip((*side_by_side, *parts[5]), wall, strict=True):
        print(f"evaluation {of.name}: {taken:.0f} s")
    print(f"SFT runs: {min(seconds):.0f} to {max(seconds):.0f} s each; this call {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
