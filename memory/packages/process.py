"""The parent's side of a memory package's worker process: finds an interpreter, starts it, calls it, ends it."""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs.spec import NotInstalled
from envs.worker import Channel, FrameError
from memory.protocol import BankError
from memory.retrieval import Embed
from runtime.processes import ChildProcess

Package = Literal["mem0", "langmem"]
Answer = Callable[[list[dict[str, Any]]], str]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ".venv-mem0"  # in the repository's folder, made by `make mem0`
VARIABLE = "MEMCOMPILER_MEMORY_PYTHON"  # interpreter with the packages, if it is another one
FIX = "make mem0"
DISTRIBUTIONS: Mapping[Package, str] = {"mem0": "mem0ai", "langmem": "langmem"}
START_S, CALL_S, BATCH = 300.0, 300.0, 5_000  # seconds of silence that end a worker; items of one message
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")  # no keys, no proxies

# The interpreter's own packages come before those beside this program, which may be of other versions.
_START = "import sys; sys.path.append(sys.argv.pop(1)); from memory.packages.worker import main; sys.exit(main())"


class PackageError(RuntimeError):
    """A memory package failed in its worker, which goes on."""


def interpreter(package: Package) -> str:
    """Return the Python interpreter that has a package. Raises: NotInstalled, which names the command to install it."""
    apart = ROOT / ENVIRONMENT / "bin" / "python"
    if named := os.environ.get(VARIABLE):
        return named
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    if apart.exists():
        return str(apart)
    raise NotInstalled(f"{DISTRIBUTIONS[package]} is not installed: {FIX}, or set {VARIABLE} to a Python that has it")


def package_version(package: Package) -> str:
    """Return a package's version and where it is, for `memcompiler doctor`. Raises: NotInstalled."""
    python = interpreter(package)
    if python == sys.executable:
        return importlib.metadata.version(DISTRIBUTIONS[package])
    code = f"from importlib.metadata import version; print(version({DISTRIBUTIONS[package]!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if found.returncode != 0:
        raise NotInstalled(f"{python} has no {DISTRIBUTIONS[package]}")
    return f"{found.stdout.strip()} in {Path(python).parents[1].name}"


class _ModelError(Exception):
    """A model raised its cause during a call."""


class PackageHost:
    """One bank in a package's worker, whose process all banks of this program share.

    Args:
        embed: the vectors that the package stores and searches.
        options: of the package's host, as JSON values.

    Raises:
        BankError: the package is not installed, or does not start.
    """

    def __init__(self, package: Package, embed: Embed, **options: Any) -> None:
        self.package, self._embed, self._worker, self._number = package, embed, _shared(package), 0
        try:
            self._number = int(self.call("start", **options))
        except PackageError as error:
            raise BankError(f"memory system {package} does not start ({error}): {FIX}") from error
        weakref.finalize(self, self._worker.unused.append, self._number)

    @property
    def alive(self) -> bool:
        """Whether the worker runs; a new host is needed after its end."""
        return not self._worker.ended

    def load(self, items: Sequence[Any], vectors: np.ndarray, start: int) -> None:
        """Put items (JSON values) with the vectors (n, d) of their texts into the package's store, from number `start`
        on."""
        for first in range(0, len(items), BATCH):
            part = slice(first, first + BATCH)
            blob = np.ascontiguousarray(vectors[part], dtype=np.float32).tobytes()
            self.call("load", [blob], items=items[part], start=start + first)

    def call(self, name: str, blobs: Sequence[bytes] = (), ask: Answer | None = None, **arguments: Any) -> Any:
        """Make one call and serve the package's questions until it answers.

        Args:
            ask: answers the package's chat messages with the text that it shall read.

        Raises:
            PackageError: the package raised.
            BankError: the worker died or is silent.
            Exception: what `ask` or the embedding model raised.
        """
        return self._worker.call(
            {"call": name, "host": self._number, "arguments": arguments}, blobs, ask=ask, embed=self._embed
        )


class _Worker:
    """A worker process. Raises: BankError, if its interpreter does not start."""

    def __init__(self, package: Package) -> None:
        self.package, self.unused, self.ended, self._owner = package, list[int](), False, os.getpid()
        self._lock = threading.RLock()
        try:
            python = interpreter(package)
        except NotInstalled as error:
            raise BankError(f"memory system {package}: {error}") from error
        ours, theirs = socket.socketpair()
        command = [python, "-I", "-c", _START, str(ROOT), "--package", package, "--socket", str(theirs.fileno())]
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        try:
            self._child = ChildProcess(
                command,
                name=f"{package} worker",
                env=variables,
                output="kept",
                dies_with="lifeline",
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            raise BankError(f"memory system {package}: cannot start {python} ({error}): {FIX}") from error
        finally:
            theirs.close()
        self._socket, self._channel = ours, Channel(ours)
        atexit.register(self.end)

    def call(self, request: dict[str, Any], blobs: Sequence[bytes], ask: Answer | None, embed: Embed) -> Any:
        with self._lock:
            unused, self.unused[:] = list(self.unused), []
            try:
                self._send({**request, "unused": unused}, blobs)
                return self._answer(request["call"], ask, embed)
            except PackageError:
                raise
            except _ModelError as error:
                assert error.__cause__ is not None
                raise error.__cause__ from None
            except (EOFError, FrameError, OSError) as error:
                what = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
                said = self._child.output_suffix()
                self.end()
                failed = f"the worker of memory system {self.package} failed in {request['call']} ({what})"
                raise BankError(failed + said) from error
            except BaseException:  # an interruption: the worker would wait for an answer that never comes
                self.end()
                raise

    def _answer(self, name: str, ask: Answer | None, embed: Embed) -> Any:
        """Serve the worker's questions until it answers the call. Once a model has raised, it gets no more answers,
        and the exception is raised when the call has ended."""
        raised: Exception | None = None
        while True:
            header, _ = self._channel.receive(time.monotonic() + (START_S if name == "start" else CALL_S))
            if "ok" in header or "error" in header:
                if raised is not None:
                    raise _ModelError from raised
                if "error" in header:
                    raise PackageError(f"{header['error']['type']}: {header['error']['message']}")
                return header["ok"]
            if raised is None:
                try:
                    self._send(*_reply(header, ask, embed))
                    continue
                except Exception as error:
                    raised = error
            self._send({"stop": True})

    def _send(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._channel.send(header, blobs, until=time.monotonic() + CALL_S)

    def end(self) -> None:
        """End the process: without its socket it leaves by itself; after that it is killed."""
        if not self.ended and os.getpid() == self._owner:  # not in a fork
            self.ended = True
            self._socket.close()
            self._child.wait(1.0)
            self._child.kill()
            atexit.unregister(self.end)


def _reply(header: Mapping[str, Any], ask: Answer | None, embed: Embed) -> tuple[dict[str, Any], list[bytes]]:
    """Answer a question of the worker by the models."""
    if "ask" in header and ask is not None:
        return {"answer": ask(header["ask"])}, []
    if "embed" in header:
        vectors = np.asarray(embed(header["embed"]), dtype=np.float32)
        return {"d": vectors.shape[1]}, [vectors.tobytes()]
    raise RuntimeError(f"no model answers {sorted(header)}")


_WORKERS: dict[tuple[int, Package], _Worker] = {}  # by process, since a fork must not share a socket
_STARTING = threading.Lock()


def _shared(package: Package) -> _Worker:
    """Return this process's worker of a package."""
    with _STARTING:
        worker = _WORKERS.get((os.getpid(), package))
        if worker is None or worker.ended:
            worker = _WORKERS[os.getpid(), package] = _Worker(package)
        return worker
