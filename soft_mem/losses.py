"""Losses on the soft tokens (paper Eq. 6 and 9) and their targets: pure functions with one value per row, (B,).

The trainer averages rows with global weights, so that no loss depends on how a batch is split over micro-batches and
ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from soft_mem.projector import Gaussian


def memory_targets(memory_Td: Tensor, n_tokens: int, emb_std: float) -> Tensor:
    """Compute targets of L_latent (N, d) in normalised units: the memory's executor embeddings (T, d), of its pictures
    or text, in N chunks, sum / sqrt(count).

    This preserves the variance of a single embedding, so targets have about unit scale for any length of memory. With
    fewer embeddings than chunks, the last chunks are zero.
    """
    embeddings = memory_Td.float() / emb_std
    chunks = torch.tensor_split(embeddings, n_tokens)
    zero = embeddings.new_zeros(embeddings.shape[1])
    return torch.stack([chunk.sum(0) / len(chunk) ** 0.5 if len(chunk) else zero for chunk in chunks])


def gauss_nll(gaussian: Gaussian, target_BNd: Tensor) -> Tensor:
    """Compute L_latent, default: -1/(N d) sum log N(target; mu, sigma^2), in normalised units."""
    return -gaussian.log_prob(target_BNd).mean(-1)


def soft_mse(z_BNd: Tensor, target_BNd: Tensor) -> Tensor:
    """Compute L_latent, alternative: mean squared distance of the sampled soft tokens from the targets."""
    return ((z_BNd.float() - target_BNd) ** 2).mean((-1, -2))


def negative_entropy(gaussian: Gaussian) -> Tensor:
    """Compute L_entropy = -mean(0.5 log(2 pi e) + log sigma), which prevents sigma from collapsing."""
    return -(0.5 * math.log(2 * math.pi * math.e) + gaussian.log_sigma.float()).mean((-1, -2))


def orthogonality(h_soft_BNd: Tensor, h_text_BTd: Tensor, text_mask_BT: Tensor) -> Tensor:
    """Compute L_orth = |cos(mean h_soft, stopgrad(mean h_text))|, the complementarity constraint of Eq. 6."""
    mask = text_mask_BT.unsqueeze(-1).to(h_text_BTd.dtype)
    mean_text = (h_text_BTd * mask).sum(1) / mask.sum(1).clamp(min=1)
    return cosine_similarity(h_soft_BNd.float().mean(1), mean_text.float().detach(), dim=-1).abs()
