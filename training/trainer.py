"""Base of both stages' trainers: steps, checkpoints and resume, the frozen executor's check, and logging."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from rich.console import Console

from compiler import checkpoint
from compiler.hf import MemoryCompiler
from configs.run_folder import RunFolder
from configs.training import MAY_CHANGE_ON_RESUME, GrpoConfig, Optimizer, SftConfig
from lm.backbone import Weights
from lm.device import describe_placement
from lm.shared_prefixes import Sharing
from runtime.progress import progress
from training import distributed
from training.backend import BACKENDS, Replicated
from training.checkpoint import mark_best, read_checkpoint, save_checkpoint
from training.evaluation import METRICS, BestCheckpoint, HeldOutTasks
from training.losses import cosine_with_warmup
from training.trackers import open_trackers

console = Console(width=120)
HELD_OUT = "held_out.json"  # in the run folder: tasks of validation rows, and tasks that are played
ROLLOUTS = "rollouts.jsonl"  # in the run folder of GRPO: one row per episode
Metrics = dict[str, float]
Result = TypeVar("Result")  # of a step


class Trainer(ABC, Generic[Result]):
    """Holds the optimiser (in `backend`) and the position: `step` of `total`. A subclass takes the steps.

    Attributes:
        items: Number of rows or tasks; a run resumes with the same number only.
        facts: Further facts for a checkpoint's state, such as the bank's version.
        sharing: Whether the compiler's rows share prefixes.
        held_out_tasks: Tasks that are played during training, if any.
        best: Best checkpoint by validation loss or success; `patience` evaluations without a better one end the run.
    """

    stage: ClassVar[str]
    unit: ClassVar[str]  # name of a step in metrics.jsonl
    counts: ClassVar[str]  # name of `items` in a checkpoint's state

    backend: Replicated
    executor: Any
    frozen: str  # fingerprint of the executor before the first step
    sharing: Sharing

    def __init__(
        self,
        config: SftConfig | GrpoConfig,
        compiler: MemoryCompiler,
        executor_hash: str,
        items: int,
        total: int,
        out: Path,
        facts: dict[str, Any] | None,
        held_out_tasks: HeldOutTasks | None,
    ) -> None:
        self.compiler, self.executor_hash, self.reading = compiler, executor_hash, config.executor.reading
        self.compiler_reading = config.compiler.reading
        self.sharing = prefix_sharing(config, compiler)
        self.items, self.total, self.seed, self.step = items, total, config.seed, 0
        self.folder, self.save_every, self.keep = out / "checkpoints", config.save_every, config.keep
        self.facts, self.held_out_tasks = facts or {}, held_out_tasks
        self.best = BestCheckpoint(by="success" if held_out_tasks and config.evaluation.selects_best else "loss")
        self.patience = config.evaluation.patience or math.inf

    @abstractmethod
    def take_step(self) -> Result:
        """Take one step: advance `step`, and save a checkpoint if one is due."""

    @abstractmethod
    def executor_fingerprint(self) -> str:
        """Hash this process's part of the executor."""

    def steps(self) -> Iterator[Result]:
        """Take all remaining steps. Raises: RuntimeError, if the executor's parameters changed."""
        while not self.is_done:
            yield self.take_step()
        if self.executor_fingerprint() != self.frozen:
            raise RuntimeError("the executor's parameters changed during training: it is not frozen")

    @property
    def is_done(self) -> bool:
        """Return whether all steps are taken, or patience has run out."""
        return self.step >= self.total or self.best.since >= self.patience

    def plays_after(self, step: int) -> bool:
        """Return whether held-out tasks are played after `step` steps."""
        return self.held_out_tasks is not None and self.held_out_tasks.is_due(step, self.total)

    def saves_after(self, step: int) -> bool:
        """Return whether a regular checkpoint follows after `step` steps."""
        return step % self.save_every == 0 or step == self.total

    def save_if_due(self, metrics: Metrics) -> None:
        """Save after a step if it is the best one, the last one, or a multiple of `save_every`."""
        if self.best.update(metrics, self.step) or self.is_done or self.saves_after(self.step):
            self.save()

    def set_learning_rate(self, settings: Optimizer, step: int) -> float:
        """Set the learning rates for the step after `step` others; returns LoRA's."""
        floor = settings.min_lr / settings.lr
        return self.backend.scale_rates(cosine_with_warmup(step, self.total, settings.warmup, floor))

    def resume(self) -> bool:
        """Load the run's newest checkpoint; returns whether there is one. Raises: CheckpointError, if it cannot be
        read, or belongs to other rows or tasks."""
        found = checkpoint.latest(self.folder)
        if found is None:
            return False
        tensors, state = read_checkpoint(found, self.compiler)
        if (state[self.counts], state["seed"]) != (self.items, self.seed):
            trained_on = f"{state[self.counts]} {self.counts} with seed {state['seed']}"
            raise checkpoint.CheckpointError(
                f"{found} was trained on {trained_on}, this run has {self.items} with seed {self.seed}"
            )
        self.backend.load(tensors)
        self.step, self.best = state["step"], BestCheckpoint.from_state(state, self.best.by)
        if self.best.step and distributed.rank() == 0:  # a kill may have come between saving and marking
            mark_best(self.folder, self.best.step)
        return True

    def save(self) -> None:
        """Write a checkpoint. Every rank must call it."""
        tensors = self.backend.state()  # on all ranks, because slices are gathered
        if distributed.rank() == 0:
            state = {
                "stage": self.stage,
                "step": self.step,
                "total": self.total,
                self.counts: self.items,
                "seed": self.seed,
                "executor_hash": self.executor_hash,
                "executor_reads": self.reading,
                "compiler_reads": self.compiler_reading,
                **self.facts,
                **self.best.to_state(),
            }
            save_checkpoint(self.folder, self.compiler, tensors, state, keep=self.keep, best=self.best.step)
        distributed.barrier()


