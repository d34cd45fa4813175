"""Rollouts for GRPO (paper C.3.2): groups of episodes, and the per-step samples that training reads.

An episode gives one sample per step: the compiler's prompt, what it sampled (an emission and N soft tokens) and how
likely that was. All samples of an episode carry the episode's advantage in its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Protocol

import torch
from torch import Tensor

from agent.deliveries import COMPILED, find
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.records import Episode, StepRecord
from compiler.checkpoint import save_weights
from compiler.gate import Need
from compiler.hf import MemoryCompiler
from compiler.records import Compilation, Compiler, CompileRequest, Decoding
from envs.base import Environment
from executor.records import Executor
from lm.prompt import Prompt
from runtime.attempts import CAUSE_LENGTH
from runtime.errors import is_failure
from soft_mem.projector import Projector
from training import distributed
from training.losses import group_advantages


@dataclass(frozen=True, slots=True)
class Draw:
    """What the executor drew, `chosen` among `candidates`, after a prompt whose soft tokens were mu + T sigma noise."""

    prompt: Prompt
    candidates: tuple[str, ...]
    chosen: int
    noise: Tensor  # (N, d_executor)
    logprob: float  # as the executor says that acted


@dataclass(frozen=True, slots=True)
class Sample:
    """One compiled step. T text tokens were sampled (the forced end-of-turn token of a cut emission was not), then, if
    the executor read them, L more: the N soft tokens, or with a `draw` the executor's action in their place."""

    prompt: Prompt
    emission: tuple[int, ...]  # T ids, or T + 1 with the forced end
    z: Tensor  # (N, d_executor), normalised units
    rollout_logprobs: Tensor  # (T + L,) or, where no soft tokens were read, (T,); as the engine that sampled says
    sampled: int  # T
    advantage: float
    episode: int  # its number among the episodes that give samples
    weight_version: int
    draw: Draw | None = None

    @property
    def soft_read(self) -> bool:
        """Tell whether soft tokens are part of the policy here: what nobody read has earned nothing."""
        return len(self.rollout_logprobs) > self.sampled


@dataclass(frozen=True, slots=True)
class Group:
    """The K episodes of one task, or those of them that this rank played. Failed ones (a dead environment, executor or
    compiler) have no part in training."""

    episodes: tuple[Episode, ...]
    elsewhere: tuple[float, ...] = ()  # rewards of the group's episodes that other ranks played
    leads: bool = True  # whether this rank played the group's first: it speaks for the group where groups are counted
    token_cost: float = 0.0  # see `configs.training.GrpoConfig`

    @property
    def counted(self) -> list[Episode]:
        return [episode for episode in self.episodes if not is_failure(episode.stop_reason)]

    @property
    def rewards(self) -> list[float]:
        """Give the rewards of this rank's, at the end of the episode: success (paper: sparse, environment-driven), less
        what its emissions cost."""
        return [reward(episode, self.token_cost) for episode in self.counted]

    @property
    def all_rewards(self) -> list[float]:
        return [*self.rewards, *self.elsewhere]

    @property
    def advantages(self) -> list[float]:
        """Give the advantages of this rank's episodes in the whole group."""
        return group_advantages(self.all_rewards)[: len(self.counted)]

    @property
    def informative(self) -> bool:
        """Say whether the rewards of the whole group differ: without variance there is no gradient."""
        return len(set(self.all_rewards)) > 1


def reward(episode: Episode, token_cost: float = 0.0) -> float:
    """Give an episode's reward: 0 where it failed, else 1 less `token_cost` for each token that its emissions have at a
    step on average, at least 0. Failures are not charged: where all fail, to fall silent would be what is learnt."""
    written = [len(step.emission_ids) for step in episode.steps if step.emission_kind]
    charge = token_cost * sum(written) / max(1, len(written))
    return max(0.0, 1.0 - charge) if episode.success else 0.0


def gather_groups(places: Sequence[int], episodes: Sequence[Episode], token_cost: float = 0.0) -> list[Group]:
    """Put this rank's episodes, each in its place among the update's groups, into groups that know all their rewards.
    Every rank has to call it. Broken episodes have no part in the update and are not played again: the policy has moved
    on. Raises: ValueError, where every episode of every rank broke; the run resumes before this update."""
    mine: dict[int, list[Episode]] = {}
    for place, episode in zip(places, episodes, strict=True):
        mine.setdefault(place, []).append(episode)
    groups = {place: Group(tuple(played), token_cost=token_cost) for place, played in mine.items()}
    rewards = distributed.gather({place: group.rewards for place, group in groups.items()})
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
            elsewhere=tuple(r for i, share in enumerate(rewards) if i != rank for r in share.get(place, ())),
            leads=not any(place in share for share in rewards[:rank]),
        )
        for place, group in groups.items()
    ]


