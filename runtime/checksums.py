"""Checksums, so that a flipped bit is found and never read as data.

    a row of JSON Lines   its last member is "crc32", of the bytes before it
    a whole file          its folder's SHA256SUMS lists it, in the format of `sha256sum`

What has no checksum, as files of earlier versions, is read without a check.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runtime.parsing import parse_json

SUMS = "SHA256SUMS"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks
_CRC = re.compile(rb', "(.{5})": "(.{8})"\}', re.DOTALL)  # the end of a row: name and value of its last member
_CRC_BYTES = 22  # of that end
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")


class RecordError(ValueError):
    """A file is damaged or has other contents. The message names the next step."""


# -- rows -------------------------------------------------------------------------------------------------------------


def row_line(text: str) -> bytes:
    """Return the line that stores a JSON object in ASCII, with its checksum; an empty object has none."""
    body = text[:-1].encode("ascii")
    return b'%b, "crc32": "%08x"}\n' % (body, zlib.crc32(body)) if text != "{}" else b"{}\n"


def parse_row(line: bytes | str) -> Any:
    """Parse a line of JSON Lines without its checksum. Raises: ValueError, for invalid JSON or another checksum."""
    row = (line.encode() if isinstance(line, str) else line).rstrip()
    body, last = row[:-_CRC_BYTES], _CRC.fullmatch(row[-_CRC_BYTES:])
    if last is None:
        return parse_json(row)
    named, equal = last[1] == b"crc32", last[2] == b"%08x" % zlib.crc32(body)
    if named != equal:  # the row, its checksum, or the checksum's name
        raise ValueError("its checksum is another one")
    return parse_json(body + b"}" if named else row)


# -- whole files ------------------------------------------------------------------------------------------------------


def record_folder(folder: Path, suffixes: Sequence[str] = (".json", ".safetensors", ".arrow")) -> None:
    """Write the checksums of a finished folder's files, those below it included."""
    listed = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    lines = [_line(path.relative_to(folder).as_posix(), _sha256(path)) for path in listed]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def record_files(folder: Path, names: Iterable[str]) -> None:
    """Add the checksums of files in a folder durably."""
    _append(folder, [_line(name, _sha256(folder / name)) for name in names])


def record_content(path: Path, data: bytes) -> None:
    """Record what a file will hold, before it is replaced: until then, its old content remains valid, too."""
    known = sums(path.parent).get(path.name)
    if known is None:  # of an earlier version: its content, too
        known = [_sha256(path)] if path.exists() else []
        _append(path.parent, [_line(path.name, digest) for digest in known])
    digest = hashlib.sha256(data).hexdigest()
    if digest not in known:
        _append(path.parent, [_line(path.name, digest)])


def sums(folder: Path) -> dict[str, list[str]]:
    """Read the checksums by file name; several for a file that was replaced. A torn last line is ignored.

    Raises:
        RecordError: a line is damaged.
    """
    try:
        return parse_sums((folder / SUMS).read_bytes(), folder / SUMS)
    except FileNotFoundError:
        return {}


def parse_sums(data: bytes, path: Path) -> dict[str, list[str]]:
    """Parse the content of a SHA256SUMS, or the end of one. Raises: RecordError, as `sums`."""
    found: dict[str, list[str]] = {}
    for line in data.split(b"\n")[:-1]:
        match = _SUM.fullmatch(line.decode("utf-8", "replace"))
        if match is None:
            raise RecordError(f"{path} is damaged (a line is no checksum): restore it, or delete it to read unchecked")
        found.setdefault(match[2], []).append(match[1])
    return found


def check_folder(folder: Path, *names: str) -> None:
    """Check the files of a folder that have a checksum; with names, those only.

    Raises:
        RecordError: a file is missing or was changed; the message names it.
    """
    for name, digests in sums(folder).items():
        if not names or name in names:
            check_file(folder, name, digests)


def check_file(folder: Path, name: str, digests: Sequence[str]) -> None:
    """Compare a file with its checksums. Raises: RecordError."""
    try:
        digest = _sha256(folder / name)
    except FileNotFoundError:
        raise RecordError(f"{folder / name} is missing, which {SUMS} lists: restore the file") from None
    if digest not in digests:
        raise _changed(folder / name)


def read_checked(path: Path) -> bytes:
    """Read a file and compare it with its checksum, if it has one. Raises: RecordError."""
    data = path.read_bytes()
    digests = sums(path.parent).get(path.name)
    if digests is not None and hashlib.sha256(data).hexdigest() not in digests:
        raise _changed(path)
    return data


def _changed(path: Path) -> RecordError:
    return RecordError(
        f"{path} is damaged (its SHA-256 is not the one in {SUMS}): restore the file (if you changed it yourself, "
        f"delete its lines in {SUMS})"
    )


def _line(name: str, digest: str) -> str:
    return f"{digest}  {name}\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _append(folder: Path, lines: Sequence[str]) -> None:
    """Append lines in one write, after removing a torn one. Several processes may do so."""
    data = "".join(lines).encode()
    if not data:
        return
    with (folder / SUMS).open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
