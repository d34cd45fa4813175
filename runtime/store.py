"""Files that survive kill -9 and power loss: JSON Lines that are appended, and files that are replaced atomically."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from runtime.checksums import NO_LOCKS, RecordError, parse_row, read_checked, record_content, row_line
from runtime.parsing import parse_json

TEMPORARY = ".tmp"  # suffix of unfinished files, whose names begin with a dot
Row = dict[str, Any]


class JsonLines:
    """A JSON Lines file with one writing process and any number of readers.

    A row exists once its line break is written. A torn last line is never read, and the next append removes it. Rows
    are stored with a checksum (`runtime.checksums`), which is checked and left out when they are read.

    Args:
        path: the file, created with its first row.
        needs: required keys of every row.
    """

    def __init__(self, path: Path, needs: tuple[str, ...] = ()) -> None:
        self.path, self.required_keys = path, needs

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows; none without a file. Raises: RecordError, for a complete line that is not a row."""
        return (row for _, row in self._lines())

    def append(self, *rows: Mapping[str, object]) -> None:
        """Append rows as strict JSON (`to_json`), durably."""
        self.append_lines(*(to_json(row, ascii=True) for row in rows))

    def append_unflushed(self, row: Mapping[str, object]) -> None:
        """Append a row that survives a kill of this process, but perhaps not a power loss."""
        line = row_line(to_json(row, ascii=True))
        with name_path_in_errors(self.path), self.path.open("ab+") as file:
            end = file.tell()
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                self.truncate()
            file.write(line)

    def append_lines(self, *texts: str) -> None:
        """Append JSON objects, as strict JSON without line breaks, durably."""
        lines = b"".join(map(row_line, texts))
        is_new = not self.path.exists()
        with name_path_in_errors(self.path):
            self.drop_torn_line()
            with self.path.open("ab") as file:
                file.write(lines)
                _flush(file)
            if is_new:
                sync(self.path.parent)

    def drop_torn_line(self) -> None:
        """Remove a torn last line."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read() not in (b"", b"\n")
        if torn:
            self.truncate()

    def truncate(self, n: int | None = None) -> None:
        """Keep the first n rows; None keeps all complete ones."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            whole = (len(line) for line in file if line.endswith(b"\n"))
            file.truncate(sum(itertools.islice(whole, n)))
            _flush(file)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Keep the wanted rows. The file is not rewritten if that is all of them."""
        if all(wanted(row) for row in self):
            self.drop_torn_line()
            return
        with atomic_file(self.path) as file:
            file.writelines(line for line, row in self._lines() if wanted(row))

    def arrange(self, key: Callable[[Row], Any]) -> None:
        """Sort the rows in a new file that replaces the old one. Sorted files are not rewritten."""
        keys = [key(row) for row in self]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        if order == list(range(len(keys))):
            return
        with self.path.open("rb") as file, atomic_file(self.path) as arranged:
            ends = list(itertools.accumulate(map(len, file), initial=0))
            for number in order:
                file.seek(ends[number])
                arranged.write(file.read(ends[number + 1] - ends[number]))

    def _lines(self) -> Iterator[tuple[bytes, Row]]:
        """Yield (line, row) of complete lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = parse_row(line)
                    if not isinstance(row, dict) or not row.keys() >= set(self.required_keys):
                        raise ValueError(f"expected an object with {', '.join(self.required_keys) or 'any keys'}")
                except ValueError as error:
                    raise RecordError(
                        f"{self.path}, line {number} is damaged ({error}): restore the file, or start again in another "
                        "folder"
                    ) from error
                yield line, row


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises: RecordError, for other contents; OSError, without a file."""
    data = read_checked(path)
    try:
        value = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}): restore the file, or use another folder") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged (expected a JSON object): restore the file, or use another folder")
    return value


def to_json(value: object, indent: int | None = None, ascii: bool = False) -> str:
    """Convert to strict JSON: non-finite numbers to null, numpy and torch scalars to numbers, paths to strings."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=ascii, allow_nan=False)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: readers, also after a power loss, find the old or the new content."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_recorded(path: Path, text: str) -> None:
    """Replace a file as `write_atomically`, with a checksum in its folder, which `read_json` checks."""
    with name_path_in_errors(path):
        record_content(path, text.encode())
    write_atomically(path, text)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the block, unless it raises."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    with name_path_in_errors(path):
        try:
            with temporary.open("xb") as file:
                yield file
                _flush(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `path` at the end of the block, and removed if it raises.

    Raises: FileExistsError, before the block."""
    if path.exists():
        raise FileExistsError(f"{path} exists: choose another folder")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    part.mkdir(parents=True)
    try:
        yield part
        for written in (*part.rglob("*"), part):
            sync(written)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync(path.parent)


@contextmanager
def locked(path: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a file's lock among the processes of this machine. `waits` is called once if another process holds it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # without locks, the run folder's lock must suffice (`runtime.lock`)
                raise
        yield


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):  # the common case: token ids
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return _plain(value.item()) if hasattr(value, "item") else value
