"""The state of a memory system as a journal and a fold: what was committed, one row per episode and in order, in one
file of the bank's folder. All that a system knows is a pure function of the first n rows: versions, going on after a
kill, writing twice and byte-identical prompts on another machine follow from that."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envs.base import task_from_json
from memory.entry import Written
from memory.protocol import BankError, Record, Trace
from runtime.store import JsonLines, locked

FILE, LOCK = "journal.jsonl", ".journal.lock"


@dataclass(frozen=True, slots=True)
class Row:
    """An episode: the attempts at one task in their order, and what language models answered about them."""

    attempts: tuple[Trace, ...]
    answers: Mapping[str, Any]

    @property
    def key(self) -> str:
        told = [[t.task.id, t.attempt, t.success, *t.actions] for t in self.attempts]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


class Journal:
    """Args: until: read the first so many rows alone, and write nothing."""

    def __init__(self, folder: Path, until: int | None = None) -> None:
        self.folder, self.until = folder, until
        self._read, self._size = list[Row](), 0  # what was read so far, of how many bytes: a journal only grows

    def append(self, rows: Sequence[Row]) -> Written:
        """Append those episodes that are not there yet: each row is on disk when this returns, or none of it.

        Raises:
            BankError: this is a read-only view.
        """
        if self.until is not None:
            raise BankError(f"{self.folder} at version {self.until} is a read-only view")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / LOCK):
            lines = JsonLines(self.folder / FILE, ("key", "attempts"))
            lines.drop_torn_line()
            known = {row.key for row in self}
            fresh = {row.key: row for row in rows if row.attempts and row.key not in known}
            lines.append(*({"key": key, **_to_json(row)} for key, row in fresh.items()))
        return Written(len(fresh), len(rows) - len(fresh))

    def __iter__(self) -> Iterator[Row]:
        path = self.folder / FILE
        if path.exists() and (size := path.stat().st_size) != self._size:
            stored = itertools.islice(JsonLines(path, ("key", "attempts")), len(self._read), None)
            self._read, self._size = [*self._read, *map(_from_json, stored)], size
        return iter(self._read[: self.until])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _to_json(row: Row) -> dict[str, Any]:
    return {"attempts": [_trace_json(trace) for trace in row.attempts], "answers": dict(row.answers)}


def _trace_json(trace: Trace) -> dict[str, Any]:
    return {**asdict(trace), "views": [base64.b64encode(view).decode("ascii") for view in trace.views]}


def _from_json(row: Mapping[str, Any]) -> Row:
    return Row(tuple(map(_trace, row["attempts"])), row.get("answers", {}))


def _trace(row: Mapping[str, Any]) -> Trace:
    parts = {
        "task": task_from_json(row["task"]),
        "records": tuple(Record(**record) for record in row["records"]),
        "views": tuple(base64.b64decode(view) for view in row["views"]),
        "shown": tuple(row["shown"]),
    }
    return Trace(**{**row, **parts})
