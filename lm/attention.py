"""Changes to attention in transformers and PyTorch.

CPU: with a mask, transformers copies keys and values for every query head at every token. PyTorch's CPU kernel shares
heads without copies and gives the same bits, so `share_heads` calls it directly. (Its fast GPU kernels share heads only
without a mask: nothing changes there.)

GPU: transformers reads the mask of every pass to decide whether it can be omitted, which synchronises with the device;
`padding` supplies the answer instead. cuDNN's kernel is disabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lm.prefix_attention import attend_behind

SHARED = "sdpa_shared_heads"
_padded: ContextVar[bool | None] = ContextVar("padded", default=None)

# cuDNN gives NaN gradients with some masks (pytorch#196678), and replans for every cache length.
torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def padding(padded: bool | None) -> Iterator[None]:
    """Declare whether the batch of the forward passes inside is padded; None lets transformers inspect the mask."""
    token = _padded.set(padded)
    try:
        yield
    finally:
        _padded.reset(token)


def _causal_mask(
    *args: Any, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **more: Any
) -> Tensor | None:
    """Create the mask of `sdpa_mask`, or omit it for a batch without padding."""
    padded = _padded.get()
    if allow_is_causal_skip and padded is not None:
        attention_mask, allow_is_causal_skip = (attention_mask, False) if padded else (None, True)
    return sdpa_mask(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **more)


def attends_beside(config: Any) -> bool:
    """Return whether a model with this text config can read prefixes beside its rows (`lm.prefix_attention`)."""
    return config._attn_implementation == SHARED and not getattr(config, "attention_dropout", 0.0)


def share_heads(model: Any) -> None:
    """Let a CPU model's text part attend without copies, if it uses PyTorch's attention with grouped query heads."""
    config = model.config.get_text_config()
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config._attn_implementation != "sdpa" or not isinstance(kv_heads, int) or heads == kv_heads:
        return
    part = next((name for name in model.config.sub_configs if getattr(model.config, name, None) is config), "")
    model.set_attn_implementation({part: SHARED})


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend with queries (B, H, Q, d) to keys and values (B, G, K, d), G a divisor of H; return (B, Q, H, d)."""
    if (prefixes := getattr(key, "prefixes", None)) is not None:
        return attend_behind(query, key, value, prefixes, scaling).transpose(1, 2).contiguous(), None
    if attention_mask is None or position_bias is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **more
        )
    out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionMaskInterface.register("sdpa", _causal_mask)
AttentionInterface.register(SHARED, _attend)
AttentionMaskInterface.register(SHARED, sdpa_mask)
