"""Runs on several Ray nodes of this machine, whose driver, processes and nodes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from random import Random

from benchmarks.chaos.runs import Run, kill
from benchmarks.chaos.stages import Stage
from benchmarks.ray_nodes import SMALL, below, processes, ray_nodes

ROLES = {"FunctionActor": "trainer", "ObjectActor": "engine", "_WorkerActor": "worker"}  # class of an actor -> its role
VICTIMS = ("driver", "node", "process", "process")  # what is killed is drawn from these


class RayRun(Run):
    """A run with a Ray of its own: a head without work, and two nodes of which one has room for the whole run.

    At a moment the driver is killed, which is started again; or an actor, which the driver replaces; or a node with all
    of its actors, and another one joins. The head is never killed: with it Ray forgets its cluster.
    """

    def __init__(self, stage: Stage, whole: Path, out: Path, rng: Random) -> None:
        super().__init__(stage, whole, out)
        self._random, self._stack = rng, ExitStack()
        self._cluster = self._stack.enter_context(ray_nodes(0, 1, 1))

    def close(self) -> None:
        super().close()
        self._stack.close()

    def _strike(self, process: subprocess.Popen[bytes]) -> str:
        victim, actors = self._random.choice(VICTIMS), self._actors()
        if victim == "driver":
            kill(process)
        elif victim == "node" or not actors:
            victim = "node"
            nodes = sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)
            self._cluster.remove_node(self._random.choice(nodes), allow_graceful=False)
            self._cluster.add_node(num_cpus=1, **SMALL)
        else:
            pid, victim = self._random.choice(sorted(actors.items()))
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        return victim

    def _actors(self) -> dict[int, str]:
        """Return the processes of the run's actors, with their roles."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._cluster.worker_nodes]
        named = {pid: command.removeprefix("ray::") for pid, command in processes("ray::").items()}
        roles = {pid: ROLES.get(name.split()[0].partition(".")[0]) for pid, name in named.items() if name.strip()}
        return {pid: role for pid, role in roles.items() if role and any(below(pid, of) for of in raylets)}
