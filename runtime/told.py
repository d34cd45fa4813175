"""What a language model answers where JSON was asked for: it may be fenced, wrapped in talk, or nothing of use."""

from __future__ import annotations

import json
import re
from typing import Any


def json_object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in a chat model's answer; None where there is none that can be read."""
    found = re.search(r"\{.*\}", text or "", re.DOTALL)
    try:
        value = json.loads(found[0]) if found else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def texts(value: Any) -> list[str]:
    """Return those of a list that are text; nothing of what is no list."""
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
