"""Reads prompts into a KV cache, and each common prefix once.

Requests with the same task memory share a prefix: the episodes of a group in one batch, and an episode from step to
step. A batch reads a shared prefix once, and the result is cached for later steps within a budget (`Speed.prefix_mib`).
The first prompt of a memory is cached whole; the second one shows how much of it is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lm.backbone import Backbone
from lm.device import to_device
from lm.prompt import Prompt

RECENT = 4  # batches: prefixes that they used are not evicted
Layer = tuple[Tensor, Tensor]  # keys and values, (heads, T, d) each


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a prompt, with keys and values of its tokens by layer."""

    prompt: Prompt
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        pixels = sum(picture.nbytes for picture in self.prompt.pictures)
        return pixels + sum(states.nbytes for layer in self.layers for states in layer)

    @classmethod
    def of(cls, cache: DynamicCache, row: int, end: int, prompt: Prompt) -> Prefix:
        """Copy a prompt out of a cache, where it ends before column `end` and has no gap."""
        at = slice(end - len(prompt.ids), end)
        layers: list[Any] = cache.layers  # full attention in all of them
        pairs = ((layer.keys[row, :, at].clone(), layer.values[row, :, at].clone()) for layer in layers)
        return cls(prompt, tuple(pairs))

    def cut(self, tokens: int, pictures: int) -> Prefix:
        """Copy the first `tokens` tokens, which hold `pictures` pictures."""
        pairs = ((keys[:, :tokens].clone(), values[:, :tokens].clone()) for keys, values in self.layers)
        return Prefix(self.prompt.cut(tokens, pictures)[0], tuple(pairs))