class Seeded(Protocol):
    """Random numbers that can begin anew: a `torch.Generator`, or what stands for several of them."""

    def manual_seed(self, seed: int, /) -> object: ...


class RolloutPolicy(Protocol):
    """An engine beside the trainer that compiles with weights it is given: `compiler.vllm.VllmCompiler`, or engines in
    other processes (`training.engines.RayCompiler`)."""

    decoding: Decoding

    @property
    def generator(self) -> Seeded: ...

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None: ...

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """Plays episodes with the compiler as it stands now: by itself, or by an engine that gets its weights first."""

    make_env: Callable[[], Environment]
    executor: Executor
    limits: Limits
    concurrency: int = 64
    served: RolloutPolicy | None = None
    need: Need | None = None  # for the delivery that asks it

    def run(self, compiler: MemoryCompiler, specs: Sequence[EpisodeSpec], name: str = COMPILED) -> list[Episode]:
        """Play an episode of each spec, in their order, under a delivery."""
        delivery = find(name).make(self._up_to_date(compiler), self.limits.seed, need=self.need)
        return run_episodes(self.make_env, specs, delivery, self.executor, self.limits, self.concurrency)

    def _up_to_date(self, compiler: MemoryCompiler) -> Compiler:
        """Bring up to date what compiles in this update, with the trainer's weights, decoding and random numbers."""
        if self.served is None:
            return compiler
        with TemporaryDirectory(prefix="memcompiler-rollout-") as folder:
            save_weights(Path(folder), compiler)
            self.served.load_adapter(Path(folder), compiler.weight_version, compiler.projector)
        self.served.decoding = compiler.decoding
        self.served.generator.manual_seed(compiler.generator.initial_seed())
        return self.served


def samples_of(groups: Sequence[Group], compiler: MemoryCompiler, pathwise: bool = False) -> list[Sample]:
    """Make the samples of all groups that can teach something; zero-variance groups are left out here."""
    played = [
        pair for group in groups if group.informative for pair in zip(group.counted, group.advantages, strict=True)
    ]
    return [
        _sample(step, compiler, advantage, index, pathwise)
        for index, (episode, advantage) in enumerate(played)
        for step in episode.steps
        if step.compilation is not None
    ]


def _sample(step: StepRecord, compiler: MemoryCompiler, advantage: float, episode: int, pathwise: bool) -> Sample:
    compiled, shape = step.compilation, (compiler.n_tokens, compiler.projector.config.d_executor)
    if compiled is None or compiled.request is None or compiled.text_logprobs is None:
        raise ValueError("this compilation cannot be trained on: it holds no request or log-probabilities")
    if step.soft_read and (compiled.z is None or compiled.latent_logprobs is None):
        raise ValueError("this compilation cannot be trained on: the executor read soft tokens that it does not hold")
    prompt = compiled.prompt or compiler.encode(compiled.request)  # a service sends ids, no pixels
    if prompt.ids != compiled.prompt_ids:  # token-in/token-out: train on the very tokens that were sampled from
        raise ValueError("the prompt was tokenised differently when it was sampled from")
    draw, logprobs = None, [compiled.text_logprobs.float()]
    if step.soft_read and pathwise:
        draw = _draw(step, compiled)
        logprobs.append(torch.tensor([draw.logprob]))
    elif step.soft_read and compiled.latent_logprobs is not None:
        logprobs.append(compiled.latent_logprobs.float())
    z = torch.zeros(shape) if compiled.z is None else compiled.z  # nobody read them: they have no part in the policy
    return Sample(
        prompt,
        compiled.emission_ids,
        z,
        torch.cat(logprobs),
        len(compiled.text_logprobs),
        advantage,
        episode,
        compiled.weight_version,
        draw,
    )


def _draw(step: StepRecord, compiled: Compilation) -> Draw:
    action = step.decision
    if action is None or action.prompt is None or action.logprob is None or action.chosen is None:
        raise ValueError(
            "a pathwise gradient needs actions that were drawn among admissible ones: this environment lists none, or "
            "the executor writes free text (loss.latent_gradient=score goes without)"
        )
    assert compiled.z is not None and step.admissible is not None
    noise = torch.zeros_like(compiled.z) if compiled.noise is None else compiled.noise
    prompt = replace(action.prompt, soft=None)  # made again, with its gradient, from mu, sigma and noise
    return Draw(prompt, step.admissible, action.chosen, noise, action.logprob)