def prefix_sharing(config: SftConfig | GrpoConfig, compiler: MemoryCompiler) -> Sharing:
    """Return whether the compiler's rows share prefixes; print if its model cannot."""
    if not config.share_prefix:
        return "never"
    if not compiler.backbone.attends_fully:
        if distributed.rank() == 0:
            name = type(compiler.backbone.model).__name__
            console.print(f"  share_prefix: {name} with this attention cannot share prefixes, so it reads whole rows")
        return "never"
    return "always" if BACKENDS[config.backend].in_lockstep else "if_shorter"


def create_run(config: SftConfig | GrpoConfig, out: Path, on_exists: str, lock: bool = True) -> RunFolder | None:
    """Create or reopen the run folder on rank 0, while other ranks wait; None on those."""
    run = None
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME, lock=lock)
    distributed.barrier()
    return run


@contextmanager
def training_log(
    trainer: Trainer[Any], run: RunFolder | None, config: SftConfig | GrpoConfig
) -> Iterator[Callable[[Metrics, str], None]]:
    """Resume the trainer, and yield `log(metrics, line)`, which writes a step to metrics.jsonl, the trackers and the
    terminal. Only rank 0, which has the run folder, logs."""
    if trainer.resume():
        console.print(f"  resumed at {trainer.unit} {trainer.step} of {trainer.total}")
    if run is not None:
        run.record(devices=describe_placement(compiler=trainer.compiler, executor=trainer.executor))
        for rows in (run.metrics, run.lines(ROLLOUTS)):  # drop rows after the checkpoint: those steps are repeated
            rows.keep(lambda row: row[trainer.unit] <= trainer.step)
    trackers = config.trackers if run is not None else ()
    with (
        progress(trainer.stage, trainer.total, trainer.step) as advance,
        open_trackers(trackers, trainer.folder.parent, config, trainer.step) as track,
    ):

        def log(metrics: Metrics, line: str) -> None:
            if run is not None:
                run.metrics.append(metrics)
                track(metrics, trainer.step)
                advance(line)

        yield log
    if trainer.step < trainer.total:
        console.print(
            f"  stopped early after {trainer.step} of {trainer.total} {trainer.unit}s: best "
            f"{METRICS[trainer.best.by]} {trainer.best.value} after {trainer.best.step}"
        )


def weights_location(backend: str) -> Weights:
    """Return where this process loads a model's weights: only rank 0 has them if the backend slices models."""
    if not BACKENDS[backend].is_sharded or distributed.world_size() == 1:
        return "device"
    return "host" if distributed.rank() == 0 else "nowhere"


def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """Shuffle 0..n-1 for an epoch: a function of (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return torch.randperm(n, generator=generator).tolist()
