"""`memcompiler bench rollout`: agent steps per second with all episodes side by side, against one at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from compiler.build import load_compiler
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from envs.registry import Environments, compiler_told, executor_told
from executor.build import load_executor
from training.grpo import rollout_engine, sampling, training_specs

console = Console(width=120)


def run_bench_rollout(config: GrpoConfig, out: Path, updates: int) -> None:
    """Play the rollouts of some updates both ways, in turn; ends with `ratio: R`."""
    executor = load_executor(config.executor, executor_told(config.env))
    compiler = load_compiler(config.compiler, executor, config.seed, compiler_told(config.env))
    compiler.decoding = sampling(config)
    run = RunFolder.create(out, config, kind="bench rollout")
    rates: dict[str, list[float]] = {"batched": [], "one at a time": []}
    with Environments(config.env) as envs:
        specs, _ = training_specs(config, envs, run, out)
        batched = rollout_engine(config, envs, executor)
        engines = {"batched": batched, "one at a time": replace(batched, concurrency=1)}
        batched.run(compiler, [spec for spec in specs[: config.tasks] for _ in range(2)])  # warm-up
        for update in range(updates):
            chosen = [specs[(update * config.tasks + i) % len(specs)] for i in range(config.tasks)]
            repeated = [spec for spec in chosen for _ in range(config.group_size)]
            for name, engine in engines.items():
                compiler.generator.manual_seed(update)
                started = time.perf_counter()
                steps = sum(len(episode.steps) for episode in engine.run(compiler, repeated))
                rates[name].append(steps / (time.perf_counter() - started))
    means = {name: fmean(values) for name, values in rates.items()}
    for name, rate in means.items():
        console.print(f"{name}: {rate:.1f} agent steps/s ({updates} updates of {config.tasks} x {config.group_size})")
    console.print(f"ratio: {means['batched'] / means['one at a time']:.2f}", highlight=False)
