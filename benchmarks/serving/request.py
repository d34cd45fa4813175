"""A request that a benchmark sends to a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client. Requests of the same name must get the same answer."""

    name: str
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)
