"""Files that outlive kill -9 and a loss of power: rows of JSON that are appended, and files that are replaced whole."""

from __future__ import annotations

import errno
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

from runtime.told import parse_json

TEMPORARY = ".tmp"  # how the names of unfinished files end; they begin with a dot
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer
Row = dict[str, Any]


class RecordError(ValueError):
    """A file of rows is damaged, or does not hold what it should. The message says what to do."""


class JsonLines:
    """Rows of JSON in a file, one line each. One process writes it; others may read meanwhile.

    A row is there when its line break is. What a killed process left behind the last line break is never read, and
    goes when the next row comes.

    Args:
        path: the file, which appears with its first row.
        needs: keys without which a row is none of this file's.
    """

    def __init__(self, path: Path, needs: tuple[str, ...] = ()) -> None:
        self.path, self.needs = path, needs

    def __iter__(self) -> Iterator[Row]:
        """Read the rows one at a time; none where there is no file. Raises: RecordError, where a whole line is no such
        row: the file was damaged, not cut short."""
        return (row for _, row in self._lines())

    def append(self, *rows: Mapping[str, object]) -> None:
        """Append rows as strict JSON (`to_json`). They are on disk when this returns."""
        self.append_lines(*(to_json(row, ascii=True) for row in rows))

    def append_lines(self, *texts: str) -> None:
        """Append rows that are strict JSON already, without line breaks. They are on disk when this returns."""
        lines = "".join(text + "\n" for text in texts).encode("ascii")
        is_new = not self.path.exists()
        with naming(self.path):
            self.drop_torn_line()
            with self.path.open("ab") as file:
                file.write(lines)
                _flush(file)
            if is_new:
                sync(self.path.parent)

    def drop_torn_line(self) -> None:
        """Cut what stands behind the last line break."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read() not in (b"", b"\n")
        if torn:
            self.truncate()

    def truncate(self, n: int | None = None) -> None:
        """Keep the first n rows; None keeps all whole ones."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            whole = (len(line) for line in file if line.endswith(b"\n"))
            file.truncate(sum(itertools.islice(whole, n)))
            _flush(file)

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Drop the other rows, and a torn line. Nothing is written where there are none."""
        if all(wanted(row) for row in self):
            self.drop_torn_line()
            return
        with atomic_file(self.path) as file:
            file.writelines(line for line, row in self._lines() if wanted(row))

    def arrange(self, key: Callable[[Row], Any]) -> None:
        """Put the rows in order, in a file that takes the place of the old one. Nothing is written where they are."""
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
        """Yield whole lines with what they hold."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = parse_json(line)
                    if not isinstance(row, dict) or not row.keys() >= set(self.needs):
                        raise ValueError(f"expected an object with {', '.join(self.needs) or 'any keys'}")
                except ValueError as error:
                    raise RecordError(
                        f"{self.path}, line {number} is damaged ({error}): restore the file, or start anew in another "
                        "folder"
                    ) from error
                yield line, row


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises: RecordError, which names the file, where it holds anything else.
    OSError, where there is none."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}): restore the file, or use another folder") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged (expected a JSON object): restore the file, or use another folder")
    return value


def to_json(value: object, indent: int | None = None, ascii: bool = False) -> str:
    """Strict JSON: numbers that are not finite become null, numpy and torch scalars numbers, paths text."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=ascii, allow_nan=False)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a machine that loses power, sees the old content or the new."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends, and leaves it alone when the block raises."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    with naming(path):
        try:
            with temporary.open("xb") as file:
                yield file
                _flush(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an error of the operating system that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that bears the name `path` when the block ends, and is gone when the block raises. Raises:
    FileExistsError, before anything is done."""
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
    """Hold a file's lock, which one process of this machine has at a time and loses however it ends. `waits` is called
    where another has it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # else the lock of the run folder is all there is (`runtime.lock`)
                raise
        yield


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):  # most of it: token ids
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
