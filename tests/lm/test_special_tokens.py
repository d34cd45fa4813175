"""Special tokens that texts spell: encoded as text, by tokenizers of several kinds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm.prompt import PromptEncoder, PromptPart
from lm.special_tokens import SpecialTokens
from tests import tiny_models

MARKS = (
    "<|im_end|>",
    "<|im_start|>",
    "<|mem|>",
    "<|image_pad|>",
    "<|endoftext|>",
    "[INST]",
    "<start_of_turn>",
    "<|eot_id|>",
    "</s>",
    "<think>",
)
OTHERS = (
    AddedToken("[INST]", special=True),
    AddedToken("<|eot_id|>", special=True, rstrip=True, lstrip=True),
    AddedToken("<start_of_turn>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("<think>", special=False),
)


def chatml() -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_models.tokenizer().backend_tokenizer.to_str()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.backend_tokenizer.add_tokens(list(OTHERS))
    made.chat_template = tiny_models.tokenizer().chat_template
    return made


def sentencepiece() -> Any:
    """Like Llama's: bytes as a fallback, a space before the first word of a text alone, special tokens in the core
    vocabulary; the template trims what it is given."""
    pieces = ["<unk>", "</s>", "<|mem|>", "▁", *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    core = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(replaced)
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("</s>", "<|mem|>", *MARKS)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    made.chat_template = (
        "{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>{% endif %}"
    )
    return made


def lower_case() -> Any:
    """Texts are normalised before they are read."""
    made = chatml()
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made


KINDS = {"chatml": chatml, "sentencepiece": sentencepiece, "lower case": lower_case}


@functools.cache
def encoder(kind: str) -> PromptEncoder:
    return PromptEncoder(KINDS[kind]())


def special(made: PromptEncoder, ids: tuple[int, ...]) -> list[int]:
    return [id for id in ids if id in made.tokenizer.added_tokens_decoder]


pieces = st.sampled_from([*MARKS, " ", "\n", "go to shelf 1", "[", "<|im_", "é", "水"])
texts = st.lists(pieces | st.text()).map("".join)
every = pytest.mark.parametrize("kind", KINDS)


@every
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(texts, min_size=1, max_size=4), instructions=texts)
def test_no_text_makes_a_special_token(kind: str, parts: list[str], instructions: str) -> None:
    made = encoder(kind)
    plain = made.encode([PromptPart("x")], instructions and "y")
    prompt = made.encode([*map(PromptPart, parts), PromptPart(soft=3)], instructions)
    soft = [made.memory_id] * 3
    assert [id for id in special(made, prompt.ids) if id != made.memory_id] == special(made, plain.ids)
    assert [id for id in prompt.ids if id == made.memory_id] == soft
    assert not special(made, made.ids("".join(parts)))


@pytest.mark.parametrize("kind", ["chatml", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_the_same_text_comes_out(kind: str, text: str) -> None:
    made = encoder(kind)
    read = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text
    assert made.tokenizer.decode(made.ids(f"a{text}b")) == f"a{read}b"
    assert read.strip() in made.tokenizer.decode(made.encode([PromptPart(f"a{text}b")]).ids)


@every
@pytest.mark.parametrize("text", [f"x{mark} go to shelf 1\n" for mark in MARKS])
def test_marks_have_the_ids_of_their_characters(kind: str, text: str) -> None:
    """As a tokenizer without special tokens encodes them, in the place where they are."""
    made = encoder(kind)
    blind = Tokenizer.from_str(made.tokenizer.backend_tokenizer.to_str().replace('"special":false', '"special":true'))
    blind.encode_special_tokens = True
    assert list(made.ids(text)) == blind.encode(text, add_special_tokens=False).ids


@every
def test_what_is_encoded_beside_a_mark_is_what_it_is_without(kind: str) -> None:
    """The slow path gives ordinary text and the template's tokens the ids that the fast one gives them."""
    made = encoder(kind)
    for text in ("goal: put a mug in cabinet\nsee: nothing. ", "  a ", "x\n"):
        rendered = made.processor.apply_chat_template(
            [{"role": "system", "content": "Act."}, {"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert tuple(made.marks.encode(rendered)) == made.encode([PromptPart(text)], "Act.").ids


def test_a_mark_in_two_parts_is_text() -> None:
    made = encoder("chatml")
    assert special(made, made.encode([PromptPart("<|im_"), PromptPart("end|>")]).ids) == special(
        made, made.encode([PromptPart("x")]).ids
    )


def test_prompts_are_encoded_alike_by_every_process() -> None:
    """Names of hidden marks are random, and leave no trace."""
    tokenizer = chatml()
    first, second = SpecialTokens(tokenizer), SpecialTokens(tokenizer)
    text = f"x{''.join(MARKS)} y"
    assert first.encode(first.hide(text)) == second.encode(second.hide(text))
    assert second.hide(first.hide(text)) == first.hide(text)


def test_a_tokenizer_that_cannot_encode_marks_as_text_is_named() -> None:
    slow = chatml()
    slow.__class__ = type("Slow", (PreTrainedTokenizerFast,), {"backend_tokenizer": None})
    with pytest.raises(ValueError, match=r"Slow \(no fast tokenizer\)"):
        PromptEncoder(slow).encode([PromptPart("a </s>")])


@pytest.mark.parametrize("kind, end", [("chatml", "<|im_end|>"), ("sentencepiece", "</s>")])
def test_an_answer_ends_with_what_the_chat_template_writes_behind_it_or_else_with_eos(kind, end):
    tokenizer = KINDS[kind]()
    if kind == "chatml":
        tokenizer.eos_token = "<|im_start|>"  # as in a folder of SmolLM2 that was made from a GGUF file
    made = PromptEncoder(tokenizer)
    assert tokenizer.convert_ids_to_tokens(made.end_id) == end
    assert made.end_id not in made.suppressed
