"""Compare the losses of SFT in bfloat16 with those in float32, and the probabilities of GRPO's sampler and trainer.

    memcompiler bench numerics [--steps 200] [--updates 3] [--sampler hf --sampler vllm] [--out FOLDER]

Trains the quickstart's small models on this machine. Both precisions read the same rows in the same order. Then GRPO
continues from the float32 compiler in each precision, and with each engine that samples: `hf`, the trainer's own
Hugging Face model, and `vllm`. With one minibatch the trainer's own ratio of an update is 1 by construction. What can
differ is the probability of a sample in the engine that drew it and in the trainer, with the same weights.
"""

from __future__ import annotations

import importlib.util
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
SAMPLERS: Mapping[str, Sequence[str]] = {"hf": (), "vllm": ("compiler.engine=vllm",)}
TOKENS = ("text", "latent")
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


def ratios(runs: Mapping[tuple[str, str], Path]) -> list[str]:
    """Return a table of how far the probabilities of fresh samples in trainer and sampler are apart."""
    rows = []
    for names, out in runs.items():
        updates = [row for row in read_metrics(out / "metrics.jsonl").values() if "apart" in row]
        if not updates:
            rows.append([*names, "0: no group had different rewards", *[""] * 8])
            continue
        mean = lambda name, updates=updates: np.mean([row[name] for row in updates])
        most = lambda name, updates=updates: max(row[name] for row in updates)
        apart = [f"{x:.1e}" for kind in TOKENS for x in (mean(f"apart_{kind}"), most(f"apart_{kind}_max"))]
        sampled = [f"{mean(f'importance_{kind}'):.5f}" for kind in TOKENS]
        rows.append([*names, str(len(updates)), *apart, *sampled, *(f"{mean(f'ratio_{kind}'):.5f}" for kind in TOKENS)])
    distances = ["text: mean distance of log p", "largest", "latent: mean distance", "largest"]
    heads = ["", "sampler", "updates", *distances, "mean ratio, text", "latent", "within the trainer, text", "latent"]
    return ["GRPO, trainer and sampler on fresh samples:", *markdown_table(heads, rows)]


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=2, help="SFT steps.")] = 200,
    updates: Annotated[int, typer.Option(min=0, help="Updates of GRPO; 0: no GRPO.")] = 3,
    sampler: Annotated[
        list[str] | None, typer.Option(help="hf or vllm, repeatable (default: hf, and vllm if it is installed).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs (default: a temporary one).")] = None,
) -> None:
    """Compare bfloat16 with float32: losses of SFT, and probabilities of GRPO's sampler and trainer."""
    samplers = sampler or [name for name in SAMPLERS if name == "hf" or importlib.util.find_spec(name)]
    if unknown := [name for name in samplers if name not in SAMPLERS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(SAMPLERS)}", param_hint="--sampler")
    with tempfile.TemporaryDirectory(prefix="memcompiler-numerics-") as temporary:
        at = out or Path(temporary)
        rows = run(at / "collect", "collect", "-c", "collect/quickstart", HOMES, "limit=32") / "rows"
        few = (f"max_steps={steps}", "batch_size=4", "micro_batch_size=4", f"save_every={steps}")
        sft = {
            name: run(at / f"sft-{name}", "train", "sft", "-c", "sft/quickstart", f"rows={rows}", *few, *settings)
            for name, settings in PRECISIONS.items()
        }
        typer.echo("\n".join(drift(sft)))
        grpo = {
            (name, each): run(at / f"grpo-{name}-{each}", *_grpo(sft["fp32"], updates), *settings, *SAMPLERS[each])
            for each in samplers
            for name, settings in PRECISIONS.items()
            if updates
        }
        typer.echo("\n".join(ratios(grpo) if grpo else []))


def _grpo(checkpoint: Path, updates: int) -> list[str]:
    few = [HOMES, f"updates={updates}", "tasks=4", "group_size=4", "max_steps=6", "loss.importance_cap=2"]
    return ["train", "grpo", "-c", "grpo/quickstart", f"compiler.checkpoint={checkpoint}", *few]


if __name__ == "__main__":
    app()
