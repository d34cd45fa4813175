"""Settings of the memory system `gmemory` (G-Memory, arXiv 2506.07398)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memory.folding import RecallSettings
from memory.trajectory import EntryText
from runtime.settings import Share


class GMemorySettings(RecallSettings):
    """Settings of the memory system `gmemory`."""

    text: EntryText = "commands"
    """What a trajectory shows of its episode: the commands, or raw, the whole trajectory."""
    edge: Share = 0.7
    """Minimal similarity of two tasks that are linked in the query graph (cosine; the released code's own measure
    corresponds to 0.85)."""
    similar: int = Field(default=1, ge=1)
    """Nearest tasks at which a recall enters the query graph."""
    hops: int = Field(default=1, ge=0)
    """Steps along the query graph from there."""
    insights: int = Field(default=3, ge=0)
    """Maximum number of insights in a recall, which leave room for at least one trajectory."""
    relevance: Literal["rule", "llm"] = "rule"
    """What ranks candidate trajectories: similarity, or a language model's score, which is asked for at recall."""
