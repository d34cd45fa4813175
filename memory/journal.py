"""A memory system's state as a journal and a fold: committed episodes in order, one row each, in one JSON Lines file.

Everything a system knows is a pure function of the first n rows. Versions, resumption after a kill, idempotent commits
and identical prompts on every machine follow from that.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envs.base import task_from_json
from memory.entry import MemoryEntry, WriteResult
from memory.protocol import BankError, FixedSession, Query, ReadingModels, Recall, Record, Session, Trace
from runtime.parsing import check_types
from runtime.store import JsonLines, locked, to_json

FILE, LOCK = "journal.jsonl", ".journal.lock"


@dataclass(frozen=True, slots=True)
class Row:
    """One episode: the attempts at one task in order, and language models' answers about them."""

    attempts: tuple[Trace, ...]
    answers: Mapping[str, Any]

    @property
    def key(self) -> str:
        identity = [[t.task.id, t.attempt, t.success, *t.actions] for t in self.attempts]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


class Journal:
    """The rows of a bank's journal file.

    Args:
        folder: the bank's folder.
        until: limits a read-only view to this many rows.
    """

    def __init__(self, folder: Path, until: int | None = None) -> None:
        self.folder, self.until = folder, until
        # Rows read so far, their keys, and the file size then: the file only grows.
        self._read, self._keys, self._size = list[Row](), set[str](), 0

    def append(self, rows: Sequence[Row]) -> WriteResult:
        """Append new episodes durably; ignore known ones. Raises: BankError, for a read-only view."""
        if self.until is not None:
            raise BankError(f"{self.folder} at version {self.until} is a read-only view")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / LOCK):
            fresh = self.unknown(rows)
            stored = [
                json.loads(
                    to_json(
                        {
                            "key": row.key,
                            "attempts": [trace_json(trace) for trace in row.attempts],
                            "answers": dict(row.answers),
                        }
                    )
                )
                for row in fresh
            ]
            parsed = list(self._parsed(stored))  # before writing: an unreadable row must not reach the file
            self._lines.append(*stored)
            self._take(parsed, self._lines.path.stat().st_size)
        return WriteResult(len(fresh), len(rows) - len(fresh))

    def unknown(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that the journal does not hold, without duplicates."""
        self._catch_up()
        keyed = {row.key: row for row in rows if row.attempts}
        return [row for key, row in keyed.items() if key not in self._keys]

    def since(self, n: int) -> Sequence[Row]:
        """Return the rows after the first n."""
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

    @property
    def failures(self) -> Counter[str]:
        """Count the unusable answers that the rows name, by role."""
        return sum((Counter(row.answers.get("failures", {})) for row in self), Counter())

    def _catch_up(self) -> None:
        """Read rows that other processes appended."""
        path = self._lines.path
        if path.exists() and (size := path.stat().st_size) != self._size:  # stat before reading: the file may grow
            self._take(self._parsed(itertools.islice(self._lines, len(self._read), None)), size)

    def _parsed(self, stored: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Row]]:
        """Yield (key, row) of stored rows. Raises: BankError, for a damaged row."""
        for n, row in enumerate(stored, len(self._read) + 1):
            try:
                attempts = tuple(map(trace_from_json, row["attempts"]))
                yield str(row["key"]), Row(attempts, dict(row.get("answers", {})))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problem = f"row {n} is not an episode ({type(error).__name__}: {error})"
                raise BankError(f"{self._lines.path}, {problem}: restore the file") from error

    def _take(self, rows: Iterable[tuple[str, Row]], size: int) -> None:
        """Add rows that were read from a file of this size in bytes."""
        for key, row in rows:
            self._read.append(row)
            self._keys.add(key)
        self._size = size


class JournalMemory:
    """Base of memory systems whose state is a fold over a journal. Subclasses define `recall`, `at` and `__iter__`."""

    def __init__(self, path: str | Path, until: int | None) -> None:
        self.path = Path(path)
        self._journal = Journal(self.path, until)
        self.recall_failures = Counter[str]()  # unusable answers to recalls, by role: no row holds them

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models that a recall asks."""
        return ()

    @property
    def failures(self) -> Counter[str]:
        """Count language models' unusable answers about the episodes, by role."""
        return self._journal.failures

    @property
    def rows(self) -> Sequence[Row]:
        """The committed episodes in order, up to the version of a read-only view."""
        return self._journal.since(0)

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        return self._journal.append([Row(tuple(attempts), {}) for attempts in episodes])

    def merge_from(self, other: JournalMemory) -> WriteResult:
        return self._journal.append(list(other._journal))

    def session(self, query: Query, first: Recall) -> Session:
        return FixedSession(first)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> Session | None:
        return None

    def snapshot(self) -> int:
        return len(self._journal)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((t.task.id, t.task.split) for row in self._journal for t in row.attempts[:1])

    def __iter__(self) -> Iterator[MemoryEntry]:
        raise NotImplementedError

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, id: str) -> MemoryEntry:
        return {entry.id: entry for entry in self}[id]


def trace_json(trace: Trace) -> dict[str, Any]:
    """Convert a trace to JSON values, pictures as base64."""
    return {**asdict(trace), "views": [base64.b64encode(view).decode("ascii") for view in trace.views]}


def trace_from_json(row: Mapping[str, Any]) -> Trace:
    """Rebuild a trace from JSON. Raises: ValueError, LookupError, TypeError or AttributeError, for other values."""
    parts = {
        "task": check_types(task_from_json(row["task"])),
        "records": tuple(check_types(Record(**record)) for record in row["records"]),
        "views": tuple(base64.b64decode(view) for view in row["views"]),
        "shown": tuple(row["shown"]),
    }
    return check_types(Trace(**{**row, **parts}))
