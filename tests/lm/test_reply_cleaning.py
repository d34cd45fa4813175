"""What of a model's text is its answer: no reasoning, whatever marks it, and no fence around the whole."""

import time

import pytest

from lm.reply_cleaning import clean_reply, extract_labelled

TAGS = [
    ("<think>", "</think>"),
    ("<Thinking>", "</Thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning a=1>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("begin", "end"), TAGS)
def test_reasoning_is_no_part_of_an_answer(begin, end):
    reasoning = "The mug is not mentioned.\nAction: look"
    for text in (
        f"{begin}{reasoning}{end}\n\nfridge 1\n",
        f"{begin}\n{reasoning}\n{end}fridge 1",
        f"\ufeff\n{begin}{end}\nfridge 1",
        f"{reasoning}{end}\r\n\r\nfridge 1",
        f"fridge 1\n{begin}{reasoning}",
        f"{begin}{reasoning} {begin} it{end}fridge 1",
        f"{begin}one{end} {begin}two{end}```\nfridge 1\n```",
    ):
        assert clean_reply(text) == "fridge 1", text
    assert clean_reply(begin + reasoning) == clean_reply(f"{reasoning}{end}\n") == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('the tag "<think>" and `</think>`', 'the tag "<think>" and `</think>`'),
        ("analysis of it", "analysis of it"),
        ("I think <b>so</b> [think]", "I think <b>so</b> [think]"),
        ("analysisWe go.assistantfinallook", "look"),
        ("<|start|>assistant<|channel|>final<|message|>look<|return|>", "look"),
        ("<answer> look </answer>", "look"),
        ("```look```", "look"),
        ("~~~json\n{}\n~~~", "{}"),
        ("```\nlook", "look"),
        ("```", ""),
        ("", ""),
        ("```\na\n```\nand\n```\nb\n```", "```\na\n```\nand\n```\nb\n```"),
        ("> a | b\n+ c: d\r\n", "> a | b\n+ c: d"),
    ],
)
def test_what_is_no_reasoning_stays(text, answer):
    assert clean_reply(text) == answer and clean_reply(answer) == answer


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("Action: look", "look"),
        ("ACTION - look", "look"),
        ("**Action:** look", "look"),
        ("Next action 2: look", "look"),
        ("Action：look", "look"),
        ("Thought: a mug. Action: look", "look"),
        ("Thought: a\nAction:\n```\nlook\n```", "look"),
        ("Sure:\n```text\nlook\n```\nThat helps.", "look"),
        ("<action>look</action>", "look"),
        ("look\n```", "look"),
        ("Emission:\n> a | b\n+ c: d", "> a | b\n+ c: d"),
        ("action figure 1", "action figure 1"),
        ("Action:", "Action:"),
    ],
)
def test_labels_and_fences_mark_out_an_answer(text, inner):
    assert extract_labelled(text) == inner


@pytest.mark.parametrize(
    "piece", ["<think ", "<think>", "</think>", "thought action ", "-", "<answer>", "```\n", "> ", "a: "]
)
def test_a_text_of_any_length_is_read_in_no_time(piece):
    started = time.process_time()
    extract_labelled(clean_reply(piece * 20_000) or piece * 20_000)
    assert time.process_time() - started < 2
