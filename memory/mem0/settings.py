"""Settings of the memory system `mem0`."""

from __future__ import annotations

from typing import Literal

from memory.packages.system import PackageSettings
from runtime.settings import Share


class Mem0Settings(PackageSettings):
    """Settings of the memory system `mem0` (docs/guides/memory-systems.md)."""

    threshold: Share = 0.1
    """Minimal similarity of a recalled fact, with an embedding model; without one there is none."""
    extraction: str = ""
    """Prompt that replaces Mem0's own extraction prompt (33,653 characters), for models with a short context; empty:
    Mem0's own. Results with another one are not Mem0's."""
    pipeline: Literal["v3", "paper"] = "v3"
    """Rules without a language model. v3: facts are only added, as since Mem0 2.0.0. paper: a thing's new place
    replaces the old one, as in arXiv 2504.19413."""
