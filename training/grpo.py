"""Stage 2, GRPO (paper C.3.2, Eq. 8): compiler LoRA and projector from binary success, the executor frozen.

    memcompiler train grpo --config configs/grpo/quickstart.yaml --out out/grpo
    torchrun --nproc_per_node 8 -m training.grpo --config configs/grpo/paper.yaml --out runs/grpo      (data parallel)

One update: `tasks` tasks, a group of `group_size` sampled episodes for each, the advantage of every episode in its
group, and a clipped policy-gradient step on all of its samples. The policy is the emission's text AND the N Gaussian
soft tokens, which count as N more tokens (`latent_gradient: score`, Eq. 8): the executor has no part in the gradient,
the actor needs none. `pathwise` takes another unbiased estimate of the same gradient: the noise of the soft tokens is
what is given, they are mu + sigma noise, and the action that the executor draws after reading them is the policy's last
token; reward then reaches mu and sigma through the frozen executor, in the one direction that matters, where the score
function has to find it among N d random ones.

Which share of the global batch a rank or a micro-batch holds changes nothing: token weights are computed from global
counts. All randomness is a function of (seed, update): resuming needs no generator state.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent.episode import EpisodeSpec
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.training import GrpoConfig
from executor.base import TokenExecutor
from executor.hf import FrozenExecutor
from lm.prompt import Prompt
from runtime.errors import is_failure
from soft_mem.projector import Gaussian
from training import distributed
from training.backend import BACKENDS, make_optimizer
from training.checkpoint import read_checkpoint, save_checkpoint
from training.losses import clipped_surrogate, cosine_with_warmup, kl_estimate
from training.rollout import Draw, Group, RolloutEngine, Sample, samples_of

if TYPE_CHECKING:
    from executor.api import ApiExecutor
    from executor.client import RemoteExecutor
    from executor.vllm import VllmExecutor


@dataclass(frozen=True, slots=True)
class Scores:
    """What a forward pass says of B samples; but for `logprobs` without gradient. L: N soft tokens, or 1 action."""

    logprobs: Tensor  # (B, T + L), 0 where there is no token
    mask: Tensor  # (B, T + L)
    text_entropy: Tensor  # (B, T)
    latent_entropy: Tensor  # (B,), nats per dimension
    sigma: Tensor  # (B,), mean
    mu: Tensor  # (B,), mean |mu|


@dataclass(frozen=True, slots=True)
class Rollout:
    groups: list[Group]
    weight_version: int  # the update whose weights sampled them
    seconds: float


class GrpoTrainer:
    """Owns optimiser and cursor; `updates()` yields the metrics of each update and the groups it learnt from."""

    def __init__(
        self, config: GrpoConfig, compiler: MemoryCompiler,
        executor: FrozenExecutor | VllmExecutor | RemoteExecutor | ApiExecutor, engine: RolloutEngine,
        specs: Sequence[EpisodeSpec], out: Path, facts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if not specs:
            raise ValueError("there are no tasks to train on: check split, limit and the environment's data")
        self.config, self.compiler, self.executor, self.engine = config, compiler, executor, engine
        self.specs, self.out, self.facts = list(specs), out, facts or {}
        self.executor_hash = executor.hash()
        compiler.decoding = sampling(config)
        self.pathwise = config.latent_gradient == "pathwise"
        self.latents = 1 if self.pathwise else compiler.n_tokens  # how many tokens of the policy follow the text
        backend = BACKENDS[config.backend]
        # What rolls out: the policy itself, unless it is about to be cut into slices or to change meanwhile.
        self.sampler = _whole_copy(compiler) if backend.is_sharded or config.overlap else compiler
        projector_lr = (config.projector_lr or config.lr) if config.latent_weight else None
        self.backend = backend(compiler, None, lambda: make_optimizer(config, compiler, projector_lr), config.grad_clip)
        self.reference = self.backend.weights() if config.kl else {}
        self.update = 0
        self._background = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: Future[Rollout] | None = None  # of the next update, sampled by the weights before this one

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint of the run, if there is one."""
        found = checkpoint.latest(self.out / "checkpoints")
        if found is None:
            return False
        tensors, state = read_checkpoint(found, self.compiler)
        if (state["tasks"], state["seed"]) != (len(self.specs), self.config.seed):
            raise checkpoint.CheckpointError(f"{found} was made on {state['tasks']} tasks with seed {state['seed']}")
        self.backend.load(tensors)
        self.update = state["step"]
        return True

    def updates(self) -> Iterator[tuple[dict[str, float], list[Group]]]:
        while self.update < self.config.updates:
            yield self._update(self.update)
        if self.executor.hash() != self.executor_hash:
            raise RuntimeError("the executor's parameters changed during training: it is not frozen")

    def save(self) -> None:
        tensors = self.backend.state()  # all ranks: it may have to be gathered
        if distributed.rank() == 0:
            state = {
                "stage": "grpo", "step": self.update, "total": self.config.updates, "tasks": len(self.specs),
                "seed": self.config.seed, "executor_hash": self.executor_hash, **self.facts,
            }  # fmt: skip
            save_checkpoint(self.out / "checkpoints", self.compiler, tensors, state, self.config.keep)
        distributed.barrier()

    def specs_of(self, update: int) -> list[EpisodeSpec]:
        """The tasks of an update: the training tasks in a fresh permutation each time all have been seen."""
        n, size = len(self.specs), self.config.tasks
        chosen = []
        for position in range(update * size, (update + 1) * size):
            epoch, i = divmod(position, n)
            generator = torch.Generator().manual_seed(self.config.seed * 100_003 + epoch)
            chosen.append(self.specs[torch.randperm(n, generator=generator)[i]])
        return chosen

    def _update(self, update: int) -> tuple[dict[str, float], list[Group]]:
        started = time.perf_counter()
        rollout = self._ahead.result() if self._ahead else self._rollout(update)()
        saves = (update + 1) % self.config.save_every == 0 or update + 1 == self.config.updates
        # Nothing is under way when a checkpoint is written, so that a run that resumes there sees what this one sees.
        self._ahead = None if saves or not self.config.overlap else self._background.submit(self._rollout(update + 1))
        rolled = time.perf_counter()
        metrics = self.learn(samples_of(rollout.groups, self.compiler, self.pathwise), update)
        seconds = {
            "seconds_rollout": rollout.seconds, "seconds_waited": rolled - started,
            "seconds_update": time.perf_counter() - rolled,
        }  # fmt: skip
        self.update += 1
        if saves:
            self.save()
        metrics = {"update": float(self.update), **_rollout_metrics(rollout.groups), **metrics, **seconds}
        metrics["staleness"] = float(update - rollout.weight_version)
        return metrics | {"seconds": time.perf_counter() - started}, rollout.groups

    def _rollout(self, update: int) -> Callable[[], Rollout]:
        """This rank's rollouts for `update`, by the weights as they are now: to be called at once, or in another thread
        while they change."""
        mine = self.specs_of(update)[distributed.rank() :: distributed.world_size()]
        if self.sampler is not self.compiler:
            checkpoint.put(self.sampler, self.backend.weights())
        self.sampler.weight_version = self.update
        seed = (self.config.seed * 1_000_003 + update) * 1024 + distributed.rank()
        self.sampler.generator.manual_seed(seed)
        if isinstance(self.engine.executor, TokenExecutor):
            self.engine.executor.generator.manual_seed(seed)

        def play() -> Rollout:
            started = time.perf_counter()
            groups = self.engine.run(self.sampler, mine, self.config.group_size) if mine else []
            return Rollout(groups, self.sampler.weight_version, time.perf_counter() - started)

        return play

    # -- the update ---------------------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Sample], update: int = 0) -> dict[str, float]:
        """`iterations` passes over this rank's samples in `minibatches` optimiser steps each; returns global means.

        Every rank has to call it, with samples or without.
        """
        config = self.config
        self.compiler.eval()  # LoRA dropout off: the ratio compares like with like
        weights, first, total = _token_weights(samples, config)
        if total == 0:  # no group had any variance: nothing to learn, on no rank
            return {"samples": 0.0, "skipped": 1.0}
        factor = cosine_with_warmup(update, config.updates, 0.0, config.min_lr / config.lr)
        rate = self.backend.scale_rates(factor)
        old = self._score_all(samples) if self._looks_back() else [None] * len(samples)
        reference = self._reference_scores(samples) if config.kl else [None] * len(samples)
        totals: Counter[str] = Counter()
        norms = []
        for iteration in range(config.iterations):
            for chosen in _minibatches(total, config.minibatches, config.seed, update * config.iterations + iteration):
                local = [i - first for i in chosen if first <= i < first + len(samples)]
                norms.append(self._step(samples, weights, old, reference, local, totals))
        return _means(totals) | {
            "samples": float(total), "skipped": 0.0, "grad_norm": max(norms), "lr": rate
        }  # fmt: skip

    def _looks_back(self) -> bool:
        """Whether the policy moves between sampling and a gradient: then old log-probabilities are scored first."""
        return self.config.minibatches * self.config.iterations > 1

    def _step(
        self, samples: Sequence[Sample], weights: Sequence[Tensor], old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None], local: Sequence[int], totals: Counter[str],
    ) -> float:  # fmt: skip
        """One optimiser step on the samples `local` of this rank; returns the gradient norm before clipping."""
        config = self.config
        for at in self.backend.micro_batches(local, config.micro_batch_size):
            rows = [[values[j] for j in at] for values in (samples, weights, old, reference)] if at else self._idle()
            loss, stats = self.backend.forward(partial(self._loss, *rows))
            self.backend.backward(loss * config.minibatches)
            if at:
                totals.update(stats)
        return self.backend.step()

    def _idle(self) -> list[list[Any]]:
        """Samples, weights, old, reference: a row that counts nothing, by which a rank without rows keeps step."""
        end, n = self.compiler.backbone.end_id, self.compiler.n_tokens
        z, zeros = torch.zeros(n, self.compiler.projector.config.d_executor), torch.zeros(1 + self.latents)
        draw = None
        if self.pathwise:
            assert isinstance(self.executor, FrozenExecutor)  # its settings say so
            prompt = Prompt((self.executor.placeholder,) * n, None)
            draw = Draw(prompt, ("",), 0, z, 0.0)
        sample = Sample(Prompt((end,)), (end,), z, zeros, 1, 0.0, 0, self.update, draw)
        old = zeros if self._looks_back() else None
        return [[sample], [zeros], [old], [zeros if self.config.kl else None]]

    def _loss(
        self, samples: Sequence[Sample], weights: Sequence[Tensor], old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
    ) -> tuple[Tensor, Counter[str]]:  # fmt: skip
        """Weighted sum of Eq. 8 over all tokens of some samples, and sums for the record."""
        config, n = self.config, self.latents
        policy = self.score(samples)
        width = policy.logprobs.shape[1]
        rollout = _pad([s.rollout_logprobs for s in samples], width, n).to(policy.logprobs)
        before = policy.logprobs.detach()
        if old[0] is not None:
            before = _pad([o for o in old if o is not None], width, n).to(policy.logprobs)
        advantages = torch.tensor([s.advantage for s in samples], device=before.device)
        weight = _pad(weights, width, n).to(policy.logprobs)
        surrogate = clipped_surrogate(policy.logprobs, before, advantages, config.clip_low, config.clip_high)
        per_token = surrogate.loss
        if config.importance_cap:  # what sampled was not quite what trains: another engine, or older weights
            per_token = per_token * (before - rollout).exp().clamp(max=config.importance_cap)
        if reference[0] is not None:
            anchor = _pad([r for r in reference if r is not None], width, n).to(policy.logprobs)
            per_token = per_token + config.kl * kl_estimate(policy.logprobs, anchor)
        return (per_token * weight * policy.mask).sum(), _statistics(policy, surrogate, rollout, before, weight, n)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Log-probabilities of what was sampled, under the weights as they are, at the sampling temperatures."""
        scored = self.compiler.score([s.prompt for s in samples], [s.emission for s in samples])
        full = self.compiler.logprobs(scored.logits, scored.targets)
        text = full.gather(2, scored.targets.unsqueeze(-1)).squeeze(-1)
        latent = self._drawn(scored.gaussian, samples) if self.pathwise else self._latent(scored.gaussian, samples)
        sampled = torch.tensor([s.sampled for s in samples], device=text.device)
        text_mask = torch.arange(text.shape[1], device=text.device) < sampled[:, None]
        entropy = -(full.exp() * full.masked_fill(full.isinf(), 0)).sum(-1).detach()
        sigma = scored.gaussian.log_sigma.detach().float()
        return Scores(
            torch.cat([text.masked_fill(~text_mask, 0.0), latent], 1),
            torch.cat([text_mask, torch.ones_like(latent, dtype=torch.bool)], 1), entropy * text_mask,
            (sigma + 0.5 * math.log(2 * math.pi * math.e)).mean((1, 2)), sigma.exp().mean((1, 2)),
            scored.gaussian.mu.detach().float().abs().mean((1, 2)),
        )  # fmt: skip

    def _latent(self, gaussian: Gaussian, samples: Sequence[Sample]) -> Tensor:
        """(B, N): of the soft tokens that were sampled."""
        z = torch.stack([s.z for s in samples]).to(gaussian.mu.device)
        return gaussian.log_prob(z, self.compiler.decoding.soft_temperature or 1.0)

    def _drawn(self, gaussian: Gaussian, samples: Sequence[Sample]) -> Tensor:
        """(B, 1): of the actions that the executor drew, with the gradient of its soft tokens."""
        assert isinstance(self.executor, FrozenExecutor)  # pathwise: its settings say so
        draws = [s.draw for s in samples if s.draw is not None]
        noise = torch.stack([draw.noise for draw in draws]).to(gaussian.mu)
        soft = self.compiler.projector.to_embeddings(gaussian.at(noise, self.compiler.decoding.soft_temperature))
        prompts = [replace(draw.prompt, soft=row) for draw, row in zip(draws, soft, strict=True)]
        scores = self.executor.candidate_logprobs(prompts, [draw.candidates for draw in draws])
        chosen = [self.executor.policy(s)[draw.chosen] for s, draw in zip(scores, draws, strict=True)]
        return torch.stack(chosen)[:, None].to(gaussian.mu.device)

    def _logprobs(self, samples: Sequence[Sample]) -> Tensor:
        return self.score(samples).logprobs

    @torch.no_grad()
    def _score_all(self, samples: Sequence[Sample]) -> list[Tensor | None]:
        """(T + L,) per sample, under the weights as they are."""
        rows: list[Tensor | None] = []
        for part in self.backend.micro_batches(samples, self.config.micro_batch_size):
            scores = self.backend.forward(partial(self._logprobs, part or self._idle()[0]))[: len(part)]
            cut, n = scores.shape[1] - self.latents, self.latents
            rows += [torch.cat([row[: s.sampled], row[cut : cut + n]]) for row, s in zip(scores, part, strict=True)]
        return rows

    def _reference_scores(self, samples: Sequence[Sample]) -> list[Tensor | None]:
        """Under the weights that training started from."""
        now = self.backend.weights()
        self.backend.load_weights(self.reference)
        try:
            return self._score_all(samples)
        finally:
            self.backend.load_weights(now)


def sampling(config: GrpoConfig) -> Decoding:
    """How rollouts are drawn, and scored again."""
    return Decoding(
        config.temperature, config.compiler.max_new_tokens, config.compiler.batch_size, config.latent_temperature,
        config.top_k, config.top_p,
    )  # fmt: skip


def _token_weights(samples: Sequence[Sample], config: GrpoConfig) -> tuple[list[Tensor], int, int]:
    """Weight of every token (T + L,) of every local sample, index of the first local sample in the global order, and
    the global number of samples. Weights sum to 1 over all samples of all ranks.

    aggregation: `token` weighs all tokens alike, `step` all samples, `episode` all episodes (each spread over its
    samples, and those over their tokens). A text token counts `text_weight`, a soft token `latent_weight`.
    """
    relative = [
        torch.cat([
            torch.full((s.sampled,), config.text_weight),
            torch.full((len(s.rollout_logprobs) - s.sampled,), config.latent_weight),
        ])
        for s in samples
    ]  # fmt: skip
    steps = Counter(s.episode for s in samples)
    counts = {
        "samples": float(len(samples)), "episodes": float(len(steps)),
        "tokens": float(sum(r.sum() for r in relative)),
    }  # fmt: skip
    shares = distributed.gather_values(counts)
    total = {name: sum(share[name] for share in shares) for name in counts}
    first = int(sum(share["samples"] for share in shares[: distributed.rank()]))
    if total["samples"] == 0:
        return [], 0, 0
    divisor = {
        "token": lambda s, r: total["tokens"],
        "step": lambda s, r: float(r.sum()) * total["samples"],
        "episode": lambda s, r: float(r.sum()) * steps[s.episode] * total["episodes"],
    }[config.aggregation]
    weights = [r / max(divisor(s, r), 1e-12) for s, r in zip(samples, relative, strict=True)]
    return weights, first, int(total["samples"])


def _minibatches(total: int, number: int, seed: int, turn: int) -> list[list[int]]:
    """Global sample indices 0..total-1 in `number` parts, shuffled; the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    order = torch.randperm(total, generator=generator).tolist() if number > 1 else list(range(total))
    return [order[i::number] for i in range(number)]


