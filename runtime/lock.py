"""One writer per folder: a lock file that names the process holding it.

The lock is a POSIX record lock: it ends with its process, forked children do not inherit it, and NFS supports it. A
process loses it when it closes any descriptor of the file, so the file is opened once per process. On file systems
without locks the content of the file decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import weakref
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.checksums import NO_LOCKS
from runtime.store import name_path_in_errors

LOCK = ".memcompiler.lock"
_held: dict[tuple[int, Path], tuple[int, int]] = {}  # (process, lock file) -> (descriptor, locks of this process on it)
_guard = threading.Lock()


class FolderInUse(ValueError):
    """Another process writes the folder. The message names the process and the next step."""


class FolderLock:
    """An exclusive lock on a folder until `release`, the end of a `with` block, or the end of the process.

    A process may lock a folder several times and frees it with the last release.

    Args:
        folder: created if missing.
        command: of this process, for other processes' messages.

    Raises:
        FolderInUse: another process holds the lock.
    """

    def __init__(self, folder: Path, command: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key = os.getpid(), folder.resolve() / LOCK
        with _guard:
            descriptor, count = _held[key] if key in _held else (_take(folder, command), 0)
            _held[key] = descriptor, count + 1
        self.release = weakref.finalize(self, _release, key)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _take(folder: Path, command: str) -> int:
    """Open and lock the lock file, write this process into it, and return its descriptor."""
    path, pid = folder / LOCK, os.getpid()
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    own = {"command": command, "pid": pid, "host": platform.node(), "since": now, "start": _start_of(pid)}
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with ExitStack() as opened, name_path_in_errors(path):
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):  # else released and removed
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(own).encode(), 0)
                opened.pop_all()
                return descriptor


def _lock(descriptor: int, folder: Path) -> None:
    """Lock the open file. Raises: FolderInUse."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder, advice = _read(descriptor), ""
        if error.errno in NO_LOCKS:
            if not holder or _is_dead(holder):
                return
            advice = f" (if that process has ended, delete {folder / LOCK})"
        elif error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        known = "`{command}` (process {pid} on {host} since {since})"
        by = known.format_map(holder) if holder else "another process"
        raise FolderInUse(f"{folder} is being written by {by}: wait for it, or choose another folder{advice}") from None


def _release(key: tuple[int, Path]) -> None:
    if key[0] != os.getpid():  # a forked child holds no lock
        return
    with _guard:
        descriptor, count = _held.pop(key)
        if count > 1:
            _held[key] = descriptor, count - 1
            return
        with suppress(OSError):  # the file system became read-only
            key[1].unlink()
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """Read the holder of the lock; {} before it is written."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return {key: holder[key] for key in ("command", "pid", "host", "since", "start")}
    except (ValueError, KeyError, TypeError):
        return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Return whether a holder on this host has ended; False for other hosts."""
    return holder["host"] == platform.node() and _start_of(holder["pid"]) != holder["start"]


def _start_of(pid: int) -> int | None:
    """Return the start time of a local process in clock ticks since boot; None if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
