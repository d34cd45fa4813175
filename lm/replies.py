"""The answer in what a language model wrote: without its reasoning, and without the fence or label around it."""

from __future__ import annotations

import re

# Around reasoning: <think> and its kin, Mistral's [THINK], Kimi's signs, Cohere's tokens, gpt-oss's channels.
_NAMES = r"(?:seed:)?(?:think|thinking|thoughts?|reasoning)"
_TAG = re.compile(
    rf"(?P<open><{_NAMES}(?:\s[^<>/]*)?>|(?-i:\[THINK\])|◁think▷|<\|(?:START_THINKING|begin_of_thought)\|>"
    r"|<\|channel\|>(?:analysis|commentary)[^<]*<\|message\|>)"
    rf"|</{_NAMES}\s?>|(?-i:\[/THINK\])|◁/think▷|<\|(?:END_THINKING|end_of_thought)\|>"
    r"|<\|channel\|>final[^<]*<\|message\|>",
    re.IGNORECASE,
)
_BARE_CHANNELS = ("analysis", "assistantfinal")  # gpt-oss's, where a tokenizer has left out its special tokens
_QUOTED = ('""', "''", "``", "“”")
_FENCE = ("```", "~~~")
_NESTED = 10  # layers of marks that are taken off
_WRAPPED = re.compile(r"<(answer|response)>(.*)</\1>", re.IGNORECASE | re.DOTALL)
_LABEL = re.compile(
    r"[ \t>*#_-]{0,8}(?:(?:thought|thinking|reasoning)\b.*?\b)?(?:next )?(?:action|command|emission)[ \t]?\d{0,3}"
    r"[*_]{0,3}[ \t]?(?:[:：=]|-[ \t]|[–—])[ \t*_]{0,8}",
    re.IGNORECASE,
)


def answer_text(text: str) -> str:
    """Return a model's text without reasoning, byte-order mark, outer white space, and what wraps the whole answer.

    Reasoning is all between its tags, after a tag that is never closed, and before a closing tag that nothing opens
    (chat templates open it). Tags may be anywhere; one in quotes or backticks is text. "" where only reasoning is left.
    """
    for _ in range(_NESTED):
        if (inner := _stripped(text)) == text:
            break
        text = inner
    return text


def _stripped(text: str) -> str:
    """Strip one layer of all that."""
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
    """Return what a fence around a whole text holds; a text that was cut off may lack its end."""
    first, *lines = text.split("\n")
    if not first.startswith(_FENCE) or any(line.startswith(_FENCE) for line in lines[:-1]):
        return text
    lines = lines[:-1] if lines and lines[-1].strip() in _FENCE else lines
    return "\n".join(lines).strip() or first.strip("`~ ")


def marked(text: str) -> str:
    """Return what a label (`Action:`, at the end of a thought, too), an <action> tag or a fence marks out in an answer;
    the whole of it where nothing does. Of several, the first: what follows presumes that it was done."""
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
