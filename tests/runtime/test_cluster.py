"""A Ray of a run's own: who can reach it, and what is left of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.cluster import ADDRESS, ray_cluster


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
