"""`memcompiler train sft` and `memcompiler train grpo`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from configs.training import GrpoConfig, SftConfig

console = Console(width=120)


def run_train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> None:
    """Train (or go on training) and leave checkpoints and metrics in OUT."""
    from training.run import train_sft

    train_sft(config, out, on_exists)


def run_train_grpo(config: GrpoConfig, out: Path, on_exists: str = "resume") -> None:
    """Train (or go on training); OUT gets checkpoints, metrics.jsonl (a line per update), rollouts.jsonl and curves."""
    from eval.plots import training_plot
    from training import distributed
    from training.run import train_grpo

    with distributed.group():
        train_grpo(config, out, on_exists)
        if distributed.rank() == 0:
            console.print(f"  curves: {training_plot(out / 'metrics.jsonl', out / 'plots' / 'training.png')}")
