"""Adds texts and soft tokens to the messages of a request, and leaves everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from executor.prompt import Context, MemoryBlock, added_parts
from lm.prompt import ChatTurn, PromptPart

if TYPE_CHECKING:
    from torch import Tensor

Parts: TypeAlias = "tuple[str | Tensor, ...]"  # texts, and soft tokens (N, d) at the executor's scale


@dataclass(frozen=True, slots=True)
class Insertion:
    """Parts that stand at an offset of a message's text (`text_slot`)."""

    offset: int
    parts: Parts


def block_parts(block: MemoryBlock, context: Context) -> Parts:
    """Write the memory part of a prompt as texts and soft tokens."""
    soft: Any = block.soft
    return tuple(soft if part.soft else part.text for part in added_parts(block, context))


def text_slot(message: Mapping[str, Any]) -> str:
    """Return the text of a message that additions go to: its content, or the last text of its content parts."""
    content = message.get("content")
    if isinstance(content, list):
        return next((part["text"] for part in reversed(content) if _is_text(part)), "")
    return content if isinstance(content, str) else ""


def offset_of(text: str, place: re.Pattern[str] | None) -> int:
    """Return where additions stand in a text: before the last match of `place`, else at its end."""
    starts = [found.start() for found in place.finditer(text)] if place is not None else []
    return starts[-1] if starts else len(text)


def spliced(text: str, insertions: Sequence[Insertion]) -> list[str | Tensor]:
    """Return a text with insertions, which are sorted by offset, as texts and soft tokens."""
    parts, done = list[Any](), 0
    for insertion in insertions:
        parts += [text[done : insertion.offset], *insertion.parts]
        done = insertion.offset
    return [part for part in (*parts, text[done:]) if not isinstance(part, str) or part]


def with_texts(message: Mapping[str, Any], insertions: Sequence[Insertion]) -> dict[str, Any]:
    """Return a message with the texts of its insertions."""
    text = "".join(part for part in spliced(text_slot(message), insertions) if isinstance(part, str))
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": text}
    last = max((i for i, part in enumerate(content) if _is_text(part)), default=None)
    if last is None:
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": [*content[:last], {**content[last], "text": text}, *content[last + 1 :]]}


def chat_of_messages(
    messages: Sequence[Any], insertions: Mapping[int, Sequence[Insertion]]
) -> tuple[list[ChatTurn], list[Tensor]]:
    """Return messages as a chat with insertions, and its soft tokens in order.

    Raises:
        ValueError: a message is not a text of system, user or assistant.
    """
    chat, soft = list[ChatTurn](), list[Any]()
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant") or not _is_plain(message):
            raise ValueError(f"messages.{i}: this upstream reads only texts of system, user and assistant")
        pieces = spliced(text_slot(message), insertions.get(i, ()))
        soft += [piece for piece in pieces if not isinstance(piece, str)]
        parts = [PromptPart(text=each) if isinstance(each, str) else PromptPart(soft=len(each)) for each in pieces]
        chat.append(ChatTurn(role, tuple(parts)))
    return chat, soft


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether a message is one text without tool calls."""
    content = message.get("content")
    single = isinstance(content, list) and len(content) == 1 and _is_text(content[0])
    return (isinstance(content, str) or single) and not message.get("tool_calls")
