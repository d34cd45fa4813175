"""What makes compiling faster leaves it as it is: the same tokens and soft tokens, greedy or drawn by the same seeds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from compiler.hf import MemoryCompiler
from compiler.records import Compilation, Decoding
from configs.models import Speed
from tests import tiny_models

SLOW = Speed(drafts=0, shrink=False)
LIMIT = 24


def requests(vlm: bool) -> list:
    """Prompts of several lengths, some of them of the same memory; one without a picture."""
    return [tiny_models.request(i, image=vlm and i != 1) for i in range(7)]


def writer(vlm: bool, temperature: float = 0.0) -> MemoryCompiler:
    """A compiler whose emissions end early or late, and partly repeat what stands before: its logits are steep, and the
    end of turn comes wherever a feature of the hidden state is large."""
    decoding = Decoding(temperature=temperature, max_new_tokens=LIMIT)
    compiler = tiny_models.memory_compiler(vlm, decoding=decoding, speed=SLOW).eval()
    flat, end = compiler.backbone.logits, compiler.backbone.end_id

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        steep = 20 * flat(hidden)
        best = steep.amax(-1)
        steep[..., end] = torch.where(hidden[..., 0] > 1.2, best + 9, best - 9)
        return steep

    compiler.backbone.logits = logits  # type: ignore[method-assign]
    return compiler


SEEDS = list(range(7))


def compiled(compiler: MemoryCompiler, speed: Speed, asked: list) -> tuple[list[Compilation], list[tuple[int, int]]]:
    """What is compiled, and rows and columns of each pass of the model."""
    passes, hidden = [], compiler.backbone.hidden
    compiler.backbone.hidden = lambda batch, *rest: passes.append(batch.tokens.shape) or hidden(batch, *rest)  # type: ignore[method-assign]
    compiler.speed = speed
    try:
        return compiler.compile(asked, seeds=SEEDS[: len(asked)]), passes
    finally:
        compiler.backbone.hidden = hidden  # type: ignore[method-assign]


def assert_same(made: list[Compilation], before: list[Compilation]) -> None:
    for a, b in zip(made, before, strict=True):
        assert (a.emission_ids, a.text, a.parse_error) == (b.emission_ids, b.text, b.parse_error)
        for name in ("text_logprobs", "mu", "log_sigma", "soft"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vlm", [True, False])
def test_no_lever_changes_what_is_written(vlm: bool, temperature: float) -> None:
    compiler = writer(vlm, temperature)
    before, slow = compiled(compiler, SLOW, requests(vlm))
    lengths = Counter(len(c.emission_ids) for c in before)
    assert len(lengths) >= 3
    for speed in (Speed(), Speed(drafts=0), Speed(drafts=9, shrink=False)):
        made, passes = compiled(compiler, speed, requests(vlm))
        assert_same(made, before)
        if speed.drafts:
            assert len(passes) < len(slow)  # guesses were right
            assert sum(c for _, c in passes[2:-1]) > len(passes)  # and guesses were wrong
        else:
            assert min(rows for rows, _ in passes[2:]) < 7  # the batch did shrink
    assert_same(compiled(compiler, Speed(drafts=9), requests(vlm)[:1])[0], before[:1])


def test_rows_that_draw_from_one_generator_draw_what_they_drew() -> None:
    compiler = writer(False, 0.7)
    asked = requests(False)
    compiler.generator.manual_seed(3)
    before = compiler.compile(asked)
    compiler.speed = Speed(drafts=9)
    compiler.generator.manual_seed(3)
    for a, b in zip(compiler.compile(asked), before, strict=True):
        assert a.emission_ids == b.emission_ids and torch.equal(a.z, b.z)


def test_guesses_hold_no_reserved_token_and_follow_what_stood_before() -> None:
    from compiler.decoding import _Row, _until

    row = _Row(0, "abcdXabceYab")
    assert row.follows(3) == "ceY"  # the last time that `ab` stood there
    assert _Row(0, "xyz").follows(3) == ""
    assert _Row(0, "xabab").follows(5) == "ababa"  # it goes round
    assert _until("abc", [ord("b"), ord("c")]) == "a" and _until("abc", []) == "abc"
