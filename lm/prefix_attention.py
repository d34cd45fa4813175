"""Attention of rows to a shared prefix and to themselves on a CPU, without a mask and without repeated keys.

The queries of all rows attend to their prefix as one row, and each row attends to itself causally; the two results are
merged by their log-sum-exp. Both parts use PyTorch's flash kernel, whose backward pass is exact for a part if it gets
the merged output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class PrefixStates:
    """Keys and values (1, G, P, d) of prefixes, and the rows behind each."""

    states: Sequence[tuple[Tensor, Tensor]]
    rows: Sequence[Sequence[int]]


def attend_behind(query: Tensor, key: Tensor, value: Tensor, prefixes: PrefixStates, scale: float | None) -> Tensor:
    """Attend with queries (B, H, Q, d) to each row's prefix and, causally, to keys and values (B, G, Q, d): (B, H, Q,
    d). H is a multiple of G. Under autocast all are cast to the type of the values."""
    flat = [states.to(value.dtype) for pair in prefixes.states for states in pair]
    query, key = query.to(value.dtype), key.to(value.dtype)
    index = [torch.tensor(rows, device=query.device) for rows in prefixes.rows]
    return _AttendBehind.apply(scale, index, query, key, value, *flat)


class _AttendBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float | None, index: Any, query: Tensor, key: Tensor, value: Tensor, *flat: Tensor):
        out, total = _flash(query, key, value, 0.0, True, scale=scale)
        merged = out.float()
        for k, rows in enumerate(index):
            keys, values = flat[2 * k], flat[2 * k + 1]
            part, logsumexp = _flash(_fold(query[rows], keys), keys, values, 0.0, False, scale=scale)
            part, logsumexp = _unfold(part, query[rows]), _unfold(logsumexp[..., None], query[rows])[..., 0]
            both = torch.logaddexp(total[rows], logsumexp)
            own, seen = (total[rows] - both).exp()[..., None], (logsumexp - both).exp()[..., None]
            merged[rows] = own * merged[rows] + seen * part
            total[rows] = both
        out = merged.to(query.dtype)
        ctx.scale, ctx.index = scale, index
        ctx.save_for_backward(query, key, value, out, total, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, total, *flat = ctx.saved_tensors
        gradient, found = gradients[0].to(query.dtype), list[Tensor]()
        own = (tensor.float() for tensor in (gradient, query, key, value, out))  # faster than in bfloat16
        of_own = _flash_backward(*own, total, 0.0, True, scale=ctx.scale)
        of_query, of_key, of_value = (tensor.to(query.dtype) for tensor in of_own)
        for k, rows in enumerate(ctx.index):
            keys, values = flat[2 * k], flat[2 * k + 1]
            given, asked, read = (_fold(tensor[rows], keys) for tensor in (gradient, query, out))
            logsumexp = _fold(total[rows][..., None], keys)[..., 0]
            for_query, *of_prefix = _flash_backward(
                given, asked, keys, values, read, logsumexp, 0.0, False, scale=ctx.scale
            )
            of_query[rows] += _unfold(for_query, query[rows])
            found += of_prefix
        return None, None, of_query, of_key, of_value, *found


def _fold(rows: Tensor, keys: Tensor) -> Tensor:
    """Turn rows (n, H, Q, d) into one row with the heads of its keys: (1, G, n Q H / G, d)."""
    n, heads, length, size = rows.shape
    shared = heads // keys.shape[1]
    return rows.view(n, -1, shared, length, size).transpose(0, 1).reshape(1, -1, n * shared * length, size)


def _unfold(row: Tensor, like: Tensor) -> Tensor:
    """Turn one row back into rows `like` (n, H, Q, ...)."""
    n, heads, length = like.shape[:3]
    parts = row.view(row.shape[1], n, -1, length, row.shape[-1])
    return parts.transpose(0, 1).reshape(n, heads, length, row.shape[-1])
