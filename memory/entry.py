"""A memory entry: what one episode (or any memory system) leaves behind for later ones."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an entry comes from: enough to audit leakage and to exclude an episode's own task."""

    task_id: str
    scene: str
    goal: str
    split: str
    success: bool
    actions: tuple[str, ...] = ()
    source: str = "trajectory"  # which memory system wrote it


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """`text` is what every delivery shows; `images` are PNG bytes in the order in which they were seen."""

    id: str
    text: str
    provenance: Provenance
    images: tuple[bytes, ...] = field(default=())
