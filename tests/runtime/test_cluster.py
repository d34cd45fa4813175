"""A Ray of a run's own: who can reach it, and what is left of it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime import cluster
from runtime.cluster import ADDRESS, ClusterError, check_answers, ray_cluster, require_ray
from runtime.http import LOOPBACK, bound_socket

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.alone
def test_it_listens_on_loopback_alone_and_its_token_is_on_no_disk_and_no_command_line(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    folder = tempfile.mkdtemp(prefix="own-")  # a short path, for sockets
    monkeypatch.setattr(tempfile, "tempdir", folder)
    already = set(psutil.Process().children(recursive=True))  # servers that other tests share, for example
    try:
        with ray_cluster(cpus=1) as ray:
            assert ray.get(ray.remote(lambda: 1).remote()) == 1
            started = set(psutil.Process().children(recursive=True)) - already
            tokens = of_those_there(lambda process: process.environ().get("RAY_AUTH_TOKEN"), started)
            [token] = {token for token in tokens if token}
            sockets = of_those_there(lambda process: process.net_connections("tcp"), started)
            ports = [socket.laddr for each in sockets for socket in each if socket.status == psutil.CONN_LISTEN]
            assert len(ports) > 3 and {address.removeprefix("::ffff:") for address, _ in ports} == {"127.0.0.1"}
            assert not any(token in " ".join(line) for line in of_those_there(psutil.Process.cmdline, started))
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            assert len(files) > 10
            assert not any(token.encode() in text for text in of_those_there(Path.read_bytes, files))
        assert not psutil.wait_procs(list(started), 60)[1] and not list(Path(folder).iterdir())
    finally:
        shutil.rmtree(folder)


def of_those_there(ask: Callable[[Any], Any], some: Iterable[Any]) -> Iterator[Any]:
    """Ask processes or files, but for those that are gone meanwhile."""
    for each in some:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            yield ask(each)


@pytest.mark.seconds
@pytest.mark.parametrize("first", ["ray", "runtime.cluster"])
def test_a_process_that_imported_ray_without_a_token_is_told_so_at_once(first: str) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    code = f"import {first}; from runtime.cluster import private_environment, import_ray\n"
    code += "for _ in range(2):\n with private_environment(): import_ray()\nprint('twice')"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    if first == "ray":
        assert "ClusterError: this process imported Ray before it had a token" in done.stderr
    else:
        assert done.stdout.strip() == "twice", done.stderr


class Answer:
    """A server that answers every connection with some bytes, or with silence (None)."""

    def __init__(self, answer: bytes | None) -> None:
        self.listening = bound_socket(LOOPBACK, 0)
        self.listening.listen()
        self.answer, self.open = answer, list[socket.socket]()
        self.address = "{}:{}".format(*self.listening.getsockname())

    def __enter__(self) -> str:
        threading.Thread(target=self._serve, daemon=True).start()
        return self.address

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                self.open.append(self.listening.accept()[0])
                if self.answer is not None:
                    self.open[-1].sendall(self.answer)
                    self.open[-1].shutdown(socket.SHUT_WR)

    def __exit__(self, *_: object) -> None:
        for each in (self.listening, *self.open):
            each.close()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "refused"),
        ("[::1]:1", "127.0.0.1|refused|family|assign"),
        ("ray://127.0.0.1:1", "refused"),
        ("host.invalid:6379", "[Nn]ame"),
        ("127.0.0.1", "HOST:PORT"),
        ("127.0.0.1:ray", "HOST:PORT"),
        ("127.0.0.1:99999", "refused|range|0-65535"),
        (":6379", "HOST:PORT"),
    ],
)
def test_a_dead_address_is_named_at_once(monkeypatch, address, why):
    pytest.importorskip("ray")
    monkeypatch.setenv(ADDRESS, address)
    started = time.monotonic()
    said = rf"RAY_ADDRESS={re.escape(address)}: .*({why}).*unset RAY_ADDRESS"
    with pytest.raises(ClusterError, match=said) as caught:
        require_ray()
    assert time.monotonic() - started < 10 and "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_of_another_server_is_named(monkeypatch, answer):
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.5)
    with Answer(answer) as address, pytest.raises(ClusterError, match=f"no Ray answers at RAY_ADDRESS={address}"):
        check_answers(address)


def test_a_grpc_server_passes_and_without_an_address_nothing_is_checked(monkeypatch):
    with Answer(b"\0\0\0\4\0\0\0\0\0") as address:
        check_answers(address)
    pytest.importorskip("ray")
    for unset in ("", "local", "auto"):
        monkeypatch.setenv(ADDRESS, unset)
        require_ray()
