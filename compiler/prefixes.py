"""Prompts read into a cache before anything is written, and what they begin with read once.

Requests of one task memory begin alike: the episodes of a group in one batch, and an episode from step to step. What a
batch has in common is read once for all of it; what was read is kept for the next steps within a budget
(`Speed.prefix_mib`). The first prompt of a memory is kept whole, for nobody knows yet how much of it stays; the second
one shows that.
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

RECENT = 4  # batches: as many may take turns
Layer = tuple[Tensor, Tensor]  # keys and values, (heads, T, d) each


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt as a model has read it: keys and values of its tokens, by layer."""

    prompt: Prompt
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        pixels = sum(picture.nbytes for picture in self.prompt.pictures)
        return pixels + sum(states.nbytes for layer in self.layers for states in layer)

    @classmethod
    def of(cls, cache: DynamicCache, row: int, end: int, prompt: Prompt) -> Prefix:
        """Copy out of a cache what it holds of a prompt that ends before column `end`, without a gap."""
        at = slice(end - len(prompt.ids), end)
        layers: list[Any] = cache.layers  # of full attention, all of them
        pairs = ((layer.keys[row, :, at].clone(), layer.values[row, :, at].clone()) for layer in layers)
        return cls(prompt, tuple(pairs))

    def cut(self, tokens: int, pictures: int) -> Prefix:
        """Copy its first tokens, with so many pictures among them."""
        pairs = ((keys[:, :tokens].clone(), values[:, :tokens].clone()) for keys, values in self.layers)
        return Prefix(self.prompt.cut(tokens, pictures)[0], tuple(pairs))


class Prefixes:
    """What was read, by memory; by one set of weights alone. What was used least recently goes first; where all of it
    was used by the last batches, nothing goes and nothing comes: of more episodes side by side than there is room for,
    each would else make room for the next one, and none be found again."""

    def __init__(self, mib: float) -> None:
        self.budget = int(mib * 2**20)  # bytes
        self.held = 0  # of them
        self._kept: OrderedDict[Hashable, tuple[Prefix, int]] = OrderedDict()  # with the last batch that used it
        self._batch = 0
        self._weights: object = None

    def of_weights(self, weights: object) -> Prefixes:
        """Begin a batch: forget what other weights have read."""
        self._batch += 1
        if weights != self._weights:
            self._kept.clear()
            self.held, self._weights = 0, weights
        return self

    def find(self, memory: Hashable) -> Prefix | None:
        prefix, _ = self._kept.pop(memory, (None, 0))
        if prefix:
            self._kept[memory] = prefix, self._batch
        return prefix

    def keep(self, memory: Hashable, prefix: Prefix) -> None:
        """Keep a beginning in place of what was kept of this memory, where there is room or can be made."""
        self._forget(memory)
        if prefix.nbytes > self.budget:
            return
        while self.held + prefix.nbytes > self.budget:
            oldest, (_, batch) = next(iter(self._kept.items()))
            if batch > self._batch - RECENT:
                return
            self._forget(oldest)
        self._kept[memory] = prefix, self._batch
        self.held += prefix.nbytes

    def _forget(self, memory: Hashable) -> None:
        if memory in self._kept:
            self.held -= self._kept.pop(memory)[0].nbytes


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of a batch that have a memory in common, and what their prompts begin with, as far as it is read once:
    so many tokens, so many pictures."""

    memory: Hashable
    rows: tuple[int, ...]
    kept: Prefix | None
    tokens: int
    pictures: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A batch of prompts in a cache of T columns: the mask (B, T), the positions of what comes next ([3,] B, 1), hidden
    states at the prompts' last tokens (B, 1, d), how many tokens of each were kept from earlier batches, and whether
    the mask hides anything."""

    cache: DynamicCache
    mask: Tensor
    position: Tensor
    hidden: Tensor
    cached: tuple[int, ...]
    padded: bool


