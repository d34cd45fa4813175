"""Runs of a stage: commands that are started, killed at a moment, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks.chaos.facts import Facts
from benchmarks.chaos.stages import Stage
from runtime.http import LOOPBACK, free_port, http_url, responds


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with log.open("ab") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it started."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_in(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("*.jsonl")) if out.exists() else 0


class Run:
    """A run of a stage in its folder, which is killed and resumed."""

    def __init__(self, stage: Stage, whole: Path, out: Path) -> None:
        self.stage, self.out, self.log = stage, out, out.with_suffix(".log")
        out.parent.mkdir(parents=True, exist_ok=True)
        self.command = [*stage.command(whole), *(["--out", str(out)] if stage.has_folder else [])]
        self.seconds = 0.0  # that its end took
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False  # the command ended with an error before it was killed
        if stage.use is not None:
            self._url = http_url(LOOPBACK, port := free_port())
            self.command += ["--port", str(port)]
            threads = ThreadPoolExecutor(1)
            self._answers: Future[Facts] = threads.submit(stage.use, self._url)
            threads.shutdown(wait=False)

    def kill_after(self, moment_s: float) -> str | None:
        """Kill after so many seconds of the command, or since the last kill; return what was killed, None if the
        command, or its use, ended before."""
        process = self.start()
        if not self._has_ended(process, moment_s):
            return self._strike(process)
        self._failed = self.stage.use is None and process.returncode != 0
        kill(process)
        return None

    def finish(self, limit_s: float) -> Facts | None:
        """Wait for the end of the command, or of its clients; return the facts, None if that is an error."""
        if self._failed:
            return None
        process, began = self.start(), time.monotonic()
        ended, status = self._has_ended(process, limit_s), process.poll()
        self.seconds = time.monotonic() - began
        kill(process)
        if not ended or (self.stage.use is None and status != 0):
            return None
        try:
            answers = self._answers.result(0) if self.stage.use else {}
        except Exception as error:
            with self.log.open("a") as log:
                log.write(f"a client failed: {type(error).__name__}: {error}\n")
            return None
        return answers | self.stage.facts(self.out)

    def close(self) -> None:
        """Kill the command if it runs."""
        if self._process is not None:
            kill(self._process)

    def _strike(self, process: subprocess.Popen[bytes]) -> str:
        """Kill a running command, or a part of it; return the name of what was killed."""
        kill(process)
        return "command" if self.stage.use is None else "server"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command unless it runs; return its process."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process; wait for a command's folder, or until a server is ready: before, nothing is disturbed."""
        process = start(self.command, self.log)
        while not self._has_begun() and process.poll() is None:
            time.sleep(0.01)
        return process

    def _has_begun(self) -> bool:
        if self.stage.use is None:
            return self.out.exists()
        return self._answers.done() or responds(f"{self._url}/ready")

    def _has_ended(self, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        """Wait for a command, or for the clients of a server; return whether that ended in time."""
        if self.stage.use is not None:
            return bool(wait([self._answers], limit_s).done)
        try:
            process.wait(limit_s)
            return True
        except subprocess.TimeoutExpired:
            return False
