"""The paper's Tables 3, 4 and 5 at small scale over several seeds, with intervals and wall times.

    python -m benchmarks.small_tables --out out/small-tables --jobs 2 301 302 303

Each seed is another set of generated homes, another collection and another SFT run of every variant of Table 4; Tables
3 and 5 take the one with N = 4, the quickstart's. Seeds are an axis of each evaluation's matrix, so that its tables
pool them. What stands in --out already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.stage import collect, run, sft
from configs.evaluation import EvalConfig
from configs.load import load_config

VARIANTS = {  # name: settings of SFT
    "n4": ["compiler.soft.n_tokens=4"],
    "n8": ["compiler.soft.n_tokens=8"],
    "n16": ["compiler.soft.n_tokens=16"],
    "n32": ["compiler.soft.n_tokens=32"],
    "no-orth": ["compiler.soft.n_tokens=16", "weights.orth=0"],
    "linear": ["compiler.soft.n_tokens=16", "compiler.soft.projector=linear"],
}


def one_table(out: Path, number: int, seeds: list[int], variants: list[str], limit: int) -> float:
    """Evaluate table `number`, all seeds in one matrix; return the seconds that it took."""
    checkpoint = f"{out}/${{seed}}/sft-"  # of the cell's own seed
    axes: dict[str, Any] = {"seed": {str(seed): {"seed": seed, "env.seed": seed} for seed in seeds}}
    if number == 4:
        levels: Any = load_config(EvalConfig, "eval/table4-small").matrix["variant"]
        trained = {level: Path(settings["compiler.checkpoint"]).name for level, settings in levels.items()}
        axes["variant"] = {
            level: {**settings, "compiler.checkpoint": checkpoint + trained[level]}
            for level, settings in levels.items()
            if trained[level] in variants
        }
    else:
        for level in axes["seed"].values():
            level["compiler.checkpoint"] = f"{checkpoint}n4"
    # Of table 4, levels may be left out here, which an override of eval/table4-small could not say.
    base = {
        3: ["eval/tables-small"], 5: ["eval/table5-small"],
        4: ["eval/quickstart", "deliveries=[compiled]", "baseline={variant: n16, delivery: compiled}"],
    }  # fmt: skip
    matrix = json.dumps(axes).replace("${", "\\\\${")  # not yet: in the cell
    return run(
        out, f"eval-table{number}", "eval", "-c", *base[number], f"matrix={matrix}", f"limit={limit}",
        "--on-exists", "resume", "--out", f"{out}/table{number}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks of each seed; Table 5 takes an eighth")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; Table 5 has the machine to itself")
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="n4 and n16 with any"
    )
    parser.add_argument("seeds", nargs="+", type=int)
    a = parser.parse_args()
    started = time.perf_counter()
    with ThreadPoolExecutor(a.jobs) as pool:
        list(pool.map(lambda seed: collect(a.out, seed), a.seeds))
        pairs = [(name, seed) for name in a.variants for seed in a.seeds]
        seconds = list(pool.map(lambda pair: sft(a.out, pair[1], pair[0], *VARIANTS[pair[0]]), pairs))
        wall: dict[int, float] = dict(
            zip((3, 4), pool.map(lambda n: one_table(a.out, n, a.seeds, a.variants, a.limit), (3, 4)), strict=True)
        )
    wall[5] = one_table(a.out, 5, a.seeds, a.variants, max(2, a.limit // 8))
    for number in (3, 4, 5):
        table = ["report", "paper", "--table", str(number), f"{a.out}/table{number}"]
        subprocess.run([sys.executable, "-m", "memcompiler", *table])
        print(f"evaluation of table {number}: {wall[number]:.0f} s")
    print(f"SFT runs: {min(seconds):.0f} to {max(seconds):.0f} s each; this call {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
