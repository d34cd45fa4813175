"""Measure how GRPO's rollouts and updates overlap, by `max_staleness`.

    memcompiler bench overlap                                                  # the household's small models
    memcompiler bench overlap -c grpo/quickstart compiler.checkpoint=out/quickstart/sft tasks=8 --staleness 0,1,2,3

A short GRPO run for each value, one after another. The rollout engine computes while the compiler compiles or the
executor acts, the update while the trainer learns from samples. The rest of the time goes to environments, to the agent
loop and to waiting. Without a trained checkpoint a new adapter is trained: the shares of the time need no good one.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from compiler.base import TokenCompiler
from compiler.hf import MemoryCompiler
from configs.load import load_config
from configs.training import GrpoConfig
from eval.table import markdown_table
from executor.base import TokenExecutor
from executor.hf import FrozenExecutor
from runtime.progress import disable_library_progress_bars
from training.grpo import GrpoTrainer, train_grpo

Interval = tuple[float, float]  # start and end in seconds
DEFAULTS = ("compiler.checkpoint=null", "tasks=2", "save_every=1000", "loss.importance_cap=2.0")

app = typer.Typer(help="Measure how GRPO's rollouts and updates overlap.")


@app.command()
def measure_overlap(
    settings: Annotated[list[str] | None, typer.Argument(help="GRPO settings as a.b=c.")] = None,
    config: Annotated[str, typer.Option("--config", "-c", help="GRPO settings.")] = "grpo/quickstart",
    staleness: Annotated[str, typer.Option(help="Values of max_staleness.")] = "0,1,2",
    updates: Annotated[int, typer.Option(min=2, help="Updates of each run.")] = 6,
    seconds: Annotated[float, typer.Option(min=1, help="Start no further update of a run after this time.")] = 45,
) -> None:
    """Measure the shares of wall time in which models compute; the last line is that of rollouts or update, at the last
    value."""
    disable_library_progress_bars()
    if not all(part.strip().isdigit() for part in staleness.split(",")):
        raise ValueError(f"--staleness is numbers such as 0,1,2; received {staleness!r}")
    values = list(map(int, staleness.split(",")))
    with tempfile.TemporaryDirectory(prefix="memcompiler-bench-") as folder:
        given = [*(settings or []), f"updates={updates}"]
        runs = [(most, _run(config, given, most, folder=Path(folder), seconds=seconds)) for most in values]
    typer.echo("\n".join(table(runs)))
    typer.echo(f"share: {runs[-1][1].shares['either']:.2f}")


def _run(config: str, settings: Sequence[str], max_staleness: int, folder: Path, seconds: float) -> WatchedRun:
    """Train in a folder beside those of earlier runs, with the bank that the first of them filled."""
    chosen = load_config(GrpoConfig, config, [*DEFAULTS, *settings, f"max_staleness={max_staleness}"])
    if chosen.cluster == "ray":
        raise ValueError("bench overlap watches one process: leave cluster=ray out")
    bank = next(folder.glob("*/bank"), None)
    if bank is not None and chosen.memory.bank is None:
        chosen = chosen.model_copy(update={"memory": chosen.memory.model_copy(update={"bank": str(bank)})})
    with watched(seconds) as run:
        train_grpo(chosen, folder / str(len(list(folder.iterdir()))))
    return run


@dataclass(slots=True)
class WatchedRun:
    """When the parts of a GRPO run computed. Threads may add intervals at the same time."""

    rollouts: list[Interval] = field(default_factory=list)
    updates: list[Interval] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)  # whole updates, waiting for episodes included

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of the wall time in which the rollout engine, the update, both, and either compute."""
        whole = self.steps[0][0], self.steps[-1][1]
        wall = whole[1] - whole[0]
        rollouts, updates, either = (
            covered(of, whole) / wall for of in (self.rollouts, self.updates, [*self.rollouts, *self.updates])
        )
        return {"rollouts": rollouts, "updates": updates, "both": rollouts + updates - either, "either": either}

    @property
    def seconds_per_update(self) -> float:
        return (self.steps[-1][1] - self.steps[0][0]) / len(self.steps)


def covered(intervals: Sequence[Interval], within: Interval) -> float:
    """Return the seconds of `within` that at least one interval covers."""
    total, reached = 0.0, within[0]
    for start, end in sorted(intervals):
        end = min(end, within[1])
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def watched(seconds: float = float("inf")) -> Iterator[WatchedRun]:
    """Record a GRPO run of this process. After `seconds` it ends with the updates whose episodes are being played."""
    run = WatchedRun()

    def timed(into: list[Interval], call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timing(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                into.append((started, time.perf_counter()))

        return timing

    take_step = timed(run.steps, GrpoTrainer.take_step)

    def take_step_in_time(trainer: GrpoTrainer) -> Any:
        done = take_step(trainer)
        if run.steps[-1][1] - run.steps[0][0] > seconds:
            trainer.total = min(trainer.total, trainer.step + trainer.config.max_staleness)
        return done

    parts: list[tuple[type, str]] = [(TokenCompiler, "compile"), (MemoryCompiler, "compile")]
    parts += [(TokenExecutor, "act"), (FrozenExecutor, "act")]
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(patch.object(owner, name, timed(run.rollouts, getattr(owner, name))))
        stack.enter_context(patch.object(GrpoTrainer, "learn", timed(run.updates, GrpoTrainer.learn)))
        stack.enter_context(patch.object(GrpoTrainer, "take_step", take_step_in_time))
        yield run


def table(runs: Sequence[tuple[int, WatchedRun]]) -> list[str]:
    heads = ["max_staleness", "updates", "s an update", "rollouts, %", "update, %", "both, %", "either, %"]
    cells = [
        [str(most), str(len(run.steps)), f"{run.seconds_per_update:.2f}"]
        + [f"{100 * run.shares[name]:.0f}" for name in ("rollouts", "updates", "both", "either")]
        for most, run in runs
    ]
    return markdown_table(heads, cells)
