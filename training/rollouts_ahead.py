"""Rollouts that run ahead of GRPO's updates, in a thread, with weights of bounded age."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agent.records import Episode
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from training.rollout import Sample

Snapshot = dict[str, Tensor] | None  # weights that roll out; None: those of the compiler in training


@dataclass(frozen=True, slots=True)
class Rollout:
    """This rank's episodes of an update."""

    group_indices: list[int]  # of each episode, among the update's groups
    episodes: list[Episode]
    weight_version: int  # update whose weights sampled them
    seconds: float


class RolloutsAhead:
    """Plays the episodes of the next updates while the current one is learned.

    The weights that play an update are a function of its number: those of `max_staleness` updates before it, or those
    of the newest pause (a checkpoint, say) if that is later. Nothing is played across a pause, so a resumed run has the
    same episodes.

    Args:
        play: Plays an update's episodes with a snapshot of the weights, and their version.
        pauses_after: Whether there is a pause after that many updates.
    """

    def __init__(
        self, play: Callable[[int, Snapshot, int], Rollout], max_staleness: int, pauses_after: Callable[[int], bool]
    ) -> None:
        self._play, self._max_staleness, self._pauses_after = play, max_staleness, pauses_after
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._rollouts: dict[int, Future[Rollout]] = {}  # by update

    def take(self, update: int, snapshot: Callable[[], Snapshot]) -> Rollout:
        """Return an update's episodes, and have those of coming updates played that may have its weights."""
        if not self._max_staleness:
            return self._play(update, snapshot(), update)
        last = update
        while last < update + self._max_staleness and not self._pauses_after(last + 1):
            last += 1
        if new := [ahead for ahead in range(update, last + 1) if ahead not in self._rollouts]:
            weights = snapshot()
            self._rollouts |= {ahead: self._thread.submit(self._play, ahead, weights, update) for ahead in new}
        return self._rollouts.pop(update).result()

    def close(self) -> None:
        """Give up rollouts that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def copy_for_rollouts(compiler: MemoryCompiler, with_base: bool) -> MemoryCompiler:
    """Copy a compiler, with a random generator of its own. Without the base, which an engine holds, only LoRA and
    projector have values, and they must still be set."""
    memo: dict[int, Any] = {id(compiler.generator): torch.Generator(device=compiler.generator.device)}
    if not with_base:
        trained = {id(parameter) for parameter in checkpoint.trained_parameters(compiler).values()}
        for parameter in compiler.parameters():
            empty = torch.empty_like(parameter, device="cpu" if id(parameter) in trained else "meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(compiler, memo)


def check_weight_versions(episodes: Sequence[Episode], version: int) -> None:
    """Raise RuntimeError if any step was compiled with weights of another version."""
    compilations = (step.compilation for episode in episodes for step in episode.steps)
    if other := next((c for c in compilations if c is not None and c.weight_version != version), None):
        raise RuntimeError(f"a rollout with weights of version {version} has some of version {other.weight_version}")


def check_staleness(samples: Sequence[Sample], update: int, limit: int) -> None:
    """Raise RuntimeError if any sample was played with weights more than `limit` updates older than `update`'s."""
    if (oldest := min((s.weight_version for s in samples), default=update)) < update - limit:
        raise RuntimeError(
            f"update {update} has a sample of weights of version {oldest}, older than max_staleness {limit} allows"
        )
