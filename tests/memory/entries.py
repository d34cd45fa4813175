"""Memory entries of one home, by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from envs.base import Task
from memory.entry import MemoryEntry
from memory.protocol import Record, Trace
from memory.trajectory import entry_of_trace


def entry(i: int, split: str = "train", images: int = 0, success: bool = True) -> MemoryEntry:
    task = Task(f"t{i}", f"put a mug in cabinet {i}", f"home {i % 3}", split, "")
    pictures = [bytes([j, i % 256, 0, 255]) * (j + 1) for j in range(images)]
    return entry_from_trajectory(
        task, [f"take mug {i} from shelf 1"], success, "it was there", images=pictures, id=f"e{i:05}"
    )


def entry_from_trajectory(
    task: Task,
    actions: Sequence[str],
    success: bool,
    rationale: str = "",
    images: Iterable[bytes] = (),
    id: str | None = None,
) -> MemoryEntry:
    records = tuple(Record(t, "", action, "") for t, action in enumerate(actions))
    made = entry_of_trace(Trace(task, records, success, rationale=rationale, views=tuple(images)))
    return made if id is None else replace(made, id=id)


def by_id(entries: Iterable[MemoryEntry]) -> dict[str, MemoryEntry]:
    return {entry.id: entry for entry in entries}
