"""Rollouts for GRPO (paper C.3.2): groups of episodes, and training samples of their steps.

Every compiled step of an episode becomes one sample: the compiler's prompt, the sampled emission and N soft tokens, and
their log-probabilities. All samples of an episode have the episode's advantage in its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Protocol

import torch
from torch import Tensor

from agent.deliveries import COMPILED, find
from agent.episode import EpisodeLimits, EpisodeSpec, MakeEnvironment, run_episodes
from agent.records import Episode, StepRecord
from compiler.checkpoint import save_weights
from compiler.gate import CompileGate
from compiler.hf import MemoryCompiler
from compiler.records import Compilation, Compiler, CompileRequest, Decoding
from executor.records import Executor
from lm.prompt import Prompt
from runtime.attempts import CAUSE_LENGTH
from runtime.errors import is_failure
from soft_mem.projector import Projector
from training import distributed
from training.losses import group_advantages


@dataclass(frozen=True, slots=True)
class ActionSample:
    """The executor's sampled action: index `chosen` of `candidates`, after a prompt whose soft tokens were
    mu + T sigma noise."""

    prompt: Prompt
    candidates: tuple[str, ...]
    chosen: int
    noise: Tensor  # (N, d_executor)
    logprob: float  # from the executor that acted


@dataclass(frozen=True, slots=True)
class Sample:
    """One compiled step: T sampled text tokens (without the forced end-of-turn token of a truncated emission) and, if
    the executor read the soft tokens, L more: the N soft tokens, or the executor's action as one (`action`)."""

    prompt: Prompt
    emission: tuple[int, ...]  # T ids, or T + 1 with the forced end
    z: Tensor  # (N, d_executor), normalised units
    rollout_logprobs: Tensor  # (T + L,), or (T,) if no soft tokens were read; from the engine that sampled
    sampled: int  # T
    advantage: float
    episode: int  # index among the episodes with samples
    weight_version: int
    action: ActionSample | None = None

    @property
    def soft_read(self) -> bool:
        """Return whether soft tokens belong to the policy at this step: unread ones cannot have earned the reward."""
        return len(self.rollout_logprobs) > self.sampled


@dataclass(frozen=True, slots=True)
class Group:
    """The K episodes of one task, or this rank's part of them. Failed episodes (of environment, executor or compiler)
    are excluded from training."""

    episodes: tuple[Episode, ...]
    other_rewards: tuple[float, ...] = ()  # of the group's valid episodes on other ranks
    is_first: bool = True  # whether no lower rank has valid episodes of the group; used to count each group once
    token_cost: float = 0.0  # `configs.training.GrpoConfig.token_cost`

    @property
    def valid(self) -> list[Episode]:
        return [episode for episode in self.episodes if not is_failure(episode.stop_reason)]

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of this rank's valid episodes."""
        return [reward(episode, self.token_cost) for episode in self.valid]

    @property
    def all_rewards(self) -> list[float]:
        return [*self.rewards, *self.other_rewards]

    @property
    def advantages(self) -> list[float]:
        """Return the advantages of this rank's valid episodes in the whole group."""
        return group_advantages(self.all_rewards)[: len(self.valid)]

    @property
    def has_variance(self) -> bool:
        """Return whether rewards of the whole group differ; if not, all advantages are 0."""
        return len(set(self.all_rewards)) > 1


def reward(episode: Episode, token_cost: float = 0.0) -> float:
    """Compute an episode's reward: 0 without success, else 1 - `token_cost` x (mean tokens per emission), at least 0.
    Unsuccessful episodes pay no cost, so that a group without success does not teach silence."""
    written = [len(step.emission_ids) for step in episode.steps if step.emission_kind]
    charge = token_cost * sum(written) / max(1, len(written))
    return max(0.0, 1.0 - charge) if episode.success else 0.0


def gather_groups(indices: Sequence[int], episodes: Sequence[Episode], token_cost: float = 0.0) -> list[Group]:
    """Group this rank's episodes by group index, with the rewards of other ranks. Failed episodes are excluded and not
    repeated, because the policy changes. Every rank must call it. Raises: ValueError, if all episodes of all ranks
    failed; the run resumes before this update."""
    mine: dict[int, list[Episode]] = {}
    for index, episode in zip(indices, episodes, strict=True):
        mine.setdefault(index, []).append(episode)
    groups = {index: Group(tuple(played), token_cost=token_cost) for index, played in mine.items()}
    rewards = distributed.gather({index: group.rewards for index, group in groups.items()})
    causes = [cause for part in distributed.gather([e.failure for e in episodes if e.failure]) for cause in part]
    if not any(values for share in rewards for values in share.values()):
        raise ValueError(
            f"every episode of the update broke ({len(causes)}), the first {shorten(causes[0], CAUSE_LENGTH)}. Mend "
            "that and run the same command again: it resumes at the newest checkpoint"
        )
    rank = distributed.rank()
    return [
        replace(
            group,
            other_rewards=tuple(r for i, share in enumerate(rewards) if i != rank for r in share.get(index, ())),
            is_first=not any(index in share for share in rewards[:rank]),
        )
        for index, group in groups.items()
    ]


