"""Soft tokens into the executor's input embeddings, at the placeholder positions and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor


def inject(embeddings_BTd: Tensor, tokens_BT: Tensor, placeholder: int, soft_BNd: Tensor) -> Tensor:
    """Embeddings with the N placeholders of each row replaced by that row's soft tokens, in order. Differentiable.

    Args:
        embeddings_BTd: input embeddings of `tokens_BT`.
        placeholder: id of the reserved memory token.
        soft_BNd: soft tokens at the executor's scale.

    Raises:
        ValueError: a row does not hold exactly N placeholders.
    """
    is_soft_BT = tokens_BT == placeholder
    counts = is_soft_BT.sum(1)
    if not bool((counts == soft_BNd.shape[1]).all()):
        raise ValueError(f"each row needs {soft_BNd.shape[1]} placeholders, found {counts.tolist()}")
    mask = is_soft_BT.unsqueeze(-1).expand_as(embeddings_BTd)
    return embeddings_BTd.masked_scatter(mask, soft_BNd.to(embeddings_BTd.dtype))


def memory_targets(embedding_table: Tensor, token_ids: list[int], n_tokens: int, emb_std: float) -> Tensor:
    """Targets of L_latent (N, d), normalised units: the memory's executor embeddings in N chunks, sum / sqrt(count).

    A chunk's sum over sqrt(count) keeps the variance of a single embedding, so targets have about unit scale whatever
    the memory's length. Fewer tokens than chunks leave the last chunks zero.
    """
    embeddings = embedding_table[torch.tensor(token_ids, device=embedding_table.device)].float() / emb_std
    chunks = torch.tensor_split(embeddings, n_tokens)
    zero = embeddings.new_zeros(embeddings.shape[1])
    return torch.stack([chunk.sum(0) / len(chunk) ** 0.5 if len(chunk) else zero for chunk in chunks])
