"""The memory bank: entries in an embedded LanceDB table, appended while episodes are collected, versioned throughout.

A bank is a folder. Every append is one atomic commit, so that a process killed at any moment leaves a readable bank,
and several processes may append at once. LanceDB keeps every version, and nothing here ever prunes one: checkpoints
and results refer to them. Open a bank after forking, not before, for LanceDB runs threads.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.memory import MemoryConfig
from envs.base import Task
from memory.embed import unit_rows
from memory.entry import MemoryEntry, Provenance
from memory.protocol import Written
from memory.retrieval import COLUMNS, Found, Retriever, encodable, goal_text
from runtime.store import atomic_file

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from lancedb.index import FTS
    from lancedb.table import Table

    from memory.embed import Embed

# lancedb and pyarrow are imported where they are used: they take a second that only those who open a bank should pay.

TABLE = "entries"
ENTRY_COLUMNS = ["id", "text", "images", "task_id", "scene", "goal", "split", "success", "actions", "source"]
FOREVER = timedelta(days=36_500)  # LanceDB's maintenance prunes versions older than a week unless told otherwise
BATCH = 64  # entries in memory at once while a bank is iterated (each may hold an episode's pictures)
IMPORT_BATCH, IMPORT_BYTES = 4096, 2**26  # entries, or picture bytes, per commit of an import
CROWDED = 64  # fragments (there is one per write) from which merging them is considered
ATTEMPTS = 5  # at indexing, when other processes index the same bank at the same time
EMBED_NAME = b"memcompiler.embed"


class BankError(RuntimeError):
    """A bank that is missing, damaged, of another kind or read-only. The message names the next step."""


@dataclass(slots=True)
class _Pinned:
    """One version of the table: what a reader sees however much is written meanwhile."""

    version: int
    table: Table
    retriever: Retriever | None = None  # made by the first retrieval


@dataclass(slots=True)
class _Known:
    version: int = -1
    ids: set[str] = field(default_factory=set)


class MemoryBank:
    """A `Memory` on disk.

    Args:
        path: the bank's folder. The first `write` makes it; reading a bank that was never written to is an error.
        embed: n texts -> (n, d) array. Entries then carry the embedding of their goal, and retrieval ranks by it
            instead of by words. A bank has embeddings from its first write on, or never.
        create: make an empty bank now if there is none.
    """

    def __init__(self, path: str | Path, embed: Embed | None = None, *, create: bool = False) -> None:
        self.path = Path(path)
        self.embed = embed
        self._view: int | None = None  # the version of a read-only view
        self._table: Table | None = None
        self._pinned: _Pinned | None = None
        self._known = _Known()
        if create:
            self._open(create=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, entries: MemoryEntry | Iterable[MemoryEntry]) -> Written:
        """Append in one commit: all or nothing. An id that is there already is ignored and counted, never overwritten.

        Raises:
            BankError: for a read-only view, or a folder that is not a bank.
            ValueError: for an entry without an id, or an `embed` that returns another shape than it should.
        """
        if self._view is not None:
            raise BankError(
                f"{self.path} at version {self._view} is a read-only view: write to MemoryBank({str(self.path)!r})"
            )
        batch = [entries] if isinstance(entries, MemoryEntry) else list(entries)
        rows = [_row(entry) for entry in batch]
        table = self._open(create=True)
        with self._clear_errors():
            known = self._known_ids(table)
        fresh: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["id"] not in known.ids:
                fresh.setdefault(row["id"], row)
        if not fresh:  # not even a new version: writing the same again changes nothing
            return Written(0, len(batch))
        data = self._to_arrow(table.schema, list(fresh.values()))
        with self._clear_errors():
            # `id` is the table's key: what another process has appended meanwhile is not inserted a second time.
            result = table.merge_insert("id").when_not_matched_insert_all().execute(data)
        if result.version == known.version + 1:  # nobody else wrote in between
            known.version = result.version
            known.ids.update(fresh)
        return Written(result.num_inserted_rows, len(batch) - result.num_inserted_rows)

    def _known_ids(self, table: Table) -> _Known:
        version = table.version
        if self._known.version != version:
            ids = _checked_out(self._connect(), version).search().select(["id"]).to_arrow().column("id")
            self._known = _Known(version, set(ids.to_pylist()))
        return self._known

    def _to_arrow(self, schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
        import pyarrow as pa

        if stored := _embedding(schema):
            if self.embed is None:
                raise BankError(f"{self.path} has embeddings: open it with embed=... ({stored}) to write to it")
            texts = [goal_text(row["goal"], row["scene"]) or row["text"] for row in rows]
            for row, vector in zip(rows, self._vectors(texts, schema), strict=True):
                row["vector"] = vector
        return pa.Table.from_pylist(rows, schema=schema)

    def _vectors(self, texts: list[str], schema: pa.Schema) -> np.ndarray:
        """(n, d), unit rows. Raises ValueError where d is not the table's."""
        assert self.embed is not None
        vectors, d = unit_rows(self.embed, texts), schema.field("vector").type.list_size
        if vectors.shape[1] != d:
            raise ValueError(f"embed gives {vectors.shape[1]} dimensions, {self.path} holds {d}")
        return vectors

    # -- versions -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        """The current version. Brings the full-text indexes up to date first, so that retrieval from it starts at once.

        The number stays the same until something is written.
        """
        if self._view is not None:
            return self._view
        table = self._open()
        with self._clear_errors():
            if os.access(self.path, os.W_OK):
                _index(table)
            return table.version

    def at(self, version: int) -> MemoryBank:
        """A read-only view of the bank as it was at `version`.

        Raises:
            BankError: for a version that does not exist.
        """
        view = MemoryBank(self.path, self.embed)
        latest = view._newest()
        if not 1 <= version <= latest:
            raise BankError(f"{self.path} has no version {version}: choose one from 1 to {latest} (the newest)")
        view._view = version
        view._pin()
        return view

    # -- reading ------------------------------------------------------------------------------------------------------

    def retrieve(
        self, task: Task, k: int = 4, exclude_own_task: bool = True, splits: Sequence[str] | None = None
    ) -> list[MemoryEntry]:
        """M = Retrieve(bank, goal): at most `k` entries, best first; `memory.retrieval` says how they are scored.

        Args:
            exclude_own_task: leave out entries that an episode of this very task wrote.
            splits: only entries that were written in these splits; None for all.
        """
        return self.retrieve_many([task], k, exclude_own_task, splits)[0]

    def retrieve_many(
        self, tasks: Sequence[Task], k: int = 4, exclude_own_task: bool = True, splits: Sequence[str] | None = None
    ) -> list[list[MemoryEntry]]:
        """`retrieve` for each task, from one version of the bank. Entries (and pictures) are read once and shared."""
        if k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        splits = [splits] if isinstance(splits, str) else splits
        pinned = self._pin()
        vectors: Sequence[np.ndarray | None] = [None] * len(tasks)
        if self.embed is not None and tasks:
            texts = [encodable(goal_text(task.goal, task.scene)) for task in tasks]
            vectors = list(self._vectors(texts, pinned.table.schema))
        ranked: dict[tuple[str, str, str], list[Found]] = {}
        with self._clear_errors():
            retriever = self._retriever(pinned)
            for task, vector in zip(tasks, vectors, strict=True):
                if (task.id, task.goal, task.scene) not in ranked:
                    found = retriever.rank(task, k, exclude_own_task, splits, vector)
                    ranked[task.id, task.goal, task.scene] = found
            entries = _take(pinned.table, {f.row for found in ranked.values() for f in found})
        return [[entries[f.id] for f in ranked[t.id, t.goal, t.scene]] for t in tasks]

    def _retriever(self, pinned: _Pinned) -> Retriever:
        if pinned.retriever is None:
            searchable = self.embed is not None or not _unindexed(pinned.table)
            pinned.retriever = Retriever(pinned.table) if searchable else Retriever(_indexed_copy(pinned.table), "row")
        return pinned.retriever

    def __len__(self) -> int:
        pinned = self._pin()
        with self._clear_errors():
            return pinned.table.count_rows()

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Every entry in the order of writing, a batch at a time; what is written meanwhile is not seen."""
        table = self._pin().table
        with self._clear_errors():
            for batch in table.search().select(ENTRY_COLUMNS).to_batches(batch_size=BATCH):
                yield from map(_entry, batch.to_pylist())

    def entries(self) -> list[MemoryEntry]:
        """All entries with their pictures, in the order of writing; iterate over the bank where that is too much."""
        return list(self)

    def get(self, id: str) -> MemoryEntry:
        """Raises KeyError for an id that the bank does not hold."""
        from lancedb.expr import col, lit

        table = self._pin().table
        with self._clear_errors():
            rows = table.search().where(col("id") == lit(encodable(id))).select(ENTRY_COLUMNS).to_arrow().to_pylist()
        if not rows:
            raise KeyError(f"no entry {id!r} in {self.path} at version {self._pin().version}")
        return _entry(rows[0])

    def inspect(self) -> dict[str, Any]:
        """What the bank holds, ready for JSON: counts of entries and pictures, by split, source and scene."""
        pinned = self._pin()
        fields = ("split", "source", "scene")
        columns: dict[str, Any] = {c: c for c in (*fields, "success")} | {"images": "array_length(images)"}
        with self._clear_errors():
            rows = pinned.table.search().select(columns).to_arrow().to_pylist()
            unindexed = _unindexed(pinned.table)
        successes = sum(row["success"] for row in rows)
        counts = {f"by_{c}": dict(sorted(Counter(row[c] for row in rows).items())) for c in fields}
        return {
            "path": str(self.path), "version": pinned.version, "entries": len(rows), "successes": successes,
            "failures": len(rows) - successes, "scenes": len(counts["by_scene"]),
            "images": sum(row["images"] or 0 for row in rows), "embedding": _embedding(pinned.table.schema),
            "unindexed": max(unindexed.values(), default=0), **counts,
        }  # fmt: skip

    def origins(self) -> Counter[tuple[str, str]]:
        """How many entries there are by (task id, split): what an audit needs, without texts and pictures."""
        pinned = self._pin()
        with self._clear_errors():
            rows = pinned.table.search().select(["task_id", "split"]).to_arrow().to_pylist()
        return Counter((row["task_id"], row["split"]) for row in rows)

    # -- exchange -----------------------------------------------------------------------------------------------------

    def export_jsonl(self, path: str | Path) -> int:
        """One JSON object per entry, pictures as base64. The file appears when it is complete. Returns the entries."""
        n = 0
        with atomic_file(Path(path)) as file:
            for n, entry in enumerate(self, 1):  # noqa: B007
                file.write((json.dumps(_to_json(entry), ensure_ascii=False) + "\n").encode())
        return n

    def import_jsonl(self, path: str | Path) -> Written:
        """Append what `export_jsonl` wrote. Entries that are there already are ignored, so that it may be repeated.

        Raises:
            BankError: for a line that is not an entry, by its number; the batches of lines before it are in the bank.
        """
        path, written = Path(path), Written(0)
        with path.open(encoding="utf-8") as file:
            entries = (_from_json(line, f"{path}:{n}") for n, line in enumerate(file, 1) if line.strip())
            for batch in _batches(entries):
                written += self.write(batch)
        self._open(create=True)
        self.snapshot()
        return written

    # -- the table ----------------------------------------------------------------------------------------------------

    def _open(self, create: bool = False) -> Table:
        """The table at its newest version, opened once."""
        if self._table is None:
            self._table = self._find()
            if self._table is None and create:
                self._table = self._make()
            if self._table is None:
                raise BankError(
                    f"no memory bank at {self.path}: check the path, collect a bank (memcompiler collect) or import "
                    f"one (memcompiler bank import {self.path} FILE.jsonl)"
                )
            try:
                _check(self._table.schema, self.embed, self.path)
            except BankError:
                self._table = None
                raise
        return self._table

    def _find(self) -> Table | None:
        """The bank's table; None where nothing has been committed yet (a process may die while it makes one)."""
        if self.path.exists() and not self.path.is_dir():
            raise BankError(f"{self.path} is a file, not a memory bank (a folder): to read an export, import it first")
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        if not (self.path / f"{TABLE}.lance").is_dir():
            raise BankError(f"{self.path} is not a memory bank and not empty: name another folder")
        with self._clear_errors():
            try:
                return self._connect().open_table(TABLE)
            except ValueError as e:
                if "not found" in str(e):
                    return None
                raise BankError(f"{self.path}: {e}") from e

    def _make(self) -> Table:
        dimension = unit_rows(self.embed, ["goal"]).shape[1] if self.embed is not None else None
        self.path.mkdir(parents=True, exist_ok=True)
        with self._clear_errors():
            schema = _schema(dimension, getattr(self.embed, "name", ""))
            return self._connect().create_table(TABLE, schema=schema, exist_ok=True)

    def _connect(self) -> Any:
        import lancedb

        # Interval 0: every read of the newest version looks for commits of other processes first (0.1 ms).
        return lancedb.connect(self.path, read_consistency_interval=timedelta(0))

    def _newest(self) -> int:
        table = self._open()
        with self._clear_errors():
            return table.version

    def _pin(self) -> _Pinned:
        version = self._newest() if self._view is None else self._view
        if self._pinned is None or self._pinned.version != version:
            with self._clear_errors():
                self._pinned = _Pinned(version, _checked_out(self._connect(), version))
        return self._pinned

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """LanceDB's errors name Rust source lines; say what to do as well."""
        try:
            yield
        except BankError:
            raise
        except (RuntimeError, OSError) as e:
            problem = (str(e) or repr(e)).splitlines()[0]
            raise BankError(
                f"{self.path}: {problem}\nIf the disk is full or not reachable, mend that: what was "
                "committed is safe. If files of the bank are missing or damaged, an earlier version may still be whole "
                "(at(version)); otherwise import an export into a new folder (memcompiler bank import)."
            ) from e


