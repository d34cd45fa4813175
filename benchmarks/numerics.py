"""Compare the losses of SFT in bfloat16 with those in float32 over many steps.

    memcompiler bench numerics [--steps 200] [--out FOLDER]

Trains the quickstart's small models on this machine. Both precisions read the same rows in the same order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from eval.plots import SFT_PANELS, read_metrics
from eval.table import markdown_table

app = typer.Typer()
BF16 = ("compiler.dtype=bfloat16", "executor.dtype=bfloat16")
PRECISIONS: Mapping[str, Sequence[str]] = {"fp32": (), "bf16": BF16}
HOMES = "env.scenes={train: 8, test: 8}"
LAST = 20  # steps whose mean is the end of a run


def run(out: Path, *arguments: str) -> Path:
    """Run a command of memcompiler. Raises: RuntimeError, with the end of its output."""
    command = [sys.executable, "-m", "memcompiler", *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed: {(done.stdout + done.stderr)[-2000:]}")
    return out


def drift(runs: Mapping[str, Path]) -> list[str]:
    """Return a table of the losses in both precisions, and of their differences at equal steps."""
    metrics = {name: read_metrics(out / "metrics.jsonl") for name, out in runs.items()}
    steps = sorted(set.intersection(*(set(rows) for rows in metrics.values())))
    rows = []
    for key in SFT_PANELS:
        if not all(key in metrics[name][step] for name in runs for step in steps):
            continue
        fp32, bf16 = (np.array([metrics[name][step][key] for step in steps]) for name in ("fp32", "bf16"))
        apart = np.abs(bf16 - fp32)
        ends = [values[-LAST:].mean() for values in (fp32, bf16)]
        rows.append([key, *(f"{x:.4f}" for x in (fp32[0], bf16[0], *ends, apart.mean(), apart.max()))])
    heads = ["", "fp32, first", "bf16", f"fp32, last {LAST}", "bf16", "mean difference", "largest"]
    return [f"SFT, {len(steps)} steps:", *markdown_table(heads, rows)]


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=2, help="SFT steps.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs (default: a temporary one).")] = None,
) -> None:
    """Compare the losses of SFT in bfloat16 with those in float32."""
    with tempfile.TemporaryDirectory(prefix="memcompiler-numerics-") as temporary:
        at = out or Path(temporary)
        rows = run(at / "collect", "collect", "-c", "collect/quickstart", HOMES, "limit=32") / "rows"
        few = (f"max_steps={steps}", "batch_size=4", "micro_batch_size=4", f"save_every={steps}")
        sft = {
            name: run(at / f"sft-{name}", "train", "sft", "-c", "sft/quickstart", f"rows={rows}", *few, *settings)
            for name, settings in PRECISIONS.items()
        }
        typer.echo("\n".join(drift(sft)))


if __name__ == "__main__":
    app()
