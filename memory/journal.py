"""The state of a memory system as a journal and a fold: what was committed, one row per episode and in order, in one
file of the bank's folder. All that a system knows is a pure function of the first n rows: versions, going on after a
kill, writing twice and byte-identical prompts on another machine follow from that."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envs.base import task_from_json
from memory.entry import Written
from memory.protocol import BankError, Record, Trace
from runtime.store import JsonLines, locked, to_json
from runtime.told import typed

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
        # What was read so far, the keys in it, and of how many bytes: a journal only grows.
        self._read, self._keys, self._size = list[Row](), set[str](), 0

    def append(self, rows: Sequence[Row]) -> Written:
        """Append those episodes that are not there yet: each row is on disk when this returns, or none of it.

        Raises:
            BankError: this is a read-only view.
        """
        if self.until is not None:
            raise BankError(f"{self.folder} at version {self.until} is a read-only view")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / LOCK):
            fresh = self.unknown(rows)
            stored = [json.loads(to_json({"key": row.key, **_to_json(row)})) for row in fresh]
            made = list(self._parsed(stored))  # what could not be read back is not written
            self._lines.append(*stored)
            self._take(made, self._lines.path.stat().st_size)
        return Written(len(fresh), len(rows) - len(fresh))

    def unknown(self, rows: Sequence[Row]) -> list[Row]:
        """Return those of `rows` that are not there yet, each once."""
        self._catch_up()
        keyed = {row.key: row for row in rows if row.attempts}
        return [row for key, row in keyed.items() if key not in self._keys]

    def since(self, n: int) -> Sequence[Row]:
        """Return the rows behind the first n."""
        self._catch_up()
        return self._read[n : self.until]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.since(0))

    def __len__(self) -> int:
        self._catch_up()
        return len(self._read) if self.until is None else min(len(self._read), self.until)

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.folder / FILE, ("key", "attempts"))

    def _catch_up(self) -> None:
        """Read what others have appended."""
        path = self._lines.path
        if path.exists() and (size := path.stat().st_size) != self._size:  # before it is read: it may grow meanwhile
            self._take(self._parsed(itertools.islice(self._lines, len(self._read), None)), size)

    def _parsed(self, stored: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Row]]:
        """Yield key and row of each that follows. Raises: BankError, where one is damaged."""
        for n, row in enumerate(stored, len(self._read) + 1):
            try:
                yield str(row["key"]), _from_json(row)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problem = f"row {n} is no episode ({type(error).__name__}: {error})"
                raise BankError(f"{self._lines.path}, {problem}: restore the file") from error

    def _take(self, rows: Iterable[tuple[str, Row]], size: int) -> None:
        """Take in the rows that follow, as a file of this size holds them."""
        for key, row in rows:
            self._read.append(row)
            self._keys.add(key)
        self._size = size


def _to_json(row: Row) -> dict[str, Any]:
    return {"attempts": [trace_json(trace) for trace in row.attempts], "answers": dict(row.answers)}


def trace_json(trace: Trace) -> dict[str, Any]:
    """Write a trace as JSON, pictures as base64."""
    return {**asdict(trace), "views": [base64.b64encode(view).decode("ascii") for view in trace.views]}


def _from_json(row: Mapping[str, Any]) -> Row:
    return Row(tuple(map(trace_from_json, row["attempts"])), dict(row.get("answers", {})))


def trace_from_json(row: Mapping[str, Any]) -> Trace:
    """Rebuild the trace that `trace_json` wrote. Raises: ValueError, LookupError, TypeError or AttributeError, where it
    is none."""
    parts = {
        "task": typed(task_from_json(row["task"])),
        "records": tuple(typed(Record(**record)) for record in row["records"]),
        "views": tuple(base64.b64decode(view) for view in row["views"]),
        "shown": tuple(row["shown"]),
    }
    return typed(Trace(**{**row, **parts}))
