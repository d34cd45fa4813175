"""Attention on a CPU, where several query heads share one of keys and values.

Behind a mask transformers copies keys and values for every query head before it asks PyTorch, at every token that is
written. PyTorch's kernel for CPUs needs no copies, and gives the same numbers to the last bit. (Its fast kernels for
GPUs do without copies only where there is no mask: there nothing is changed.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SHARED = "sdpa_shared_heads"


def share_heads(model: Any) -> None:
    """Have the text part of a model that lives on a CPU attend without copies, where transformers chose PyTorch's
    attention for it and query heads share heads of keys and values."""
    config = model.config.get_text_config()
    heads, theirs = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config._attn_implementation != "sdpa" or not isinstance(theirs, int) or heads == theirs:
        return
    part = next((name for name in model.config.sub_configs if getattr(model.config, name, None) is config), "")
    model.set_attn_implementation({part: SHARED})


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, position_bias: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend with queries (B, H, Q, d) to keys and values (B, G, K, d), G a divisor of H: (B, Q, H, d)."""
    if attention_mask is None or position_bias is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **more
        )
    out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SHARED, _attend)
AttentionMaskInterface.register(SHARED, sdpa_mask)
