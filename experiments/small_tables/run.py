"""Reproduce the paper's Tables 3, 4 and 5 at small scale over several seeds.

A seed is another SFT run of every variant and, on generated homes, another set of homes and rows. N = 0 is trained on
text alone, and the row without Brief State on rows of a teacher without one. Each evaluation is a matrix with the seeds
as an axis, so that its tables pool them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs.load import as_override
from experiments.stages import PIPELINES, Pipeline, run_once

VARIANTS = {  # name: settings of SFT
    "n0": ["soft=false"],
    "n4": ["compiler.soft.n_tokens=4"],
    "n8": ["compiler.soft.n_tokens=8"],
    "n16": ["compiler.soft.n_tokens=16"],
    "n32": ["compiler.soft.n_tokens=32"],
    "no_orth": ["compiler.soft.n_tokens=16", "weights.orth=0"],
    "linear": ["compiler.soft.n_tokens=16", "compiler.soft.projector=linear"],
}
FULL, NO_BRIEF = "n4", "no-brief"  # the full compiler, and the one without a Brief State


def evaluate(
    name: str,
    deliveries: Sequence[str],
    sft: str,
    settings: Sequence[str],
    *,
    out: Path,
    pipeline: Pipeline,
    seeds: Sequence[int],
) -> str:
    """Evaluate the SFT run `sft` (or `each` variant) of every seed in one matrix; return the matrix's folder."""
    checkpoint = f"{out}/${{seed}}/sft-"  # of the cell's seed
    axes: dict[str, Any] = {"seed": {str(seed): pipeline.seed_settings(seed) for seed in seeds}}
    if sft == "each":
        axes["variant"] = {variant: _variant_level(variant, checkpoint) for variant in VARIANTS}
    else:
        for level in axes["seed"].values():
            level["compiler.checkpoint"] = checkpoint + sft
    command = ["eval", "-c", f"eval/{pipeline.config}", *pipeline.eval_settings, f"deliveries={json.dumps(deliveries)}"]
    folder = f"{out}/{name}"
    run_once(out, f"eval-{name}", *command, *settings, as_override("matrix", axes), "--out", folder)
    return folder


def _variant_level(name: str, checkpoint: str) -> dict[str, Any]:
    """Return the evaluation settings of a variant of Table 4: those of its compiler, without those of its losses."""
    soft = dict(setting.split("=") for setting in VARIANTS[name] if setting.startswith("compiler."))
    return {**soft, "compiler.checkpoint": checkpoint + name, **({} if soft else {"deliveries": ["compiled_text"]})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", default="household", choices=PIPELINES)
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks per seed; an eighth of them in Table 5")
    parser.add_argument("--sft", nargs="*", default=(), help="settings of all SFT runs, such as max_steps=2")
    parser.add_argument("seeds", nargs="+", type=int)
    a = parser.parse_args()
    pipeline, out = PIPELINES[a.env], a.out
    for seed in a.seeds:
        pipeline.collect(out, seed)
        pipeline.collect(out, seed, "brief_state=false", name=NO_BRIEF)
        for name, settings in {**VARIANTS, NO_BRIEF: VARIANTS[FULL]}.items():
            rows = NO_BRIEF if name == NO_BRIEF else "collect"
            pipeline.sft(out, seed, name, *settings, *a.sft, rows=[rows])
    limit, run = f"limit={a.limit}", partial(evaluate, out=out, pipeline=pipeline, seeds=a.seeds)
    deliveries = ["none", "static", "static_top1", "compiled"]
    one_by_one = [f"limit={max(2, a.limit // 8)}", "concurrency=1", "baseline=static"]
    tables = {
        3: [
            run("table3", deliveries, FULL, [limit, "baseline=none"]),
            run("table3-n0", ["compiled_text"], "n0", [limit]),
            run("table3-no-brief", ["compiled_no_brief"], NO_BRIEF, [limit]),
        ],
        4: [run("table4", ["compiled"], "each", [limit, "baseline={variant: n16, delivery: compiled}"])],
        5: [run("table5", ["static", "compiled"], FULL, one_by_one)],
    }
    for number, folders in tables.items():
        subprocess.run([sys.executable, "-m", "memcompiler", "report", "paper", "--table", str(number), *folders])


if __name__ == "__main__":
    main()
