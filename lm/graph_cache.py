"""A KV cache that keeps the autograd graph, so that gradients flow from later rows into a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from lm.prefix_attention import PrefixStates


class GraphCache(Cache):
    """Keys and values of one forward pass with their graph.

    Unlike `DynamicCache` it does not grow: a layer that gradient checkpointing computes again finds it unchanged.
    """

    @classmethod
    def empty(cls, config: Any) -> GraphCache:
        """Create a cache for the forward pass of a prefix by a model with this text config."""
        return cls(layers=[_Recorder() for _ in DynamicCache(config=config).layers])

    def beside(self, groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> GraphCache:
        """Put prefixes of these lengths beside the keys of the rows behind them, which each group names, for
        `lm.attention`'s kernel on a CPU."""
        layers: list[Any] = self.layers
        return GraphCache(layers=[_Beside(of.keys, of.values, groups, lengths) for of in layers])

    def repeated(self, rows: Sequence[int]) -> GraphCache:
        """Repeat prefixes for the forward pass of rows behind them; `rows` gives each row's prefix."""
        layers: list[Any] = self.layers
        return GraphCache(layers=[_Prefix(_rows(of.keys, rows), _rows(of.values, rows)) for of in layers])


class _Recorder(DynamicLayer):
    """Records the keys and values of the first call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class _Beside(DynamicLayer):
    """Hands its keys and values to attention as an attribute of the keys of a call."""

    def __init__(self, keys: Any, values: Any, groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        cut = [(keys[k : k + 1, :, :n], values[k : k + 1, :, :n]) for k, n in enumerate(lengths)]
        self._prefixes = PrefixStates(cut, groups)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states.prefixes = self._prefixes  # type: ignore[attr-defined]
        return key_states, value_states


class _Prefix(DynamicLayer):
    """Puts its keys and values before those of a call."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)


def _rows(states: Any, rows: Sequence[int]) -> Tensor:
    """Select prefixes (G, heads, P, d) for rows: (B, heads, P, d). Slices, because an index's gradient has no fixed
    order of sums on a GPU."""
    if len(states) == 1:
        return states.expand(len(rows), -1, -1, -1)
    parts = states.split(1)
    return torch.cat([parts[k] for k in rows])
