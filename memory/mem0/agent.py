"""What Mem0's language model answers: checked before Mem0 reads it, and cleaned of what is no memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from memory.registry import ChatFunction
from memory.replies import ask_json, line

EXTRACTION, JUNK = "memory_extraction", "junk"  # role in the endpoint's account; count of dropped texts
QUOTED = 24  # characters from which a text that stands in the prompt is a quotation of it


class Extraction:
    """Answers one of Mem0's extraction prompts by a language model, asked twice if the first answer is unusable.

    Attributes:
        failures: unusable answers, and dropped texts, by role.
        replies: the usable answers, as Mem0 read them.
        usable: whether the last answer was.
    """

    def __init__(self, ask: ChatFunction, max_tokens: int) -> None:
        self._ask, self._max_tokens = ask, max_tokens
        self.failures, self.replies, self.usable = Counter[str](), list[str](), True

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        found = ask_json(
            self._ask,
            messages,
            EXTRACTION,
            max_tokens=self._max_tokens,
            read=facts_in,
            failures=self.failures,
        )
        self.usable = found is not None
        kept = [fact for fact in found or [] if not is_quoted(fact["text"], instructions_of(messages))]
        self.failures[JUNK] += len(found or []) - len(kept)
        reply = json.dumps({"memory": kept}, ensure_ascii=False)
        self.replies.append(reply)
        return reply


def facts_in(answer: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Return the facts of an extraction as Mem0 reads them, each text on one line; None for another object."""
    listed = answer.get("memory")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        return None
    if not all(isinstance(each.get("text"), str) for each in listed):
        return None
    facts = [
        {"text": line(each["text"]), "attributed_to": line(str(each.get("attributed_to") or ""))} for each in listed
    ]
    return [{"id": str(n), **fact} for n, fact in enumerate(facts) if fact["text"]]


def instructions_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the instructions of a request: its system prompt, with its examples, and the custom instructions."""
    custom = str(messages[-1]["content"]).rpartition("## Custom Instructions\n")
    return f"{messages[0]['content']}\n{custom[2] if custom[1] else ''}"


def is_quoted(text: str, instructions: str) -> bool:
    """Return whether a text only repeats the instructions or one of their examples."""
    plain = lambda words: " ".join(words.lower().split())
    return len(text) >= QUOTED and plain(text).rstrip(".") in plain(instructions)
