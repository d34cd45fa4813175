"""What both stages' trainers share: the cursor, checkpoints, and the check that the executor stays frozen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from compiler import checkpoint
from compiler.hf import MemoryCompiler
from configs.training import GrpoConfig, Optimizer, SftConfig
from training import distributed
from training.backend import Replicated
from training.checkpoint import mark_best, read_checkpoint, save_checkpoint
from training.evaluation import HeldOutTasks
from training.losses import cosine_with_warmup
from training.validation import Best, By

Made = TypeVar("Made")  # what a step tells of itself


class Trainer(ABC, Generic[Made]):
    """Owns the optimiser (in `backend`) and the cursor: `step` of `total` are done. A subclass takes the steps.

    Attributes:
        items: How many rows or tasks it goes through; a run resumes on as many only.
        facts: What a checkpoint records besides, such as the bank's version.
        played: Tasks that are held out and played, if any are.
        best: By validation or by these, where there is either; `patience` ends the run after so many without a better
            one.
    """

    stage: ClassVar[str]
    unit: ClassVar[str]  # a step, as metrics.jsonl calls it
    counts: ClassVar[str]  # what `items` are, as a checkpoint's state names them

    backend: Replicated
    executor: Any
    frozen: str  # the executor's fingerprint before the first step

    def __init__(
        self,
        config: SftConfig | GrpoConfig,
        compiler: MemoryCompiler,
        executor_hash: str,
        items: int,
        total: int,
        out: Path,
        facts: dict[str, Any] | None,
        played: HeldOutTasks | None,
    ) -> None:
        self.compiler, self.executor_hash, self.reading = compiler, executor_hash, config.executor.reading
        self.items, self.total, self.seed, self.step = items, total, config.seed, 0
        self.folder, self.save_every, self.keep = out / "checkpoints", config.save_every, config.keep
        self.facts, self.played = facts or {}, played
        judged: By = "success" if played is not None and config.evaluation.decides else "loss"
        self.best, self.patience = Best(by=judged), config.evaluation.patience or math.inf

    @abstractmethod
    def take_step(self) -> Made:
        """Take the step after `step` others; advances the cursor, and saves where `is_due` says so."""

    @abstractmethod
    def executor_fingerprint(self) -> str:
        """Hash what this process holds of the executor."""

    def steps(self) -> Iterator[Made]:
        """Take all remaining steps. Raises: RuntimeError, where the executor's parameters changed meanwhile."""
        while not self.is_over:
            yield self.take_step()
        if self.executor_fingerprint() != self.frozen:
            raise RuntimeError("the executor's parameters changed during training: it is not frozen")

    def run(self, on_step: Callable[[Made], None]) -> None:
        """Take all remaining steps; rank 0 hears of each."""
        for made in self.steps():
            if distributed.rank() == 0:
                on_step(made)

    @property
    def is_over(self) -> bool:
        """Say whether all steps are done, or validation has not found a better checkpoint for too long."""
        return self.step >= self.total or self.best.since >= self.patience

    def is_evaluated(self, step: int) -> bool:
        """Say whether held-out tasks are played after `step` steps."""
        return self.played is not None and self.played.due(step, self.total)

    def is_due(self, step: int) -> bool:
        """Say whether there is a checkpoint after `step` steps."""
        return step % self.save_every == 0 or step == self.total

    def schedule(self, settings: Optimizer, step: int) -> float:
        """Set the learning rates of the step after `step` others; returns the first."""
        floor = settings.min_lr / settings.lr
        return self.backend.scale_rates(cosine_with_warmup(step, self.total, settings.warmup, floor))

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint of the run, if there is one. Raises: CheckpointError, where it
        cannot be read, or was made from other rows or tasks."""
        found = checkpoint.latest(self.folder)
        if found is None:
            return False
        tensors, state = read_checkpoint(found, self.compiler)
        if (state[self.counts], state["seed"]) != (self.items, self.seed):
            was = f"{state[self.counts]} {self.counts} with seed {state['seed']}"
            raise checkpoint.CheckpointError(f"{found} was made from {was}")
        self.backend.load(tensors)
        self.step, self.best = state["step"], Best.of(state, self.best.by)
        if self.best.step and distributed.rank() == 0:  # a kill may have come before it was marked
            mark_best(self.folder, self.best.step)
        return True

    def save(self) -> None:
        """Write a checkpoint; every rank has to call it."""
        tensors = self.backend.state()  # all ranks: it may have to be gathered
        if distributed.rank() == 0:
            state = {
                "stage": self.stage,
                "step": self.step,
                "total": self.total,
                self.counts: self.items,
                "seed": self.seed,
                "executor_hash": self.executor_hash,
                "executor_reads": self.reading,
                **self.facts,
                **self.best.facts(),
            }
            save_checkpoint(self.folder, self.compiler, tensors, state, self.keep, self.best.step)
        distributed.barrier()


def permuted(n: int, seed: int, epoch: int) -> list[int]:
    """Order n rows or tasks for an epoch: a function of (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return torch.randperm(n, generator=generator).tolist()
