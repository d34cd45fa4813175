"""Losses on token logits, as pure functions: per-row sums and counts, so that the trainer can weight them globally."""

from __future__ import annotations

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


def cosine_with_warmup(step: int, total: int, warmup: float, floor: float = 0.0) -> float:
    """Learning-rate factor at `step` of `total`: linear warm-up over the first share, then cosine down to `floor`."""
    import math

    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, total - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