def read(backbone: Backbone, prompts: Sequence[Prompt], memories: Sequence[Hashable], prefixes: Prefixes) -> Reading:
    """Read prompts, each of which begins with the memory that `memories` names."""
    groups = _groups(backbone, prompts, memories, prefixes)
    of_row = {i: group for group in groups for i in group.rows}
    tails = [prompt.cut(of_row[i].tokens, of_row[i].pictures)[1] for i, prompt in enumerate(prompts)]
    cache = DynamicCache(config=backbone.model.config.get_text_config())
    begun = _begin(backbone, prompts, groups, cache, prefixes)
    # What is left of every row: its last columns. Where another row has more left, some of them are read already.
    whole, left = backbone.pad(prompts, "left"), backbone.pad(tails, "left")
    mask = torch.cat([begun, left.mask], 1)
    positions = whole.positions[..., -left.tokens.shape[1] :]
    padded = any(len(prompt.ids) < mask.shape[1] for prompt in prompts)
    hidden = backbone.hidden(replace(left, mask=mask, positions=positions, padded=padded), cache)[:, -1:]
    for group in groups if prefixes.budget else ():
        if group.kept is None and not group.tokens:
            prefixes.keep(group.memory, Prefix.of(cache, group.rows[0], mask.shape[1], prompts[group.rows[0]]))
    cached = tuple(of_row[i].tokens if of_row[i].kept else 0 for i in range(len(prompts)))
    return Reading(cache, mask, whole.next_positions, hidden, cached, padded)


def _groups(
    backbone: Backbone, prompts: Sequence[Prompt], memories: Sequence[Hashable], prefixes: Prefixes
) -> list[Group]:
    groups = []
    for memory in dict.fromkeys(memories):
        rows = tuple(i for i, m in enumerate(memories) if m == memory)
        kept = prefixes.find(memory)
        common = backbone.common([*([kept.prompt] if kept else []), *(prompts[i] for i in rows)])
        groups.append(Group(memory, rows, kept if common[0] else None, *common))
    return groups


def _begin(
    backbone: Backbone, prompts: Sequence[Prompt], groups: Sequence[Group], cache: DynamicCache, prefixes: Prefixes
) -> Tensor:
    """Fill the cache with what is read once for several rows; return its mask (B, P)."""
    width = max(group.tokens for group in groups)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    if not width:
        return mask.to(backbone.device)
    unread = [group for group in groups if group.tokens and group.kept is None]
    heads = [prompts[group.rows[0]].cut(group.tokens, group.pictures)[0] for group in unread]
    beginnings = {g.memory: prefix for g, prefix in zip(unread, _read_heads(backbone, heads), strict=True)}
    for group in groups:
        if group.kept is not None:
            beginnings[group.memory] = group.kept
            # One token of a whole prompt is always left to read: what is kept is not cut by that again and again.
            if group.tokens + 1 < len(group.kept.prompt.ids):
                prefixes.keep(group.memory, group.kept.cut(group.tokens, group.pictures))
        elif group.tokens and prefixes.budget:
            prefixes.keep(group.memory, beginnings[group.memory])
        mask[list(group.rows), width - group.tokens :] = 1
    shared = [group for group in groups if group.tokens]
    places = [to_device(torch.tensor(group.rows), backbone.device) for group in shared]
    for i, (keys, values) in enumerate(beginnings[shared[0].memory].layers):
        zeros = lambda states: states.new_zeros(len(prompts), states.shape[0], width, states.shape[2])
        filled = zeros(keys), zeros(values)
        for group, at in zip(shared, places, strict=True):
            for whole, states in zip(filled, beginnings[group.memory].layers[i], strict=True):
                whole[at, :, width - group.tokens :] = states[:, : group.tokens]
        cache.update(filled[0], filled[1], i)
    return to_device(mask, backbone.device)


def _read_heads(backbone: Backbone, heads: Sequence[Prompt]) -> list[Prefix]:
    """Read beginnings of prompts, side by side."""
    if not heads:
        return []
    cache, batch = DynamicCache(config=backbone.model.config.get_text_config()), backbone.pad(heads, "left")
    backbone.hidden(batch, cache)
    return [Prefix.of(cache, i, batch.tokens.shape[1], head) for i, head in enumerate(heads)]
