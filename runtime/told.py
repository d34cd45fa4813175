"""JSON that others wrote: files that may be damaged, answers of language models that may be fenced, wrapped in talk, or
nothing of use."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")
# Types of values by annotation. A number that is not finite is written as null (`runtime.store.to_json`).
_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float, NoneType)}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises: ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def typed(record: T) -> T:
    """Return a dataclass instance whose fields of simple types, tuples of them, and None where that is declared, hold
    such values. Raises: ValueError, which names the field."""
    for name, types, many in _simple_fields(type(record)):
        value = getattr(record, name)
        if value is None and NoneType in types:
            continue
        if many and type(value) is not tuple:
            raise ValueError(f"{name} is a {type(value).__name__}, not a list")
        values: Any = value if many else (value,)
        for wrong in set(map(type, values)).difference(types):
            raise ValueError(f"{name} is a {wrong.__name__}, not a {types[0].__name__}")
    return record


@cache
def _simple_fields(kind: Any) -> list[tuple[str, tuple[type, ...], bool]]:
    """List name, types and whether it is a tuple, of each field of a simple type."""
    found = []
    for field in fields(kind):
        annotation = getattr(field.type, "__name__", field.type) if isinstance(field.type, type) else str(field.type)
        required = annotation.removesuffix(" | None")
        inner = required.removeprefix("tuple[").removesuffix(", ...]")
        if inner in _TYPES:
            optional = (NoneType,) if required != annotation else ()
            found.append((field.name, (*_TYPES[inner], *optional), inner != required))
    return found


def json_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a chat model's answer; None where there is none that can be read."""
    text = text or ""
    held = text[max(0, text.find("{")) : text.rfind("}") + 1]  # found so, garbage of any length takes no time
    try:
        value = parse_json(held) if held else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def texts(value: Any) -> list[str]:
    """Return those of a list that are text; nothing of what is no list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
