"""Losses as pure functions, and the learning rate's course. Whoever calls them weights rows and tokens globally."""

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
    """Terms of the policy loss at every token (B, T): `loss` carries the gradient, the others are for the record."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor  # True where the clip holds the ratio up: ratio < 1 - low and A < 0
    clipped_high: Tensor  # ratio > 1 + high and A > 0


def clipped_surrogate(
    logprobs_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, low: float = 0.2, high: float = 0.28
) -> Surrogate:
    """Compute paper Eq. 8 with the asymmetric clip of C.3.2: -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_old.

    A token is a text token or a soft token; for both, r is the ratio of its probability (density) under the policy to
    that under the policy that sampled it.
    """
    ratio = (logprobs_BT - old_BT).exp()
    gain = advantages_B[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    return Surrogate(
        loss, ratio.detach(), ((ratio < 1 - low) & (gain < 0)).detach(), ((ratio > 1 + high) & (gain > 0)).detach()
    )


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the policy loss reads of B samples: log-probabilities (B, T) of what was sampled, by different weights."""

    policy: Tensor  # the weights in training, with their gradient
    old: Tensor  # the weights that this update started from
    rollout: Tensor  # the engine that sampled
    reference: Tensor | None  # the weights that training started from
    advantages: Tensor  # (B,)
    weights: Tensor  # (B, T), of every token in the loss
    mask: Tensor  # (B, T)


def policy_loss(tokens: PolicyTokens, settings: PolicyLoss) -> tuple[Tensor, Surrogate]:
    """Compute the weighted sum of Eq. 8 over all tokens, with what the settings add; and its terms, for the record."""
    surrogate = clipped_surrogate(tokens.policy, tokens.old, tokens.advantages, settings.clip_low, settings.clip_high)
    per_token = surrogate.loss
    if settings.importance_cap:  # what sampled was not quite what trains: another engine, or older weights
        per_token = per_token * (tokens.old - tokens.rollout).exp().clamp(max=settings.importance_cap)
    if tokens.reference is not None:
        per_token = per_token + settings.kl * kl_estimate(tokens.policy, tokens.reference)
    return (per_token * tokens.weights * tokens.mask).sum(), surrogate


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per sampled token, unbiased, never negative: e^d - 1 - d, d = ref - policy."""
    d = reference - logprobs
    return d.exp() - 1 - d


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Compute A = (r - mean) / (std + eps) in one group (sample std); all zero where every reward is the same."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    return ((values - values.mean()) / (values.std() + eps)).tolist()


def cosine_with_warmup(step: int, total: int, warmup: float, floor: float = 0.0) -> float:
    """Scale the learning rate at `step` of `total`: linear warm-up over the first share, then cosine to `floor`."""
    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, total - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
