"""Reads goal, observations and actions from the messages of an OpenAI chat request, by the declared mapping."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.proxy import MappingConfig, Reading
from runtime.pictures import open_picture

if TYPE_CHECKING:
    from PIL.Image import Image

Message = Mapping[str, Any]
_HEAD = ("system", "developer")  # roles of messages that belong to no turn
_STEP = re.compile(r"\.\*|\.([A-Za-z_]\w*)|\[(-?\d+|\*)\]")
_WHOLE, _ANSWER = Reading(), Reading(roles=("assistant",))
_OBSERVED = ("user", "tool", "function")
_OBSERVATION = Reading(roles=_OBSERVED)
_CALLED = Reading(roles=("assistant",), path="$.tool_calls[*].function.arguments.*")
_LINE_GOAL = r"(?:in [^:\n]+: )?([^\n]*)"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A complete mapping; fields as in `MappingConfig`."""

    goal: Reading = _WHOLE
    scene: Reading | None = None
    observation: Reading = _OBSERVATION
    action: Reading = _ANSWER
    place: re.Pattern[str] | None = None
    grows_by_messages: bool = True


_TOOLS = Mapped(action=_CALLED)
PRESETS = {
    "chat": Mapped(),
    "turns": Mapped(
        goal=Reading(match=rf"\AGoal: {_LINE_GOAL}"),
        scene=Reading(match=r"\AGoal: in ([^:\n]+): "),
        observation=Reading(roles=_OBSERVED, match=r"(?s)\A(?:Goal: [^\n]*\n)?(.*)\Z"),
    ),
    "rebuilt": Mapped(
        goal=Reading(match=rf"(?m)^goal: {_LINE_GOAL}"),
        scene=Reading(match=r"(?m)^goal: in ([^:\n]+): "),
        observation=Reading(match=r"(?ms)^see: (.*?)(?:\ngoal: [^\n]*)?\Z"),
        action=Reading(match=r"(?m)^did: (?:.* ; )?([^\n]*)$"),
        place=re.compile(r"(?m)^(?:did: [^\n]*\n)?see: "),
        grows_by_messages=False,
    ),
    "react": Mapped(
        goal=Reading(match=r"(?i)your task is to:? ([^\n]*)"),
        observation=Reading(roles=_OBSERVED, match=r"(?s)\A\s*(?:Observation: ?)?(.*?)\s*\Z"),
        action=Reading(roles=("assistant",), match=r"(?mi)^\s*(?:>|act:|action:)[ \t]*(?!think:)(\S[^\n]*?)\s*$"),
    ),
    "react_prompt": Mapped(
        goal=Reading(match=r"(?i)your task is to:? ([^\n]*)"),
        observation=Reading(match=r"(?s)(?:\A|\n> ?[^\n]+\n)((?:(?!\n>).)*?)\s*(?:\n>\s*)?\Z"),
        action=Reading(match=r"(?m)^> ?(?!think:)(\S[^\n]*?)\s*$"),
        place=re.compile(r"\n>\s*\Z"),
        grows_by_messages=False,
    ),
    "tools": _TOOLS,
    "langgraph": _TOOLS,
    "smolagents": Mapped(
        goal=Reading(match=r"(?s)\A(?:New task:\n)?(.*?)\s*\Z"),
        observation=Reading(roles=_OBSERVED, match=r"(?s)\A(?:New task:\n|Observation:\n)?(.*?)\s*\Z"),
        action=Reading(
            roles=("assistant",),
            match=r"(?s)(?:<code>\s*|'arguments': \{'\w+': ['\"])(.*?)(?:\s*</code>|['\"]\}\}\]\s*\Z)",
        ),
    ),
}


def mapped(config: MappingConfig) -> Mapped:
    """Return the preset with the settings' own readings in place of its own."""
    preset = PRESETS[config.preset]
    return Mapped(
        goal=config.goal or preset.goal,
        scene=config.scene or preset.scene,
        observation=config.observation or preset.observation,
        action=config.action or preset.action,
        place=preset.place if config.place is None else re.compile(config.place),
        grows_by_messages=preset.grows_by_messages if config.grows is None else config.grows == "messages",
    )


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user turn: the messages between two answers.

    Attributes:
        key: hash of the conversation up to its end.
        observation: what the agent saw.
        action: the action that came before it; "" at the first turn.
        message: index of the message that ends it.
    """

    key: str
    observation: str
    action: str
    message: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as the mapping reads it.

    Attributes:
        identity: hash of what stays the same from request to request.
        turns: all user turns; under a growing prompt, only the newest.
        image: the newest picture of the newest turn, if it is part of the request.
    """

    identity: str
    goal: str
    scene: str
    turns: tuple[UserTurn, ...]
    image: Image | None = None


