"""The cache of prompts: a tree with a budget; what is read behind it is what is read without it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from lm.backbone import Backbone
from lm.prefixes import RECENT, PrefixCache, read_overlapping, read_prompts
from lm.prompt import Prompt, PromptPart
from tests import tiny_models

TOKEN = (
    2 * 2 * 1 * 8 * 4
)  # bytes of a token in `states`: keys and values, two layers, one head, eight features, float32


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return tiny_models.lm_backbone()


def states(n: int) -> DynamicCache:
    """A cache with n columns of one row."""
    cache = DynamicCache()
    for layer in range(2):
        columns = torch.arange(float(n))[None, None, :, None].expand(1, 1, n, 8)
        cache.update(columns, columns + 100, layer)
    return cache


def keep(kept: PrefixCache, backbone: Backbone, *ids: int, soft: torch.Tensor | None = None) -> None:
    prompt = Prompt(ids, soft)
    kept.keep(backbone, prompt, states(len(ids)), 0, len(ids))


def found(kept: PrefixCache, backbone: Backbone, *ids: int, soft: torch.Tensor | None = None) -> int:
    return kept.find(backbone, Prompt(ids, soft)).tokens


def batches(kept: PrefixCache, n: int = 1) -> PrefixCache:
    for _ in range(n):
        kept.of_weights("the same")
    return kept


def test_the_longest_beginning_is_found_with_its_keys_and_values(backbone: Backbone) -> None:
    kept = batches(PrefixCache(1))
    keep(kept, backbone, 5, 6, 7, 8)
    keep(kept, backbone, 5, 6, 9, 10, 11)
    assert kept.held == 7 * TOKEN  # 5 6, 7 8, 9 10 11
    assert found(kept, backbone, 5, 6, 9, 10, 12) == 4 and found(kept, backbone, 5, 6, 7, 8, 1) == 4
    assert found(kept, backbone, 5, 1) == 1 and found(kept, backbone, 1, 5) == 0
    assert found(kept, backbone, 5, 6, 7, 8) == 3  # one is left to read
    start = kept.find(backbone, Prompt((5, 6, 9, 10, 1)))
    assert start.layer(1, 0)[0, :, 0].tolist() == [0, 1, 2, 3]
    assert start.layer(0, 1)[0, :, 7].tolist() == [100, 101, 102, 103]
    assert kept.held == 7 * TOKEN


def test_random_prompts_are_found_as_far_as_any_that_was_kept_agrees(backbone: Backbone) -> None:
    kept, rng, seen = batches(PrefixCache(64)), random.Random(0), list[tuple[int, ...]]()
    for _ in range(300):
        batches(kept)
        ids = tuple(rng.choices((5, 6), k=rng.randint(1, 9)))
        agree = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, old, strict=False)))) for old in seen]
        start = kept.find(backbone, Prompt(ids))
        assert start.tokens == min(max(agree, default=0), len(ids) - 1)
        assert [id for part in start.parts for id in part.prompt.ids] == list(ids[: start.tokens])
        if start.parts:
            assert start.layer(1, 0)[0, :, 0].tolist() == list(range(start.tokens))
        keep(kept, backbone, *ids)
        seen.append(ids)
    assert kept.held == TOKEN * len({old[:n] for old in seen for n in range(1, len(old) + 1)})


def test_other_soft_tokens_end_a_beginning(backbone: Backbone) -> None:
    mem, kept = backbone.memory_id, batches(PrefixCache(1))
    soft = torch.arange(12.0).view(3, 4)
    keep(kept, backbone, 5, mem, mem, 6, mem, 7, soft=soft)
    other = soft.clone()
    other[1] += 1
    assert found(kept, backbone, 5, mem, mem, 6, mem, 8, soft=soft) == 5
    assert found(kept, backbone, 5, mem, mem, 6, mem, 8, soft=other) == 2
    assert found(kept, backbone, 5, mem, mem, 6, mem, 8) == 1  # text that none replaces
    keep(kept, backbone, 5, mem, mem, 6, mem, 8, soft=other)
    assert found(kept, backbone, 5, mem, mem, 6, mem, 8, 9, soft=other) == 6
    assert found(kept, backbone, 5, mem, mem, 6, mem, 7, 9, soft=soft) == 6


def test_the_budget_holds_and_what_was_used_least_recently_goes_first(backbone: Backbone) -> None:
    kept = batches(PrefixCache(25 * TOKEN / 2**20))
    a, b, c = ([k] * 10 for k in (5, 6, 7))
    keep(kept, backbone, *a)
    keep(kept, backbone, *b)
    batches(kept, RECENT)
    assert found(kept, backbone, *a, 1) == 10
    keep(kept, backbone, *c)
    assert [found(kept, backbone, *ids, 1) for ids in (a, b, c)] == [10, 0, 10] and kept.held == 20 * TOKEN
    keep(kept, backbone, *range(30))  # larger than the budget
    assert kept.held == 20 * TOKEN and found(kept, backbone, *a, 1) == 10
    kept.of_weights("others")
    assert kept.held == 0 == found(kept, backbone, *a, 1)
    keep(none := PrefixCache(0), backbone, *a)
    assert none.held == 0 == found(none, backbone, *a, 1)


def test_the_end_that_a_next_prompt_does_not_repeat_is_evicted_though_it_is_recent(backbone: Backbone) -> None:
    kept, begun = PrefixCache(11 * TOKEN / 2**20), [5] * 8
    for t in range(4):
        batches(kept)
        assert found(kept, backbone, *begun, 50 + t, 51) == (8 if t else 0)
        keep(kept, backbone, *begun, 50 + t, 51)
        assert kept.held == 10 * TOKEN and found(kept, backbone, *begun, 50 + t, 51, 1) == 10


def test_more_prompts_side_by_side_than_there_is_room_for_leave_some_of_them_kept(backbone: Backbone) -> None:
    """Three of them in turn, room for two; then another takes the place of the first one that has ended."""
    kept, hits = PrefixCache(25 * TOKEN / 2**20), []
    for _ in range(3):
        batches(kept)
        hits.append([found(kept, backbone, *[k] * 10, 1) == 10 for k in (5, 6, 7)])
        for k in (5, 6, 7):
            keep(kept, backbone, *[k] * 10)
    assert hits == [[False] * 3, [True, True, False], [True, True, False]]
    for _ in range(RECENT):
        batches(kept)
        assert found(kept, backbone, *[6] * 10, 1)
    keep(kept, backbone, *[8] * 10)
    assert [found(kept, backbone, *[k] * 10, 1) > 0 for k in (5, 6, 8)] == [False, True, True]


def embed(backbone: Backbone, tokens: torch.Tensor, rows: Any) -> torch.Tensor:
    """Embeddings with soft tokens, one row at a time."""
    out = backbone.embeddings(tokens).clone()
    for i, row in enumerate(rows):
        if row.soft is not None:
            out[i, tokens[i] == backbone.memory_id] = row.soft
    return out


@torch.no_grad()
@pytest.mark.parametrize("vlm", [False, True])
def test_states_behind_cached_beginnings_are_those_of_whole_prompts(vlm: bool) -> None:
    """Pictures and soft tokens in the beginnings and behind them, rows of several lengths."""
    backbone = tiny_models.vlm_backbone() if vlm else tiny_models.lm_backbone()
    picture = lambda i: [PromptPart(image=Image.new("RGB", (64, 64), (i, 90, 200)))] if vlm else []
    soft, kept = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), PrefixCache(64)

    def prompt(episode: int, t: int) -> Prompt:
        parts = [PromptPart(f"go to shelf {episode} "), *picture(episode), PromptPart("now "), PromptPart(soft=2)]
        for step in range(t):
            parts += [PromptPart(f" look at mug {step} "), *(picture(step) if step % 2 else [])]
        encoded = backbone.encode([*parts, PromptPart("you see "), PromptPart(soft=2)], "find")
        return replace(encoded, soft=torch.cat([soft[episode : episode + 2], soft[t : t + 2] + 1]))

    embedded = lambda tokens, rows: embed(backbone, tokens, rows)
    for t in range(4):
        batches(kept)
        prompts = [prompt(episode, t + episode) for episode in range(3)]
        made, plain = (read_prompts(backbone, prompts, cache, embed=embedded) for cache in (kept, PrefixCache(0)))
        torch.testing.assert_close(made.hidden, plain.hidden, atol=1e-4, rtol=1e-4)
        lines = [[7, 8, 9][: 1 + i] for i in range(3)]
        for a, b in zip(*(reading.feed_lines(lines) for reading in (made, plain)), strict=True):
            torch.testing.assert_close(a[0], b[0], atol=1e-4, rtol=1e-4)
        assert all(cached > 0 for cached in made.cached) is (t > 0) and plain.cached == (0, 0, 0)


@torch.no_grad()
def test_prompts_that_begin_other_ones_are_read_behind_them(backbone: Backbone) -> None:
    """Steps of two episodes, whose prompts end otherwise than the next ones go on."""
    steps = [
        backbone.encode([PromptPart(f"{name} " + "go to shelf " * 20 * t)], "find") for name in "ab" for t in (1, 3, 2)
    ]
    read, hidden = list[int](), backbone.hidden
    counted = lambda batch, *given: (read.append(batch.tokens.numel()), hidden(batch, *given))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbone, "hidden", counted)
        made = read_overlapping(backbone, steps, batches(PrefixCache(64)))
    rests = [len(step.ids) - cached for step, cached in zip(steps, made.cached, strict=True)]
    assert max(rests) < 16
    assert read == [2 * max(len(step.ids) for step in steps), len(steps) * max(rests)]
    torch.testing.assert_close(made.hidden, read_prompts(backbone, steps, PrefixCache(0)).hidden, atol=1e-4, rtol=1e-4)
