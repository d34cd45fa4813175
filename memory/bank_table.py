"""The LanceDB table behind `memory.bank`: opening and creation, schema, conversion of rows, compaction."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory.bank_store import Place, StoreAddress
from memory.entry import MemoryEntry, Provenance
from memory.protocol import BankError
from memory.registry import RESPONSES
from memory.retrieval import encodable, unit_rows
from memory.trajectory import EntryText, compact_text
from runtime.lock import LOCK

if TYPE_CHECKING:
    import pyarrow as pa
    from lancedb.table import Table

    from memory.retrieval import Embed

# lancedb and pyarrow take a second to import: import them where they are used.

TABLE = "entries"
UNFINISHED = ".making-"  # prefix of the temporary folder of a new table; a kill may leave one behind
ENTRY_COLUMNS = ["id", "text", "images", "task_id", "scene", "goal", "split", "success", "actions", "source"]
FOREVER = timedelta(days=36_500)  # LanceDB prunes versions older than a week by default
CROWDED = 64  # minimal number of fragments (one per write) before a merge
_STORE_SAID = re.compile(r'<Message>(.+?)</Message>|message: "(.+?)"')  # a store's answer, or the system's, in an error
EMBED_NAME, ENTRY_TEXT = b"memcompiler.embed", b"memcompiler.text"  # keys of the schema's metadata


def connect(place: Place) -> Any:
    """Connect to a bank's database. Raises: BankError, if an object store is not reachable or refuses."""
    import lancedb

    # Interval 0: every read of the newest version checks for commits of other processes first (0.1 ms; on an object
    # store one request).
    connected = partial(lancedb.connect, read_consistency_interval=timedelta(0))
    if isinstance(place, Path):
        return connected(place)
    try:
        return connected(place.uri, storage_options=place.options())
    except ValueError as e:
        raise _bank_error(place, e) from e


def open_version(place: Place, version: int) -> Table:
    """Open the table at a version."""
    table = connect(place).open_table(TABLE)
    table.checkout(version)
    return table


def find_table(place: Place) -> Table | None:
    """Open a bank's table at its newest version; None before its first commit.

    Raises:
        BankError: a file, a folder with other contents, or an object store that cannot be read.
    """
    if isinstance(place, Path) and not _holds_table(place):
        return None
    with bank_errors(place):
        try:
            return connect(place).open_table(TABLE)
        except ValueError as e:
            if f"Table '{TABLE}' was not found" in str(e):
                return None
            raise BankError(f"{place}: {e}") from e


def _holds_table(path: Path) -> bool:
    """Return whether a folder holds a table, finished or not. Raises: BankError, as `find_table`."""
    if path.exists() and not path.is_dir():
        raise BankError(f"{path} is a file, not a memory bank (a folder): to read an export, import it first")
    if not path.exists() or all(inner.name.startswith((UNFINISHED, RESPONSES, LOCK)) for inner in path.iterdir()):
        return False
    if not (path / f"{TABLE}.lance").is_dir():
        raise BankError(f"{path} is not a memory bank and not empty: name another folder")
    return True


def create_table(place: Place, schema: pa.Schema) -> Table:
    """Create a bank's table, or open the one that another process has just created."""
    if isinstance(place, Path):
        _create_in_folder(place, schema)
    with bank_errors(place):  # a store accepts the file of the first version from one process only
        return connect(place).create_table(TABLE, schema=schema, exist_ok=True)


def _create_in_folder(path: Path, schema: pa.Schema) -> None:
    with bank_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        # Concurrent creations conflict in LanceDB, but only one process can rename a complete table into place.
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path) as folder:
            connect(Path(folder)).create_table(TABLE, schema=schema)
            with suppress(OSError):  # another process was first
                (Path(folder) / f"{TABLE}.lance").rename(path / f"{TABLE}.lance")


@contextmanager
def bank_errors(place: Place) -> Iterator[None]:
    """Convert LanceDB's errors, which name Rust source lines, to BankError with advice."""
    try:
        yield
    except BankError:
        raise
    except (RuntimeError, OSError) as e:
        raise _bank_error(place, e) from e


def _bank_error(place: Place, error: Exception) -> BankError:
    problem, where = (str(error) or repr(error)).splitlines()[0], "disk is full or not reachable"
    if isinstance(place, StoreAddress):
        said, where = _STORE_SAID.search(problem), "store refuses or is not reachable"
        problem = next(filter(None, said.groups())) if said else problem
    return BankError(
        f"{place}: {problem}. If the {where}, fix that: what was "
        "committed is safe. If files of the bank are missing or damaged, an earlier version may still be whole "
        "(at(version)); otherwise import an export into a new folder (memcompiler bank import)."
    )


