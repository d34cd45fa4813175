"""Stage 2, GRPO (paper C.3.2, Eq. 8): compiler LoRA and projector from binary success, the executor frozen.

    memcompiler train grpo -c grpo/quickstart --out out/grpo
    memcompiler train grpo -c grpo/paper cluster=ray --out runs/grpo                     (engines beside the trainers)
    torchrun --nproc_per_node 8 -m memcompiler train grpo -c grpo/paper compiler.engine=hf --out runs/grpo    (without)

One update: `tasks` tasks, a group of `group_size` sampled episodes for each, the advantage of every episode in its
group, and a clipped policy-gradient step on all of its samples. Ranks share out the episodes: a group may be played by
several, which tell each other its rewards. The policy is the emission's text AND the N Gaussian soft tokens, which
count as N more tokens (`latent_gradient: score`, Eq. 8) at the steps at which the executor reads them
(`executor.soft_on`): the executor has no part in the gradient. `pathwise` takes
another unbiased estimate of the same gradient: the noise of the soft tokens is given, they are mu + sigma noise, and
the action that the executor draws after reading them is the policy's last token. Reward then reaches mu and sigma
through the frozen executor, in the one direction that matters; the score function has to find it among N d random ones.

How the global batch is split changes nothing: token weights are computed from global counts. All randomness is a
function of (seed, update): resuming needs no generator state.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from agent.episode import EpisodeSpec
from agent.records import Episode
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.training import GrpoConfig, PolicyLoss
from executor.base import TokenExecutor
from executor.hf import FrozenExecutor
from executor.records import Executor
from lm.device import to_device
from lm.prompt import Prompt
from soft_mem.projector import Gaussian
from training import distributed
from training.backend import BACKENDS
from training.evaluation import HeldOutTasks
from training.losses import PolicyTokens, policy_loss
from training.metrics import Scores, Totals, rollout_means, token_means, token_totals
from training.rollout import Draw, Group, RolloutEngine, Sample, gather_groups, samples_of
from training.trainer import Trainer, permuted

Row = tuple[Sample, Tensor, Tensor | None, Tensor | None]  # its weights, old and reference log-probabilities: (T + L,)


class ModelExecutor(Executor, Protocol):
    """An executor that can say whether it is still the same."""

    def hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """This rank's episodes of an update."""

    places: list[int]  # which group of the update each belongs to
    episodes: list[Episode]
    weight_version: int  # the update whose weights sampled them
    seconds: float


