"""Attention for training on CPU, in which the rows of an episode share one copy of their common beginning.

PyTorch's fused attention is slow backwards on CPUs, and repeating keys and values for every row costs more than the
matrix products of a small model. Here the queries of all rows of an episode attend to the beginning in one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "shared_beginning"  # of the attention implementation
HIDDEN = -1e9  # added to scores of hidden positions; finite also in bfloat16


@dataclass(frozen=True, slots=True)
class Beginning:
    """Keys and values (E, H, P, d) by layer of E beginnings, and what is added to scores (E, 1, 1, P): 0, or hidden."""

    layers: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    beginning: Beginning | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of queries (B, H, T, d) to their own keys, and to the beginnings: B / E rows share each."""
    query = query * scaling
    own = query @ key.transpose(-1, -2)
    if attention_mask is not None:
        own = own + attention_mask.clamp(min=HIDDEN).to(own.dtype)
    if beginning is None:
        return (own.softmax(-1) @ value).transpose(1, 2), None
    keys, values = beginning.layers[module.layer_idx]
    rows, length, groups = len(query), query.shape[2], len(keys)
    before = _by_group(query, groups) @ keys.transpose(-1, -2)
    before += beginning.bias.to(before.dtype)
    weights = torch.cat([before, _by_group(own, groups)], -1).softmax(-1)
    past, new = weights.split([keys.shape[-2], length], -1)
    out = _by_row(past @ values, rows, length) + _by_row(new, rows, length) @ value
    return out.transpose(1, 2), None


def _by_group(states: Tensor, groups: int) -> Tensor:
    """Arrange (B, H, T, n) as (E, H, B / E * T, n)."""
    rows, heads, length, size = states.shape
    return states.view(groups, rows // groups, heads, length, size).transpose(1, 2).reshape(groups, heads, -1, size)


def _by_row(states: Tensor, rows: int, length: int) -> Tensor:
    """Arrange (E, H, B / E * T, n) as (B, H, T, n)."""
    groups, heads, _, size = states.shape
    return states.view(groups, heads, rows // groups, length, size).transpose(1, 2).reshape(rows, heads, length, size)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)
