"""Memory entries: texts and pictures from one episode or several, with their provenance."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.parsing import check_types


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of an entry, for leakage audits and to exclude a task's own episodes."""

    task_id: str
    scene: str
    goal: str
    split: str
    success: bool
    actions: tuple[str, ...] = ()  # commands executed, or commands that fetch an object: teachers read these
    source: str = "trajectory"  # memory system that wrote the entry


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """An entry. `text`: shown by every delivery; `images`: PNG bytes in the order of the episode."""

    id: str
    text: str
    provenance: Provenance
    images: tuple[bytes, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, pictures as base64."""
        images = [base64.b64encode(image).decode("ascii") for image in self.images]
        return {"id": self.id, "text": self.text, "provenance": asdict(self.provenance), "images": images}


def entry_from_json(row: Mapping[str, Any]) -> MemoryEntry:
    """Rebuild an entry from `MemoryEntry.to_json`. Raises: ValueError, for a missing field or one of the wrong type."""
    try:
        origin = row["provenance"]
        provenance = check_types(Provenance(**{**origin, "actions": tuple(origin.get("actions", ()))}))
        images = tuple(base64.b64decode(image, validate=True) for image in row.get("images", ()))
        return check_types(MemoryEntry(row["id"], row["text"], provenance, images))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Numbers of entries that a write added and ignored (entries whose id was known)."""

    added: int
    ignored: int = 0

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(self.added + other.added, self.ignored + other.ignored)
