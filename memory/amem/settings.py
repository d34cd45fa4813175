"""Settings of the memory system `amem` (A-Mem, arXiv 2502.12110)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memory.folding import RecallSettings
from memory.trajectory import EntryText

Variant = Literal["paper", "released"]


class AMemSettings(RecallSettings):
    """Settings of the memory system `amem`."""

    text: EntryText = "commands"
    """What a note shows of its episode: the commands, or raw, the whole trajectory."""
    neighbours: int = Field(default=5, ge=0)
    """Nearest notes that a new one may be linked with; 0: no links and no evolution."""
    evolve: bool = True
    """Rewrite the attributes of linked notes when a note is added."""
    variant: Variant = "paper"
    """How a recall of k entries uses links. paper: the best notes fill the first half, the best notes linked with them
    the second. released, as in the released code: each of the best notes is followed by its linked notes in order of
    creation, together at most half of the entries."""