def _pad(rows: Sequence[Tensor], width: int, n: int) -> Tensor:
    """Rows (T_i + n,) -> (B, width): text tokens from the left, what follows them in the last n columns, 0 between."""
    padded = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        padded[i, : len(row) - n] = row[: len(row) - n]
        padded[i, width - n :] = row[len(row) - n :]
    return padded


def _statistics(
    policy: Scores, surrogate: Any, rollout: Tensor, before: Tensor, weight: Tensor, n: int
) -> Counter[str]:  # fmt: skip
    """Sums over tokens, to be divided by their counts when all micro-batches and ranks are through."""
    text, latent = policy.mask[:, :-n], policy.mask[:, -n:]
    gap = kl_estimate(rollout, before)
    sums: dict[str, Tensor | float] = {
        "text_tokens": text.sum(), "latent_tokens": latent.sum(), "rows": float(len(rollout)),
        "loss": (surrogate.loss.detach() * weight * policy.mask).sum(),
        "entropy_text": policy.text_entropy.sum(), "entropy_latent": policy.latent_entropy.sum(),
        "sigma": policy.sigma.sum(), "mu_abs": policy.mu.sum(),
    }  # fmt: skip
    for name, mask, columns in (("text", text, slice(None, -n)), ("latent", latent, slice(-n, None))):
        sums[f"clip_low_{name}"] = (surrogate.clipped_low[:, columns] & mask).sum()
        sums[f"clip_high_{name}"] = (surrogate.clipped_high[:, columns] & mask).sum()
        sums[f"ratio_{name}"] = (surrogate.ratio[:, columns] * mask).sum()
        sums[f"mismatch_kl_{name}"] = (gap[:, columns] * mask).sum()
    return Counter({name: float(value) for name, value in sums.items()})


