"""Reads prompts into a KV cache, and what earlier prompts began with only once.

Prompts share their beginnings: the episodes of a batch have instructions and memory in common, and an episode's prompt
repeats most of its last one. `PrefixCache` holds the prompts that were read, within a budget of bytes
(`Speed.prefix_mib` of the compiler, `executor.prefix_mib`). A prompt reuses the longest beginning with the same ids,
the same soft tokens and the same pictures; only the rest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lm.backbone import Backbone, Batch
from lm.device import to_device
from lm.growing_cache import growing_cache
from lm.prompt import Prompt

RECENT = 4  # batches: what they used is not evicted
WORTH_A_PASS = 32  # more tokens than these, beyond the cached ones, are worth a pass of their own
Layer = tuple[Tensor, Tensor]  # keys and values, (heads, T, d) each
Embed = Callable[[Tensor, Sequence[Prompt]], Tensor]  # embeddings (B, T, d) of tokens (B, T) and their prompts


@dataclass(slots=True, eq=False)
class Segment:
    """A part of a prompt, with keys and values of its tokens by layer."""

    prompt: Prompt
    layers: tuple[Layer, ...] = ()
    parent: Segment | None = None
    children: list[Segment] = field(default_factory=list)  # parts that followed it in some prompt
    born: int = 0  # batch that read it
    used: int = 0  # last batch that used it

    @property
    def nbytes(self) -> int:
        given = [*self.prompt.pictures, *([] if self.prompt.soft is None else [self.prompt.soft])]
        return sum(tensors.nbytes for tensors in given) + sum(
            states.nbytes for layer in self.layers for states in layer
        )

    @classmethod
    def of(cls, cache: DynamicCache, row: int, prompt: Prompt) -> Segment:
        """View the last columns of a cache, which hold this part of a prompt, as a segment."""
        layers: list[Any] = cache.layers  # full attention in all of them
        at = slice(layers[0].keys.shape[2] - len(prompt.ids), None)
        return cls(prompt, tuple((layer.keys[row, :, at], layer.values[row, :, at]) for layer in layers))

    def copied(self, prompt: Prompt, at: slice, **links: Any) -> Segment:
        """Copy the tokens `at`, which are those of `prompt`."""
        layers = ((keys[:, at].clone(), values[:, at].clone()) for keys, values in self.layers)
        return Segment(prompt, tuple(layers), **links)


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a prompt that was read before, in parts."""

    parts: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(part.prompt.ids) for part in self.parts)

    @property
    def pictures(self) -> int:
        return sum(len(part.prompt.pictures) for part in self.parts)

    def layer(self, index: int, kind: int) -> Tensor:
        """Return the keys (kind 0) or values (1) of a layer, (heads, tokens, d)."""
        return torch.cat([part.layers[index][kind] for part in self.parts], 1)


