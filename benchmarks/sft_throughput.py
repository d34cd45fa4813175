"""SFT tokens per second with the soft channel against without, side by side in one run.

    python -m benchmarks.sft_throughput ROWS [--steps 20]      (ROWS: a folder of `memcompiler collect`)

Steps of the two trainers alternate, so that whatever else the machine does falls on both; medians are compared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import typer

from compiler.build import load_compiler
from configs.load import load_config
from configs.training import SftConfig
from data_gen.rows import load_rows
from envs.household.environment import INSTRUCTIONS
from envs.spec import Told
from executor.build import load_frozen
from training.sft import SftTrainer


def main(rows: Path, steps: int = 20) -> None:
    played, rates = load_rows(rows), {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for soft in (True, False):
            config = load_config(SftConfig, "sft/quickstart", [f"soft={soft}", "save_every=100000", "max_steps=100000"])
            executor = load_frozen(config.executor, Told(INSTRUCTIONS))
            compiler = load_compiler(config.compiler, executor)
            running[soft] = SftTrainer(config, compiler, executor, played, Path(folder) / str(soft)).steps()
        for step in range(steps + 2):
            for soft, trainer in running.items():
                started = time.perf_counter()
                metrics = next(trainer)
                if step >= 2:  # the first steps warm up caches and allocators
                    rates[soft].append(metrics["tokens"] / (time.perf_counter() - started))
    with_soft, without = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"with the soft channel:    {with_soft:8.0f} tokens/s (compiler and executor tokens)")
    print(f"without the soft channel: {without:8.0f} tokens/s (compiler tokens)")
    print(f"ratio: {with_soft / without:.2f}")


if __name__ == "__main__":
    typer.run(main)
