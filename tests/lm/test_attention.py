"""Attention on a CPU without copies of keys and values: the numbers of transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lm.attention import SHARED, share_heads
from tests import tiny_vlms


def model(groups: int = 3) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=6 // groups, **sizes)).eval()


def read(model: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Read two prompts, one of them padded, then three more tokens behind the cache: all hidden states."""
    model, tokens = model.to(dtype).model, torch.arange(2 * 12).view(2, 12) % 50
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    cache = DynamicCache(config=model.config)
    read = [model(tokens[:, :9], attention_mask=mask[:, :9], past_key_values=cache).last_hidden_state]
    for at in range(9, 12):
        more = model(tokens[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache)
        read.append(more.last_hidden_state)
    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_what_is_read_is_the_same_to_the_last_bit(dtype):
    own = model()
    before = read(own, dtype)
    share_heads(own)
    assert own.config._attn_implementation == SHARED
    assert all(one.equal(other) for one, other in zip(before, read(own, dtype), strict=True))


def test_gradients_are_the_same():
    found = []
    for shared in (False, True):
        own = model()
        if shared:
            share_heads(own)
        mask = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
        own(torch.arange(24).view(2, 12), attention_mask=mask).logits.square().sum().backward()
        found.append([p.grad for p in own.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_heads_of_their_own_and_other_attention_stay_as_they_are():
    alone, eager = model(groups=1), model()
    eager.set_attn_implementation("eager")
    for own in (alone, eager):
        before = own.config._attn_implementation
        share_heads(own)
        assert own.config._attn_implementation == before != SHARED


def test_of_a_model_with_pictures_it_is_the_text_part():
    seeing = tiny_vlms.backbone("internvl").model
    share_heads(seeing)
    assert seeing.config.get_text_config()._attn_implementation == SHARED
    assert seeing.config.vision_config._attn_implementation != SHARED
