"""Cleaning of language models' replies: removal of reasoning, fences and labels."""

from __future__ import annotations

import re

# Reasoning tags: <think> and similar, Mistral's [THINK], and those of Kimi, Cohere and gpt-oss.
_NAMES = r"(?:seed:)?(?:think|thinking|thoughts?|reasoning)"
_TAG = re.compile(
    rf"(?P<open><{_NAMES}(?:\s[^<>/]*)?>|(?-i:\[THINK\])|◁think▷|<\|(?:START_THINKING|begin_of_thought)\|>"
    r"|<\|channel\|>(?:analysis|commentary)[^<]*<\|message\|>)"
    rf"|</{_NAMES}\s?>|(?-i:\[/THINK\])|◁/think▷|<\|(?:END_THINKING|end_of_thought)\|>"
    r"|<\|channel\|>final[^<]*<\|message\|>",
    re.IGNORECASE,
)
_BARE_CHANNELS = ("analysis", "assistantfinal")  # gpt-oss's, decoded without special tokens
_QUOTED = ('""', "''", "``", "“”")
_FENCE = ("```", "~~~")
_NESTED = 10  # maximal layers of wrapping
_WRAPPED = re.compile(r"<(answer|response)>(.*)</\1>", re.IGNORECASE | re.DOTALL)
_LABEL = re.compile(
    r"[ \t>*#_-]{0,8}(?:(?:thought|thinking|reasoning)\b.*?\b)?(?:next )?(?:action|command|emission)[ \t]?\d{0,3}"
    r"[*_]{0,3}[ \t]?(?:[:：=]|-[ \t]|[–—])[ \t*_]{0,8}",
    re.IGNORECASE,
)


def clean_reply(text: str) -> str:
    """Remove reasoning, byte-order mark, outer white space, and fences or tags around the whole reply.

    Reasoning is the text between its tags, after an unclosed opening tag, and before an unopened closing tag (chat
    templates open it). A tag in quotes or backticks is text. Returns "" for a reply of reasoning alone.
    """
    for _ in range(_NESTED):
        if (inner := _stripped(text)) == text:
            break
        text = inner
    return text


def _stripped(text: str) -> str:
    """Remove one layer of reasoning and wrapping."""
    text = text.replace("\r\n", "\n").strip("\ufeff \t\n")
    begin, end = _BARE_CHANNELS
    if text.startswith(begin) and end in text:
        text = text.rpartition(end)[2]
    answer, start, inside = "", 0, False
    for tag in _TAG.finditer(text):
        if text[tag.start() - 1 : tag.start()] + text[tag.end() : tag.end() + 1] in _QUOTED:
            continue
        if tag["open"]:
            answer += "" if inside else text[start : tag.start()]
        elif not inside:
            answer = ""
        start, inside = tag.end(), bool(tag["open"])
    answer = (answer if inside else answer + text[start:]).strip("\ufeff \t\n").removesuffix("<|return|>")
    if wrapped := _WRAPPED.fullmatch(answer):
        answer = wrapped[2].strip()
    return _unfenced(answer)


def _unfenced(text: str) -> str:
    """Remove a fence around a whole text; the end of a truncated text may lack it."""
    first, *lines = text.split("\n")
    if not first.startswith(_FENCE) or any(line.startswith(_FENCE) for line in lines[:-1]):
        return text
    lines = lines[:-1] if lines and lines[-1].strip() in _FENCE else lines
    return "\n".join(lines).strip() or first.strip("`~ ")


def extract_labelled(text: str) -> str:
    """Return the part of an answer behind a label (`Action:`), in an <action> tag or in a fence; else the whole answer.

    Of several the first counts: later ones presume that it was executed."""
    text = text.partition("<action>")[2].partition("</action>")[0].strip() or text
    lines = text.split("\n")
    for n, line in enumerate(lines):
        if label := _LABEL.match(line):
            lines = [line[label.end() :], *lines[n + 1 :]]
            break
    fences = [n for n, line in enumerate(lines) if line.lstrip().startswith(_FENCE)]
    if fences:
        held = lines[fences[0] + 1 : fences[1] if len(fences) > 1 else None]
        lines = held if any(map(str.strip, held)) else lines[: fences[0]]
    return "\n".join(lines).strip() or text
