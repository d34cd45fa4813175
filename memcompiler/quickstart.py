"""`memcompiler quickstart`: collect, train (SFT, and GRPO if configured), evaluate and report, at a small size."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from agent.deliveries import AFTER_GRPO
from agent.records import Episode, read_episodes
from compiler import checkpoint
from compiler.build import load_compiler
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.run_folder import RunFolder
from configs.training import MAY_CHANGE_ON_RESUME as TRAINING
from configs.training import GrpoConfig
from envs.registry import compiler_instructions_for, executor_instructions_for
from eval.evaluate import MAY_CHANGE as EVALUATION
from eval.evaluate import ModelCache, evaluate
from eval.matrix import Cell
from eval.metrics import difference
from eval.plots import results_plots, training_plot
from eval.report import write_report
from eval.runs import EPISODES, RESULTS
from eval.table import points, print_results
from executor.build import AnyExecutor, load_executor
from memcompiler.collection import MAY_CHANGE_ON_RESUME as COLLECTION
from memcompiler.collection import run_collect
from runtime.store import read_json
from training.grpo import train_grpo
from training.sft import train_sft

console = Console(width=120)
STAGES = {"collect": COLLECTION, "sft": TRAINING, "grpo": TRAINING, "eval": EVALUATION}
MAY_CHANGE_ON_RESUME = tuple(f"{stage}.{name}" for stage, names in STAGES.items() for name in names)


def run_quickstart(config: QuickstartConfig, out: Path, on_exists: str = "resume") -> None:
    """Run all stages; each is the command of the same name."""
    with RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME) as run:
        if (out / RESULTS).exists():
            console.print(f"  {out} is complete already")
            print_results(read_json(out / RESULTS), console)
        else:
            _quickstart(config, run)


def _quickstart(config: QuickstartConfig, run: RunFolder) -> None:
    out, started, seconds = run.path, time.perf_counter(), {}
    with _stage("collect: the expert plays the training scenes", seconds, "collect"):
        run_collect(config.collect, out / "collect")
    sft = config.sft.model_copy(update={"rows": str(out / "collect" / "rows")})
    with _stage("SFT: LoRA and projector against the frozen executor", seconds, "sft"):
        train_sft(sft, out / "sft")
        executor = load_executor(config.eval.executor, executor_instructions_for(config.eval.env))
        state = checkpoint.read_state(checkpoint.find(out / "sft"))
        frozen = state["executor_hash"] == executor.hash()
        console.print(f"  executor unchanged: {frozen} (sha256 {executor.hash()[:16]}...)")
    if config.grpo is not None:
        with _stage("GRPO: text and soft tokens from success alone", seconds, "grpo"):
            train_grpo(_from_checkpoint(config.grpo, out / "sft"), out / "grpo")
    with _stage("evaluation on held-out scenes", seconds, "eval"):
        results, episodes = _evaluated(
            config.eval, out, stage="sft", deliveries=config.eval.deliveries, executor=executor
        )
        if config.grpo is not None:
            after, played = _evaluated(config.eval, out, stage="grpo", deliveries=("compiled",), executor=executor)
            episodes += _add_grpo_results(results, episodes, after=after, played=played, budgets=config.eval.budgets)
    seconds["total"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results |= {"seconds": seconds, "peak_memory_gib": peak}
    plots = [
        *results_plots(results, out / "plots"),
        training_plot(out / "sft" / "metrics.jsonl", out / "plots" / "training.png"),
        *([training_plot(out / "grpo" / "metrics.jsonl", out / "plots" / "grpo.png")] if config.grpo else ()),
    ]
    write_report(results, episodes, out / "report.html", plots)
    run.write_json(RESULTS, results)  # last, because it marks the run as complete
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"\nwall time: {stages}; peak memory {peak:.1f} GiB")
    console.print(f"results: {out / 'results.json'}   replay: {out / 'report.html'}   plots: {out / 'plots'}")


Config = TypeVar("Config", GrpoConfig, EvalConfig)


def _from_checkpoint(config: Config, start: Path) -> Config:
    return config.model_copy(update={"compiler": config.compiler.model_copy(update={"checkpoint": str(start)})})


def _evaluated(
    config: EvalConfig, out: Path, stage: str, deliveries: tuple[str, ...], executor: AnyExecutor
) -> tuple[dict[str, Any], list[Episode]]:
    """Evaluate deliveries with a stage's checkpoint; returns results and episodes."""
    cell = _from_checkpoint(config, out / stage).model_copy(update={"deliveries": deliveries})
    folder = out / ("eval" if stage == "sft" else f"eval-{stage}")
    with ModelCache.preloaded(
        cell, executor, load_compiler(cell.compiler, executor, cell.seed, compiler_instructions_for(cell.env))
    ) as loaded:
        results = evaluate(Cell({}, cell), folder, loaded, "resume")
    return results, list(read_episodes(folder / EPISODES))


def _add_grpo_results(
    results: dict[str, Any],
    episodes: Sequence[Episode],
    after: Mapping[str, Any],
    played: list[Episode],
    budgets: Sequence[int],
) -> list[Episode]:
    """Add results after GRPO as delivery `compiled_grpo`; returns its episodes under that name."""
    if before := [episode for episode in episodes if episode.delivery == "compiled"]:
        change = difference(played, before, budgets)
        results["paired_difference"][f"{AFTER_GRPO} - compiled"] = change
        console.print(f"  GRPO changed the success of text + soft by {points(change)}")
    results["results"][AFTER_GRPO] = after["results"]["compiled"]
    for episode in played:
        episode.delivery = AFTER_GRPO
    return played


@contextmanager
def _stage(title: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Print a stage's title, and record its seconds."""
    console.rule(f"{len(seconds) + 1}. {title}", align="left")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
