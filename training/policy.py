"""GRPO's policy: log-probabilities of sampled text and soft tokens under the current weights, and the loss on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compiler.hf import MemoryCompiler
from configs.training import PolicyLoss
from executor.hf import FrozenExecutor
from executor.records import Executor
from lm.device import to_device
from lm.prompt import Prompt
from lm.shared_prefixes import Sharing
from soft_mem.projector import Gaussian
from training import distributed
from training.losses import PolicyTokens, policy_loss
from training.metrics import Scores, Totals, token_totals
from training.rollout import ActionSample, Sample

WeightedSample = tuple[Sample, Tensor, Tensor | None]  # with token weights and old log-probabilities, (T + L,) each


class Policy:
    """Scores samples with the compiler (and, `pathwise`, the executor), and computes their loss.

    Attributes:
        n_latent: L, the number of policy tokens after the text: N soft tokens, or one action.
        sharing: Whether the compiler's samples share prefixes.
    """

    def __init__(
        self, compiler: MemoryCompiler, executor: Executor, settings: PolicyLoss, sharing: Sharing = "never"
    ) -> None:
        self.compiler, self.executor, self.settings = compiler, executor, settings
        self.sharing: Sharing = sharing
        self.pathwise = settings.latent_gradient == "pathwise"
        self.n_latent = 1 if self.pathwise else compiler.n_tokens

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Compute the samples' log-probabilities (B, T + L) under the current weights, at the sampling temperatures."""
        scored = self.compiler.score([s.prompt for s in samples], [s.emission for s in samples], self.sharing)
        full = self.compiler.logprobs(scored.logits)
        text = full.gather(2, scored.targets.unsqueeze(-1)).squeeze(-1)
        if self.pathwise:
            latent = self._score_actions(scored.gaussian, samples)
        else:
            z = to_device(torch.stack([s.z for s in samples]), scored.gaussian.mu.device)
            latent = scored.gaussian.log_prob(z, self.compiler.decoding.soft_temperature or 1.0)
        sampled, read = to_device(torch.tensor([[s.sampled, s.soft_read] for s in samples]), text.device).unbind(1)
        text_mask = torch.arange(text.shape[1], device=text.device) < sampled[:, None]
        mask = torch.cat([text_mask, read.bool()[:, None].expand_as(latent)], 1)
        entropy = -(full.exp() * full.masked_fill(full.isinf(), 0)).sum(-1).detach()
        sigma = scored.gaussian.log_sigma.detach().float()
        return Scores(
            logprobs=torch.cat([text, latent], 1).masked_fill(~mask, 0.0),
            mask=mask,
            text_entropy=entropy * text_mask,
            latent_entropy=(sigma + 0.5 * math.log(2 * math.pi * math.e)).mean((1, 2)),
            sigma=sigma.exp().mean((1, 2)),
            mu=scored.gaussian.mu.detach().float().abs().mean((1, 2)),
        )

    def _score_actions(self, gaussian: Gaussian, samples: Sequence[Sample]) -> Tensor:
        """Compute log-probabilities (B, 1) of the executor's actions, with gradient through its soft tokens; 0 for
        samples without an action."""
        assert isinstance(self.executor, FrozenExecutor)  # checked in the settings
        # Keeps the projector in every backward pass, with actions or without, for ranks that run in lockstep.
        zeros = 0.0 * gaussian.mu.float().flatten(1).sum(1, keepdim=True)
        rows = [i for i, s in enumerate(samples) if s.action is not None]
        actions = [s.action for s in samples if s.action is not None]
        if not actions:
            return zeros
        index = to_device(torch.tensor(rows), zeros.device)
        given = Gaussian(gaussian.mu[index], gaussian.log_sigma[index])
        noise = to_device(torch.stack([action.noise for action in actions]), zeros.device).to(gaussian.mu)
        soft = self.compiler.projector.to_embeddings(given.at(noise, self.compiler.decoding.soft_temperature))
        prompts = [replace(action.prompt, soft=row) for action, row in zip(actions, soft, strict=True)]
        candidates, chosen = [action.candidates for action in actions], [action.chosen for action in actions]
        logprobs = self.executor.chosen_logprobs(prompts, candidates, chosen)
        return zeros.index_add(0, index, logprobs[:, None].to(zeros))

    def loss(self, rows: Sequence[WeightedSample]) -> tuple[Tensor, Totals]:
        """Compute the loss of a micro-batch (Eq. 8), and its totals for the metrics. Without old log-probabilities,
        the current weights are the old ones."""
        samples, weights, old = zip(*rows, strict=True)
        scores = self.score(samples)
        logprobs, device = scores.logprobs, scores.logprobs.device
        pad = lambda values: self._pad(values, samples, logprobs)
        tokens = PolicyTokens(
            policy=logprobs,
            old=logprobs.detach() if old[0] is None else pad(old),
            rollout=pad([s.rollout_logprobs for s in samples]),
            advantages=to_device(torch.tensor([s.advantage for s in samples]), device),
            weights=pad(weights),
            mask=scores.mask,
        )
        loss, surrogate, importance = policy_loss(tokens, self.settings)
        return loss, token_totals(scores, tokens, surrogate, importance, self.n_latent)

    def _pad(self, rows: Sequence[Tensor], samples: Sequence[Sample], like: Tensor) -> Tensor:
        """Pad host tensors (T_i + L,) or (T_i,) to `like` (B, T + L): text from the left, latent tokens at the end."""
        padded = torch.zeros(like.shape)
        for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            padded[i, : sample.sampled] = row[: sample.sampled]
            if len(row) > sample.sampled:
                padded[i, like.shape[1] - self.n_latent :] = row[sample.sampled :]
        return to_device(padded, like.device).to(like.dtype)

    def dummy_row(self, weight_version: int, with_old: bool) -> WeightedSample:
        """Create a row of weight 0, for ranks without samples that run in lockstep with others."""
        end, n = self.compiler.backbone.end_id, self.compiler.n_tokens
        z, zeros = torch.zeros(n, self.compiler.projector.config.d_executor), torch.zeros(1 + self.n_latent)
        action = None
        if self.pathwise:
            assert isinstance(self.executor, FrozenExecutor)  # checked in the settings
            action = ActionSample(
                prompt=Prompt((self.executor.placeholder,) * n, None), candidates=("",), chosen=0, noise=z, logprob=0.0
            )
        sample = Sample(
            prompt=Prompt((end, end)),
            emission=(end,),
            z=z,
            rollout_logprobs=zeros,
            sampled=1,
            advantage=0.0,
            episode=0,
            weight_version=weight_version,
            action=action,
        )
        return sample, zeros, zeros if with_old else None


def token_weights(samples: Sequence[Sample], settings: PolicyLoss) -> tuple[list[Tensor], int, int]:
    """Compute the weight of every token (T + L,) of this rank's samples, the global index of the first of them, and the
    global number of samples. All text tokens have one weight, all latent tokens another; they sum to 1 over all
    ranks."""
    relative = [
        torch.cat(
            [
                torch.full((s.sampled,), settings.text_weight),
                torch.full((len(s.rollout_logprobs) - s.sampled,), settings.latent_weight),
            ]
        )
        for s in samples
    ]
    shares = distributed.gather((len(samples), float(sum(row.sum() for row in relative))))
    first = sum(count for count, _ in shares[: distributed.rank()])
    total = sum(weight for _, weight in shares)
    return [row / max(total, 1e-12) for row in relative], first, sum(count for count, _ in shares)
