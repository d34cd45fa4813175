"""The lock of a folder: one process writes it, whatever happens to that process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime import lock
from runtime.lock import LOCK, FolderInUse, FolderLock

TAKE = """
import os, sys
from pathlib import Path
from runtime.lock import FolderInUse, FolderLock
try:
    held = FolderLock(Path(sys.argv[1]), "memcompiler collect")
    print("held", flush=True)
    sys.stdin.read()
except FolderInUse as error:
    print(error, flush=True)
"""


@contextmanager
def other_process(folder: Path, repository: Path, code: str = TAKE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Have another process take the lock; it keeps it until its input ends. Yields it with what it says."""
    command = [sys.executable, "-c", code, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=repository, **pipes) as process:
        assert process.stdout and process.stdin
        yield process, process.stdout.readline().strip()
        process.stdin.close()


def test_a_second_process_is_refused_and_told_which_one_writes(tmp_path, repository):
    with other_process(tmp_path / "run", repository) as (process, said):
        assert said == "held"
        with pytest.raises(FolderInUse) as refused:
            FolderLock(tmp_path / "run", "memcompiler collect")
    start = f"{tmp_path / 'run'} is being written by `memcompiler collect` (process {process.pid} on {platform.node()} "
    assert str(refused.value).startswith(start) and "\n" not in str(refused.value)
    FolderLock(tmp_path / "run", "memcompiler eval").release()
    assert not (tmp_path / "run" / LOCK).exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, repository):
    with other_process(tmp_path, repository) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
        with FolderLock(tmp_path, "memcompiler eval"):
            assert json.loads((tmp_path / LOCK).read_text())["command"] == "memcompiler eval"


def test_a_process_may_take_a_lock_twice_and_keeps_it_until_both_are_released(tmp_path, repository):
    first, second = FolderLock(tmp_path, "a"), FolderLock(tmp_path / ".", "b")
    first.release()
    first.release()
    with other_process(tmp_path, repository) as (_, said):
        assert "is being written by `a`" in said
    second.release()
    with other_process(tmp_path, repository) as (_, said):
        assert said == "held"


def test_a_lock_that_is_no_longer_referenced_is_free(tmp_path):
    FolderLock(tmp_path, "a")
    assert not (tmp_path / LOCK).exists()


def test_a_forked_child_holds_nothing_and_gives_nothing_back(tmp_path, repository):
    held, (reads, writes) = FolderLock(tmp_path, "a"), os.pipe()
    if not (child := os.fork()):
        try:
            held.release()
            with pytest.raises(FolderInUse):
                FolderLock(tmp_path, "b")
            os.read(reads, 1)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    with other_process(tmp_path, repository) as (_, said):
        assert "is being written by `a`" in said
    held.release()
    with other_process(tmp_path, repository) as (_, said):  # while the child is still there
        assert said == "held"
    os.write(writes, b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_of_many_processes_one_writes_at_a_time(tmp_path, repository):
    code = """
import os, sys, time
from pathlib import Path
from runtime.lock import FolderInUse, FolderLock
folder, done, until = Path(sys.argv[1]), 0, time.monotonic() + 30
while done < 40 and time.monotonic() < until:
    try:
        with FolderLock(folder, "x"):
            os.close(os.open(folder / "alone", os.O_CREAT | os.O_EXCL))
            (folder / "alone").unlink()
            done += 1
    except FolderInUse:
        time.sleep(0.001)
print(done)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["40"] * 3


# --- where the file system has no locks ---


def holder(**other: Any) -> dict[str, Any]:
    pid = os.getpid()
    known = {"command": "memcompiler eval", "pid": pid, "host": platform.node(), "since": "1", "start": start(pid)}
    return known | other


def start(pid: int) -> int | None:
    return lock._start_of(pid)


DEAD = 2**22 + 1  # above the largest process number


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize(
    ("there", "is_free"),
    [
        (holder(), False),
        (holder(pid=DEAD), True),
        (holder(start=1), True),
        (holder(host="elsewhere"), False),
        (holder(host="elsewhere", pid=DEAD), False),
        ({}, True),
        ({"pid": 3}, True),
    ],
)
def test_without_locks_the_content_of_the_file_decides(tmp_path, monkeypatch, code, there, is_free):
    def no_locks(*_: object) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    (tmp_path / LOCK).write_text(json.dumps(there))
    if is_free:
        with FolderLock(tmp_path, "mine"):
            assert json.loads((tmp_path / LOCK).read_text())["command"] == "mine"
    else:
        with pytest.raises(FolderInUse, match=f"`memcompiler eval`.*if that process has ended, delete .*{LOCK}"):
            FolderLock(tmp_path, "mine")


def test_another_error_of_the_file_system_names_the_file(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match=f"broken: '.*{LOCK}'"):
        FolderLock(tmp_path, "mine")
