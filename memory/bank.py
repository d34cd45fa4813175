"""The memory bank: entries in an embedded LanceDB table, appended while episodes are collected, versioned throughout.
As a memory system (`trajectory`, the paper's) it keeps one entry per episode and recalls by goal, once for all steps.

A bank is a folder. Every append is one atomic commit, so that a process killed at any moment leaves a readable bank,
and several processes may make one bank and append to it at once. LanceDB keeps every version, and nothing here ever
prunes one: checkpoints and results refer to them. Open a bank after forking, not before, for LanceDB runs threads.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from envs.base import Task
from memory.entry import MemoryEntry, Written, entry_from_json
from memory.protocol import BankError, Fixed, Query, Recall, Trace
from memory.registry import RESPONSES, MemorySpec, Tools
from memory.retrieval import COLUMNS, Found, Retriever, encodable, unit_rows
from memory.table import (
    ENTRY_COLUMNS,
    TABLE,
    check_schema,
    checked_out,
    clear_errors,
    connect,
    embedding_of,
    entry_of,
    make_schema,
    merge_small_writes,
    row_of,
    take_entries,
)
from memory.trajectory import entry_of_trace, goal_without_scene
from runtime.lock import LOCK
from runtime.settings import Settings
from runtime.store import atomic_file
from runtime.told import parse_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from lancedb.expr import Expr
    from lancedb.table import Table

    from memory.retrieval import Embed

BATCH = 64  # entries in memory at once while a bank is iterated (each may hold an episode's pictures)
READ_BATCH = 4096  # and while retrieval reads what it compares
UNFINISHED = ".making-"  # how the folder of a table that is being made begins; a kill may leave one behind
IMPORT_BATCH, IMPORT_BYTES = 4096, 2**26  # entries, or picture bytes, per commit of an import


@dataclass(slots=True)
class _Pinned:
    """One version of the table: what a reader sees however much is written meanwhile."""

    version: int
    table: Table
    read: bool = False  # by the retriever, to its end


class MemoryBank:
    """The memory system `trajectory`, on disk.

    Args:
        path: the bank's folder. The first `write` makes it; reading a bank that was never written to is an error.
        embed: n texts -> (n, d) array. Entries then carry the embedding of their goal, and retrieval ranks by it
            instead of by words. A bank has embeddings from its first write on, or never.
    """

    name: ClassVar[str] = "trajectory"

    def __init__(self, path: str | Path, embed: Embed | None = None) -> None:
        self.path, self.embed = Path(path), embed
        self._view: int | None = None  # the version of a read-only view
        self._table: Table | None = None
        self._pinned: _Pinned | None = None
        self._known = -1, set[str]()  # a version, and the ids in it
        self._retriever, self._ranking = Retriever(), Lock()  # what retrieval has read; it reads on as rows are added

    # -- as a memory system -------------------------------------------------------------------------------------------

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> Written:
        """Keep an entry of every attempt."""
        return self.write(entry_of_trace(trace) for attempts in episodes for trace in attempts)

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        """Retrieve M for each task. Entries stand in the order of their ids (hashes), not of their rank: the right one
        usually ranks first, and a place in the prompt that gives it away would make reading the entries unnecessary,
        for every delivery alike."""
        tasks = {k: [query.task for query in queries if query.k == k] for k in {query.k for query in queries}}
        found = {k: iter(self.retrieve(of_k, k)) for k, of_k in tasks.items()}
        entries = (next(found[query.k]) for query in queries)
        return [Recall(tuple(sorted(some, key=lambda entry: entry.id))) for some in entries]

    def take_over(self, other: MemoryBank) -> Written:
        return self.write(other)

    def session(self, query: Query, first: Recall) -> Fixed:
        """Recall the same at every step: prompts keep their prefix, and its cache."""
        return Fixed(first)

    # -- writing ------------------------------------------------------------------------------------------------------

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        """Keep a failure as it is: there is nothing more to learn from another one."""

    def write(self, entries: MemoryEntry | Iterable[MemoryEntry]) -> Written:
        """Append in one commit: all or nothing. An id that is there already is ignored and counted, never overwritten.
        Raises: BankError for a read-only view or another kind of folder, ValueError for an entry without an id."""
        if self._view is not None:
            raise BankError(
                f"{self.path} at version {self._view} is a read-only view: write to MemoryBank({str(self.path)!r})"
            )
        batch = [entries] if isinstance(entries, MemoryEntry) else list(entries)
        rows = [row_of(entry) for entry in batch]
        table = self._open(create=True)
        with clear_errors(self.path):
            version, known = self._known_ids(table)
        fresh: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["id"] not in known:
                fresh.setdefault(row["id"], row)
        if not fresh:  # not even a new version: writing the same again changes nothing
            return Written(0, len(batch))
        data = self._to_arrow(table.schema, list(fresh.values()))
        with clear_errors(self.path):
            # `id` is the table's key: what another process has appended meanwhile is not inserted a second time.
            result = table.merge_insert("id").when_not_matched_insert_all().execute(data)
            merge_small_writes(table)
        if result.version == version + 1:  # nobody else wrote in between
            known.update(fresh)
            self._known = result.version, known
        return Written(result.num_inserted_rows, len(batch) - result.num_inserted_rows)

    def _known_ids(self, table: Table) -> tuple[int, set[str]]:
        if self._known[0] != (version := table.version):
            ids = checked_out(self.path, version).search().select(["id"]).to_arrow().column("id")
            self._known = version, set(ids.to_pylist())
        return self._known

    def _to_arrow(self, schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
        import pyarrow as pa

        if stored := embedding_of(schema):
            if self.embed is None:
                raise BankError(f"{self.path} has embeddings: open it with embed=... ({stored}) to write to it")
            texts = [goal_without_scene(row["goal"], row["scene"]) or row["text"] for row in rows]
            for row, vector in zip(rows, self._vectors(texts, schema), strict=True):
                row["vector"] = vector
        return pa.Table.from_pylist(rows, schema=schema)

    def _vectors(self, texts: list[str], schema: pa.Schema) -> np.ndarray:
        """Embed texts as unit rows (n, d). Raises: ValueError, where d is not the table's."""
        assert self.embed is not None
        vectors, d = unit_rows(self.embed, texts), schema.field("vector").type.list_size
        if vectors.shape[1] != d:
            raise ValueError(f"embed gives {vectors.shape[1]} dimensions, {self.path} holds {d}")
        return vectors

    # -- versions -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        """Return the current version, which stays the same until something is written."""
        return self._pin().version

    def at(self, version: int) -> MemoryBank:
        """Open a read-only view of the bank as it was at `version`. Raises: BankError, where there is none."""
        view = MemoryBank(self.path, self.embed)
        latest = view._pin().version
        if not 1 <= version <= latest:
            raise BankError(f"{self.path} has no version {version}: choose one from 1 to {latest} (the newest)")
        view._view = version
        view._pin()
        return view

    # -- reading ------------------------------------------------------------------------------------------------------

    def retrieve(self, tasks: Sequence[Task], k: int = 4) -> list[list[MemoryEntry]]:
        """Retrieve M = Retrieve(bank, goal) for each task from one version: at most `k` entries, best first, none that
        an episode of this very task wrote (`memory.retrieval`). Entries (and pictures) are read once and shared."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        if k == 0:
            return [[] for _ in tasks]
        vectors: Sequence[np.ndarray | None] = [None] * len(tasks)
        if self.embed is not None and tasks:
            texts = [encodable(goal_without_scene(task.goal, task.scene)) for task in tasks]
            vectors = list(self._vectors(texts, self._open().schema))
        ranked: dict[tuple[str, str, str], list[Found]] = {}
        with clear_errors(self.path), self._ranking:
            pinned = self._pin()
            self._read_on(pinned)
            for task, vector in zip(tasks, vectors, strict=True):
                if (task.id, task.goal, task.scene) not in ranked:
                    ranked[task.id, task.goal, task.scene] = self._retriever.rank(task, k, vector)
            entries = take_entries(pinned.table, {f.row for found in ranked.values() for f in found})
        return [[entries[f.id] for f in ranked[t.id, t.goal, t.scene]] for t in tasks]

    def _read_on(self, pinned: _Pinned) -> None:
        """Let the retriever read the rows that it has not read: versions only add rows, behind those that are there."""
        if pinned.read:
            return
        compared = "words" if self.embed is None else "vector"
        held, self._retriever = self._retriever, Retriever()  # nothing half read is kept where this is interrupted
        for batch in pinned.table.search().select([*COLUMNS, compared]).offset(len(held)).to_batches(READ_BATCH):
            held.add(batch)
        self._retriever, pinned.read = held, True

    def __len__(self) -> int:
        pinned = self._pin()
        with clear_errors(self.path):
            return pinned.table.count_rows()

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Yield every entry in the order of writing, a batch at a time; what is written meanwhile is not seen."""
        table = self._pin().table
        with clear_errors(self.path):
            for batch in table.search().select(ENTRY_COLUMNS).to_batches(batch_size=BATCH):
                yield from map(entry_of, batch.to_pylist())

    def entries(self) -> list[MemoryEntry]:
        """Return all entries with their pictures; iterate over the bank where that is too much."""
        return list(self)

    def __getitem__(self, id: str) -> MemoryEntry:
        """Return one entry. Raises: KeyError, where the bank does not hold this id."""
        from lancedb.expr import col, lit

        if not (rows := self._rows(ENTRY_COLUMNS, col("id") == lit(encodable(id)))):
            raise KeyError(f"no entry {id!r} in {self.path} at version {self._pin().version}")
        return entry_of(rows[0])

    def inspect(self) -> dict[str, Any]:
        """Count what the bank holds, ready for JSON: counts of entries and pictures, by split, source and scene."""
        pinned = self._pin()
        fields = ("split", "source", "scene")
        columns: dict[str, Any] = {c: c for c in (*fields, "success")} | {"images": "array_length(images)"}
        rows = self._rows(columns)
        successes = sum(row["success"] for row in rows)
        counts = {f"by_{c}": dict(sorted(Counter(row[c] for row in rows).items())) for c in fields}
        return {
            "path": str(self.path),
            "version": pinned.version,
            "entries": len(rows),
            "successes": successes,
            "failures": len(rows) - successes,
            "scenes": len(counts["by_scene"]),
            "images": sum(row["images"] or 0 for row in rows),
            "embedding": embedding_of(pinned.table.schema),
            **counts,
        }

    def origins(self) -> Counter[tuple[str, str]]:
        """Count entries by (task id, split): what an audit needs, without texts and pictures."""
        return Counter((row["task_id"], row["split"]) for row in self._rows(["task_id", "split"]))

    def _rows(self, columns: Any, where: Expr | None = None) -> list[dict[str, Any]]:
        table = self._pin().table
        with clear_errors(self.path):
            search = table.search() if where is None else table.search().where(where)
            return search.select(columns).to_arrow().to_pylist()

    # -- exchange -----------------------------------------------------------------------------------------------------

    def export_jsonl(self, path: str | Path) -> int:
        """Write one JSON object per entry, pictures as base64; returns how many. The file appears when it is whole."""
        n = 0
        with atomic_file(Path(path)) as file:
            for n, entry in enumerate(self, 1):  # noqa: B007
                file.write((json.dumps(entry.to_json(), ensure_ascii=False) + "\n").encode())
        return n

    def import_jsonl(self, path: str | Path) -> Written:
        """Append what `export_jsonl` wrote; it may be repeated. Raises: BankError, naming the line that is no entry;
        the batches of lines before it are in the bank."""
        path, written = Path(path), Written(0)
        with path.open(encoding="utf-8") as file:
            entries = (_imported(line, f"{path}:{n}") for n, line in enumerate(file, 1) if line.strip())
            for batch in _batches(entries):
                written += self.write(batch)
        self._open(create=True)
        return written

    # -- the table ----------------------------------------------------------------------------------------------------

    def _open(self, create: bool = False) -> Table:
        """Open the table at its newest version, once."""
        if self._table is not None:
            return self._table
        table = self._find()
        if table is None and create:
            table = self._make()
        if table is None:
            raise BankError(
                f"no memory bank at {self.path}: check the path, collect a bank (memcompiler collect) or import one "
                f"(memcompiler bank import {self.path} FILE.jsonl)"
            )
        check_schema(table.schema, self.embed, self.path)
        self._table = table
        return table

    def _find(self) -> Table | None:
        """Find the bank's table; None where nothing has been committed yet (a process may die while it makes one)."""
        if self.path.exists() and not self.path.is_dir():
            raise BankError(f"{self.path} is a file, not a memory bank (a folder): to read an export, import it first")
        other = (UNFINISHED, RESPONSES, LOCK)
        if not self.path.exists() or all(path.name.startswith(other) for path in self.path.iterdir()):
            return None
        if not (self.path / f"{TABLE}.lance").is_dir():
            raise BankError(f"{self.path} is not a memory bank and not empty: name another folder")
        with clear_errors(self.path):
            try:
                return connect(self.path).open_table(TABLE)
            except ValueError as e:
                if "not found" in str(e):
                    return None
                raise BankError(f"{self.path}: {e}") from e

    def _make(self) -> Table:
        dimension = unit_rows(self.embed, ["goal"]).shape[1] if self.embed is not None else None
        schema = make_schema(dimension, getattr(self.embed, "name", ""))
        with clear_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # LanceDB's own making is a write like any other: of two processes at the same moment one may fail. Moving a
            # table that is whole into its place can be done once.
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self.path) as folder:
                connect(Path(folder)).create_table(TABLE, schema=schema)
                with suppress(OSError):  # another process was first
                    (Path(folder) / f"{TABLE}.lance").rename(self.path / f"{TABLE}.lance")
            return connect(self.path).create_table(TABLE, schema=schema, exist_ok=True)

    def _pin(self) -> _Pinned:
        with clear_errors(self.path):
            version = self._open().version if self._view is None else self._view
            if self._pinned is None or self._pinned.version != version:
                self._pinned = _Pinned(version, checked_out(self.path, version))
        return self._pinned


def _batches(entries: Iterable[MemoryEntry]) -> Iterator[list[MemoryEntry]]:
    """Large enough that commits cost little, small enough for memory."""
    batch, size = [], 0
    for entry in entries:
        batch.append(entry)
        size += sum(map(len, entry.images))
        if len(batch) >= IMPORT_BATCH or size >= IMPORT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _imported(line: str, where: str) -> MemoryEntry:
    try:
        return entry_from_json(parse_json(line))
    except ValueError as e:
        raise BankError(f"{where}: not a memory entry ({e}); expected a line as export_jsonl writes it") from e


# -- by its name ------------------------------------------------------------------------------------------------------


def _open(path: Path, settings: Settings, tools: Tools) -> MemoryBank:
    return MemoryBank(path, tools.embed)


TRAJECTORY = MemorySpec(MemoryBank.name, Settings, _open)
