"""Evaluation during training: tasks held out to be played, and the choice of the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent.episode import EpisodeSpec
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.models import CompilerConfig
from configs.training import TrainingEvaluation
from executor.base import TokenExecutor
from runtime.errors import is_failure
from training import distributed
from training.rollout import RolloutEngine

SEED = 0  # the same for every evaluation of a run
Criterion = Literal["loss", "success"]
METRICS: Mapping[Criterion, str] = {"loss": "val_loss", "success": "eval_success"}  # names in metrics.jsonl


@dataclass(slots=True)
class BestCheckpoint:
    """Best value of a metric so far, the step that had it, and the number of evaluations since. NaN and infinity are
    never better."""

    value: float | None = None  # None before the first evaluation
    step: int = 0
    since: int = 0
    by: Criterion = "loss"

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Compare the metrics after a step, if they have the value; return whether it is the best so far."""
        if (value := metrics.get(METRICS[self.by])) is None:
            return False
        sign = 1 if self.by == "success" else -1
        better = math.isfinite(value) and (self.value is None or sign * value > sign * self.value)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def to_state(self) -> dict[str, Any]:
        """Return what a checkpoint's state records; nothing before the first evaluation."""
        known = {self.by: self.value, "step": self.step, "since": self.since}
        return {"best": known} if self.value is not None or self.since else {}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], by: Criterion = "loss") -> BestCheckpoint:
        """Read it from a checkpoint's state."""
        known = dict(state.get("best", {}))
        return cls(known.pop(by, None), **known, by=by)


@dataclass(frozen=True, slots=True)
class HeldOutTasks:
    """Tasks excluded from training, with the engine that plays them and its decoding (by default greedy)."""

    settings: TrainingEvaluation
    engine: RolloutEngine
    specs: Sequence[EpisodeSpec]
    decoding: Decoding

    def is_due(self, step: int, total: int) -> bool:
        """Return whether tasks are played after `step` of `total` steps."""
        return step % self.settings.every == 0 or step == total

    def play(self, compiler: MemoryCompiler) -> dict[str, float]:
        """Play one episode of each task, distributed over the ranks. Returns success and steps per episode, over
        episodes that did not fail (NaN if all did), and the number of failures. Every rank must call it."""
        specs = [self.specs[i] for i in distributed.share(len(self.specs))]
        rollout_decoding, compiler.decoding = compiler.decoding, self.decoding
        compiler.generator.manual_seed(SEED)
        if isinstance(self.engine.executor, TokenExecutor):
            self.engine.executor.generator.manual_seed(SEED)
        try:
            episodes = self.engine.run(compiler, specs, self.settings.delivery)
        finally:
            compiler.decoding = rollout_decoding
        valid = [episode for episode in episodes if not is_failure(episode.stop_reason)]
        sums = {
            "failures": len(episodes) - len(valid),
            "valid": len(valid),
            "success": sum(e.success for e in valid),
            "steps": sum(len(e.steps) for e in valid),
        }
        environments = sorted({spec.environment for spec in self.specs} - {""})  # of several
        for name in environments:
            own = [episode.success for episode in valid if episode.environment == name]
            sums |= {f"success_{name}": sum(own), f"valid_{name}": len(own)}
        total = distributed.total({name: float(value) for name, value in sums.items()})
        mean = lambda name, of="valid": total[name] / total[of] if total[of] else float("nan")
        return {
            "eval_success": mean("success"),
            **{f"eval_success_{name}": mean(f"success_{name}", f"valid_{name}") for name in environments},
            "eval_episode_steps": mean("steps"),
            "eval_failures": total["failures"],
        }


def eval_decoding(config: CompilerConfig) -> Decoding:
    """Return the decoding of an evaluation with these settings."""
    return Decoding(config.temperature, config.max_new_tokens, config.batch_size)
