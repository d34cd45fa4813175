"""Parsing of endpoints' response bodies into an answer, vectors, or a named fault."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from lm.answer_cache import Answer
from lm.reply_cleaning import clean_reply
from memory.words import word_tokens
from runtime.http import TransientError
from runtime.parsing import parse_json

Message = dict[str, Any]  # {"role", "content"} of the chat protocol

# Kinds of faults that an equal request would have again, with advice for each.
PERMANENT_FAULTS = {
    "refused": "",  # any other 4xx
    "refusal": "Ask another model",
    "content_filter": "Ask another model, or have the provider's filter changed",
    "tool_call": "No tools were offered: have the server answer in text (tool_choice: none, or its tool parser off)",
    "length": "Give it more room (api.extra={%(length_key)s: N}), or turn its reasoning off (api.extra)",
    "empty": "Ask another model, or turn its reasoning off (api.extra)",
}
# Finish reasons in lower case: of content filters, of the token limit, of transient faults.
_FILTERED = ("content_filter", "refusal", "safety", "recitation", "prohibited_content", "sensitive")
_CUT, _PASSING = ("length", "max_tokens"), ("none", "error", "abort", "other", "unknown")


class RequestFault(TransientError):
    """An attempt failed. `paid`: input and output tokens that are charged nevertheless."""

    def __init__(self, kind: str, detail: str, wait_s: float = 0.0, paid: tuple[int, int] = (0, 0)) -> None:
        super().__init__(f"{kind}: {detail}", wait_s)
        self.kind, self.paid = kind, paid

    @property
    def final(self) -> bool:
        return self.kind in PERMANENT_FAULTS


def parse_answer(text: str, messages: Sequence[Message] = (), length_key: str = "max_tokens") -> Answer:
    """Return the first answer among a response's choices; missing token counts are estimated at four characters each.

    Raises: Fault, with the reason why there is no answer."""
    body, counts = _read_json(text)
    read, written = _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))
    choices = body.get("choices") if isinstance(body, dict) else None
    faults = list[RequestFault]()
    for choice in choices if isinstance(choices, list) else []:
        content, kind, why = _read_choice(choice, counts)
        if not kind:
            read = estimate_tokens(messages) if read is None else read
            written = len(content) // 4 + 1 if written is None else written
            return Answer(content, read, written, _finish(choice) in _CUT)
        advice = PERMANENT_FAULTS.get(kind, "") % {"length_key": length_key}
        faults.append(RequestFault(kind, f"{why}. {advice}" if advice else why, paid=(read or 0, written or 0)))
    raise next(
        iter(faults), RequestFault("no_choice", f"the body begins {text[:300]!r}", paid=(read or 0, written or 0))
    )


def _read_choice(choice: Any, counts: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (answer, "", "") of a choice, or ("", kind of fault, details)."""
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return "", "no_choice", f"a choice without a message: {str(choice)[:300]!r}"
    content, reason = message.get("content"), _finish(choice)
    parts = content if isinstance(content, list) else [content]
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    texts = [part.get("text") for part in parts if part.get("type") in ("text", "output_text")]
    written = "".join(text for text in texts if isinstance(text, str))
    answer = clean_reply(written.encode("utf-8", "replace").decode())  # JSON may contain lone surrogates
    if answer and reason not in _FILTERED:
        return answer, "", ""
    refusal = message.get("refusal") or next((part["refusal"] for part in parts if part.get("refusal")), None)
    calls, reasoned = _tool_calls(message, parts), _reasoned(message, parts, counts)
    if not answer and written.strip():
        reasoned = reasoned or "all of it was reasoning"
    kind = (
        "refusal"
        if refusal
        else "content_filter"
        if reason in _FILTERED
        else "tool_call"
        if calls
        else "length"
        if reason in _CUT
        else "no_choice"
        if reason in _PASSING and not reasoned
        else "empty"
    )
    facts = {"finish_reason": reason, "refusal": str(refusal or "")[:200], "tool call": ", ".join(calls)[:200]}
    details = [f"{name} {fact}" for name, fact in facts.items() if fact]
    return "", kind, ", ".join(filter(None, ["no answer", *details, reasoned]))


def _finish(choice: Mapping[str, Any]) -> str:
    """Return a choice's finish reason in lower case; "none" without one."""
    return str(choice.get("finish_reason")).lower()[:40]


def _tool_calls(message: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the names of the tools that a message calls."""
    calls = message.get("tool_calls")
    calls = [*(calls if isinstance(calls, list) else []), {"function": message.get("function_call")}]
    named = [call.get("function") for call in calls if isinstance(call, dict)]
    named += [part for part in parts if part.get("type") in ("tool_use", "tool_call", "function_call")]
    return [str(each.get("name")) for each in named if isinstance(each, dict)]


def _reasoned(message: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], counts: Mapping[str, Any]) -> str:
    """Describe reasoning in separate fields, which are ignored; "" for none."""
    details = counts.get("completion_tokens_details")
    tokens = _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    if tokens:
        return f"{tokens} of {counts.get('completion_tokens')} tokens were reasoning"
    fields = [name for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)]
    fields += [str(part["type"]) for part in parts if part.get("type") in ("thinking", "reasoning")]
    return f"all of it is in {fields[0]}" if fields else ""


def parse_vectors(text: str, n: int, estimate: int) -> tuple[list[bytes], int]:
    """Return the n vectors of a response in the order of their texts as float32 bytes, and the input tokens.

    Args:
        estimate: the input tokens if the server counts none.

    Raises:
        Fault: there are not n finite vectors of one length.
    """
    body, counts = _read_json(text)
    read = _count(counts.get("prompt_tokens"))
    read = estimate if read is None else read
    try:
        rows = sorted(body["data"], key=lambda row: row["index"])
        vectors = [array("f", row["embedding"]) for row in rows]
        whole = [row["index"] for row in rows] == list(range(n)) and len({len(vector) for vector in vectors}) == 1
        finite = all(math.isfinite(value) for vector in vectors for value in vector)
    except (LookupError, TypeError, AttributeError, OverflowError):
        vectors, whole, finite = [], False, False
    if not (whole and finite and vectors[0]):
        raise RequestFault(
            "no_vectors", f"not {n} vectors of one length, the body begins {text[:80]!r}", paid=(read, 0)
        )
    return [vector.tobytes() for vector in vectors], read


def _read_json(text: str) -> tuple[Any, dict[str, Any]]:
    """Parse a response body; return it with its token counts. Raises: Fault, for other text."""
    try:
        body = parse_json(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise RequestFault("not_json", f"{type(error).__name__}, the body begins {text[:80]!r}") from None
    usage = body.get("usage") if isinstance(body, dict) else None
    return body, usage if isinstance(usage, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of messages: four characters each or, if more, by words and scripts; 1,000 a picture."""
    contents = [message["content"] for message in messages]
    parts = [part for parts in contents for part in ([{"text": parts}] if isinstance(parts, str) else parts)]
    return sum(
        max(len(part["text"]) // 4, round(word_tokens(part["text"]))) + 1 if "text" in part else 1000 for part in parts
    )
