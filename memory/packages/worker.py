"""A worker process that runs a memory package (Mem0 or LangMem) beside the main environment, without a network.

`memory.packages.process` starts it, possibly under the interpreter of `.venv-mem0`. It imports the standard library,
numpy and the package. A request is {"call": name, "host": number of a bank, "arguments": {...}, "unused": numbers of
banks to forget}, its answer {"ok": value} or {"error": {"type", "message"}}. During a call the worker asks its parent
for what the package needs of models: {"ask": messages} for a language model's answer, and {"embed": texts} for vectors.
The frames are those of `envs.worker`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from envs.worker import Channel, die_with_parent, end_group

HOSTS = {"mem0": "memory.packages.mem0_host:Mem0Host", "langmem": "memory.packages.langmem_host:LangMemHost"}


class Parent:
    """The models of the parent process, and the vectors of texts that it has sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock = channel, threading.Lock()  # packages ask from threads, too
        self._vectors: dict[str, np.ndarray] = {}

    def ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the language model's answer to chat messages of plain texts, as the parent accepts it."""
        with self._lock:
            return str(self._question({"ask": list(messages)})[0]["answer"])

    def _question(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        self._channel.send(question)
        header, blobs = self._channel.receive()
        if "stop" in header:
            raise RuntimeError("the parent's model has stopped")
        return header, blobs

    def keep(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Keep vectors (n, d) of texts, so that the parent is not asked for them."""
        self._vectors.update(zip(texts, vectors, strict=True))

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector per text."""
        with self._lock:
            if fresh := [text for text in dict.fromkeys(texts) if text not in self._vectors]:
                header, [blob] = self._question({"embed": fresh})
                self.keep(fresh, read_vectors(blob, int(header["d"])))
            return [self._vectors[text].tolist() for text in texts]


def read_vectors(blob: bytes, d: int) -> np.ndarray:
    """Read float32 vectors (n, d) from bytes."""
    return np.frombuffer(blob, dtype=np.float32).reshape(-1, d)


class Network:
    """Refuses and counts attempts to reach a network, by an audit hook: this process needs none."""

    def __init__(self) -> None:
        self.attempts = list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
            self.attempts.append(f"{event} {arguments[1:] if event == 'socket.connect' else arguments[:2]}")
            raise OSError(f"a memory package has no network ({event})")


def _set_environment(folder: str) -> None:
    """Switch telemetry off and keep the packages' files in a scratch folder; before the packages are imported."""
    os.environ.update(
        MEM0_TELEMETRY="False",
        MEM0_DIR=folder,
        LANGSMITH_TRACING="false",
        LANGCHAIN_TRACING_V2="false",
        ANONYMIZED_TELEMETRY="False",
    )


def serve(channel: Channel, package: str, network: Network) -> None:
    """Answer calls until the parent closes the socket; each bank has a host of its own, by number."""
    hosts, started = dict[int, Any](), 0
    while True:
        request, blobs = channel.receive()
        name, number, arguments = request["call"], request["host"], request["arguments"]
        for unused in request["unused"]:
            hosts.pop(unused, None)
        try:
            if name == "start":
                started += 1
                hosts[started] = _host(package)(Parent(channel), **arguments)
                value: Any = started
            elif name == "attempts":
                value = network.attempts
            else:
                vectors = [read_vectors(blob, hosts[number].dims) for blob in blobs]
                value = getattr(hosts[number], name)(*vectors, **arguments)
            answer = {"ok": value}
        except (EOFError, ConnectionError):  # the parent is gone
            raise
        except Exception as error:  # of the package
            traceback.print_exc()
            answer = {"error": {"type": type(error).__name__, "message": str(error)[:2000]}}
        channel.send(answer)


def _host(package: str) -> Any:
    module, _, member = HOSTS[package].partition(":")
    return getattr(import_module(module), member)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a memory package for memory.packages.process.")
    parser.add_argument("--package", required=True, choices=sorted(HOSTS))
    parser.add_argument("--socket", type=int, required=True, help="inherited file descriptor of the parent's socket")
    options = parser.parse_args()
    die_with_parent()
    os.set_inheritable(options.socket, False)
    channel, network = Channel(socket.socket(fileno=options.socket)), Network()
    with tempfile.TemporaryDirectory(prefix="memcompiler-") as folder:
        _set_environment(folder)
        with contextlib.suppress(EOFError, OSError):  # the parent has closed the socket
            serve(channel, options.package, network)
    end_group()
    return 0