# -- indexes ----------------------------------------------------------------------------------------------------------


def _indexes() -> dict[str, FTS]:
    from lancedb.index import FTS

    return {
        # Words in any script, stemmed where they are English. No stop words: with this tokenizer LanceDB drops those of
        # other languages too (among them "pot"), and a word that every entry has weighs next to nothing anyway.
        "words": FTS(base_tokenizer="icu/split", remove_stop_words=False),
        "scene": FTS(  # the whole label is one word
            base_tokenizer="raw", lower_case=False, stem=False, remove_stop_words=False, ascii_folding=False,
            max_token_length=None,
        ),
    }  # fmt: skip


def _unindexed(table: Table) -> dict[str, int]:
    """Rows that the full-text index of a column does not cover; columns whose index covers all are left out."""
    rows = table.count_rows()
    covered = {index.columns[0]: table.index_stats(index.name) for index in table.list_indices()}
    missing = {c: stats.num_unindexed_rows if (stats := covered.get(c)) else rows for c in ("words", "scene")}
    return {column: n for column, n in missing.items() if n}


def _index(table: Table) -> None:
    """Cover every row by the indexes.

    They are built afresh (7 to 20 us per row): LanceDB's way of extending them would also rewrite all the pictures.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            for column in _unindexed(table):
                table.create_index(column, config=_indexes()[column], replace=True)
            if _crowded(table):  # after indexing: rows that differ in being indexed would not stay in order
                table.optimize(cleanup_older_than=FOREVER)
            return
        except (RuntimeError, OSError, ValueError):  # another process has just committed the same index
            if attempt == ATTEMPTS:
                raise


def _crowded(table: Table) -> bool:
    """Many small writes, and twice as many rows as the last merge left: all merges together write a row only twice."""
    stats: Any = table.stats()["fragment_stats"]  # type: ignore[index]  # a dict, whatever its annotation says
    return stats["num_fragments"] >= CROWDED and 2 * stats["lengths"]["max"] <= table.count_rows()


def _indexed_copy(table: Table) -> Table:
    """What ranking reads, in memory and indexed: for versions that were not indexed when they were written.

    LanceDB would find their rows, but score indexed and other rows on different scales.
    """
    import lancedb

    rows = table.search().select(list(COLUMNS)).with_row_id(True).to_arrow()
    rows = rows.rename_columns(["row" if name == "_rowid" else name for name in rows.column_names])
    copy = lancedb.connect("memory://").create_table(TABLE, rows)
    for column, config in _indexes().items():
        copy.create_index(column, config=config)
    return copy


# -- rows -------------------------------------------------------------------------------------------------------------


def _schema(dimension: int | None, embed_name: str) -> pa.Schema:
    import pyarrow as pa

    key = {b"lance-schema:unenforced-primary-key": b"true"}  # concurrent inserts of one id conflict and are retried
    fields = [
        pa.field("id", pa.string(), nullable=False, metadata=key),
        pa.field("text", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.large_binary()), nullable=False),
        *(pa.field(c, pa.string(), nullable=False) for c in ("task_id", "scene", "goal", "split", "source")),
        pa.field("success", pa.bool_(), nullable=False),
        pa.field("actions", pa.list_(pa.string()), nullable=False),
        pa.field("words", pa.string(), nullable=False),  # what full-text search reads: the text, and the goal
    ]
    if dimension is not None:
        fields.append(pa.field("vector", pa.list_(pa.float32(), dimension), nullable=False))
    return pa.schema(fields, metadata={EMBED_NAME: encodable(embed_name).encode()})


def _check(schema: pa.Schema, embed: Embed | None, path: Path) -> None:
    """Raises BankError for a table of another kind, and for embeddings that do not go with the bank's."""
    if missing := {*ENTRY_COLUMNS, "words"} - set(schema.names):
        raise BankError(f"{path} is not a memory bank of this version of MemCompiler: no column {min(missing)!r} in it")
    if embed is None:
        return
    stored = _embedding(schema)
    remedy = "export it (memcompiler bank export) and import it into a new bank with this embedding"
    if stored is None:
        raise BankError(f"{path} was written without embeddings: open it without, or {remedy}")
    theirs, ours = stored["name"], getattr(embed, "name", "")
    if theirs and ours and theirs != ours:
        raise BankError(f"{path} was written with the embedding {theirs}, not {ours}: open it with that, or {remedy}")