class Seedable(Protocol):
    """Random numbers with a seed, such as a `torch.Generator`."""

    def manual_seed(self, seed: int, /) -> object: ...


class RolloutPolicy(Protocol):
    """Compiles in place of the trainer's model, with its weights: `compiler.vllm.VllmCompiler`, or
    `training.ray_engines.RayCompiler` for engines in other processes."""

    decoding: Decoding

    @property
    def generator(self) -> Seedable: ...

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None: ...

    def compile(self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None) -> list[Compilation]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """Plays episodes with the compiler's current weights, by the compiler itself or by `served`."""

    make_env: MakeEnvironment
    executor: Executor
    limits: EpisodeLimits
    concurrency: int = 64
    served: RolloutPolicy | None = None
    gate: CompileGate | None = None  # gate of the delivery `compiled_gated`

    def run(self, compiler: MemoryCompiler, specs: Sequence[EpisodeSpec], name: str = COMPILED) -> list[Episode]:
        """Play one episode of each spec with a delivery; returns them in order."""
        found = find(name)
        delivery = found.create(self._synced(compiler), self.limits.seed, gate=self.gate)
        limits = replace(self.limits, draw_seed=compiler.generator.initial_seed())
        return run_episodes(
            self.make_env,
            [spec.without_memory() for spec in specs] if found.memory == "empty" else specs,
            delivery=delivery,
            executor=self.executor,
            limits=limits,
            concurrency=self.concurrency,
        )

    def _synced(self, compiler: MemoryCompiler) -> Compiler:
        """Return what compiles, with the trainer's weights, decoding and seed."""
        if self.served is None:
            return compiler
        with TemporaryDirectory(prefix="memcompiler-rollout-") as folder:
            save_weights(Path(folder), compiler)
            self.served.load_adapter(Path(folder), compiler.weight_version, compiler.projector)
        self.served.decoding = compiler.decoding
        self.served.generator.manual_seed(compiler.generator.initial_seed())
        return self.served


def samples_of(groups: Sequence[Group], compiler: MemoryCompiler, pathwise: bool = False) -> list[Sample]:
    """Collect the samples of groups with variance. `pathwise`: with the executor's actions instead of soft tokens."""
    episodes = [
        pair for group in groups if group.has_variance for pair in zip(group.valid, group.advantages, strict=True)
    ]
    return [
        _sample(step, compiler, advantage=advantage, episode=index, pathwise=pathwise)
        for index, (episode, advantage) in enumerate(episodes)
        for step in episode.steps
        if step.compilation is not None
    ]


def _sample(step: StepRecord, compiler: MemoryCompiler, advantage: float, episode: int, pathwise: bool) -> Sample:
    compiled, shape = step.compilation, (compiler.n_tokens, compiler.projector.config.d_executor)
    if compiled is None or compiled.request is None or compiled.text_logprobs is None:
        raise ValueError("cannot train on a compilation without request or log-probabilities")
    if step.soft_read and (compiled.z is None or compiled.latent_logprobs is None):
        raise ValueError("cannot train on a compilation without the soft tokens that the executor read")
    prompt = compiled.prompt or compiler.encode(compiled.request)  # a service returns ids without pixels
    if prompt.ids != compiled.prompt_ids:  # the ratio needs the same tokens
        raise ValueError("the prompt is tokenised differently here than by the engine that sampled")
    action, logprobs = None, [compiled.text_logprobs.float()]
    if step.soft_read and pathwise:
        action = _action_sample(step, compiled)
        logprobs.append(torch.tensor([action.logprob]))
    elif step.soft_read and compiled.latent_logprobs is not None:
        logprobs.append(compiled.latent_logprobs.float())
    z = torch.zeros(shape) if compiled.z is None else compiled.z
    return Sample(
        prompt=prompt,
        emission=compiled.emission_ids,
        z=z,
        rollout_logprobs=torch.cat(logprobs),
        sampled=len(compiled.text_logprobs),
        advantage=advantage,
        episode=episode,
        weight_version=compiled.weight_version,
        action=action,
    )


def _action_sample(step: StepRecord, compiled: Compilation) -> ActionSample:
    action = step.decision
    if action is None or action.prompt is None or action.logprob is None or action.chosen is None:
        raise ValueError(
            "loss.latent_gradient=pathwise needs actions sampled from admissible ones: this environment lists none, or "
            "the executor generates free text; use loss.latent_gradient=density_root"
        )
    assert compiled.z is not None and step.admissible is not None
    noise = torch.zeros_like(compiled.z) if compiled.noise is None else compiled.noise
    prompt = replace(action.prompt, soft=None)  # recomputed with gradient from mu, sigma and noise
    return ActionSample(
        prompt=prompt, candidates=step.admissible, chosen=action.chosen, noise=noise, logprob=action.logprob
    )
