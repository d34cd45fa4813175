"""Child processes: one way to start them, watch them and end them.

A child has a session and a process group of its own: Ctrl-C reaches it through us alone, and what it has started ends
with it. It is reaped only once its group has been killed, for until then nobody else can be given its number.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self

GRACE_S = 15.0  # between SIGTERM and SIGKILL
_TAIL = 2000  # bytes of a child's last words
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ProcessError(RuntimeError):
    """A child process that is not there as it should be; the message ends with its last words."""


class ChildProcess:
    """A child that has been started. All methods may be called from any thread; as a context, it ends with the block.

    Args:
        name: for messages (default: the program's).
        env: its whole environment (default: ours).
        output: where stdout and stderr go: to the "terminal" (they stay ours), into a file, or "kept": only their last
            words, for `tail`.
        dies_with: how it learns that we are gone, however we went. "thread": the kernel sends it SIGTERM when the
            THREAD that started it ends (Linux), so start it from the main one. "lifeline": its standard input is a pipe
            that we hold open and never write to, whose end it has to watch for itself.
        pass_fds: file descriptors that it inherits.

    Raises:
        OSError: there is no such program.
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
        self._lock = threading.RLock()  # a signal handler of ours may come while we hold it
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
        end_all([self])

    # -- watching -----------------------------------------------------------------------------------------------------

    @property
    def reaped(self) -> bool:
        """Whether `kill` is done with it: its number may belong to somebody else by now."""
        return self._process.returncode is not None

    @property
    def status(self) -> int | None:
        """Exit status, -n where signal n ended it, None while it runs. Reading it does not reap the child."""
        with self._lock:
            if self.reaped:
                return self._process.returncode
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it
                return self._process.wait()
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    @property
    def ending(self) -> str:
        """How it ended, in words; empty while it runs."""
        if (status := self.status) is None:
            return ""
        return f"exit {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def wait(self, timeout_s: float = float("inf")) -> int | None:
        """Return the status once it has ended, None if it has not by then."""
        wait_for([self], timeout_s)
        return self.status

    def wait_until_ready(
        self, ready: Callable[[], bool], timeout_s: float, others: Sequence[ChildProcess] = (), every_s: float = 0.2
    ) -> None:
        """Return once `ready()` is true. Raises: ProcessError, where this one or one of `others` has ended, or the time
        is over."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            check_alive([self, *others])
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} is not ready after {timeout_s:g} s{self.last_words()}")
            time.sleep(every_s)

    def tail(self) -> str:
        """Return its last words; nothing where they went to the terminal."""
        if self._log is not None:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL))
                return file.read().decode(errors="replace").strip()
        if self._drain is not None and self.status is not None:
            self._drain.join(0.2)  # what it wrote just before its end
        return self._words.decode(errors="replace").strip()

    # -- ending -------------------------------------------------------------------------------------------------------

    def signal(self, *numbers: int, group: bool = True) -> None:
        """Send signals to the whole group, or to the child alone; nobody is reached once it is reaped."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: nobody is left
            for number in numbers if not self.reaped else ():
                (os.killpg if group else os.kill)(self.pid, number)

    def terminate(self) -> None:
        """Ask the whole group to end. A stopped process hears it only once it is continued."""
        self.signal(signal.SIGTERM, signal.SIGCONT)

    def kill(self) -> None:
        """Kill what is left of the group and reap the child."""
        self.signal(signal.SIGKILL)
        with self._lock:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: it is left to the kernel
                self._process.wait(5.0)
            if self._process.stdin is not None:
                self._process.stdin.close()

    def last_words(self) -> str:
        """Return the end of a message: its tail, if there is one."""
        return f"; its last words:\n{words}" if (words := self.tail()) else ""

    def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            while chunk := stream.read(4096):
                self._words += chunk
                del self._words[:-_TAIL]


def check_alive(children: Sequence[ChildProcess]) -> None:
    """Raise ProcessError, if one of them has ended."""
    for child in children:
        if child.status is not None:
            raise ProcessError(f"{child.name} ended ({child.status}){child.last_words()}")


def end_all(children: Sequence[ChildProcess], grace_s: float = GRACE_S) -> None:
    """End children together: SIGTERM, then after `grace_s` SIGKILL; their groups are gone after."""
    for child in children:
        child.terminate()
    wait_for(children, grace_s)
    for child in children:
        child.kill()


def torchrun_command(processes: int) -> list[str]:
    """Write how torchrun starts a group's processes on this machine; `-m MODULE ARGUMENT...` follows.

    torchrun would make a folder for their output, which goes to ours instead, and leave it in the temporary directory.
    """
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return [*start, f"--log-dir={os.devnull}", "--standalone"]


def run_in_foreground(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a child at our terminal, send it the SIGINT and SIGTERM that we get, and return its exit status as a shell
    would: 128 + n where signal n ended it. For the main thread."""
    child = ChildProcess(command, env=env)
    try:
        with _signal_handler(lambda number, frame: child.signal(number, group=False), signal.SIGINT, signal.SIGTERM):
            status = child.wait()
    finally:
        child.kill()
    assert status is not None
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _signal_handler(handle: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for(children: Sequence[ChildProcess], timeout_s: float) -> None:
    """Wait until all have ended, or the time is over."""
    deadline, pause = time.monotonic() + timeout_s, 0.002
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _end_with_thread(parent: int) -> None:
    """Have the kernel send this process SIGTERM when the thread that started it is gone (runs before the program)."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it went before that was said
            os._exit(1)
