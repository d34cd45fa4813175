"""A KV cache with room to grow, so that a further token does not copy the keys and values before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 64  # tokens to allocate beyond those that are needed


def growing_cache(config: Any) -> DynamicCache:
    """Create a cache for a model with this text config, to be used without gradients. It holds what `DynamicCache`
    holds."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, T, d), views of the first columns of larger tensors."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, added = self.get_seq_length(), key_states.shape[-2]
        if self._room is None or held + added > self._room[0].shape[-2]:
            states = (self.keys, key_states), (self.values, value_states)
            keys, values = (_with_room(old, new, held) for old, new in states)
            self._room = keys, values
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., held : held + added, :] = new
        self.keys, self.values = (room[..., : held + added, :] for room in self._room)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._room = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None


def _with_room(old: Any, new: Tensor, held: int) -> Tensor:
    """Copy the `held` tokens of `old` to a tensor with room for those of `new` and `ROOM` more."""
    *rest, added, width = new.shape
    larger = new.new_empty(*rest, held + added + ROOM, width)
    if held:
        larger[..., :held, :] = old
    return larger
