"""Losses on the soft tokens (paper Eq. 6 and 9), pure functions on tensors. Each returns one value per row: (B,).

Rows are averaged by the trainer with weights that are computed globally, so that no loss depends on how a batch is
split over micro-batches and ranks.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import cosine_similarity

from soft_mem.projector import Gaussian


def gauss_nll(gaussian: Gaussian, target_BNd: Tensor) -> Tensor:
    """L_latent, default: -1/(N d) sum log N(target; mu, sigma^2), in normalised units."""
    return -gaussian.log_prob(target_BNd).mean(-1)


def soft_mse(z_BNd: Tensor, target_BNd: Tensor) -> Tensor:
    """L_latent, alternative: mean squared distance of the drawn soft tokens from the targets."""
    return ((z_BNd.float() - target_BNd) ** 2).mean((-1, -2))


def negative_entropy(gaussian: Gaussian) -> Tensor:
    """L_entropy = -mean(0.5 log(2 pi e) + log sigma): minimising it keeps sigma from collapsing."""
    return -(0.5 * math.log(2 * math.pi * math.e) + gaussian.log_sigma.float()).mean((-1, -2))


def orthogonality(h_soft_BNd: Tensor, h_text_BTd: Tensor, text_mask_BT: Tensor) -> Tensor:
    """L_orth = |cos(mean h_soft, stopgrad(mean h_text))|, the complementarity constraint of Eq. 6."""
    mask = text_mask_BT.unsqueeze(-1).to(h_text_BTd.dtype)
    mean_text = (h_text_BTd * mask).sum(1) / mask.sum(1).clamp(min=1)
    return cosine_similarity(h_soft_BNd.float().mean(1), mean_text.float().detach(), dim=-1).abs()
