"""The parent's side of one worker process: start it, call it, report its failures, end it. `envs.pool` uses it."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from envs.base import EnvironmentFailure
from envs.spec import PoolLimits, WorkerSpec
from envs.worker import Channel, FrameError
from runtime.processes import ChildProcess, terminate_all, wait_for

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().with_name("worker.py")
GRACE_S = 1.0  # between SIGTERM and SIGKILL
T = TypeVar("T")


class WorkerFailure(EnvironmentFailure):
    """A worker failed and must be killed. `name`: start, timeout, died, silent, garbled, abandoned or faulty."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class HostedError(EnvironmentFailure):
    """The hosted environment raised an exception of this `type`; its worker is still usable."""

    def __init__(self, type: str, call: str, message: str) -> None:
        super().__init__(message if type == "EnvironmentFailure" else f"{type} in {call}: {message}")
        self.type, self.plain_message = type, message


class Worker:
    """One worker process, which serves one call at a time. Raises: WorkerFailure, if the interpreter does not start."""

    def __init__(self, spec: WorkerSpec, limits: PoolLimits) -> None:
        self.limits = limits
        self.name: str | None = None  # of the environment, once it is built
        self.mid_call = True  # stays true after an interrupted call, whose answer the next call would read
        self.strikes = 0  # errors of the hosted environment since its last successful step
        ours, theirs = socket.socketpair()
        command = [
            spec.python or sys.executable,
            str(SCRIPT),
            "--factory",
            spec.factory,
            "--arguments",
            json.dumps(dict(spec.arguments)),
            "--socket",
            str(theirs.fileno()),
            "--beat",
            str(limits.beat_s),
        ]
        try:
            # A lifeline, since the end of the thread that starts a worker must not end the worker.
            self.child = ChildProcess(
                command,
                name="worker",
                env=_variables(spec),
                output="kept",
                dies_with="lifeline",
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            raise WorkerFailure("start", f"cannot start {command[0]}: {error}; set WorkerSpec.python") from error
        finally:
            theirs.close()
        self.pid = self.child.pid
        self._sock, self._channel = ours, Channel(ours)

    def hello(self) -> None:
        """Wait until the environment is built. Raises: WorkerFailure, named "start" if the factory raised."""
        try:
            self.name = str(self._answer("start", time.monotonic() + self.limits.start_s)[0]["name"])
        except HostedError as error:
            raise self._failure("start", f"could not build its environment: {error}") from error

    def call(self, name: str, decode: Callable[[Any, list[bytes]], T], **arguments: Any) -> T:
        """Make one call and decode its answer.

        Raises:
            HostedError: the environment raised.
            WorkerFailure: the worker must be ended.
        """
        limit_s = getattr(self.limits, f"{name}_s")
        deadline = time.monotonic() + limit_s
        self.mid_call = True
        try:
            self._channel.send({"call": name, **arguments}, until=deadline)
        except (FrameError, TypeError, ValueError) as error:  # nothing was sent
            self.mid_call = False
            raise HostedError(type(error).__name__, name, f"the request cannot be sent: {error}") from error
        except TimeoutError as error:
            raise self._failure("silent", f"accepted no request for {limit_s:g} s", name) from error
        except OSError as error:
            raise self._failure("died", f"died ({self._exit()})", name) from error
        value, blobs = self._answer(name, deadline)
        try:
            return decode(value, blobs)
        except Exception as error:  # any content may come from a broken worker
            what = f"sent an invalid answer ({error!r})"
            raise self._failure("garbled", what, name) from error

    def _answer(self, name: str, deadline: float) -> tuple[Any, list[bytes]]:
        heard = name != "start"  # no heartbeats before the interpreter runs
        header: dict[str, Any] = {"beat": True}
        blobs: list[bytes] = []
        while "beat" in header:
            silence = time.monotonic() + self.limits.unresponsive_s if heard else deadline
            try:
                header, blobs = self._channel.receive(min(deadline, silence))
            except TimeoutError as error:
                if time.monotonic() < deadline:
                    what = f"sent no heartbeat for {self.limits.unresponsive_s:g} s"
                    raise self._failure("silent", what, name) from error
                what, advice = f"timed out after {getattr(self.limits, f'{name}_s'):g} s", f"raise PoolLimits.{name}_s"
                raise self._failure("timeout", what, name, f"{advice} if it is only slow") from error
            except (EOFError, OSError) as error:
                raise self._failure("died", f"died ({self._exit()})", name) from error
            except FrameError as error:
                raise self._failure("garbled", f"sent an invalid frame ({error})", name) from error
            heard = True
        self.mid_call = False
        if "error" in header:
            raise HostedError(str(header["error"]["type"]), name, str(header["error"]["message"]))
        return header.get("ok"), blobs

    def ask_to_close(self) -> None:
        """Request an idle environment to clean up and exit, without waiting for it."""
        try:
            if not self.mid_call:
                self._channel.send({"call": "close"}, until=time.monotonic() + 0.1)
                return
        except OSError:
            pass
        self.child.terminate()

    def hang_up(self) -> None:
        """Close the channel, which wakes a thread that waits for an answer."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _failure(self, name: str, what: str, call: str = "", advice: str = "") -> WorkerFailure:
        where = f" in {call}" if call else ""
        message = f"worker {self.pid} {what}{where}{'; ' + advice if advice else ''}"
        return WorkerFailure(name, message + self.child.output_suffix())

    def _exit(self) -> str:
        """Wait for the process, whose socket closes slightly earlier, and describe how it ended."""
        self.child.wait(3.0)
        return "ended by the pool" if self.child.reaped else self.child.ending or "closed its socket"


def _variables(spec: WorkerSpec) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or spec.python is None}
    variables = {**inherited, **spec.env}
    module = ROOT.joinpath(*spec.factory.partition(":")[0].split("."))
    if module.with_suffix(".py").is_file() or module.is_dir():
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    return variables


def end_workers(workers: Iterable[Worker], patience_s: float) -> None:
    """End workers in parallel: request them to close, after `patience_s` send SIGTERM, then SIGKILL their groups."""
    everyone = list(workers)
    children = [worker.child for worker in everyone]
    if patience_s:
        for worker in everyone:
            worker.ask_to_close()
        wait_for(children, patience_s)
    terminate_all(children, GRACE_S)
    for worker in everyone:
        worker.hang_up()
