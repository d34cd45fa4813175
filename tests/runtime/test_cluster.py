"""A Ray of a run's own: who can reach it, and what is left of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from runtime.cluster import ADDRESS, ray_cluster


@pytest.mark.slow
@pytest.mark.alone
def test_it_listens_on_loopback_alone_and_its_token_is_on_no_disk_and_no_command_line(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    folder = tempfile.mkdtemp(prefix="own-")  # a short path, for sockets
    monkeypatch.setattr(tempfile, "tempdir", folder)
    try:
        with ray_cluster(cpus=1) as ray:
            assert ray.get(ray.remote(lambda: 1).remote()) == 1
            started = psutil.Process().children(recursive=True)
            [token] = {process.environ()["RAY_AUTH_TOKEN"] for process in started if process.name() == "raylet"}
            ports = [
                each.laddr for process in started for each in process.net_connections("tcp") if each.status == "LISTEN"
            ]
            assert len(ports) > 3 and {address.removeprefix("::ffff:") for address, _ in ports} == {"127.0.0.1"}
            assert not any(token in " ".join(process.cmdline()) for process in started)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            assert len(files) > 10 and not [path for path in files if token.encode() in path.read_bytes()]
        assert not psutil.wait_procs(started, 60)[1] and not list(Path(folder).iterdir())
    finally:
        shutil.rmtree(folder)
