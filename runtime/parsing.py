"""Parsing of untrusted text: JSON files that may be damaged, and language models' answers."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")
# Types of values by annotation. `runtime.store.to_json` writes non-finite numbers as null.
_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float, NoneType)}
_NEWLINE = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # the line breaks of str.splitlines


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises: ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_types(record: T) -> T:
    """Check a dataclass instance's fields of simple types, optional or in tuples; return the instance.

    Raises: ValueError, with the name of a field that has another type."""
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
    """Return (name, types, whether it is a tuple) of each field of a simple type."""
    found = []
    for field in fields(kind):
        annotation = getattr(field.type, "__name__", field.type) if isinstance(field.type, type) else str(field.type)
        required = annotation.removesuffix(" | None")
        inner = required.removeprefix("tuple[").removesuffix(", ...]")
        if inner in _TYPES:
            optional = (NoneType,) if required != annotation else ()
            found.append((field.name, (*_TYPES[inner], *optional), inner != required))
    return found


def parse_json_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a chat model's answer; None without a valid one."""
    text = text or ""
    candidate = text[max(0, text.find("{")) : text.rfind("}") + 1]  # linear time for any text
    try:
        value = parse_json(candidate) if candidate else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def strings_in(value: Any) -> list[str]:
    """Return the strings in a list; [] for other values."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def without_newlines(text: str) -> str:
    """Replace every line break by a space."""
    return _NEWLINE.sub(" ", text)
