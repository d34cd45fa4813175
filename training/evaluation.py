"""A small evaluation in the middle of training: held-out tasks, played with the compiler as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.episode import EpisodeSpec
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.models import CompilerConfig
from configs.training import Evaluation
from executor.base import TokenExecutor
from runtime.errors import is_failure
from training import distributed
from training.rollout import RolloutEngine

SEED = 0  # of what is drawn, if anything is: every evaluation of a run draws alike


@dataclass(frozen=True, slots=True)
class HeldOutTasks:
    """Tasks that training goes without, and what plays them; `decoding` as the settings have it (by default greedy),
    not as rollouts draw."""

    settings: Evaluation
    engine: RolloutEngine
    specs: Sequence[EpisodeSpec]
    decoding: Decoding

    def due(self, step: int, total: int) -> bool:
        """Say whether they are played after `step` steps of `total`."""
        return step % self.settings.every == 0 or step == total

    def play(self, compiler: MemoryCompiler) -> dict[str, float]:
        """Play an episode of each, the ranks a share of them: success of those that did not break (not a number, where
        all did), how many did, and steps per episode. Every rank has to call it."""
        mine = [self.specs[i] for i in distributed.share(len(self.specs))]
        drawn, compiler.decoding = compiler.decoding, self.decoding
        compiler.generator.manual_seed(SEED)
        if isinstance(self.engine.executor, TokenExecutor):
            self.engine.executor.generator.manual_seed(SEED)
        try:
            episodes = self.engine.run(compiler, mine, self.settings.delivery)
        finally:
            compiler.decoding = drawn
        whole = [episode for episode in episodes if not is_failure(episode.stop_reason)]
        sums = {
            "failures": len(episodes) - len(whole),
            "whole": len(whole),
            "success": sum(e.success for e in whole),
            "steps": sum(len(e.steps) for e in whole),
        }
        total = distributed.total({name: float(value) for name, value in sums.items()})
        mean = lambda name: total[name] / total["whole"] if total["whole"] else float("nan")
        found = {"success": mean("success"), "episode_steps": mean("steps"), "failures": total["failures"]}
        return {f"eval_{name}": value for name, value in found.items()}


def greedy(config: CompilerConfig) -> Decoding:
    """Give the decoding that an evaluation with these settings has."""
    return Decoding(config.temperature, config.max_new_tokens, config.batch_size)
