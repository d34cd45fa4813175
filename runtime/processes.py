"""Start, supervision and termination of child processes.

A child has its own session and process group: Ctrl-C reaches it only through the parent, and its descendants end with
it. It is reaped only after its group was killed, so that its pid cannot be reused before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self

GRACE_S = 15.0  # between SIGTERM and SIGKILL
_TAIL = 2000  # bytes of output in messages
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ProcessError(RuntimeError):
    """A child process ended or is not ready. The message ends with its last output."""


class ChildProcess:
    """A running child process. Methods may be called from any thread; as a context manager, it ends with the block.

    Args:
        name: for messages (default: the program's).
        env: its whole environment (default: the parent's).
        output: of stdout and stderr: "terminal" inherits the parent's, a path writes a file, and "kept" stores only the
            last output for `tail`.
        dies_with: how it learns of the parent's end. "thread": the kernel sends SIGTERM when the THREAD that started
            it ends (Linux), so start it from the main thread. "lifeline": its standard input is a pipe without data,
            and the child must watch for its end.
        pass_fds: inherited file descriptors.

    Raises:
        OSError: the program does not exist.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: Path | Literal["terminal", "kept"] = "terminal",
        dies_with: Literal["thread", "lifeline"] = "thread",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name or Path(command[0]).name
        self._log = output if isinstance(output, Path) else None
        self._words, self._drain = bytearray(), None
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(self._log.open("wb")) if self._log else None
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.PIPE if dies_with == "lifeline" else None,
                stdout=subprocess.PIPE if output == "kept" else sink,
                stderr=subprocess.STDOUT if output == "kept" else sink,
                bufsize=0,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=partial(_end_with_thread, os.getpid()) if dies_with == "thread" else None,
            )
        self.pid = self._process.pid
        if output == "kept":
            self._drain = threading.Thread(target=self._read_output, name=f"output of {self.name}", daemon=True)
            self._drain.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        terminate_all([self])

    # -- watching -----------------------------------------------------------------------------------------------------

    @property
    def reaped(self) -> bool:
        """Whether it was reaped; its pid may be reused."""
        return self._process.returncode is not None

    @property
    def status(self) -> int | None:
        """Exit status, -n if signal n ended it, None while it runs. Reading it does not reap the child."""
        with self._lock:
            if self.reaped:
                return self._process.returncode
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere
                return self._process.wait()
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    @property
    def ending(self) -> str:
        """Description of its end; "" while it runs."""
        if (status := self.status) is None:
            return ""
        return f"exit {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def wait(self, timeout_s: float = float("inf")) -> int | None:
        """Wait for its end; return its status, None after the time-out."""
        wait_for([self], timeout_s)
        return self.status

    def wait_until_ready(
        self, ready: Callable[[], bool], timeout_s: float, others: Sequence[ChildProcess] = (), every_s: float = 0.2
    ) -> None:
        """Wait until `ready()` is true. Raises: ProcessError, if this or another child ends, or after the time-out."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            check_alive([self, *others])
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} is not ready after {timeout_s:g} s{self.output_suffix()}")
            time.sleep(every_s)

    def tail(self) -> str:
        """Return its last output; "" if that went to the terminal."""
        if self._log is not None:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL))
                return file.read().decode(errors="replace").strip()
        if self._drain is not None and self.status is not None:
            self._drain.join(0.2)  # read the final output
        return self._words.decode(errors="replace").strip()

    # -- ending -------------------------------------------------------------------------------------------------------

    def signal(self, *numbers: int, group: bool = True) -> None:
        """Send signals to the whole group or to the child alone, unless it was reaped."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the group is empty
            for number in numbers if not self.reaped else ():
                (os.killpg if group else os.kill)(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the whole group, and SIGCONT so that stopped processes receive it."""
        self.signal(signal.SIGTERM, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the group and reap the child."""
        self.signal(signal.SIGKILL)
        with self._lock:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
                self._process.wait(5.0)
            if self._process.stdin is not None:
                self._process.stdin.close()

    def output_suffix(self) -> str:
        """Return the last output as the end of a message; "" without output."""
        return f"; its last output:\n{words}" if (words := self.tail()) else ""

    def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            while chunk := stream.read(4096):
                self._words += chunk
                del self._words[:-_TAIL]


def check_alive(children: Sequence[ChildProcess]) -> None:
    """Raise ProcessError if a child has ended."""
    for child in children:
        if child.status is not None:
            raise ProcessError(f"{child.name} ended ({child.status}){child.output_suffix()}")


def terminate_all(children: Sequence[ChildProcess], grace_s: float = GRACE_S) -> None:
    """Terminate children and their groups: SIGTERM, then SIGKILL after `grace_s` seconds."""
    for child in children:
        child.terminate()
    wait_for(children, grace_s)
    for child in children:
        child.kill()


def torchrun_command(processes: int) -> list[str]:
    """Return the torchrun command for processes on this machine; append `-m MODULE ARGUMENT...`.

    The log directory is disabled because torchrun would leave it in the temporary directory.
    """
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return [*start, f"--log-dir={os.devnull}", "--standalone"]


def run_in_foreground(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a child at the terminal and forward SIGINT and SIGTERM to it. Call it from the main thread.

    Returns its exit status, 128 + n if signal n ended it."""
    child = ChildProcess(command, env=env)
    forward = lambda number, frame: child.signal(number, group=False)
    handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        child.kill()
    assert status is not None
    return status if status >= 0 else 128 - status


def wait_for(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Wait until all children have ended or the time-out has passed."""
    deadline, pause = time.monotonic() + timeout_s, 0.002
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _end_with_thread(parent: int) -> None:
    """Let the kernel send this process SIGTERM when the thread that started it ends (`preexec_fn`)."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)
