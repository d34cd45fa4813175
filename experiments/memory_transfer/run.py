"""Train a compiler on the rows of one memory system, of another, and of both, and evaluate each on every memory.

All three are trained for the same number of steps on generated homes, each on as many rows as its collections have. The
evaluation is a matrix: `trained_with` (nothing: the memory is pasted) x `memory`, on the same held-out tasks. Finished
stages are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.load import as_override
from eval.metrics import joined
from eval.runs import RESULTS
from eval.table import interval, markdown_table, points
from experiments.stages import PIPELINES, Pipeline, run_once
from runtime.store import read_json

MIXTURE, PASTED = "mixture", "pasted"  # levels of the axis trained_with besides the systems
COMPILED, STATIC = "compiled", "static"


def train(
    out: Path, seed: int, systems: Sequence[str], pipeline: Pipeline, collect: Sequence[str], sft: Sequence[str]
) -> None:
    """Collect with every system, then train a compiler on each collection and one on all of them."""
    for system in systems:
        pipeline.collect(out, seed, f"memory.system={system}", *collect, name=system)
    for name, used in {**{system: [system] for system in systems}, MIXTURE: list(systems)}.items():
        pipeline.sft(out, seed, name, *sft, rows=used)


def settings_of(
    out: Path, seeds: Sequence[int], systems: Sequence[str], memories: Sequence[str], pipeline: Pipeline, limit: int
) -> list[str]:
    """Return the settings of the evaluation: a matrix over compilers, memories and seeds."""
    trained: dict[str, Any] = {PASTED: {"deliveries": [STATIC], "compiler.checkpoint": None}}
    for name in (*systems, MIXTURE):
        trained[name] = {"deliveries": [COMPILED], "compiler.checkpoint": f"{out}/${{seed}}/sft-{name}"}
    matrix = {
        "trained_with": trained,
        "memory": {name: {"memory.system": name} for name in memories},
        "seed": {str(seed): pipeline.seed_settings(seed) for seed in seeds},
    }
    baseline = f"baseline={{trained_with: {PASTED}, delivery: {STATIC}}}"
    # References of the matrix are resolved in each cell.
    return [*pipeline.eval_settings, f"limit={limit}", as_override("matrix", matrix), baseline]


def table(results: Mapping[str, Any], systems: Sequence[str], memories: Sequence[str]) -> list[str]:
    """Format success and compiled minus static: a row per memory and compiler."""
    rows = list[list[str]]()
    for memory in memories:
        name = lambda level, delivery, memory=memory: joined(f"trained_with={level},memory={memory}", delivery)
        pasted = name(PASTED, STATIC)
        rows.append([memory, "(pasted)", interval(results["results"][pasted]["success"]), ""])
        for level in (*systems, MIXTURE):
            compiled = name(level, COMPILED)
            gain = results["paired_difference"][f"{compiled} - {pasted}"]
            rows.append([memory, level, interval(results["results"][compiled]["success"]), points(gain)])
    return markdown_table(["evaluated on", "compiler trained with", "success %", "compiled minus static"], rows, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", nargs="+", default=["trajectory", "s3mem"], help="memories to train with")
    parser.add_argument("--memories", nargs="+", default=["trajectory", "s3mem", "karma"], help="memories to evaluate")
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks per seed")
    parser.add_argument("--collect", nargs="*", default=(), help="settings of all collections, such as limit=40")
    parser.add_argument("--sft", nargs="*", default=(), help="settings of all SFT runs, such as max_steps=200")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    a = parser.parse_args()
    pipeline = PIPELINES["household"]
    for seed in a.seeds:
        train(a.out, seed, a.systems, pipeline, a.collect, a.sft)
    own = settings_of(a.out, a.seeds, a.systems, a.memories, pipeline, a.limit)
    run_once(a.out, "evaluation", "eval", "-c", f"eval/{pipeline.config}", *own, "--out", f"{a.out}/eval")
    print(*table(read_json(a.out / "eval" / RESULTS), a.systems, a.memories), sep="\n")


if __name__ == "__main__":
    main()
