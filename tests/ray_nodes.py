"""Several nodes of Ray on this machine, on loopback and with a token, and who belongs to them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.cluster import ADDRESS, import_ray, private_environment, sigterm_as_before
from runtime.http import LOOPBACK
from tests.waiting import until

# The agent of a node, which takes its jobs, gives up where its port is taken: by default one of those that the system
# hands out to any connection, and one for all nodes of a machine.
SMALL = {"object_store_memory": 80 * 2**20, "include_log_monitor": False, "dashboard_agent_listen_port": 0}


@contextmanager
def ray_nodes(*cpus: int, dashboard: bool = False) -> Iterator[Any]:
    """Yield `ray.cluster_utils.Cluster` with a node for each number of CPUs, the head first, as RAY_ADDRESS names it;
    whatever belongs to it is gone after. `dashboard`: with the server that takes jobs."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))
    (folder / "ray").mkdir()  # where Ray notes the newest cluster of a machine, for `auto`: not the user's own
    with private_environment(), sigterm_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        ray = import_ray()
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
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            patch.setenv(ADDRESS, cluster.address)
            for number in cpus[1:]:
                cluster.add_node(num_cpus=number, **SMALL)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
    until(lambda: not processes(str(folder)), 60, 0.2, words=lambda: processes(str(folder)))
    shutil.rmtree(folder)


def processes(word: str) -> dict[int, str]:
    """Return the processes whose command or environment has a word, but for this one."""
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
    """Return the processes of our crew's workers on the nodes of this machine that we may kill: those below us."""
    return [pid for pid, command in processes("ray::_Host").items() if below(pid, os.getpid())]


def node_of(cluster: Any, pid: int) -> Any:
    """Return the node, other than the head, that a process belongs to."""
    [node] = [node for node in cluster.worker_nodes if below(pid, node.all_processes["raylet"][0].process.pid)]
    return node


def below(pid: int, of: int) -> bool:
    while pid > 1:
        if pid == of:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False
