"""Losses on token logits, as pure functions: per-row sums and counts, so that the trainer can weight them globally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def token_nll(logits_BTV: Tensor, targets_BT: Tensor, mask_BT: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """L_text (paper Eq. 7 and C.3.1): summed label-smoothed NLL (B,) and token counts (B,).

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
    """Paper Eq. 8 with the asymmetric clip of C.3.2: -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_old.

    A token is a text token or a soft token; for both, r is the ratio of its probability (density) under the policy to
    that under the policy that sampled it.
    """
    ratio = (logprobs_BT - old_BT).exp()
    gain = advantages_B[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    return Surrogate(
        loss, ratio.detach(), ((ratio < 1 - low) & (gain < 0)).detach(), ((ratio > 1 + high) & (gain > 0)).detach()
    )


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(policy || reference) per sampled token: e^d - 1 - d, d = ref - policy."""
    d = reference - logprobs
    return d.exp() - 1 - d


def group_advantages(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """A = (r - mean) / (std + eps) in one group (sample std); all zero where every reward is the same."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    return ((values - values.mean()) / (values.std() + eps)).tolist()


def cosine_with_warmup(step: int, total: int, warmup: float, floor: float = 0.0) -> float:
    """Learning-rate factor at `step` of `total`: linear warm-up over the first share, then cosine down to `floor`."""
    import math

    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, total - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