def _means(local: Counter[str]) -> dict[str, float]:
    """Global means of the sums of `_statistics`."""
    shares = distributed.gather_values(dict(local))
    total = {name: sum(share.get(name, 0.0) for share in shares) for name in {n for s in shares for n in s}}
    text, latent, rows = (max(1.0, total[name]) for name in ("text_tokens", "latent_tokens", "rows"))
    means = {name: total[name] / rows for name in ("entropy_latent", "sigma", "mu_abs")}
    means |= {"loss": total["loss"], "entropy_text": total["entropy_text"] / text, "text_tokens": text / rows}
    for what in ("clip_low", "clip_high", "ratio", "mismatch_kl"):
        means[f"{what}_text"] = total[f"{what}_text"] / text
        means[f"{what}_latent"] = total[f"{what}_latent"] / latent
        means[what] = (total[f"{what}_text"] + total[f"{what}_latent"]) / (text + latent)
    return means


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all ranks' groups, and what failed."""
    episodes = [episode for group in groups for episode in group.episodes]
    counted = [episode for group in groups for episode in group.counted]
    steps = [step for episode in counted for step in episode.steps]
    kinds = Counter(step.emission_kind.lower() for step in steps)
    spread = [torch.tensor(group.rewards).var(correction=0).item() if group.rewards else 0.0 for group in groups]
    local = {
        "episodes": len(episodes), "counted": len(counted), "groups": len(groups), "steps": len(steps),
        "reward": sum(e.success for e in counted), "group_variance": sum(spread),
        "zero_variance_fraction": sum(not group.informative for group in groups),
        "failures": sum(is_failure(e.stop_reason) for e in episodes),
        "parse_error_rate": sum(step.parse_error is not None for step in steps),
        "op_error_rate": sum(bool(step.op_errors) for step in steps),
        **{f"emission_{name}": kinds[name] for name in ("experience", "brief", "hybrid", "noaction")},
        **{f"seconds_{short}": sum(s.seconds.get(name, 0.0) for e in episodes for s in e.steps)
           for short, name in (("env", "environment"), ("compiler", "compiler"), ("executor", "executor"))},
    }  # fmt: skip
    shares = distributed.gather_values({name: float(value) for name, value in local.items()})
    total = {name: sum(share[name] for share in shares) for name in local}
    per = {"reward": "counted", "group_variance": "groups", "zero_variance_fraction": "groups"}
    per |= {name: "steps" for name in total if name.endswith("_rate") or name.startswith("emission_")}
    means = {name: value / max(1.0, total[per[name]]) if name in per else value for name, value in total.items()}
    means["episode_steps"] = total["steps"] / max(1.0, total["counted"])
    if torch.cuda.is_available():
        means["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: value for name, value in means.items() if name not in ("counted", "groups")}


def _whole_copy(compiler: MemoryCompiler) -> MemoryCompiler:
    """A second compiler, base and all, for a rank whose first one is about to be cut into slices."""
    generator = torch.Generator(device=compiler.generator.device)
    return copy.deepcopy(compiler, {id(compiler.generator): generator})


def run_grpo(trainer: GrpoTrainer, on_update: Callable[[dict[str, float], list[Group]], None]) -> None:
    """All remaining updates; rank 0 hears of each."""
    for metrics, groups in trainer.updates():
        if distributed.rank() == 0:
            on_update(metrics, groups)


def main() -> None:
    """`torchrun -m training.grpo --config FILE [a.b=c ...] --out DIR`: the same as `memcompiler train grpo`."""
    import sys

    from memcompiler.cli import app  # late: the face imports us

    app(["train", "grpo", *sys.argv[1:]])


if __name__ == "__main__":
    main()