class PrefixCache:
    """Tree of prompts for one set of weights: each path from the root is the beginning of a prompt.

    Where two prompts part, a segment is split in two. The least recently used leaf is evicted first, but none that the
    last RECENT batches used. Otherwise, if more episodes run side by side than there is room for, each would evict the
    next one's prompt, and none would be found again. The end of a prompt that its successor did not repeat may be
    evicted at once.
    """

    def __init__(self, mib: float) -> None:
        self.budget = int(mib * 2**20)  # bytes
        self.held = 0  # bytes in use
        self._root = Segment(Prompt(()))
        self._segments: dict[Segment, None] = {}
        self._batch = 0
        self._weights: object = None

    def of_weights(self, weights: object) -> PrefixCache:
        """Begin a batch. Clear the cache if the weights have changed."""
        self._batch += 1
        if weights != self._weights:
            self._root, self._segments = Segment(Prompt(())), {}
            self.held, self._weights = 0, weights
        return self

    def find(self, backbone: Backbone, prompt: Prompt, most: int | None = None) -> Start:
        """Return the longest cached beginning of a prompt, and mark it as used by this batch.

        Args:
            most: tokens of the beginning; by default all but one, since a pass has to read something.
        """
        most = len(prompt.ids) - 1 if most is None else most
        parts, at = list[Segment](), self._root
        while most and at.children:
            shared = [(part, *backbone.shared_prefix([part.prompt, prompt], most)) for part in at.children]
            at, tokens, pictures = max(shared, key=lambda found: found[1])
            if not tokens:
                break
            if tokens < len(at.prompt.ids):
                at = self._split(backbone, at, tokens=tokens, pictures=pictures)
            at.used = self._batch
            parts.append(at)
            most -= tokens
            prompt = backbone.cut(prompt, tokens, pictures)[1]
        return Start(tuple(parts))

    def keep(self, backbone: Backbone, prompt: Prompt, cache: DynamicCache, row: int, read: int) -> None:
        """Copy what is new of a prompt out of a cache, if room is left or older prompts can be evicted.

        Args:
            read: the prompt's last tokens that are the last columns of this row without a gap.
        """
        if not self.budget:
            return
        start = self.find(backbone, prompt, len(prompt.ids))
        rest = backbone.cut(prompt, start.tokens, start.pictures)[1]
        if not 0 < len(rest.ids) <= read:
            return
        new = Segment.of(cache, row, rest)
        if not self._make_room(new.nbytes):
            return
        parent = start.parts[-1] if start.parts else self._root
        self._add(new.copied(rest, slice(None), parent=parent, born=self._batch, used=self._batch))

    def _split(self, backbone: Backbone, part: Segment, tokens: int, pictures: int) -> Segment:
        """Replace a segment by two; return the first one. The segment itself stays as it is, for those who hold it."""
        first, last = backbone.cut(part.prompt, tokens, pictures)
        self._remove(part)
        times = {"born": part.born, "used": part.used}
        head = part.copied(first, slice(None, tokens), parent=part.parent, **times)
        tail = part.copied(last, slice(tokens, None), parent=head, children=part.children, **times)
        for child in tail.children:
            child.parent = tail
        self._add(head)
        self._add(tail)
        return head

    def _make_room(self, size: int) -> bool:
        """Evict leaves until `size` bytes fit; return whether they do."""
        while size <= self.budget < self.held + size:
            old = [part for part in self._segments if self._may_go(part)]
            if not old:
                return False
            self._remove(min(old, key=lambda part: part.used))
        return size <= self.budget

    def _may_go(self, part: Segment) -> bool:
        if part.children or part.parent is None:
            return False
        unrepeated = part.born == part.used < part.parent.used
        return unrepeated or part.used <= self._batch - RECENT

    def _add(self, part: Segment) -> None:
        assert part.parent is not None
        part.parent.children.append(part)
        self._segments[part] = None
        self.held += part.nbytes

    def _remove(self, part: Segment) -> None:
        assert part.parent is not None
        part.parent.children.remove(part)
        del self._segments[part]
        self.held -= part.nbytes


@dataclass(slots=True)
class PromptReading:
    """A batch of B prompts in a KV cache of T columns, to which further tokens can be added."""

    backbone: Backbone
    cache: DynamicCache
    mask: Tensor  # (B, T)
    position: Tensor  # of the next token, ([3,] B, 1)
    hidden: Tensor  # states at the prompts' last tokens, (B, 1, d)
    padded: bool  # whether the mask may hide anything
    cached: tuple[int, ...] = ()  # tokens of each prompt from earlier batches

    def feed(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Read K more columns (B, K), given on the host, of which some are real: hidden states (B, K, d)."""
        self.padded |= not bool(real.all())
        tokens, counts = to_device(torch.stack([tokens, real.long()]), self.mask.device)
        self.mask = torch.cat([self.mask, counts], 1)
        positions = self.position + counts.cumsum(1) - counts
        self.position = self.position + counts.sum(1, keepdim=True)
        return self.backbone.hidden(Batch(tokens, self.mask, positions, padded=self.padded), self.cache)

    def feed_lines(self, lines: Sequence[Sequence[int]]) -> Tensor:
        """Read a line of further tokens of each row, of any length: hidden states (B, K, d), K the longest."""
        width, pad = max(map(len, lines)), self.backbone.pad_id
        tokens = torch.tensor([[*line, *[pad] * (width - len(line))] for line in lines])
        return self.feed(tokens, torch.arange(width) < torch.tensor([len(line) for line in lines])[:, None])

    def drop(self, width: int, accepted: Sequence[int]) -> None:
        """Keep the first `accepted` of each row's last `width` columns: hide the others, and crop what no row keeps."""
        if min(accepted) == width:
            return
        last = self.mask[:, -width:]
        stays = torch.arange(width, device=last.device) < to_device(torch.tensor(accepted), last.device)[:, None]
        self.position = self.position - (last * ~stays).sum(1, keepdim=True)
        self.padded |= min(accepted) < max(accepted)
        extra = width - max(accepted)
        self.mask = torch.cat([self.mask[:, :-width], (last * stays)[:, : max(accepted)]], 1)
        if extra:
            self.cache.crop(-extra)


def read_prompts(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    prefixes: PrefixCache,
    keys: Sequence[Hashable] = (),
    embed: Embed | None = None,
) -> PromptReading:
    """Read prompts as one batch, and cache them.

    Args:
        keys: prompts with the same key have a beginning in common, which is read once; none: each has its own.
        embed: embeds tokens with the prompts' soft tokens; None: they have none.
    """
    found = [prefixes.find(backbone, prompt) for prompt in prompts]
    starts = _read_heads(backbone, prompts, found, prefixes, keys, embed)
    reading = _read(backbone, prompts, starts, embed)
    for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        prefixes.keep(backbone, prompt, reading.cache, row, len(prompt.ids) - start.tokens)
    reading.cached = tuple(start.tokens for start in found)
    return reading


def read_overlapping(
    backbone: Backbone, prompts: Sequence[Prompt], prefixes: PrefixCache, embed: Embed | None = None
) -> PromptReading:
    """Read prompts that mostly begin other ones, such as those of an episode's steps: the longest ones first, whose
    beginnings the cache then holds, and all of them behind these."""
    first = list[Prompt]()
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.ids), reverse=True):
        shared = (backbone.common_prefix([prompt, longer])[0] for longer in first)
        if len(prompt.ids) - max([prefixes.find(backbone, prompt).tokens, *shared]) > WORTH_A_PASS:
            first.append(prompt)
    if 0 < len(first) < len(prompts):
        read_prompts(backbone, first, prefixes, embed=embed)
    return read_prompts(backbone, prompts, prefixes, embed=embed)


