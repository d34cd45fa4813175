"""What LangMem's language model answers: tool calls as JSON, checked before LangMem reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from memory.registry import ChatFunction
from memory.replies import ask_json
from memory.retrieval import encodable

WRITE = "memory_write"  # role in the endpoint's account
NO_CALLS = '{"calls": []}'


class ToolCalls:
    """Answers LangMem's requests for tool calls by a language model, asked twice if the first answer is unusable.

    Attributes:
        failures: unusable answers by role.
        replies: the usable answers, as LangMem read them.
        usable: whether all answers were.
    """

    def __init__(self, ask: ChatFunction, max_tokens: int) -> None:
        self._ask, self._max_tokens = ask, max_tokens
        self.failures, self.replies, self.usable = Counter[str](), list[str](), True

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        calls = ask_json(self._ask, messages, WRITE, max_tokens=self._max_tokens, read=calls_in, failures=self.failures)
        self.usable &= calls is not None
        reply = NO_CALLS if calls is None else encodable(json.dumps({"calls": calls}, ensure_ascii=False))
        self.replies.append(reply)
        return reply


def calls_in(answer: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tool calls of an answer; None if it is not a list of calls with a name and arguments."""
    listed = answer.get("calls")
    if not isinstance(listed, list):
        return None
    calls = [{"name": call.get("name"), "args": call.get("args")} for call in listed if isinstance(call, dict)]
    if len(calls) < len(listed) or not all(isinstance(c["name"], str) and isinstance(c["args"], dict) for c in calls):
        return None
    return calls
