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
    """Rewrite the attributes of linked notes in the light of a new one."""
    variant: Variant = "paper"
    """Links in a recall. paper: after half of the entries, the best linked notes. released: behind each note its links
    in order of creation, of which all notes together show half of the entries, as in the released code."""