class PrefixCache:
    """Least-recently-used cache of prefixes by task memory, for one set of weights.

    A prefix that one of the last RECENT batches used is not evicted. Otherwise, if more episodes run side by side than
    there is room for, each would evict the next one's prefix, and none would be found again.
    """

    def __init__(self, mib: float) -> None:
        self.budget = int(mib * 2**20)  # bytes
        self.held = 0  # bytes in use
        self._prefixes: OrderedDict[Hashable, tuple[Prefix, int]] = OrderedDict()  # with the last batch that used it
        self._batch = 0
        self._weights: object = None

    def of_weights(self, weights: object) -> PrefixCache:
        """Begin a batch. Clear the cache if the weights have changed."""
        self._batch += 1
        if weights != self._weights:
            self._prefixes.clear()
            self.held, self._weights = 0, weights
        return self

    def find(self, memory: Hashable) -> Prefix | None:
        """Return the cached prefix of a memory, and mark it as used by this batch."""
        prefix, _ = self._prefixes.pop(memory, (None, 0))
        if prefix:
            self._prefixes[memory] = prefix, self._batch
        return prefix

    def keep(self, memory: Hashable, prefix: Prefix) -> None:
        """Cache a prefix, which replaces the one of this memory, if room is left or older prefixes can be evicted."""
        self._forget(memory)
        if prefix.nbytes > self.budget:
            return
        while self.held + prefix.nbytes > self.budget:
            oldest, (_, batch) = next(iter(self._prefixes.items()))
            if batch > self._batch - RECENT:
                return
            self._forget(oldest)
        self._prefixes[memory] = prefix, self._batch
        self.held += prefix.nbytes

    def _forget(self, memory: Hashable) -> None:
        if memory in self._prefixes:
            self.held -= self._prefixes.pop(memory)[0].nbytes


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of a batch that share a memory, and the size of their common prefix in tokens and pictures."""

    memory: Hashable
    rows: tuple[int, ...]
    cached: Prefix | None  # from an earlier batch
    tokens: int
    pictures: int


@dataclass(frozen=True, slots=True)
class PromptReading:
    """A batch of B prompts in a cache of T columns."""

    cache: DynamicCache
    mask: Tensor  # (B, T)
    position: Tensor  # of the next token, ([3,] B, 1)
    hidden: Tensor  # states at the prompts' last tokens, (B, 1, d)
    cached: tuple[int, ...]  # tokens of each prompt from earlier batches
    padded: bool  # whether the mask hides anything


def read_prompts(
    backbone: Backbone, prompts: Sequence[Prompt], memories: Sequence[Hashable], prefixes: PrefixCache
) -> PromptReading:
    """Read prompts, each of which begins with the task memory of this key."""
    groups = _groups(backbone, prompts, memories, prefixes)
    of_row = {i: group for group in groups for i in group.rows}
    tails = [prompt.cut(of_row[i].tokens, of_row[i].pictures)[1] for i, prompt in enumerate(prompts)]
    cache = DynamicCache(config=backbone.model.config.get_text_config())
    begun = _begin(backbone, prompts, groups, cache=cache, prefixes=prefixes)
    # The rest of every row is its last columns. Where another row has a longer rest, some of them are masked.
    whole, left = backbone.pad(prompts, "left"), backbone.pad(tails, "left")
    mask = torch.cat([begun, left.mask], 1)
    positions = whole.positions[..., -left.tokens.shape[1] :]
    padded = any(len(prompt.ids) < mask.shape[1] for prompt in prompts)
    hidden = backbone.hidden(replace(left, mask=mask, positions=positions, padded=padded), cache)[:, -1:]
    for group in groups if prefixes.budget else ():
        if group.cached is None and not group.tokens:
            prefixes.keep(group.memory, Prefix.of(cache, group.rows[0], mask.shape[1], prompts[group.rows[0]]))
    cached = tuple(of_row[i].tokens if of_row[i].cached else 0 for i in range(len(prompts)))
    return PromptReading(
        cache=cache,
        mask=mask,
        position=whole.next_positions,
        hidden=hidden,
        cached=cached,
        padded=padded,
    )


def _groups(
    backbone: Backbone, prompts: Sequence[Prompt], memories: Sequence[Hashable], prefixes: PrefixCache
) -> list[_Group]:
    groups = []
    for memory in dict.fromkeys(memories):
        rows = tuple(i for i, m in enumerate(memories) if m == memory)
        cached = prefixes.find(memory)
        common = backbone.common_prefix([*([cached.prompt] if cached else []), *(prompts[i] for i in rows)])
        groups.append(_Group(memory, rows, cached if common[0] else None, *common))
    return groups


def _begin(
    backbone: Backbone, prompts: Sequence[Prompt], groups: Sequence[_Group], cache: DynamicCache, prefixes: PrefixCache
) -> Tensor:
    """Fill the cache with the shared prefixes; return its mask (B, P)."""
    width = max(group.tokens for group in groups)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    if not width:
        return mask.to(backbone.device)
    unread = [group for group in groups if group.tokens and group.cached is None]
    heads = [prompts[group.rows[0]].cut(group.tokens, group.pictures)[0] for group in unread]
    prefix_of = {g.memory: prefix for g, prefix in zip(unread, _read_heads(backbone, heads), strict=True)}
    for group in groups:
        if group.cached is not None:
            prefix_of[group.memory] = group.cached
            # `common_prefix` leaves one token of a whole prompt to read, which is no reason to cut the cached prefix.
            if group.tokens + 1 < len(group.cached.prompt.ids):
                prefixes.keep(group.memory, group.cached.cut(group.tokens, group.pictures))
        elif group.tokens and prefixes.budget:
            prefixes.keep(group.memory, prefix_of[group.memory])
        mask[list(group.rows), width - group.tokens :] = 1
    shared = [group for group in groups if group.tokens]
    places = [to_device(torch.tensor(group.rows), backbone.device) for group in shared]
    for i, (keys, values) in enumerate(prefix_of[shared[0].memory].layers):
        zeros = lambda states: states.new_zeros(len(prompts), states.shape[0], width, states.shape[2])
        filled = zeros(keys), zeros(values)
        for group, at in zip(shared, places, strict=True):
            for whole, states in zip(filled, prefix_of[group.memory].layers[i], strict=True):
                whole[at, :, width - group.tokens :] = states[:, : group.tokens]
        cache.update(filled[0], filled[1], i)
    return to_device(mask, backbone.device)


def _read_heads(backbone: Backbone, heads: Sequence[Prompt]) -> list[Prefix]:
    """Read prefixes of prompts as one batch."""
    if not heads:
        return []
    cache, batch = DynamicCache(config=backbone.model.config.get_text_config()), backbone.pad(heads, "left")
    backbone.hidden(batch, cache)
    return [Prefix.of(cache, i, batch.tokens.shape[1], head) for i, head in enumerate(heads)]
