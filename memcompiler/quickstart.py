"""`memcompiler quickstart`: collect, train (SFT, then GRPO), evaluate and report, once and small."""

from __future__ import annotations

import json
import resource
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from compiler.build import load_compiler
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from envs.registry import executor_instructions
from executor.build import AnyExecutor, load_executor

if TYPE_CHECKING:
    from agent.records import Episode

console = Console(width=120)


def run_quickstart(config: QuickstartConfig, out: Path, on_exists: str = "overwrite") -> None:
    """Collect, train (SFT, then GRPO), evaluate, report; each stage is the command of the same name."""
    from memcompiler.collect import run_collect
    from memcompiler.train import run_train_grpo, run_train_sft

    started, seconds = time.perf_counter(), {}
    run = RunFolder.create(out, config, on_exists=on_exists)
    with _stage("1/4 collect: the expert plays the training scenes", seconds, "collect"):
        run_collect(config.collect, out / "collect", on_exists)
    sft = config.sft.model_copy(update={"rows": str(out / "collect" / "rows")})
    with _stage("2/4 SFT: LoRA and projector against the frozen executor", seconds, "sft"):
        run_train_sft(sft, out / "sft", on_exists)
        executor = load_executor(config.eval.executor, executor_instructions(config.eval.env))
        frozen = json.loads((_last(out / "sft") / "state.json").read_text())["executor_hash"] == executor.hash()
        console.print(f"  executor unchanged: {frozen} (sha256 {executor.hash()[:16]}...)")
    with _stage("3/4 GRPO: text and soft tokens from success alone", seconds, "grpo"):
        run_train_grpo(_from(config.grpo, out / "sft"), out / "grpo", on_exists)
    with _stage("4/4 evaluation on held-out scenes", seconds, "eval"):
        results, episodes = _before_and_after(config.eval, out, executor, on_exists)
    seconds["total"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results |= {"seconds": seconds, "peak_memory_gib": peak}
    run.write_json("results.json", results)
    _write_page(out, results, episodes)
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"\nwall time: {stages}; peak memory {peak:.1f} GiB")
    console.print(f"results: {out / 'results.json'}   replay: {out / 'report.html'}   plots: {out / 'plots'}")


Starting = TypeVar("Starting", GrpoConfig, EvalConfig)


def _from(config: Starting, checkpoint: Path) -> Starting:
    return config.model_copy(update={"compiler": config.compiler.model_copy(update={"checkpoint": str(checkpoint)})})


def _before_and_after(
    config: EvalConfig, out: Path, executor: AnyExecutor, on_exists: str
) -> tuple[dict[str, Any], list[Episode]]:
    """All deliveries after SFT, and the full one again after GRPO (`compiled_grpo`): results and episodes."""
    from agent.deliveries import AFTER_GRPO
    from agent.records import read_episodes
    from eval.evaluate import ModelCache, evaluate
    from eval.matrix import Cell
    from eval.metrics import difference

    made: dict[str, dict[str, Any]] = {}
    episodes: dict[str, list[Episode]] = {}
    deliveries = {"sft": config.deliveries, "grpo": ("compiled",)}
    for stage, names in deliveries.items():
        cell = _from(config, out / stage).model_copy(update={"deliveries": names})
        folder = out / ("eval" if stage == "sft" else "eval-grpo")
        with ModelCache.holding(cell, executor, load_compiler(cell.compiler, executor, cell.seed)) as loaded:
            made[stage] = evaluate(Cell({}, cell), folder, loaded, on_exists)
        episodes[stage] = list(read_episodes(folder / "episodes.jsonl"))
    results = made["sft"]
    if before := [episode for episode in episodes["sft"] if episode.delivery == "compiled"]:
        change = difference(episodes["grpo"], before)
        results["paired_difference"][f"{AFTER_GRPO} - compiled"] = change
        console.print(
            f"  GRPO changed the success of text + soft by {100 * change['mean']:+.1f} points "
            f"[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]: better on {change['wins']}, worse on "
            f"{change['losses']} of {change['n']} tasks"
        )
    results["results"][AFTER_GRPO] = made["grpo"]["results"]["compiled"]
    for episode in episodes["grpo"]:
        episode.delivery = AFTER_GRPO
    return results, episodes["sft"] + episodes["grpo"]


def _last(run: Path) -> Path:
    from compiler.checkpoint import find

    return find(run)


def _write_page(out: Path, results: dict[str, Any], episodes: list[Episode]) -> None:
    """The quickstart's page: evaluation and training curves together."""
    from eval.plots import deliveries_plot, training_plot
    from eval.report import write_report

    plots = [
        deliveries_plot(results, out / "plots" / "deliveries.png"),
        training_plot(out / "sft" / "metrics.jsonl", out / "plots" / "training.png"),
        training_plot(out / "grpo" / "metrics.jsonl", out / "plots" / "grpo.png"),
    ]
    write_report(results, episodes, out / "report.html", plots)


@contextmanager
def _stage(title: str, seconds: dict[str, float], name: str):
    console.rule(title, align="left")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
