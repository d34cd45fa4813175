"""The cache with room to grow."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig

from lm.growing_cache import ROOM, growing_cache

CONFIG = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


def test_it_holds_what_a_dynamic_cache_holds_after_growing_cropping_selecting_and_repeating():
    torch.manual_seed(0)
    caches = growing_cache(CONFIG), DynamicCache(config=CONFIG)
    steps = [("add", 5), ("add", 1), ("crop", -2), ("add", 3), ("add", ROOM), ("select", [1, 2]), ("add", 1)]
    rows = 3
    for name, value in [*steps, ("repeat", 2), ("add", 2), ("crop", -1), ("add", 2)]:
        if name == "add":
            states = torch.randn(2, rows, 2, value, 4)
            for cache in caches:
                for i in range(2):
                    cache.update(states[0] + i, states[1] + i, i)
        for cache in caches:
            if name == "crop":
                cache.crop(value)
            elif name == "select":
                cache.batch_select_indices(torch.tensor(value))
            elif name == "repeat":
                cache.batch_repeat_interleave(value)
        rows = caches[1].layers[0].keys.shape[0]
        for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
            assert ours.get_seq_length() == theirs.get_seq_length()


def test_a_further_token_copies_nothing_while_there_is_room():
    cache = growing_cache(CONFIG)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    at = cache.layers[0].keys.data_ptr()
    for _ in range(ROOM):
        cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert cache.layers[0].keys.data_ptr() == at
    cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert cache.layers[0].keys.data_ptr() != at