def _embedding(schema: pa.Schema) -> dict[str, Any] | None:
    if "vector" not in schema.names:
        return None
    name = (schema.metadata or {}).get(EMBED_NAME, b"").decode()
    return {"name": name, "dimension": schema.field("vector").type.list_size}


def _row(entry: MemoryEntry) -> dict[str, Any]:
    if not entry.id:
        raise ValueError(f"an entry needs an id (text: {entry.text[:80]!r})")
    origin = entry.provenance
    row = {"id": entry.id, "text": entry.text, "task_id": origin.task_id, "scene": origin.scene, "goal": origin.goal}
    row |= {"split": origin.split, "source": origin.source}
    row = {column: encodable(value) for column, value in row.items()}
    words = row["text"] if row["goal"] in row["text"] else f"{row['text']}\n{row['goal']}"
    actions = [encodable(action) for action in origin.actions]
    return {**row, "success": origin.success, "actions": actions, "images": list(entry.images), "words": words}


def _entry(row: dict[str, Any]) -> MemoryEntry:
    origin = {c: row[c] for c in ("task_id", "scene", "goal", "split", "success", "source")}
    provenance = Provenance(**origin, actions=tuple(row["actions"]))
    return MemoryEntry(row["id"], row["text"], provenance, tuple(row["images"]))