def read_conversation(messages: object, mapping: Mapped, images: bool = False) -> Conversation | None:
    """Read a request's messages; None where they are no conversation with a goal and a user turn.

    Args:
        images: decode the newest picture.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    goal = next((found for message in messages if (found := _read(message, mapping.goal))), "")
    turns = _turns(messages, mapping)
    if not goal or not turns:
        return None
    scene = ""
    if mapping.scene is not None:
        scene = next((found for message in messages if (found := _read(message, mapping.scene))), "")
    first = messages[: turns[0].message + 1] if mapping.grows_by_messages else [*_head(messages), goal, scene]
    image = _picture(messages[turns[-1].message]) if images else None
    return Conversation(_digest(first), goal, scene, tuple(turns), image)


def _turns(messages: Sequence[Message], mapping: Mapped) -> list[UserTurn]:
    """List the user turns."""
    if not mapping.grows_by_messages:
        last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=None)
        if last is None:
            return []
        message = messages[last]
        key = _digest([*_head(messages), message])
        return [UserTurn(key, _read(message, mapping.observation), _read(message, mapping.action), last)]
    turns, key, action, start = list[UserTurn](), "", "", 0
    for end in _ends(messages):
        answered = [i for i in range(start, end + 1) if messages[i].get("role") == "assistant"]
        run = messages[answered[-1] + 1 if answered else start : end + 1]
        key = _digest([key, *messages[start : end + 1]])
        action = action_of([messages[i] for i in answered], mapping)
        seen = "\n".join(filter(None, (_read(message, mapping.observation) for message in run)))
        turns.append(UserTurn(key, seen, action, end))
        start = end + 1
    return turns


def _ends(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the index of the last message of every user turn that is not the system's."""
    end = None
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            if end is not None:
                yield end
            end = None
        elif message.get("role") in _OBSERVED:
            end = i
    if end is not None:
        yield end


def _head(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.get("role") in _HEAD]


def action_of(messages: Sequence[Message], mapping: Mapped) -> str:
    """Return the action in the answers of a turn: as the mapping reads it, else the text of the last answer, else its
    tool calls."""
    for reading in (mapping.action, _ANSWER, Reading(roles=("assistant",), path="$.tool_calls[*].function")):
        found = [text for message in messages if (text := _read(message, reading).strip())]
        if found:
            return " ".join(found[-1].split())
    return ""


def _read(message: Message, reading: Reading) -> str:
    """Return the text that a reading finds in a message; "" where it finds none."""
    if message.get("role") not in reading.roles:
        return ""
    text = "\n".join(filter(None, map(text_of, find(message, reading.path))))
    if reading.match is None:
        return text
    matches = list(re.finditer(reading.match, text))
    if not matches:
        return ""
    found = matches[-1]
    return (found["value"] if "value" in found.re.groupindex else found[min(1, found.re.groups)]) or ""


def find(value: Any, path: str) -> list[Any]:
    """Return the values at a JSON path (`configs.proxy.Reading`)."""
    values = [value]
    for step in _STEP.finditer(path):
        values = [inner for each in values for inner in _inside(each, step)]
    return values


def _inside(value: Any, step: re.Match[str]) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    name, index = step[1], step[2]
    if isinstance(value, dict):
        return [value[name]] if name in value else list(value.values()) if name is None and index is None else []
    if not isinstance(value, list) or index is None:
        return []
    if index == "*":
        return value
    return value[int(index) :][:1] if int(index) >= -len(value) else []


def text_of(value: Any) -> str:
    """Return the text of a value in a message: of content parts their texts, of an object those of its values."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return "\n".join(filter(None, map(text_of, value)))
    if isinstance(value, dict):
        if "type" in value and ("text" in value or value["type"] != "object"):
            return text_of(value.get("text"))  # a content part; others than text have none
        return " ".join(filter(None, map(text_of, value.values())))
    return json.dumps(value)


def _digest(parts: Sequence[object]) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _picture(message: Message) -> Image | None:
    """Decode the last picture of a message that the request itself holds; None for others and broken ones."""
    for url in reversed([url for url in find(message, "$.content[*].image_url.url") if isinstance(url, str)]):
        head, _, data = url.partition(",")
        if not (head.startswith("data:image/") and head.endswith(";base64")):
            return None
        try:
            return open_picture(base64.b64decode(data, validate=True), ("PNG", "JPEG", "WEBP")).convert("RGB")
        except ValueError:  # binascii.Error is one
            return None
    return None
