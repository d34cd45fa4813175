"""Settings of the memory bank."""

from __future__ import annotations

from pydantic import Field

from runtime.settings import Settings


class MemoryConfig(Settings):
    """Where M comes from. Without `bank`, an experience bank is collected by the expert before evaluation."""

    bank: str | None = None
    version: int | None = None  # bank version to read (default: the newest)
    k: int = Field(default=4, ge=0)  # entries retrieved per task
    embed: str | None = None  # a sentence-transformers model: rank by embeddings instead of words (extra `embed`)
    experience_split: str | None = None  # split played by the expert to fill the bank (default: by environment)
    experience_limit: int | None = None
