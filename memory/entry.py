"""A memory entry: what one episode leaves behind for later ones, or what a memory system has made of several."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.told import typed


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an entry comes from: enough to audit leakage and to exclude an episode's own task."""

    task_id: str
    scene: str
    goal: str
    split: str
    success: bool
    actions: tuple[str, ...] = ()  # what was done, or would fetch what was seen: what a teacher reads of the entry
    source: str = "trajectory"  # which memory system wrote it


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """`text` is what every delivery shows; `images` are PNG bytes in the order in which they were seen."""

    id: str
    text: str
    provenance: Provenance
    images: tuple[bytes, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, pictures as base64."""
        images = [base64.b64encode(image).decode("ascii") for image in self.images]
        return {"id": self.id, "text": self.text, "provenance": asdict(self.provenance), "images": images}


def entry_from_json(row: Mapping[str, Any]) -> MemoryEntry:
    """Rebuild the entry that `to_json` wrote. Raises: ValueError, where a field is missing or of the wrong type."""
    try:
        origin = row["provenance"]
        provenance = typed(Provenance(**{**origin, "actions": tuple(origin.get("actions", ()))}))
        images = tuple(base64.b64decode(image, validate=True) for image in row.get("images", ()))
        return typed(MemoryEntry(row["id"], row["text"], provenance, images))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Written:
    """What one `write` did. `ignored` entries carried an id that memory already held (or the same write twice)."""

    added: int
    ignored: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(self.added + other.added, self.ignored + other.ignored)