def merge_small_writes(table: Table) -> None:
    """Merge fragments once there are many and rows have doubled since the last merge.

    All merges together write each row at most twice on average. Versions and the order of rows are preserved."""
    stats: Any = table.stats()["fragment_stats"]  # type: ignore[index]  # a dict, whatever its annotation says
    if stats["num_fragments"] < CROWDED or 2 * stats["lengths"]["max"] > table.count_rows():
        return
    with suppress(RuntimeError, OSError, ValueError):  # another process merged, or the next write will
        table.optimize(cleanup_older_than=FOREVER)


# -- rows -------------------------------------------------------------------------------------------------------------


def schema_for(embed: Embed | None, text: EntryText) -> pa.Schema:
    """Return the schema of a new bank."""
    dimension = unit_rows(embed, ["goal"]).shape[1] if embed is not None else None
    return make_schema(dimension, getattr(embed, "name", ""), text)


def make_schema(dimension: int | None, embed_name: str, text: EntryText = "commands") -> pa.Schema:
    import pyarrow as pa

    key = {b"lance-schema:unenforced-primary-key": b"true"}  # concurrent inserts of one id conflict and are retried
    fields = [
        pa.field("id", pa.string(), nullable=False, metadata=key),
        pa.field("text", pa.string(), nullable=False),
        pa.field("images", pa.list_(pa.large_binary()), nullable=False),
        *(pa.field(c, pa.string(), nullable=False) for c in ("task_id", "scene", "goal", "split", "source")),
        pa.field("success", pa.bool_(), nullable=False),
        pa.field("actions", pa.list_(pa.string()), nullable=False),
        pa.field("words", pa.string(), nullable=False),  # compact text and goal, for retrieval by words
    ]
    if dimension is not None:
        fields.append(pa.field("vector", pa.list_(pa.float32(), dimension), nullable=False))
    return pa.schema(fields, metadata={EMBED_NAME: encodable(embed_name).encode(), ENTRY_TEXT: text.encode()})


def check_schema(schema: pa.Schema, embed: Embed | None, path: Place, text: EntryText | None = None) -> None:
    """Raise BankError for a table of another kind, or for an embedding or a text of entries other than the table's."""
    if missing := {*ENTRY_COLUMNS, "words"} - set(schema.names):
        raise BankError(f"{path} is not a memory bank of this version of MemCompiler: no column {min(missing)!r} in it")
    if text is not None and (held := stored_text(schema)) != text:
        raise BankError(
            f"{path} holds entries of text {held}, not {text}: set memory.settings.text={held}, or fill another bank"
        )
    if embed is None:
        return
    stored = embedding_info(schema)
    remedy = "export it (memcompiler bank export) and import it into a new bank with this embedding"
    if stored is None:
        raise BankError(f"{path} was written without embeddings: open it without, or {remedy}")
    theirs, ours = stored["name"], getattr(embed, "name", "")
    if theirs and ours and theirs != ours:
        raise BankError(f"{path} was written with the embedding {theirs}, not {ours}: open it with that, or {remedy}")


def stored_text(schema: pa.Schema) -> EntryText:
    """Return the form of a table's entry texts; a table that does not name it holds commands."""
    return "raw" if (schema.metadata or {}).get(ENTRY_TEXT) == b"raw" else "commands"


def embedding_info(schema: pa.Schema) -> dict[str, Any] | None:
    if "vector" not in schema.names:
        return None
    name = (schema.metadata or {}).get(EMBED_NAME, b"").decode()
    return {"name": name, "dimension": schema.field("vector").type.list_size}


def entry_to_row(entry: MemoryEntry, text: EntryText = "commands") -> dict[str, Any]:
    """Convert an entry to a row. Retrieval reads the same words from a raw entry as from one of commands."""
    origin = entry.provenance
    row = {"id": entry.id, "text": entry.text}
    row |= {column: getattr(origin, column) for column in ("task_id", "scene", "goal", "split", "source")}
    row = {column: encodable(value) for column, value in row.items()}
    compact = compact_text(row["text"]) if text == "raw" else row["text"]
    words = compact if row["goal"] in compact else f"{compact}\n{row['goal']}"
    actions = [encodable(action) for action in origin.actions]
    return {**row, "success": origin.success, "actions": actions, "images": list(entry.images), "words": words}


def row_to_entry(row: dict[str, Any]) -> MemoryEntry:
    origin = {c: row[c] for c in ("task_id", "scene", "goal", "split", "success", "source")}
    provenance = Provenance(**origin, actions=tuple(row["actions"]))
    return MemoryEntry(row["id"], row["text"], provenance, tuple(row["images"]))


def read_entries(table: Table, rows: set[int]) -> dict[str, MemoryEntry]:
    """Read entries by row number; returns them by id."""
    if not rows:
        return {}
    taken = table.take_offsets(sorted(rows)).select(ENTRY_COLUMNS).to_arrow().to_pylist()
    return {row["id"]: row_to_entry(row) for row in taken}
