"""What makes compiling faster changes nothing: the same tokens and soft tokens, greedy or drawn by the same seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from compiler.brief_state import Create
from compiler.hf import MemoryCompiler
from compiler.language import Emission, ParseResult
from compiler.records import Compilation, Decoding
from configs.models import Speed
from lm.prefixes import PrefixCache
from tests import tiny_models

SLOW = Speed(drafts=0, prefix_mib=0, second_pass="always")
KEEPING = SLOW.model_copy(update={"prefix_mib": 64})
LIMIT = 24


def requests(vlm: bool) -> list:
    """Prompts of several lengths, some of them of the same memory; one without a picture."""
    return [tiny_models.request(i, image=vlm and i != 1) for i in range(7)]


def writer(vlm: bool, temperature: float = 0.0) -> MemoryCompiler:
    return tiny_models.uneven_writer(vlm, Decoding(temperature=temperature, max_new_tokens=LIMIT), SLOW)


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
    for speed in (Speed(), Speed(drafts=0), Speed(drafts=9, prefix_mib=0)):
        made, passes = compiled(compiler, speed, requests(vlm))
        assert_same(made, before)
        if speed.drafts:
            assert len(passes) < len(slow)  # guesses were right
            assert sum(c for _, c in passes[2:-1]) > len(passes)  # and guesses were wrong
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


# -- soft tokens that are not read ------------------------------------------------------------------------------------

WHERE_READ = SLOW.model_copy(update={"second_pass": "read"})


def guiding(compiler: MemoryCompiler) -> MemoryCompiler:
    """What a random model writes says nothing: take its emissions of an odd length for guidance."""
    plain = compiler.parsed

    def parsed(ids: Sequence[int], truncated: bool) -> tuple[str, ParseResult]:
        guidance = Emission("go north" if len(ids) % 2 else "")
        return plain(ids, truncated)[0], ParseResult(guidance)

    compiler.parsed = parsed  # type: ignore[method-assign]
    return compiler


@pytest.mark.parametrize("full", [True, False], ids=["full attention", "linear attention"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_soft_tokens_are_made_where_they_are_read_and_are_the_same(temperature: float, full: bool) -> None:
    compiler = guiding(writer(False, temperature))
    compiler.backbone.__dict__["attends_fully"] = full
    asked = [replace(request, soft_on="guidance") for request in requests(False)]
    before, slow = compiled(compiler, SLOW, asked)
    assert all(c.soft is not None for c in before)
    heard = [bool(c.emission.guidance) for c in before]
    assert 0 < sum(heard) < len(heard)
    for speed in (WHERE_READ, Speed(drafts=0), Speed()):
        made, _ = compiled(compiler, speed, asked)
        assert [c.soft is not None for c in made] == heard
        assert [(c.emission_ids, c.text) for c in made] == [(c.emission_ids, c.text) for c in before]
        assert_same(*([c for c, read in zip(of, heard, strict=True) if read] for of in (made, before)))
        for unread, whole in zip(made, before, strict=True):
            if unread.soft is None:
                assert unread.mu is unread.log_sigma is unread.z is unread.noise is unread.latent_logprobs is None
                assert unread.tokens_out == whole.tokens_out - compiler.n_tokens == len(unread.emission_ids)
    silent, fewer = compiled(compiler, WHERE_READ, [replace(request, soft_on="never") for request in asked])
    assert all(c.soft is None for c in silent) and len(fewer) == len(slow) - 1  # the second pass
    assert compiled(compiler, SLOW, [replace(r, soft_on="never") for r in asked])[0][0].soft is not None  # the switch


def test_rows_in_common_draw_what_they_drew_beside_soft_tokens_that_are_not_made() -> None:
    compiler = guiding(writer(False, 0.7))
    asked, drawn = [replace(request, soft_on="guidance") for request in requests(False)], []
    for speed in (SLOW, WHERE_READ):
        compiler.speed = speed
        compiler.generator.manual_seed(3)
        drawn.append(compiler.compile(asked))
    before, made = drawn
    assert [c.emission_ids for c in made] == [c.emission_ids for c in before]
    read = [(a, b) for a, b in zip(made, before, strict=True) if a.z is not None]
    assert 0 < len(read) < len(made) and all(torch.equal(a.z, b.z) for a, b in read)


def test_guesses_hold_no_reserved_token_and_follow_what_stood_before() -> None:
    from compiler.decoding import _Row, _until

    def follows(text: str, most: int, then: str = "") -> str:
        row = _Row(0, ids := list(map(ord, text)), len(ids))
        row.take(list(map(ord, then)), (0, 0))
        row.follows(most)
        return "".join(map(chr, row.follows(most)))

    assert follows("abcdXabceYab", 3) == "ceY"  # the last time that `ab` stood there
    assert follows("abcdXabceY", 3, "ab") == follows("abcd", 3, "XabceYab") == "ceY"
    assert follows("xyz", 3) == "" and follows("x", 3) == ""
    assert follows("xabab", 5) == "ababa"  # it goes round
    assert _until([1, 2, 3], [2, 3]) == [1] and _until([1, 2, 3], []) == [1, 2, 3]


# -- prefixes of prompts, cached between steps ------------------------------------------------------------------------


def episode(vlm: bool, i: int) -> list:
    """The steps of an episode: one memory, another state and view at each."""
    first = tiny_models.request(i, image=vlm)
    views = ["You see a cabinet 1.", "You see a shelf 2. You see a mug 1.", "You see nothing.", "You see a cabinet 2."]
    return [
        replace(first, observation=view, state=first.state and first.state.apply(Create(f"step {t}", view)))
        for t, view in enumerate(views)
    ]


def read_columns(passes: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in passes)


@pytest.mark.parametrize("vlm", [True, False])
def test_kept_beginnings_change_nothing_and_are_not_read_again(vlm: bool) -> None:
    """Episodes of three memories step by step, two of them of the same memory from the third step on."""
    compiler = writer(vlm)
    episodes = [episode(vlm, i) for i in range(3)]
    compiler._prefixes = PrefixCache(64)
    for t in range(4):
        asked = [steps[t] for steps in (*episodes, *([episodes[0]] if t > 1 else []))]
        before, slow = compiled(compiler, SLOW, asked)
        made, fast = compiled(compiler, KEEPING, asked)
        assert_same(made, before)
        assert all(c.tokens_cached is None for c in before)
        assert all(bool(c.tokens_cached) is (t > 0) for c in made)
        if t > 0:  # state and view are read, and not the memory
            assert read_columns(fast) < 0.8 * read_columns(slow)
            assert all(len(c.prompt_ids) - c.tokens_cached < 60 for c in made if c.tokens_cached)
    assert 0 < compiler._prefixes.held < 64 * 2**20


def test_what_other_weights_have_read_is_forgotten() -> None:
    compiler = writer(False)
    steps = episode(False, 0)
    compiler._prefixes, speed = PrefixCache(64), KEEPING
    compiled(compiler, speed, steps[:1])
    with torch.no_grad():
        for name, parameter in compiler.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    made, _ = compiled(compiler, speed, steps[1:2])
    assert made[0].tokens_cached == 0
    assert_same(made, compiled(compiler, SLOW, steps[1:2])[0])
    again, _ = compiled(compiler, speed, steps[2:3])
    assert again[0].tokens_cached
    compiler.weight_version += 1
    assert compiled(compiler, speed, steps[3:])[0][0].tokens_cached == 0


def test_what_sampling_shares_a_generator_keeps_nothing() -> None:
    compiler = writer(False, 0.7)
    compiler.speed, compiler._prefixes = KEEPING, PrefixCache(64)
    made = compiler.compile(requests(False))
    assert compiler._prefixes.held == 0 and made[0].tokens_cached is None
