"""The memory bank: a versioned LanceDB table of entries, and the paper's memory system `trajectory`.

The system stores one entry per attempt and recalls by goal, once for all steps.

A bank is a folder, or a prefix on an object store (`memory.bank_store`). Every append is one atomic commit: a kill
leaves a readable bank, and several processes may create and append to one bank at once. Versions are never pruned,
because checkpoints and results refer to them. Open a bank after forking, because LanceDB runs threads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from envs.base import Task
from memory.bank_files import BankFiles
from memory.bank_store import Place, StoreAddress, place_of
from memory.bank_table import (
    ENTRY_COLUMNS,
    bank_errors,
    check_schema,
    create_table,
    embedding_info,
    entry_to_row,
    find_table,
    merge_small_writes,
    open_version,
    read_entries,
    row_to_entry,
    schema_for,
    stored_text,
)
from memory.entry import MemoryEntry, WriteResult, entry_from_json
from memory.protocol import BankError, FixedSession, Isolation, Query, ReadingModels, Recall, Trace
from memory.registry import MemorySpec, MemoryTools
from memory.retrieval import COLUMNS, BankRanker, RankedEntry, encodable, unit_rows
from memory.trajectory import EntryText, TrajectorySettings, entry_of_trace, goal_without_scene
from runtime.parsing import parse_json
from runtime.store import atomic_file

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from lancedb.expr import Expr
    from lancedb.table import Table

    from memory.retrieval import Embed

BATCH = 64  # entries per read of an iteration, with pictures
READ_BATCH = 4096  # entries per read of the retriever, without pictures
FORM = "form"  # key of an exported entry: the form of its text
IMPORT_BATCH, IMPORT_BYTES = 4096, 2**26  # entries, or picture bytes, per commit of an import or a copy
T = TypeVar("T")


@dataclass(slots=True)
class _Pinned:
    """The table at one version, unaffected by later writes."""

    version: int
    table: Table
    read: bool = False  # whether the retriever holds all of its rows


class MemoryBank:
    """The memory system `trajectory`, on disk.

    Args:
        path: the bank's folder, or its address s3://BUCKET/PREFIX; created by the first `write`. Reading a bank without
            writes raises BankError.
        embed: n texts -> (n, d) array. Entries then store the embedding of their goal, and retrieval ranks by cosine
            instead of by words. A bank has embeddings from its first write on, or never.
        text: form of the entries' texts (`TrajectorySettings.text`), which a bank keeps; opening it with another one
            raises BankError. None: the bank's own; commands for a new bank.
        successes_only: recall entries of successful episodes only.
    """

    name: ClassVar[str] = "trajectory"

    def __init__(
        self,
        path: str | Place,
        embed: Embed | None = None,
        text: EntryText | None = None,
        successes_only: bool = False,
    ) -> None:
        self.place, self.embed, self.successes_only = place_of(path), embed, successes_only
        self._wanted: EntryText | None = text  # as asked for
        self._text: EntryText = "commands"  # as the opened table has it
        self._view: int | None = None  # the version of a read-only view
        self._table: Table | None = None
        self._pinned: _Pinned | None = None
        self._files = BankFiles(self.place) if isinstance(self.place, Path) else None
        self._known = -1, set[str]()  # a version and the ids in it
        self._retriever, self._ranking = BankRanker(), Lock()  # holds the rows read so far

    # -- as a memory system -------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Return the bank's folder. Raises: BankError, for a bank on an object store."""
        if isinstance(self.place, StoreAddress):
            raise BankError(
                f"{self.place} is on an object store, and this needs a folder: copy the bank into one "
                f"(memcompiler bank copy {self.place} FOLDER) and name that"
            )
        return self.place

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        """Write an entry per attempt."""
        self._open(create=self._view is None)
        return self.write(entry_of_trace(trace, self._text) for attempts in episodes for trace in attempts)

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        """Retrieve M for each task, sorted by id.

        Sorting by rank would reveal the best entry by its position in the prompt, without reading the entries."""
        groups = dict[tuple[int, Isolation], list[Task]]()
        for query in queries:
            groups.setdefault((query.k, query.isolation), []).append(query.task)
        found = {(k, isolation): iter(self.retrieve(of, k, isolation)) for (k, isolation), of in groups.items()}
        entries = (next(found[query.k, query.isolation]) for query in queries)
        return [Recall(tuple(sorted(some, key=lambda entry: entry.id))) for some in entries]

    def merge_from(self, other: MemoryBank) -> WriteResult:
        """Write another bank's entries. Raises: BankError, if their texts have another form."""
        self._require_text(other.text, str(other.place))
        return self.write(other)

    @property
    def text(self) -> EntryText:
        """Return the form of the entries' texts."""
        self._open()
        return self._text

    def _require_text(self, text: EntryText, source: str) -> None:
        """Open the bank, or create one for entries of this form. Raises: BankError, if it holds another one."""
        if self._wanted is None and self._table is None and find_table(self.place) is None:
            self._wanted = text
        self._open(create=True)
        if self._text != text:
            raise BankError(f"{source} holds entries of text {text}, {self.place} of text {self._text}: use a new bank")

    def session(self, query: Query, first: Recall) -> FixedSession:
        """Recall the same entries at every step, so that prompts share a cached prefix."""
        return FixedSession(first)

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models that a recall asks."""
        return ("embed",) if self.embed is not None else ()

    @property
    def recall_failures(self) -> Counter[str]:
        """Return no counts: a recall asks no language model."""
        return Counter()

    # -- writing ------------------------------------------------------------------------------------------------------

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        """Return None: this memory learns from no further attempt."""

    def write(self, entries: MemoryEntry | Iterable[MemoryEntry]) -> WriteResult:
        """Append entries in one atomic commit. Known ids are ignored and counted, never overwritten.

        Raises:
            BankError: a read-only view, or a folder that is not a bank.
            ValueError: an entry without an id.
        """
        self._require_writable()
        batch = [entries] if isinstance(entries, MemoryEntry) else list(entries)
        if (nameless := next((entry for entry in batch if not entry.id), None)) is not None:
            raise ValueError(f"an entry needs an id (text: {nameless.text[:80]!r})")
        table = self._open(create=True)
        rows = [entry_to_row(entry, self._text) for entry in batch]
        known = self._known_ids(table)
        fresh: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["id"] not in known:
                fresh.setdefault(row["id"], row)
        if not fresh:  # do not create a new version
            return WriteResult(0, len(batch))
        added = self._append(table, self._to_arrow(table.schema, list(fresh.values())))
        return WriteResult(added, len(batch) - added)

    def _require_writable(self) -> None:
        if self._view is not None:
            raise BankError(
                f"{self.place} at version {self._view} is a read-only view: write to MemoryBank({str(self.place)!r})"
            )

    def _append(self, table: Table, data: pa.Table) -> int:
        """Append rows in one atomic commit; return the number of those whose ids no other process has appended."""
        with bank_errors(self.place):
            # `id` is the table's key: entries that another process appended meanwhile are not inserted again.
            result = table.merge_insert("id").when_not_matched_insert_all().execute(data)
            merge_small_writes(table)
            if self._files is not None:
                self._files.record()
        version, known = self._known
        if result.version == version + 1:  # no other process wrote in between
            known.update(data.column("id").to_pylist())
            self._known = result.version, known
        return result.num_inserted_rows

    def _known_ids(self, table: Table) -> set[str]:
        """Return the ids in the newest version."""
        with bank_errors(self.place):
            if self._known[0] != (version := table.version):
                ids = open_version(self.place, version).search().select(["id"]).to_arrow().column("id")
                self._known = version, set(ids.to_pylist())
        return self._known[1]

    def _to_arrow(self, schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
        import pyarrow as pa

        if stored := embedding_info(schema):
            if self.embed is None:
                raise BankError(f"{self.place} has embeddings: open it with embed=... ({stored}) to write to it")
            texts = [goal_without_scene(row["goal"], row["scene"]) or row["words"] for row in rows]
            for row, vector in zip(rows, self._vectors(texts, schema), strict=True):
                row["vector"] = vector
        return pa.Table.from_pylist(rows, schema=schema)

    def _vectors(self, texts: list[str], schema: pa.Schema) -> np.ndarray:
        """Embed texts as unit rows (n, d). Raises: ValueError, if d differs from the table's."""
        assert self.embed is not None
        vectors, d = unit_rows(self.embed, texts), schema.field("vector").type.list_size
        if vectors.shape[1] != d:
            raise ValueError(f"embed gives {vectors.shape[1]} dimensions, {self.place} holds {d}")
        return vectors

    # -- versions -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        """Return the current version, which changes with the next write."""
        return self._pin().version

    def at(self, version: int) -> MemoryBank:
        """Open a read-only view of `version`. Raises: BankError, for an unknown version."""
        view = MemoryBank(self.place, self.embed, self._wanted, self.successes_only)
        latest = view._pin().version
        if not 1 <= version <= latest:
            raise BankError(f"{self.place} has no version {version}: choose one from 1 to {latest} (the newest)")
        view._view = version
        view._pin()
        return view

    # -- reading ------------------------------------------------------------------------------------------------------

    def retrieve(self, tasks: Sequence[Task], k: int = 4, isolation: Isolation = "task") -> list[list[MemoryEntry]]:
        """Retrieve M = Retrieve(bank, goal) for each task from one version (`memory.retrieval`).

        Returns at most `k` entries per task, best first, without the task's own episodes (with `isolation="scene"`,
        without episodes of its scene). Tasks share the entries."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        if k == 0:
            return [[] for _ in tasks]
        vectors: Sequence[np.ndarray | None] = [None] * len(tasks)
        if self.embed is not None and tasks:
            texts = [encodable(goal_without_scene(task.goal, task.scene)) for task in tasks]
            vectors = list(self._vectors(texts, self._open().schema))
        ranked: dict[tuple[str, str, str], list[RankedEntry]] = {}
        with bank_errors(self.place), self._ranking:
            pinned = self._pin()
            self._read_on(pinned)
            for task, vector in zip(tasks, vectors, strict=True):
                if (task.id, task.goal, task.scene) not in ranked:
                    ranked[task.id, task.goal, task.scene] = self._retriever.rank(
                        task, k, vector, isolation=isolation, successes_only=self.successes_only
                    )
            entries = read_entries(pinned.table, {f.row for found in ranked.values() for f in found})
        return [[entries[f.id] for f in ranked[t.id, t.goal, t.scene]] for t in tasks]

    def _read_on(self, pinned: _Pinned) -> None:
        """Add new rows to the retriever. Versions only append rows."""
        if pinned.read:
            return
        compared = "words" if self.embed is None else "vector"
        held, self._retriever = self._retriever, BankRanker()  # an interruption leaves an empty retriever
        for batch in pinned.table.search().select([*COLUMNS, compared]).offset(len(held)).to_batches(READ_BATCH):
            held.add(batch)
        self._retriever, pinned.read = held, True

    def __len__(self) -> int:
        pinned = self._pin()
        with bank_errors(self.place):
            return pinned.table.count_rows()

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Iterate over the current version's entries in the order of writing."""
        table = self._pin().table
        with bank_errors(self.place):
            for batch in table.search().select(ENTRY_COLUMNS).to_batches(batch_size=BATCH):
                yield from map(row_to_entry, batch.to_pylist())

    def entries(self) -> list[MemoryEntry]:
        """Return all entries with their pictures."""
        return list(self)

    def __getitem__(self, id: str) -> MemoryEntry:
        """Return an entry. Raises: KeyError, for an unknown id."""
        from lancedb.expr import col, lit

        if not (rows := self._rows(ENTRY_COLUMNS, col("id") == lit(encodable(id)))):
            raise KeyError(f"no entry {id!r} in {self.place} at version {self._pin().version}")
        return row_to_entry(rows[0])

    def inspect(self) -> dict[str, Any]:
        """Count entries and pictures, in all and by split, source and scene, as JSON values."""
        pinned = self._pin()
        fields = ("split", "source", "scene")
        columns: dict[str, Any] = {c: c for c in (*fields, "success")} | {"images": "array_length(images)"}
        rows = self._rows(columns)
        successes = sum(row["success"] for row in rows)
        counts = {f"by_{c}": dict(sorted(Counter(row[c] for row in rows).items())) for c in fields}
        return {
            "path": str(self.place),
            "version": pinned.version,
            "entries": len(rows),
            "successes": successes,
            "failures": len(rows) - successes,
            "scenes": len(counts["by_scene"]),
            "images": sum(row["images"] or 0 for row in rows),
            "text": self._text,
            "embedding": embedding_info(pinned.table.schema),
            **counts,
        }

    def origins(self) -> Counter[tuple[str, str]]:
        """Count entries by (task id, split), for leakage audits."""
        return Counter((row["task_id"], row["split"]) for row in self._rows(["task_id", "split"]))

    def _rows(self, columns: Any, where: Expr | None = None) -> list[dict[str, Any]]:
        table = self._pin().table
        with bank_errors(self.place):
            search = table.search() if where is None else table.search().where(where)
            return search.select(columns).to_arrow().to_pylist()

    # -- exchange -----------------------------------------------------------------------------------------------------

    def export_jsonl(self, path: str | Path) -> int:
        """Write one JSON object per entry, pictures as base64; return their number. The file appears when complete."""
        n, form = 0, {FORM: self.text}
        with atomic_file(Path(path)) as file:
            for n, entry in enumerate(self, 1):  # noqa: B007
                file.write((json.dumps(entry.to_json() | form, ensure_ascii=False) + "\n").encode())
        return n

    def import_jsonl(self, path: str | Path) -> WriteResult:
        """Append the entries of an export in batches; known ids are ignored.

        Raises: BankError, for an invalid line, or a text of another form than the bank's. Earlier batches remain in the
            bank."""
        path, written = Path(path), WriteResult(0)
        with path.open(encoding="utf-8") as file:
            entries = (self._imported(line, f"{path}:{n}") for n, line in enumerate(file, 1) if line.strip())
            for batch in _batches(entries, lambda entry: (1, sum(map(len, entry.images)))):
                written += self.write(batch)
        self._open(create=True)
        return written

    def copy_from(self, other: MemoryBank) -> WriteResult:
        """Append another bank's rows as they are stored, embeddings included, in commits of bounded size.

        Raises: BankError, if the banks' texts or embeddings differ, or for a read-only view. After an interruption,
            earlier commits remain in the bank, and another call appends the rest."""
        import pyarrow as pa

        self._require_writable()
        source, written = other._pin().table, WriteResult(0)
        if self._table is None and find_table(self.place) is None:
            create_table(self.place, source.schema)
        table = self._open()
        if not source.schema.equals(table.schema, check_metadata=True):
            raise BankError(f"{other.place} and {self.place} differ in texts or embeddings: copy into a new bank")
        with bank_errors(other.place):
            rows = source.search().select(table.schema.names).to_batches(batch_size=BATCH)
            for batch in _batches(rows, lambda some: (some.num_rows, some.nbytes)):
                known, data = self._known_ids(table), pa.Table.from_batches(batch, table.schema)
                data = data.filter(pa.array([id not in known for id in data.column("id").to_pylist()]))
                added = self._append(table, data) if data.num_rows else 0
                written += WriteResult(added, sum(some.num_rows for some in batch) - added)
        return written

    def _imported(self, line: str, where: str) -> MemoryEntry:
        entry, form = read_exported(line, where)
        self._require_text(form, where)
        return entry

    # -- the table ----------------------------------------------------------------------------------------------------

    def _open(self, create: bool = False) -> Table:
        """Open the table at its newest version, once."""
        if self._table is not None:
            return self._table
        self._check_files()
        table = find_table(self.place)
        if table is None and create:
            table = create_table(self.place, schema_for(self.embed, self._wanted or "commands"))
        if table is None:
            raise BankError(
                f"no memory bank at {self.place}: check the path, collect a bank (memcompiler collect) or import one "
                f"(memcompiler bank import {self.place} FILE.jsonl)"
            )
        check_schema(schema := table.schema, self.embed, self.place, self._wanted)
        self._table, self._text = table, stored_text(schema)
        return table

    def _check_files(self) -> None:
        """Compare the files of a bank in a folder with their checksums; stores keep checksums of their own."""
        if self._files is not None:
            self._files.check()

    def _pin(self) -> _Pinned:
        with bank_errors(self.place):
            version = self._open().version if self._view is None else self._view
            if self._pinned is None or self._pinned.version != version:
                self._check_files()
                self._pinned = _Pinned(version, open_version(self.place, version))
        return self._pinned


def _batches(items: Iterable[T], size: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Group items into commits of bounded size. `size` returns the number of an item's entries, and of bytes."""
    batch, entries, n = list[T](), 0, 0
    for item in items:
        batch.append(item)
        more, more_bytes = size(item)
        entries, n = entries + more, n + more_bytes
        if entries >= IMPORT_BATCH or n >= IMPORT_BYTES:
            yield batch
            batch, entries, n = [], 0, 0
    if batch:
        yield batch


def _open(place: Place, settings: TrajectorySettings, tools: MemoryTools) -> MemoryBank:
    return MemoryBank(place, tools.embed, settings.text, successes_only=settings.outcomes == "success")


TRAJECTORY = MemorySpec(MemoryBank.name, TrajectorySettings, _open, on_stores=True)


def read_exported(line: str, where: str) -> tuple[MemoryEntry, EntryText]:
    """Read a line of an export: the entry, and the form of its text. Raises: BankError, which names `where`."""
    try:
        row = parse_json(line)
        return entry_from_json(row), "raw" if row.get(FORM) == "raw" else "commands"
    except ValueError as e:
        raise BankError(f"{where}: not a memory entry ({e}); expected a line of `memcompiler bank export`") from e
