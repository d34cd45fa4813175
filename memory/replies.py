"""Language models' answers for memory systems: asked at most twice, cleaned, and counted if unusable."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memory.registry import ChatFunction
from memory.retrieval import encodable
from runtime.parsing import parse_json_object

T = TypeVar("T")
LONGEST = 300  # characters of a line
TRIES = 2
NOT_JSON = "That is not the JSON object that was asked for. Answer with it and nothing else."
NOT_LINES = "That is not in the form that was asked for. Answer in that form and with nothing else."


def chat(instruction: str, content: str) -> list[dict[str, Any]]:
    """Return chat messages of an instruction and data."""
    return [{"role": "system", "content": instruction}, {"role": "user", "content": encodable(content)}]


def ask_until_usable(
    ask: ChatFunction | None,
    messages: Sequence[dict[str, Any]],
    role: str,
    *,
    max_tokens: int,
    read: Callable[[str], T | None],
    failures: Counter[str],
    complaint: str = NOT_LINES,
) -> T | None:
    """Ask a model, and once more with a complaint if its answer is unusable.

    Args:
        ask: None, without a model, returns None and counts nothing.
        role: of the call in the endpoint's account, and of the failure in `failures`.
        read: parses an answer; None for an unusable one.

    Returns:
        What `read` returns; None, counted as a failure, if both answers are unusable or the endpoint fails.
    """
    if ask is None:
        return None
    asked = list(messages)
    for _ in range(TRIES):
        answer = ask(asked, role, max_tokens)
        if answer is None:  # the endpoint has retried already
            break
        if (value := read(encodable(answer))) is not None:
            return value
        asked = [*messages, {"role": "assistant", "content": encodable(answer)}, {"role": "user", "content": complaint}]
    failures[role] += 1
    return None


def ask_json(
    ask: ChatFunction | None,
    messages: Sequence[dict[str, Any]],
    role: str,
    *,
    max_tokens: int,
    read: Callable[[dict[str, Any]], T | None],
    failures: Counter[str],
) -> T | None:
    """Ask for a JSON object (`ask_until_usable`); `read` parses the object, None for an unusable one."""

    def read_text(answer: str) -> T | None:
        parsed = parse_json_object(answer)
        return None if parsed is None else read(parsed)

    return ask_until_usable(
        ask, messages, role, max_tokens=max_tokens, read=read_text, failures=failures, complaint=NOT_JSON
    )


def line(text: str, longest: int = LONGEST) -> str:
    """Flatten a model's text into one short line without leading list or heading marks."""
    flat = " ".join(encodable(text).split())
    return re.sub(r"^(?:[-*#>•·.\s]|\d+(?:[.)](?=\s)|[、．]))+", "", flat)[:longest].strip()


def shorten(text: str, most: int) -> str:
    """Return a text for a prompt; one of more than `most` characters ends with a note that it was shortened."""
    return text if len(text) <= most else f"{text[:most]}\n(shortened)"


def listed_lines(answer: str, most: int) -> list[str] | None:
    """Return at most `most` lines of a list with numbers, hyphens or stars; None for an answer without one."""
    marked = [each for each in answer.splitlines() if re.match(r"\s*(?:[-*•]|\d+[.)])\s+\S", each)]
    return lines_in(marked, most) or None


def lines_in(value: Any, most: int, longest: int = LONGEST) -> list[str]:
    """Return at most `most` distinct non-empty short lines from a list, or from a single text; [] for other values."""
    given = value if isinstance(value, list) else [value]
    lines = [line(each, longest) for each in given if isinstance(each, str)]
    return list(dict.fromkeys(filter(None, lines)))[:most]