def _take(table: Table, rows: set[int]) -> dict[str, MemoryEntry]:
    if not rows:
        return {}
    taken = table.take_row_ids(sorted(rows)).select(ENTRY_COLUMNS).to_arrow().to_pylist()
    return {row["id"]: _entry(row) for row in taken}


def _checked_out(db: Any, version: int) -> Table:
    table = db.open_table(TABLE)
    table.checkout(version)
    return table


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


def _to_json(entry: MemoryEntry) -> dict[str, Any]:
    images = [base64.b64encode(image).decode("ascii") for image in entry.images]
    return {"id": entry.id, "text": entry.text, "provenance": asdict(entry.provenance), "images": images}


def _from_json(line: str, where: str) -> MemoryEntry:
    try:
        row = json.loads(line)
        origin = row["provenance"]
        provenance = Provenance(**{**origin, "actions": tuple(origin.get("actions", ()))})
        images = tuple(base64.b64decode(image, validate=True) for image in row.get("images", ()))
        entry = MemoryEntry(row["id"], row["text"], provenance, images)
        if not all(isinstance(text, str) for text in _texts(entry)) or not isinstance(provenance.success, bool):
            raise TypeError("a field is of the wrong type")
        return entry
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        problem = f"{type(e).__name__}: {e}"
        raise BankError(f"{where}: not a memory entry ({problem}); expected a line as export_jsonl writes it") from e


def _texts(entry: MemoryEntry) -> tuple[object, ...]:
    origin = entry.provenance
    names = (origin.task_id, origin.scene, origin.goal, origin.split, origin.source)
    return (entry.id, entry.text, *names, *origin.actions)


# -- from settings ----------------------------------------------------------------------------------------------------


def open_bank(config: MemoryConfig, default: Path) -> MemoryBank:
    """The bank that the settings name (at its version), or the one at `default`."""
    from memory.embed import SentenceEmbedder

    bank = MemoryBank(config.bank or default, SentenceEmbedder(config.embed) if config.embed else None)
    return bank.at(config.version) if config.version is not None else bank


def growing_bank(config: MemoryConfig, path: Path) -> tuple[MemoryBank, int]:
    """A bank at `path` to be written to, with what the bank that the settings name holds; and how much that is."""
    bank = open_bank(config.model_copy(update={"bank": None, "version": None}), path)
    given = open_bank(config, path).entries() if config.bank is not None else []
    bank.write(given)
    return bank, len(given)
