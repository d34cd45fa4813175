"""Settings of the memory system `langmem`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memory.packages.system import PackageSettings


class LangMemSettings(PackageSettings):
    """Settings of the memory system `langmem` (docs/guides/memory-systems.md)."""

    schemas: Literal["memory", "typed"] = "memory"
    """What LangMem may store. memory: its default, one text. typed: facts, and episodes with observation, thoughts,
    action and result."""
    query_limit: int = Field(default=20, ge=1)
    """Existing memories that LangMem sees in a write. It looks for them by the last 1, 2, 4, ... messages, a number
    of times that is a fourth of this: below 4 it sees none and never updates one."""
