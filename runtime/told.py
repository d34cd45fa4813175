"""What a language model answers where JSON was asked for: it may be fenced, wrapped in talk, or nothing of use."""

from __future__ import annotations

import json
from typing import Any


def json_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a chat model's answer; None where there is none that can be read."""
    text = text or ""
    held = text[max(0, text.find("{")) : text.rfind("}") + 1]  # found so, garbage of any length takes no time
    try:
        value = json.loads(held) if held else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def texts(value: Any) -> list[str]:
    """Return those of a list that are text; nothing of what is no list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
