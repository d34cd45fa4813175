"""Reads rows with gradients, and what rows begin with in common only once.

The rows of an episode begin with the same instructions and task memory. `read_rows` reads these prefixes as one batch
whose keys and values keep their graph, repeats them for the rows (the gradient of a repeat is a sum), and reads the
rest of all rows as a second batch behind them. States and gradients are those of whole rows, up to the order of sums.
Dropout is drawn once for the tokens of a prefix. `lm/prefixes.py` does the same without gradients, for decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lm.attention import attends_beside
from lm.backbone import Backbone, Batch
from lm.device import to_device
from lm.graph_cache import GraphCache
from lm.prompt import Prompt

# Whether rows share prefixes: always in two passes for processes that must run equally many, else where that pays.
Sharing = Literal["never", "if_shorter", "always"]
WORTH = 0.9  # most tokens of two passes, padding included, as a share of those of one


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens and pictures of some rows, given by their indices."""

    rows: tuple[int, ...]
    tokens: int
    pictures: int


@dataclass(frozen=True, slots=True)
class RowStates:
    """Hidden states of a batch of rows.

    Attributes:
        tokens: (B, T), padded on the right.
        hidden: (B, T, d).
        skipped: tokens of each row before the first column.
    """

    tokens: Tensor
    hidden: Tensor
    skipped: tuple[int, ...]


def read_rows(
    backbone: Backbone, prompts: Sequence[Prompt], ends: Sequence[Sequence[int]], sharing: Sharing = "never"
) -> RowStates:
    """Read rows, each a prompt and the tokens behind it."""
    rows = [prompt.extended(end) for prompt, end in zip(prompts, ends, strict=True)]
    if prefixes := prefixes_to_share(backbone, prompts, rows, sharing):
        return _read_behind(backbone, rows, prefixes, joined=sharing == "always")
    batch = backbone.pad(rows, "right")
    return RowStates(batch.tokens, backbone.hidden(batch), (0,) * len(rows))


def prefixes_to_share(
    backbone: Backbone, prompts: Sequence[Prompt], rows: Sequence[Prompt], sharing: Sharing
) -> list[Prefix]:
    """Return the prefixes of rows that begin with these prompts; none if rows are read whole, as by all models without
    full attention (`Backbone.attends_fully`)."""
    if sharing == "never" or not backbone.attends_fully:
        return []
    prefixes = find_prefixes(backbone, prompts)
    pays = tokens_read(prefixes, rows) <= WORTH * len(rows) * max(len(row.ids) for row in rows)
    return prefixes if pays or sharing == "always" else []


def find_prefixes(backbone: Backbone, prompts: Sequence[Prompt]) -> list[Prefix]:
    """Divide prompts into groups with a common prefix, so that the fewest tokens are read.

    A prompt's last token is never part of a prefix. A prompt alone in its group is cut where it leaves about as much as
    the others: a batch is padded to its longest row."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].ids)
    sizes = [len(prompts[i].ids) - 1 for i in order]
    pairs = [
        backbone.shared_prefix([prompts[a], prompts[b]], min(most))
        for (a, b), most in zip(pairwise(order), pairwise(sizes), strict=True)
    ]
    spans = best_groups([tokens for tokens, _ in pairs])
    longest = max((min(pairs[i:j])[0] for i, j in spans if i < j), default=0) or max(sizes)
    common = [
        min(pairs[i:j]) if i < j else backbone.shared_prefix([prompts[order[i]]], min(longest, sizes[i]))
        for i, j in spans
    ]
    return [Prefix(tuple(order[i : j + 1]), *cut) for (i, j), cut in zip(spans, common, strict=True)]


def best_groups(shared: Sequence[int]) -> list[tuple[int, int]]:
    """Divide sorted rows, of which neighbours share `shared` tokens, into groups (first and last row) that save the
    most tokens: those that all rows of a group share, once for every row but the first."""
    saved, first = [0], list[int]()  # of the rows up to each: tokens saved, and the first row of the last group
    for last in range(len(shared) + 1):
        best, begin, common = saved[last], last, 0
        for i in range(last - 1, -1, -1):
            common = min(common, shared[i]) if i < last - 1 else shared[i]
            if (value := saved[i] + (last - i) * common) > best:
                best, begin = value, i
        saved.append(best)
        first.append(begin)
    groups, last = list[tuple[int, int]](), len(shared)
    while last >= 0:
        groups.append((first[last], last))
        last = first[last] - 1
    return groups[::-1]


def tokens_saved(prefixes: Sequence[Prefix]) -> int:
    """Count the tokens that are read less often, padding excluded."""
    return sum(prefix.tokens * (len(prefix.rows) - 1) for prefix in prefixes)


def tokens_read(prefixes: Sequence[Prefix], rows: Sequence[Prompt]) -> int:
    """Count the tokens of both passes, padding included."""
    rest = max(len(rows[i].ids) - prefix.tokens for prefix in prefixes for i in prefix.rows)
    return len(prefixes) * max(prefix.tokens for prefix in prefixes) + len(rows) * rest


def _read_behind(backbone: Backbone, rows: Sequence[Prompt], prefixes: Sequence[Prefix], joined: bool) -> RowStates:
    """Read prefixes, then the rest of each row behind its prefix.

    Args:
        joined: let the first pass's states have a gradient (of zero), which FSDP2 needs to gather their weights."""
    of = {i: k for k, prefix in enumerate(prefixes) for i in prefix.rows}
    cuts = [(prefixes[of[i]].tokens, prefixes[of[i]].pictures) for i in range(len(rows))]
    parts = [backbone.cut(row, *cut) for row, cut in zip(rows, cuts, strict=True)]
    heads = backbone.pad([parts[prefix.rows[0]][0] for prefix in prefixes], "right")
    config = backbone.model.config.get_text_config()
    cache = GraphCache.empty(config)
    begun = backbone.hidden(heads, cache)
    which = [of[i] for i in range(len(rows))]
    batch = _rest(backbone, rows, [rest for _, rest in parts], heads, which)
    if attends_beside(config) and all(prefix.tokens for prefix in prefixes):  # its kernel needs some
        behind = cache.beside([prefix.rows for prefix in prefixes], [prefix.tokens for prefix in prefixes])
    else:
        behind = cache.repeated(which)
    hidden = backbone.hidden(batch, behind)
    if joined:
        hidden = hidden + 0 * begun[:1, :1]
    return RowStates(batch.tokens, hidden, tuple(tokens for tokens, _ in cuts))


def _rest(
    backbone: Backbone, rows: Sequence[Prompt], rest: Sequence[Prompt], heads: Batch, which: Sequence[int]
) -> Batch:
    """Pad the rest of each row, with the mask and positions that it has behind its prefix among `heads`."""
    tails, whole = backbone.pad(rest, "right"), backbone.pad(rows, "right").positions
    skipped = torch.tensor([len(row.ids) - len(part.ids) for row, part in zip(rows, rest, strict=True)])
    at = (skipped[:, None] + torch.arange(tails.tokens.shape[1])).clamp(max=whole.shape[-1] - 1)
    at, index = to_device(at, whole.device), to_device(torch.tensor(which), whole.device)
    return replace(
        tails,
        mask=torch.cat([heads.mask[index], tails.mask], 1),
        positions=whole.gather(-1, at.expand(*whole.shape[:-1], -1)),
        padded=heads.padded or tails.padded,
    )
