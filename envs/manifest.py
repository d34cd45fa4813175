"""Manifest of a task list: ids, isolation labels and content hashes, comparable as one hash.

A manifest holds digests of goals and contents, not their text.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from envs.base import Task
from runtime.parsing import parse_json
from runtime.store import write_atomically

FORMAT = 1


class ManifestError(ValueError):
    """A file is no valid manifest, or tasks cannot form one."""


@dataclass(frozen=True, slots=True)
class ManifestTask:
    """One task. Ids are unique in their split; `digest` hashes the goal and the content's digest, if any."""

    id: str
    split: str
    isolation: Mapping[str, tuple[str, ...]]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Tasks of one or several splits, sorted by id."""

    benchmark: str
    tasks: tuple[ManifestTask, ...]

    @classmethod
    def of(cls, benchmark: str, tasks: Iterable[Task]) -> Self:
        """Create a manifest. Raises: ManifestError, for no tasks or for two different tasks of a split with one id."""
        listed: dict[tuple[str, str], ManifestTask] = {}
        for task in tasks:
            isolation = {name: tuple(sorted(set(values))) for name, values in sorted(task.isolation.items())}
            entry = ManifestTask(task.id, task.split, isolation, _sha256([task.goal, task.data.get("sha256", "")]))
            if listed.setdefault((task.id, task.split), entry) != entry:
                raise ManifestError(f"two different tasks of {benchmark} {task.split} have the id {task.id!r}")
        if not listed:
            raise ManifestError(f"{benchmark} has no tasks to list: check split, limit and the benchmark's data")
        return cls(benchmark, tuple(listed[key] for key in sorted(listed)))

    @property
    def split(self) -> str:
        """Return the names of all splits, joined by "+"."""
        return "+".join(sorted({task.split for task in self.tasks}))

    @cached_property
    def sha256(self) -> str:
        """Return a hash of all ids, goals, isolation labels and contents."""
        return _sha256([self.benchmark, [[t.id, t.split, t.isolation, t.digest] for t in self.tasks]])

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(task.id for task in self.tasks)

    def write(self, path: Path) -> None:
        """Write the manifest atomically, one task per line; equal tasks give equal bytes."""
        head = {"format": FORMAT, "benchmark": self.benchmark, "split": self.split, "sha256": self.sha256}
        lines = ",\n".join(json.dumps(asdict(task), ensure_ascii=False, sort_keys=True) for task in self.tasks)
        write_atomically(path, f'{json.dumps(head, ensure_ascii=False)[:-1]}, "tasks": [\n{lines}\n]}}\n')

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest. Raises: ManifestError, if the file is missing, invalid or changed."""
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ManifestError(f"{path} is a manifest of format {data['format']!r}; this version reads {FORMAT}")
            manifest = cls(str(data["benchmark"]), tuple(map(_task_from_json, data["tasks"])))
            recorded = data["sha256"]
        except OSError as error:
            raise ManifestError(f"no manifest {path}: {error.strerror}; `memcompiler collect` writes one") from None
        except ManifestError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ManifestError(f"{path} is not a manifest ({type(error).__name__}: {error})") from None
        if recorded != manifest.sha256:
            raise ManifestError(f"{path} was changed after it was written: its hash is not that of its tasks")
        return manifest


def _task_from_json(entry: Mapping[str, Any]) -> ManifestTask:
    isolation = {name: tuple(values) for name, values in entry["isolation"].items()}
    return ManifestTask(entry["id"], entry["split"], isolation, entry["digest"])


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True, sort_keys=True).encode("ascii")).hexdigest()
