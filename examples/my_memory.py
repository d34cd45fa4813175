"""A memory system of your own in one file: register it, and every command knows it (a minute on a CPU).

    python examples/my_memory.py                        evaluates it beside no memory; further arguments are settings
    python examples/my_memory.py env=alfworld limit=8

A package that names `SPEC` under the entry point group `memcompiler.memories` brings it into every command:
`memcompiler eval -c eval/quickstart memory.system=diary ...`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import memcompiler as mc


class DiarySettings(mc.Settings):
    """Settings of the diary, as `memory.settings={failures: true}`."""

    failures: bool = False
    """Recall failed episodes, too."""


class Diary(mc.JournalMemory):
    """Recalls a scene's last episodes. The journal of the base class brings versions, resumption and two writers."""

    name: ClassVar[str] = "diary"

    def __init__(self, path: Path, settings: DiarySettings, until: int | None = None) -> None:
        super().__init__(path, until)
        self.settings = settings

    def at(self, version: int) -> Diary:
        """Open a read-only view of the first episodes."""
        return Diary(self.path, self.settings, version)

    def __iter__(self) -> Iterator[mc.MemoryEntry]:
        """Write an entry per attempt. The expert, as a teacher, reads its actions."""
        for row in self.rows:
            for trace in row.attempts:
                task, did = trace.task, trace.actions
                origin = mc.Provenance(task.id, task.scene, task.goal, task.split, trace.success, did, self.name)
                text = " ".join(f"in {task.scene}: {task.goal}: {' ; '.join(did)}".split())
                yield mc.MemoryEntry(f"diary/{row.key}-{trace.attempt}", text, origin)

    def recall(self, queries: Sequence[mc.Query]) -> list[mc.Recall]:
        """Recall up to k entries per query, in reading order."""
        return [mc.Recall(tuple(filter(self._fits(query), self))[-query.k :] if query.k else ()) for query in queries]

    def _fits(self, query: mc.Query) -> Any:
        """Tell which entries a task may see: no episode of its own, and of its scene none if that is isolated."""
        own, scene, isolated = query.task.id, query.task.scene, query.isolation == "scene"
        kept = lambda origin: (origin.success or self.settings.failures) and origin.task_id != own
        return lambda entry: kept(entry.provenance) and (entry.provenance.scene == scene) != isolated


SPEC = mc.MemorySpec("diary", DiarySettings, lambda path, settings, tools: Diary(path, settings))


def main(*overrides: str) -> dict[str, Any]:
    """Register the memory, evaluate it with the small models that ship, and return the results."""
    mc.register_memory(SPEC)
    given = ("memory.system=diary", "deliveries=[none, static]", "compiler.checkpoint=null", "limit=32")
    with tempfile.TemporaryDirectory() as folder:
        return mc.evaluate("eval/quickstart", *given, *overrides, out=Path(folder, "eval"))


if __name__ == "__main__":
    main(*sys.argv[1:])
