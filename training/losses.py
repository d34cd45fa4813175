"""Losses as pure functions, and the learning-rate schedule. Callers weight rows and tokens over the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.training import PolicyLoss


def token_nll(logits_BTV: Tensor, targets_BT: Tensor, mask_BT: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute L_text (paper Eq. 7 and C.3.1): summed label-smoothed NLL (B,) and token counts (B,).

    Smoothing e: (1 - e) NLL(target) + e mean over the vocabulary of NLL, as in torch's cross_entropy.
    """
    nll = torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), label_smoothing=smoothing, reduction="none"
    ).view_as(targets_BT)
    mask = mask_BT.to(nll.dtype)
    return (nll * mask).sum(1), mask.sum(1)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Terms of the policy loss at every token (B, T); only `loss` has a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor  # ratio < 1 - low and A < 0
    clipped_high: Tensor  # ratio > 1 + high and A > 0


def clipped_surrogate(
    logprobs_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, low: float = 0.2, high: float = 0.28
) -> Surrogate:
    """Compute paper Eq. 8 with the asymmetric clip of C.3.2: -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_old.

    Tokens are text tokens and soft tokens. r is the ratio of a text token's probability under the policy to that under
    the old policy; of a soft token, the d-th root of its density ratio (`soft_mem.projector.Gaussian.log_prob`).
    """
    ratio = (logprobs_BT - old_BT).exp()
    gain = advantages_B[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    return Surrogate(
        loss, ratio.detach(), ((ratio < 1 - low) & (gain < 0)).detach(), ((ratio > 1 + high) & (gain > 0)).detach()
    )


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Weights (B, T) of tokens that another engine, or older weights, sampled; without gradient."""

    ratio: Tensor  # probability before this update over that when it was sampled
    capped: Tensor  # min(ratio, cap), which multiplies the loss
    exceeds: Tensor  # ratio > cap


def importance_weights(old_BT: Tensor, rollout_BT: Tensor, cap: float) -> ImportanceWeights:
    """Compute truncated importance weights min(pi_old / pi_rollout, cap)."""
    ratio = (old_BT - rollout_BT).exp().detach()
    return ImportanceWeights(ratio, ratio.clamp(max=cap), ratio > cap)


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Inputs of the policy loss for B samples: log-probabilities (B, T) of the sampled tokens under three weights."""

    policy: Tensor  # the current weights, with gradient
    old: Tensor  # the weights before this update
    rollout: Tensor  # the engine that sampled
    advantages: Tensor  # (B,)
    weights: Tensor  # (B, T), sum to 1 over the global batch
    mask: Tensor  # (B, T)


def policy_loss(tokens: PolicyTokens, settings: PolicyLoss) -> tuple[Tensor, Surrogate, ImportanceWeights | None]:
    """Compute the weighted sum of Eq. 8 over all tokens, with capped importance weights if set; and its terms."""
    surrogate = clipped_surrogate(
        tokens.policy, tokens.old, advantages_B=tokens.advantages, low=settings.clip_low, high=settings.clip_high
    )
    per_token, importance = surrogate.loss, None
    if settings.importance_cap:  # sampled by another engine, or older weights
        importance = importance_weights(tokens.old, tokens.rollout, settings.importance_cap)
        per_token = per_token * importance.capped
    return (per_token * tokens.weights * tokens.mask).sum(), surrogate, importance


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per sampled token, unbiased and non-negative: e^d - 1 - d, d = ref - policy."""
    d = reference - logprobs
    return d.exp() - 1 - d


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Compute A = (r - mean) / (std + eps) in one group (sample std); 0 if all rewards are equal."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    return ((values - values.mean()) / (values.std() + eps)).tolist()


def cosine_with_warmup(step: int, total: int, warmup: float, floor: float = 0.0) -> float:
    """Return the learning rate's factor at `step` of `total`: linear warm-up over a share, then cosine to `floor`."""
    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, total - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
