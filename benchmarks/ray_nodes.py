"""Several Ray nodes on this machine, on loopback and with a token, and their processes (Linux)."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from runtime.cluster import ADDRESS, import_ray, private_environment, sigterm_as_before
from runtime.http import LOOPBACK

# Port 0: the default port of a node's agent may be in use, and is the same for all nodes of a machine.
SMALL = {"object_store_memory": 80 * 2**20, "include_log_monitor": False, "dashboard_agent_listen_port": 0}
START_S = 180.0  # in which a node starts; Ray itself gives up after 30 s, too early on a busy machine
END_S = 180.0  # in which the processes of all nodes end: agents look every now and then whether their node is there


@contextmanager
def ray_nodes(*cpus: int, dashboard: bool = False) -> Iterator[Any]:
    """Yield `ray.cluster_utils.Cluster` at RAY_ADDRESS, with a node for each number of CPUs, the head first; end all of
    its processes afterwards.

    Args:
        dashboard: start the job server.

    Raises:
        RuntimeError: A process remains.
    """
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))
    (folder / "ray").mkdir()  # Ray records the newest cluster here, for `auto`, instead of in the user's folder
    with private_environment(), sigterm_as_before(), patch.dict(os.environ, RAY_TMPDIR=str(folder)):
        ray = import_ray()
        from ray._private import services
        from ray.cluster_utils import Cluster

        head = {
            **SMALL,
            "num_cpus": cpus[0],
            "include_dashboard": dashboard,
            "dashboard_host": LOOPBACK,
            "dashboard_port": 0,
            "no_monitor": True,
            "temp_dir": str(folder),
        }
        patient = retry(
            retry=retry_if_exception_type(RuntimeError),
            stop=stop_after_delay(START_S),
            wait=wait_fixed(0.5),
            reraise=True,
        )
        with patch.object(services, "get_node", patient(services.get_node)):
            cluster = Cluster(initialize_head=True, head_node_args=head)
            try:
                os.environ[ADDRESS] = str(cluster.address)
                for number in cpus[1:]:
                    cluster.add_node(num_cpus=number, **SMALL)
                yield cluster
            finally:
                ray.shutdown()
                cluster.shutdown()
    due = time.monotonic() + END_S
    while left := processes(str(folder)):
        if time.monotonic() > due:
            raise RuntimeError(f"processes of Ray remain after {END_S:g} s: {left}")
        time.sleep(0.2)
    shutil.rmtree(folder)


def processes(word: str) -> dict[int, str]:
    """Return the other processes whose command or environment contains a word."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            if word.encode() in command or word.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = command.decode(errors="replace")[:100]
        except OSError:  # gone, or another user's
            continue
    found.pop(os.getpid(), None)
    return found


def workers() -> list[int]:
    """Return the worker processes that descend from this process."""
    return [pid for pid, command in processes("ray::_WorkerActor").items() if below(pid, os.getpid())]


def node_of(cluster: Any, pid: int) -> Any:
    """Return the node, other than the head, that a process belongs to."""
    [node] = [node for node in cluster.worker_nodes if below(pid, node.all_processes["raylet"][0].process.pid)]
    return node


def parent(pid: int) -> int:
    """Return the parent of a process, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def below(pid: int, of: int) -> bool:
    """Return whether a process is another one, or descends from it."""
    while pid > 1:
        if pid == of:
            return True
        pid = parent(pid)
    return False