def _read_heads(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    found: Sequence[Start],
    prefixes: PrefixCache,
    keys: Sequence[Hashable],
    embed: Embed | None,
) -> list[Start]:
    """Read what prompts of one key have in common, as one batch; return the beginning of each prompt that is read."""
    starts, groups, heads = list(found), list[list[int]](), list[Prompt]()
    for key in dict.fromkeys(keys):
        rows = [i for i, other in enumerate(keys) if other == key]
        tokens, pictures = backbone.common_prefix([prompts[i] for i in rows])
        known = min(found[i].tokens for i in rows)
        if tokens > (known + WORTH_A_PASS if known else 0):
            groups.append(rows)
            heads.append(backbone.cut(prompts[rows[0]], tokens, pictures)[0])
    if not heads:
        return starts
    begun = [prefixes.find(backbone, head) for head in heads]
    cache = _read(backbone, heads, begun, embed).cache
    for k, (rows, head, start) in enumerate(zip(groups, heads, begun, strict=True)):
        rest = backbone.cut(head, start.tokens, start.pictures)[1]
        whole = Start((*start.parts, Segment.of(cache, k, rest)))
        prefixes.keep(backbone, head, cache, k, len(rest.ids))
        for i in rows:
            starts[i] = max(whole, starts[i], key=lambda start: start.tokens)
    return starts


def _read(backbone: Backbone, prompts: Sequence[Prompt], starts: Sequence[Start], embed: Embed | None) -> PromptReading:
    """Read each prompt behind its start."""
    pairs = list(zip(prompts, starts, strict=True))
    tails = [backbone.cut(prompt, start.tokens, start.pictures)[1] for prompt, start in pairs]
    cache = growing_cache(backbone.model.config.get_text_config())
    begun = _fill(cache, starts, backbone.device)
    # The rest of every row is its last columns. Where another row has a longer rest, some of them are masked.
    whole, left = backbone.pad(prompts, "left"), backbone.pad(tails, "left")
    mask = torch.cat([begun, left.mask], 1)
    positions = whole.positions[..., -left.tokens.shape[1] :]
    padded = any(len(prompt.ids) < mask.shape[1] for prompt in prompts)
    batch = replace(left, mask=mask, positions=positions, padded=padded)
    embeddings = None if embed is None else embed(left.tokens, tails)
    hidden = backbone.hidden(batch, cache, embeddings)[:, -1:]
    return PromptReading(backbone, cache, mask, position=whole.next_positions, hidden=hidden, padded=padded)


def _fill(cache: DynamicCache, starts: Sequence[Start], device: torch.device) -> Tensor:
    """Fill an empty cache with the starts, which end at its last column; return its mask (B, P)."""
    width = max(start.tokens for start in starts)
    mask = torch.arange(width) >= torch.tensor([[width - start.tokens] for start in starts])
    if width:
        some = next(start.parts[0] for start in starts if start.parts)
        for i, layer in enumerate(some.layers):
            filled = [states.new_zeros(len(starts), states.shape[0], width, states.shape[2]) for states in layer]
            for row, start in enumerate(starts):
                for kind in (0, 1) if start.parts else ():
                    filled[kind][row, :, width - start.tokens :] = start.layer(i, kind)
            cache.update(filled[0], filled[1], i)
    return to_device(mask.long(), device)
