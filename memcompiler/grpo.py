"""`memcompiler train grpo` and `memcompiler bench rollout`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compiler.build import load_compiler, load_remote_compiler, load_served_compiler
from configs.executor import ExecutorConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from envs.environments import Environments
from executor.build import load_executor
from runtime.progress import progress

if TYPE_CHECKING:
    from agent.episode import EpisodeSpec
    from compiler.hf import MemoryCompiler
    from executor.records import Executor
    from training.rollout import Group, RolloutEngine

console = Console(width=120)
ROLLOUTS = "rollouts.jsonl"


def run_train_grpo(config: GrpoConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Train (or go on training); OUT gets checkpoints, metrics.jsonl (a line per update) and rollouts.jsonl."""
    from training import distributed

    with distributed.group():
        return _train_grpo(config, out, on_exists)


def _train_grpo(config: GrpoConfig, out: Path, on_exists: str) -> MemoryCompiler:
    from training import distributed
    from training.grpo import GrpoTrainer, run_grpo

    run = None
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=distributed.MAY_CHANGE_ON_RESUME)  # type: ignore[arg-type]
    distributed.barrier()
    with Environments(config.env) as envs:
        specs, facts = _specs(config, envs, run, out)
        executor = load_executor(_executor_of(config))
        compiler = load_compiler(config.compiler, executor, config.seed)
        trainer = GrpoTrainer(config, compiler, executor, _engine(config, envs, executor, out), specs, out, facts)
        if trainer.resume():
            console.print(f"  resumed at update {trainer.update} of {config.updates}")
        if run is not None:  # also where it starts over, having been killed before its first checkpoint
            run.metrics.keep(lambda row: row["update"] <= trainer.update)
            run.lines(ROLLOUTS).keep(lambda row: row["update"] <= trainer.update)
        with progress("grpo", config.updates, trainer.update) as advance:
            run_grpo(trainer, lambda metrics, groups: advance(_record(config, run, metrics, groups)))
    if run is not None:
        from eval.plots import training_plot

        console.print(f"  curves: {training_plot(out / 'metrics.jsonl', out / 'plots' / 'training.png')}")
    return compiler


def _record(config: GrpoConfig, run: RunFolder | None, metrics: dict[str, float], groups: Sequence[Group]) -> str:
    """An update into the run folder; returns its line for the terminal."""
    assert run is not None  # only rank 0 records
    run.metrics.append(metrics)
    run.lines(ROLLOUTS).append(*_rollout_rows(int(metrics["update"]), groups))
    if metrics.get("mismatch_kl", 0.0) > config.mismatch_alarm:
        console.print(
            f"  warning: rollouts and trainer disagree by {metrics['mismatch_kl']:.3f} nats per token (alarm at "
            f"{config.mismatch_alarm}): are precision, truncation and weights of the two the same?"
        )
    return one_line(metrics)


def one_line(metrics: dict[str, float]) -> str:
    """An update on the terminal."""
    clipped = metrics.get("clip_low", 0.0) + metrics.get("clip_high", 0.0)
    return (
        f"reward {metrics['reward']:.2f}  flat groups {metrics['zero_variance_fraction']:.2f}  clipped {clipped:.3f}  "
        f"entropy {metrics.get('entropy_text', 0.0):.2f}  sigma {metrics.get('sigma', 0.0):.3f}  "
        f"{metrics['seconds_rollout']:.1f} + {metrics['seconds_update']:.1f} s"
    )


def run_bench_rollout(config: GrpoConfig, out: Path, updates: int) -> None:
    """The rollouts of some updates, all episodes side by side and one at a time, in turn; ends with `ratio: R`."""
    from dataclasses import replace

    from training.grpo import sampling

    executor = load_executor(config.executor)
    compiler = load_compiler(config.compiler, executor, config.seed)
    compiler.decoding = sampling(config)
    run = RunFolder.create(out, config, on_exists="overwrite")
    rates: dict[str, list[float]] = {"batched": [], "one at a time": []}
    with Environments(config.env) as envs:
        specs, _ = _specs(config, envs, run, out)
        batched = _engine(config, envs, executor, out)
        engines = {"batched": batched, "one at a time": replace(batched, concurrency=1)}
        batched.run(compiler, specs[: config.tasks], 2)  # warm-up
        for update in range(updates):
            chosen = [specs[(update * config.tasks + i) % len(specs)] for i in range(config.tasks)]
            for name, engine in engines.items():
                compiler.generator.manual_seed(update)
                started = time.perf_counter()
                groups = engine.run(compiler, chosen, config.group_size)
                steps = sum(len(e.steps) for g in groups for e in g.episodes)
                rates[name].append(steps / (time.perf_counter() - started))
    means = {name: sum(values) / len(values) for name, values in rates.items()}
    for name, rate in means.items():
        console.print(f"{name}: {rate:.1f} agent steps/s ({updates} updates of {config.tasks} x {config.group_size})")
    console.print(f"ratio: {means['batched'] / means['one at a time']:.2f}", highlight=False)


# ---------------------------------------------------------------------------------------------------------------------


def _specs(
    config: GrpoConfig, envs: Environments, run: RunFolder | None, out: Path
) -> tuple[list[EpisodeSpec], dict[str, Any]]:
    """Training tasks with their memory. Rank 0 (which has the run folder) checks them and fills the bank; the others
    take what it has made."""
    from data_gen.tasks import specs_for, training_tasks_and_bank
    from envs.manifest import Manifest
    from memcompiler.leakage import MANIFEST
    from memory.bank import open_bank
    from training import distributed

    if run is not None:
        bank, tasks = training_tasks_and_bank(config, envs, run)
        distributed.barrier()
    else:
        distributed.barrier()
        kept = Manifest.read(out / MANIFEST).ids
        tasks = [task for task in envs.tasks(config.split)[: config.limit] if task.id in kept]
        bank = open_bank(config.memory, out / "bank")
    return specs_for(tasks, bank, config.memory.k), {"bank_version": bank.snapshot()}


def _executor_of(config: GrpoConfig) -> ExecutorConfig:
    """This rank's executor: its share of the services, where there are any."""
    from training import distributed

    if not config.executor_urls:
        return config.executor
    url = config.executor_urls[distributed.rank() % len(config.executor_urls)]
    return config.executor.model_copy(update={"engine": "http", "url": url})


def _engine(config: GrpoConfig, envs: Environments, executor: Executor, out: Path) -> RolloutEngine:
    from agent.episode import Limits
    from training.launch import scratch_of
    from training.rollout import RolloutEngine

    served: Any = None
    if config.rollout_urls:
        served = load_remote_compiler(config.compiler, config.seed, config.rollout_urls)
    elif config.compiler.engine == "vllm":
        served = load_served_compiler(config.compiler, config.seed)
    scratch = scratch_of(out) if config.rollout_urls else None
    limits = Limits(config.max_steps, config.seed)
    return RolloutEngine(envs.lease, executor, limits, config.concurrency, served, scratch)


def _rollout_rows(update: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row per episode: what it was and how it ended, failures with their reason."""
    return [
        {
            "update": update, "task": episode.task_id, "family": episode.family, "success": episode.success,
            "steps": len(episode.steps), "stop_reason": str(episode.stop_reason), "error": episode.error,
        }
        for group in groups
        for episode in group.episodes
    ]  # fmt: skip