class GrpoTrainer(Trainer[tuple[dict[str, float], list[Group]]]):
    """Trains on episodes that it plays; a step, here an update, gives its metrics and the groups it learnt from."""

    stage, unit, counts = "grpo", "update", "tasks"

    def __init__(
        self,
        config: GrpoConfig,
        compiler: MemoryCompiler,
        executor: ModelExecutor,
        engine: RolloutEngine,
        specs: Sequence[EpisodeSpec],
        out: Path,
        facts: dict[str, Any] | None = None,
        played: HeldOutTasks | None = None,
    ) -> None:
        if not specs:
            raise ValueError("there are no tasks to train on: check split, limit and the environment's data")
        if (episodes := config.tasks * config.group_size) < distributed.world_size():
            raise ValueError(
                f"{config.tasks} tasks x {config.group_size} episodes an update leave {distributed.world_size()} ranks "
                f"only {episodes} episodes, some none: set tasks or group_size higher, or start fewer processes"
            )
        self.config, self.executor, self.engine, self.specs = config, executor, engine, list(specs)
        hash = distributed.once_per_node(executor.hash)
        super().__init__(config, compiler, hash, len(specs), config.updates, out, facts, played)
        self.frozen = self.executor_hash
        compiler.decoding = sampling(config)
        self.pathwise = config.loss.latent_gradient == "pathwise"
        self.latents = 1 if self.pathwise else compiler.n_tokens  # how many tokens of the policy follow the text
        backend = BACKENDS[config.backend]
        # What rolls out: the policy itself, unless it is about to be cut into slices or to change meanwhile.
        copied = backend.is_sharded or config.overlap
        self.sampler = _copy(compiler, engine.served is None) if copied else compiler
        self.backend = backend(compiler, None, config.optimizer, config.loss.latent_weight > 0)
        self.reference = self.backend.weights() if config.loss.kl else {}
        if config.gradient_checkpointing:
            compiler.backbone.recompute_layers()
            if self.pathwise and isinstance(executor, FrozenExecutor):
                executor.backbone.recompute_layers()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: Future[Rollout] | None = None  # of the next update, sampled by the weights before this one

    def executor_fingerprint(self) -> str:
        return distributed.once_per_node(self.executor.hash)

    def specs_of(self, update: int) -> list[EpisodeSpec]:
        """Choose the tasks of an update: a fresh permutation each time all have been seen."""
        places = range(update * self.config.tasks, (update + 1) * self.config.tasks)
        turns = [divmod(place, len(self.specs)) for place in places]
        return [self.specs[permuted(len(self.specs), self.config.seed, epoch)[i]] for epoch, i in turns]

    def take_step(self) -> tuple[dict[str, float], list[Group]]:
        started, update = time.perf_counter(), self.step
        rollout = self._ahead.result() if self._ahead else self._rollout(update)()
        # Nothing is under way when a checkpoint is written, so that a run that resumes there sees what this one sees,
        # nor while held-out tasks are played: they may find the best one.
        pauses = self.is_due(update + 1) or self.is_evaluated(update + 1)
        self._ahead = None if pauses or not self.config.overlap else self._background.submit(self._rollout(update + 1))
        rolled = time.perf_counter()
        groups = gather_groups(rollout.places, rollout.episodes, self.config.token_cost)
        metrics = self.learn(samples_of(groups, self.compiler, self.pathwise), update)
        seconds = {
            "seconds_rollout": rollout.seconds,
            "seconds_waited": rolled - started,
            "seconds_update": time.perf_counter() - rolled,
        }
        self.step += 1
        metrics = {"update": float(self.step), **rollout_means(groups), **metrics, **seconds}
        metrics["staleness"] = float(update - rollout.weight_version)
        if self.played is not None and self.is_evaluated(self.step):
            self._bring_up_to_date()
            metrics |= self.played.play(self.sampler)
        if self.best.hear(metrics, self.step) or self.is_over or self.is_due(self.step):
            self.save()
        return metrics | {"seconds": time.perf_counter() - started}, groups

    def _rollout(self, update: int) -> Callable[[], Rollout]:
        """Prepare this rank's rollouts for `update`, by the weights as they are now: to be called at once, or in
        another thread while they change."""
        chosen = self.specs_of(update)
        places = [e // self.config.group_size for e in distributed.share(len(chosen) * self.config.group_size)]
        self._bring_up_to_date()
        seed = (self.config.seed * 1_000_003 + update) * 1024 + distributed.rank()
        self.sampler.generator.manual_seed(seed)
        if isinstance(self.engine.executor, TokenExecutor):
            self.engine.executor.generator.manual_seed(seed)

        def play() -> Rollout:
            started = time.perf_counter()
            episodes = self.engine.run(self.sampler, [chosen[place] for place in places], self.config.delivery)
            check_versions(episodes, self.sampler.weight_version)
            return Rollout(places, episodes, self.sampler.weight_version, time.perf_counter() - started)

        return play

    def _bring_up_to_date(self) -> None:
        """Give what rolls out the weights as they are now."""
        if self.sampler is not self.compiler:
            checkpoint.put(self.sampler, self.backend.weights())
        self.sampler.weight_version = self.step

    # -- the update ---------------------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Sample], update: int = 0) -> dict[str, float]:
        """Make `iterations` passes over this rank's samples in `minibatches` optimiser steps each; gives global means.
        Every rank has to call it, with samples or without."""
        config = self.config
        self.compiler.eval()  # LoRA dropout off: the ratio compares like with like
        weights, first, total = token_weights(samples, config.loss)
        if total == 0:  # no group had any variance: nothing to learn, on no rank
            return {"samples": 0.0, "skipped": 1.0}
        rate = self.schedule(config.optimizer, update)
        old = self._score_all(samples) if self._looks_back() else [None] * len(samples)
        reference = self._reference_scores(samples) if config.loss.kl else [None] * len(samples)
        rows = list(zip(samples, weights, old, reference, strict=True))
        totals = Totals()
        norms = []
        for iteration in range(config.iterations):
            for chosen in _minibatches(total, config.minibatches, config.seed, update * config.iterations + iteration):
                norms.append(self._step([rows[i - first] for i in chosen if first <= i < first + len(rows)], totals))
        counts = {"samples": float(total), "skipped": 0.0, "grad_norm": max(norms), "lr": rate}
        return token_means(totals) | counts

    def _looks_back(self) -> bool:
        """Say whether the policy moves between sampling and a gradient: then old log-probabilities are scored first."""
        return self.config.minibatches * self.config.iterations > 1

    def _step(self, rows: Sequence[Row], totals: Totals) -> float:
        """Take one optimiser step on rows of this rank; returns the gradient norm before clipping."""
        for part in self.backend.micro_batches(rows, self.config.micro_batch_size):
            loss, stats = self.backend.forward(partial(self._loss, part or [self._idle()]))
            self.backend.backward(loss * self.config.minibatches)
            if part:
                totals.add(stats)
        return self.backend.step()

    def _idle(self) -> Row:
        """Make a row that counts nothing: a rank without rows keeps step by it."""
        end, n = self.compiler.backbone.end_id, self.compiler.n_tokens
        z, zeros = torch.zeros(n, self.compiler.projector.config.d_executor), torch.zeros(1 + self.latents)
        draw = None
        if self.pathwise:
            assert isinstance(self.executor, FrozenExecutor)  # its settings say so
            draw = Draw(Prompt((self.executor.placeholder,) * n, None), ("",), 0, z, 0.0)
        sample = Sample(Prompt((end,)), (end,), z, zeros, 1, 0.0, 0, self.step, draw)
        return sample, zeros, zeros if self._looks_back() else None, zeros if self.config.loss.kl else None

    def _loss(self, rows: Sequence[Row]) -> tuple[Tensor, Totals]:
        """Compute the loss of some samples, and what the record says of them."""
        samples, weights, old, reference = zip(*rows, strict=True)
        scores = self.score(samples)
        like, n, sampled = scores.logprobs, self.latents, [s.sampled for s in samples]
        padded = lambda values: _padded(values, sampled, like, n)
        rollout, weight, before = padded([s.rollout_logprobs for s in samples]), padded(weights), padded(old)
        assert rollout is not None and weight is not None
        tokens = PolicyTokens(
            like,
            like.detach() if before is None else before,
            rollout,
            padded(reference),
            to_device(torch.tensor([s.advantage for s in samples]), like.device),
            weight,
            scores.mask,
        )
        loss, surrogate = policy_loss(tokens, self.config.loss)
        return loss, token_totals(scores, tokens, surrogate, n)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score what was sampled under the weights as they are, at the sampling temperatures."""
        scored = self.compiler.score([s.prompt for s in samples], [s.emission for s in samples])
        full = self.compiler.logprobs(scored.logits)
        text = full.gather(2, scored.targets.unsqueeze(-1)).squeeze(-1)
        if self.pathwise:
            latent = self._drawn(scored.gaussian, samples)
        else:
            z = to_device(torch.stack([s.z for s in samples]), scored.gaussian.mu.device)
            latent = scored.gaussian.log_prob(z, self.compiler.decoding.soft_temperature or 1.0)
        sampled, read = to_device(torch.tensor([[s.sampled, s.soft_read] for s in samples]), text.device).unbind(1)
        text_mask = torch.arange(text.shape[1], device=text.device) < sampled[:, None]
        mask = torch.cat([text_mask, read.bool()[:, None].expand_as(latent)], 1)
        entropy = -(full.exp() * full.masked_fill(full.isinf(), 0)).sum(-1).detach()
        sigma = scored.gaussian.log_sigma.detach().float()
        return Scores(
            torch.cat([text, latent], 1).masked_fill(~mask, 0.0),
            mask,
            entropy * text_mask,
            (sigma + 0.5 * math.log(2 * math.pi * math.e)).mean((1, 2)),
            sigma.exp().mean((1, 2)),
            scored.gaussian.mu.detach().float().abs().mean((1, 2)),
        )

    def _drawn(self, gaussian: Gaussian, samples: Sequence[Sample]) -> Tensor:
        """Score the actions that the executor drew, with the gradient of its soft tokens: (B, 1), 0 without a draw."""
        assert isinstance(self.executor, FrozenExecutor)  # pathwise: its settings say so
        # The projector has its part in every backward pass, whether or not a row has a draw: ranks keep step.
        nothing = 0.0 * gaussian.mu.float().flatten(1).sum(1, keepdim=True)
        rows = [i for i, s in enumerate(samples) if s.draw is not None]
        draws = [s.draw for s in samples if s.draw is not None]
        if not draws:
            return nothing
        at = to_device(torch.tensor(rows), nothing.device)
        given = Gaussian(gaussian.mu[at], gaussian.log_sigma[at])
        noise = to_device(torch.stack([draw.noise for draw in draws]), nothing.device).to(gaussian.mu)
        soft = self.compiler.projector.to_embeddings(given.at(noise, self.compiler.decoding.soft_temperature))
        prompts = [replace(draw.prompt, soft=row) for draw, row in zip(draws, soft, strict=True)]
        scores = self.executor.candidate_logprobs(prompts, [draw.candidates for draw in draws])
        chosen = [self.executor.action_logprobs(s)[draw.chosen] for s, draw in zip(scores, draws, strict=True)]
        return nothing.index_add(0, at, torch.stack(chosen)[:, None].to(nothing))

    @torch.no_grad()
    def _score_all(self, samples: Sequence[Sample]) -> list[Tensor | None]:
        """Score every sample under the weights as they are: (T + L,) each."""
        rows: list[Tensor | None] = []
        for part in self.backend.micro_batches(samples, self.config.micro_batch_size):
            score = partial(self.score, part or [self._idle()[0]])
            scores = self.backend.forward(lambda score=score: score().logprobs)[: len(part)].cpu()
            cut, n = scores.shape[1] - self.latents, self.latents
            rows += [
                torch.cat([row[: s.sampled], row[cut : cut + n * s.soft_read]])
                for row, s in zip(scores, part, strict=True)
            ]
        return rows

    def _reference_scores(self, samples: Sequence[Sample]) -> list[Tensor | None]:
        """Score under the weights that training started from."""
        now = self.backend.weights()
        self.backend.load_weights(self.reference)
        try:
            return self._score_all(samples)
        finally:
            self.backend.load_weights(now)


def _copy(compiler: MemoryCompiler, whole: bool) -> MemoryCompiler:
    """Copy what rolls out, with random numbers of its own. Not `whole`: where an engine compiles in its place, it is
    what the engine is told, LoRA and projector, which have yet to be put there; of the base nothing but shapes."""
    memo: dict[int, Any] = {id(compiler.generator): torch.Generator(device=compiler.generator.device)}
    if not whole:
        trained = {id(parameter) for parameter in checkpoint.trained_parameters(compiler).values()}
        for parameter in compiler.parameters():
            made = torch.empty_like(parameter, device="cpu" if id(parameter) in trained else "meta")
            memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return copy.deepcopy(compiler, memo)


def check_versions(episodes: Sequence[Episode], version: int) -> None:
    """Raise RuntimeError where something was compiled with other weights than were asked for."""
    made = (step.compilation for episode in episodes for step in episode.steps)
    if other := next((c for c in made if c is not None and c.weight_version != version), None):
        raise RuntimeError(f"a rollout with weights of version {version} has some of version {other.weight_version}")


def sampling(config: GrpoConfig) -> Decoding:
    """Say how rollouts are drawn, and scored again."""
    how, compiler = config.sampling, config.compiler
    return Decoding(how.temperature, compiler.max_new_tokens, compiler.batch_size, how.latent_temperature)


def token_weights(samples: Sequence[Sample], settings: PolicyLoss) -> tuple[list[Tensor], int, int]:
    """Compute the weight of every token (T + L,) of every local sample, the index of the first local sample in the
    global order, and the global number of samples. Weights sum to 1 over all samples of all ranks: `token` weighs all
    tokens alike, `step` all samples, `episode` all episodes (each spread over its samples, those over their tokens)."""
    relative = [
        torch.cat(
            [
                torch.full((s.sampled,), settings.text_weight),
                torch.full((len(s.rollout_logprobs) - s.sampled,), settings.latent_weight),
            ]
        )
        for s in samples
    ]
    steps = Counter(s.episode for s in samples)
    counts = {
        "samples": float(len(samples)),
        "episodes": float(len(steps)),
        "tokens": float(sum(r.sum() for r in relative)),
    }
    shares = distributed.gather(counts)
    total = {name: sum(share[name] for share in shares) for name in counts}
    first = int(sum(share["samples"] for share in shares[: distributed.rank()]))
    if total["samples"] == 0:
        return [], 0, 0
    divisor = {
        "token": lambda s, r: total["tokens"],
        "step": lambda s, r: float(r.sum()) * total["samples"],
        "episode": lambda s, r: float(r.sum()) * steps[s.episode] * total["episodes"],
    }[settings.aggregation]
    weights = [r / max(divisor(s, r), 1e-12) for s, r in zip(samples, relative, strict=True)]
    return weights, first, int(total["samples"])


def _minibatches(total: int, number: int, seed: int, turn: int) -> list[list[int]]:
    """Split global sample indices 0..total-1 into `number` parts, shuffled; the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    order = torch.randperm(total, generator=generator).tolist() if number > 1 else list(range(total))
    return [order[i::number] for i in range(number)]


def _padded(rows: Sequence[Tensor | None], sampled: Sequence[int], like: Tensor, n: int) -> Tensor | None:
    """Pad rows (T_i + n,) or (T_i,), which are on the host, as `like` (B, T + n): their T_i text tokens from the left,
    what follows them in the last n columns, 0 between. None for rows of None."""
    padded = torch.zeros(like.shape)
    for i, (row, text) in enumerate(zip(rows, sampled, strict=True)):
        if row is None:
            return None
        padded[i, :text] = row[:text]
        if len(row) > text:
            padded[i, like.shape[1] - n :] = row[text:]
    return to_device(padded, like.device).to(like.dtype)
