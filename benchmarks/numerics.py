"""Compare bfloat16 with float32: losses of SFT over many steps, and GRPO's ratios on fresh samples.

    memcompiler bench numerics [--steps 200] [--updates 3] [--out FOLDER]

Trains the quickstart's small models on this machine. SFT reads the same rows in the same order in both precisions. In
GRPO every update is one step on fresh samples, so each ratio pi / pi_old should be 1; `mismatch_kl` compares the
rollout's log-probabilities with the trainer's. Exit status 1 if a ratio is off by more than 5 %.
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
ENGINES: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16": BF16,
    "fp32, shared prefixes": ("share_prefix=true",),
    "bf16, shared prefixes": ("share_prefix=true", *BF16),
    "fp32, density root": ("loss.latent_gradient=density_root", "loss.latent_weight=1"),
}
HOMES = "env.scenes={train: 8, test: 8}"
LAST = 20  # steps whose mean is the end of a run
TOLERANCE = 0.05


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


def ratios(runs: Mapping[str, Path]) -> tuple[list[str], float]:
    """Return a table of the ratios' extremes over the updates, and the largest distance of a ratio from 1."""
    rows, farthest = [], 0.0
    for name, out in runs.items():
        updates = [row for row in read_metrics(out / "metrics.jsonl").values() if not row.get("skipped")]
        cells = []
        for key in ("ratio_text", "ratio_latent"):
            values = [row[key] for row in updates if row.get(key)]  # 0: no token of this kind
            farthest = max([farthest, *(abs(value - 1) for value in values)])
            cells.append(f"{min(values):.5f} to {max(values):.5f}" if values else "-")
        mismatch = max((row["mismatch_kl"] for row in updates if "mismatch_kl" in row), default=float("nan"))
        rows.append([name, str(len(updates)), *cells, f"{mismatch:.1e}"])
    return markdown_table(["GRPO", "updates", "ratio of text", "of soft tokens", "largest mismatch_kl"], rows), farthest


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=2, help="SFT steps.")] = 200,
    updates: Annotated[int, typer.Option(min=1, help="GRPO updates.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs (default: a temporary one).")] = None,
) -> None:
    """Compare the losses of SFT in bfloat16 with those in float32, and check GRPO's ratios on fresh samples."""
    with tempfile.TemporaryDirectory(prefix="memcompiler-numerics-") as temporary:
        at = out or Path(temporary)
        rows = run(at / "collect", "collect", "-c", "collect/quickstart", HOMES, "limit=32") / "rows"
        few = (f"max_steps={steps}", "batch_size=4", "micro_batch_size=4", f"save_every={steps}")
        sft = {
            name: run(at / f"sft-{name}", "train", "sft", "-c", "sft/quickstart", f"rows={rows}", *few, *settings)
            for name, settings in PRECISIONS.items()
        }
        typer.echo("\n".join(drift(sft)) + "\n")
        start = ("train", "grpo", "-c", "grpo/quickstart", f"compiler.checkpoint={sft['fp32']}", HOMES)
        small = (f"updates={updates}", "tasks=2", "group_size=4", "max_steps=4")
        grpo = {
            name: run(at / f"grpo-{number}", *start, *small, *settings)
            for number, (name, settings) in enumerate(ENGINES.items())
        }
        lines, farthest = ratios(grpo)
    typer.echo("\n".join(lines))
    typer.echo(f"largest distance of a ratio from 1: {farthest:.1e}")
    raise typer.Exit(farthest > TOLERANCE)


if __name__ == "__main__":
    app()
