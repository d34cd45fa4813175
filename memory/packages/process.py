"""The parent's side of a memory package's worker process: finds an interpreter, starts it, calls it, ends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
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
START_S, CALL_S, BATCH = 180.0, 300.0, 5_000  # seconds of silence that end a worker; items of one message
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")  # no keys, no proxies


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
    raise NotInstalled(f"{DISTRIBUTIONS[package]} is not installed: {FIX} (in the repository's folder)")


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


class PackageProcess:
    """A worker with one package, started at once. It ends with this object or with the process.

    Args:
        embed: the vectors that it stores and searches.
        options: of the package's host, as JSON values.

    Raises:
        BankError: the package is not installed, or does not start.
    """

    def __init__(self, package: Package, embed: Embed, **options: Any) -> None:
        try:
            python = interpreter(package)
        except NotInstalled as error:
            raise BankError(f"memory system {package}: {error}") from error
        self._embed, self.package = embed, package
        ours, theirs = socket.socketpair()
        command = [python, "-m", "memory.packages.worker", "--package", package, "--socket", str(theirs.fileno())]
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        try:
            child = ChildProcess(
                command,
                name=f"{package} worker",
                env={**variables, "PYTHONPATH": str(ROOT)},
                output="kept",
                dies_with="lifeline",
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            raise BankError(f"memory system {package}: cannot start {python} ({error}): {FIX}") from error
        finally:
            theirs.close()
        self._child, self._channel = child, Channel(ours)
        self.end = weakref.finalize(self, _end, child, ours)
        try:
            self.version = str(self.call("start", **options))
        except PackageError as error:
            self.end()
            raise BankError(f"memory system {package} does not start: {error}") from error

    def load(self, items: Sequence[Any], vectors: np.ndarray, start: int) -> None:
        """Put items (JSON values) with the vectors (n, d) of their texts into the package's store, from number `start`
        on."""
        for first in range(0, len(items), BATCH):
            part = slice(first, first + BATCH)
            blob = np.ascontiguousarray(vectors[part], dtype=np.float32).tobytes()
            self.call("load", [blob], items=items[part], start=start + first)

    def call(self, name: str, blobs: Sequence[bytes] = (), ask: Answer | None = None, **arguments: Any) -> Any:
        """Make one call and serve the worker's questions until it answers.

        Args:
            ask: answers the package's chat messages with the text that it shall read.

        Raises:
            PackageError: the package raised.
            BankError: the worker died or is silent.
            Exception: what `ask` or `embed` raised; the worker is ended.
        """
        try:
            self._channel.send({"call": name, **arguments}, blobs, until=time.monotonic() + CALL_S)
            while True:
                header, _ = self._channel.receive(time.monotonic() + (START_S if name == "start" else CALL_S))
                if "ask" in header and ask is not None:
                    self._reply({"answer": ask(header["ask"])})
                elif "embed" in header:
                    vectors = np.asarray(self._embed(header["embed"]), dtype=np.float32)
                    self._reply({"d": vectors.shape[1]}, [vectors.tobytes()])
                elif "error" in header:
                    raise PackageError(f"{header['error']['type']}: {header['error']['message']}")
                elif "ok" in header:
                    return header["ok"]
                else:
                    raise FrameError(f"an unexpected frame: {sorted(header)}")
        except PackageError:
            raise
        except (EOFError, FrameError, OSError) as error:
            what = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            said = self._child.output_suffix()
            self.end()
            raise BankError(f"the worker of memory system {self.package} failed in {name} ({what}){said}") from error
        except BaseException:  # of `ask` or `embed`: the worker waits for an answer that never comes
            self.end()
            raise

    def _reply(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._channel.send(header, blobs, until=time.monotonic() + CALL_S)


def _end(child: ChildProcess, sock: socket.socket) -> None:
    """End a worker: without its socket it leaves by itself; after that it is killed."""
    sock.close()
    child.wait(2.0)
    child.kill()
