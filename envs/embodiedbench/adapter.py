"""Our side of EmbodiedBench: where its installation is, its tasks, and workers that play them.

    bench = EmbodiedBench("eb_alfred")  # $EMBODIEDBENCH_PYTHON and $EMBODIEDBENCH_HOME say where it is installed
    with bench.pool(size=2) as pool:
        episodes = run_episodes(pool.lease, [Job(task) for task in bench.tasks("base")], ...)

Tasks that are files are listed without EmbodiedBench; only EB-Manipulation, and EB-Habitat from its own pickles, ask a
worker. Pickles are opened by EmbodiedBench in its own process and never here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.base import Task
from envs.embodiedbench import tasks as task_files
from envs.pool import EnvironmentPool, PoolLimits, WorkerSpec

# A simulator's first start compiles shaders and loads scenes; listing EB-Manipulation loads each of its scenes.
LIMITS = PoolLimits(start_s=120, tasks_s=1800, reset_s=600, step_s=180, close_s=20, silence_s=120)


@dataclass(frozen=True, slots=True)
class Installation:
    """How one benchmark is installed: EmbodiedBench needs three conda environments for its four."""

    variable: str  # names the interpreter
    conda: str  # EmbodiedBench's own name for that environment
    modules: tuple[str, ...]  # what its environment class imports, the simulator first
    data: str  # what must be downloaded into the checkout; "" when git brings all


INSTALLATIONS: Mapping[str, Installation] = {
    "eb_alfred": Installation(
        "EMBODIEDBENCH_PYTHON", "embench", ("ai2thor.controller", "gym", "numpy", "PIL.Image", "embodiedbench"),
        "embodiedbench/envs/eb_alfred/data/json_2.1.0",
    ),
    "eb_habitat": Installation(
        "EMBODIEDBENCH_PYTHON", "embench", ("habitat_sim", "habitat", "gym", "numpy", "PIL.Image", "embodiedbench"),
        "embodiedbench/envs/eb_habitat/data",
    ),
    "eb_navigation": Installation(
        "EMBODIEDBENCH_NAV_PYTHON", "embench_nav", ("ai2thor.platform", "gym", "numpy", "PIL.Image", "embodiedbench"),
        "",
    ),
    "eb_manipulation": Installation(
        "EMBODIEDBENCH_MAN_PYTHON", "embench_man",
        ("pyrep", "amsolver", "gymnasium", "numpy", "PIL.Image", "embodiedbench"),
        "embodiedbench/envs/eb_manipulation/data",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmbodiedBench:
    """One of EmbodiedBench's four benchmarks.

    Attributes:
        name: "eb_alfred", "eb_habitat", "eb_navigation" or "eb_manipulation".
        python: EmbodiedBench's interpreter; None for the one that the benchmark's variable names (`INSTALLATIONS`).
        home: its checkout; None for $EMBODIEDBENCH_HOME, or else the place that its Python has it installed from.
        data_root: folder of task files (see `tasks`); None for `home`.
        display: X display for the simulator; None for $DISPLAY or else ":1", which EmbodiedBench's startx opens.
        resolution: side of the square picture, in pixels.
    """

    name: str
    python: str | None = None
    home: str | None = None
    data_root: str | None = None
    display: str | None = None
    resolution: int = 500

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, in the order of the official files.

        Raises:
            ValueError: for a benchmark or split that does not exist.
            FileNotFoundError: no task files, and no EmbodiedBench to ask; the message says what to set.
            EnvironmentFailure: the simulator that was asked broke.
        """
        try:
            listed = task_files.list_tasks(self.name, split, self.data_root or self._home() or "")
        except task_files.NoTaskFile as missing:
            try:
                pool = self.pool(1)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"cannot list {self.name} {split}: {missing}; {error}") from missing
            with pool:
                return pool.tasks(split)
        return [task_of(fields) for fields in listed]

    def pool(self, size: int) -> EnvironmentPool:
        """Workers that play this benchmark, each with a simulator of its own. Close it after use.

        Raises:
            FileNotFoundError: EmbodiedBench's interpreter is not known or not there.
        """
        return EnvironmentPool(self.spec(), size, LIMITS)

    def spec(self) -> WorkerSpec:
        """What `envs.pool` starts. Raises as `pool`."""
        home = self._home()
        arguments = {
            "benchmark": self.name,
            "home": str(Path(home).resolve()) if home else "",
            "data_root": str(Path(self.data_root).resolve()) if self.data_root else "",
            "resolution": self.resolution,
        }
        return WorkerSpec(
            "envs.embodiedbench.hosted:HostedEmbodiedBench", arguments, interpreter(self.name, self.python),
            worker_variables(self.name, self.display),
        )  # fmt: skip

    def _home(self) -> str | None:
        return self.home or os.environ.get("EMBODIEDBENCH_HOME")


def task_of(fields: Mapping[str, Any]) -> Task:
    """A task record of `envs.embodiedbench.tasks` as ours."""
    return Task(**{**fields, "isolation": {name: tuple(labels) for name, labels in fields["isolation"].items()}})


def interpreter(benchmark: str, python: str | None = None) -> str:
    """EmbodiedBench's Python for this benchmark.

    Raises:
        ValueError: no such benchmark.
        FileNotFoundError: it is not named, or what is named is no program.
    """
    if benchmark not in INSTALLATIONS:
        raise ValueError(f"no benchmark {benchmark!r}; there are: {', '.join(INSTALLATIONS)}")
    place = INSTALLATIONS[benchmark]
    named = python or os.environ.get(place.variable)
    if not named:
        raise FileNotFoundError(
            f"{place.variable} is not set: install EmbodiedBench (docs/environments.md), then"
            f' export {place.variable}="$(conda run -n {place.conda} which python)"'
        )
    found = shutil.which(named)
    if not found:
        raise FileNotFoundError(
            f"{named} is no program that can be run: set {place.variable} to EmbodiedBench's Python"
        )
    return found


def worker_variables(benchmark: str, display: str | None) -> dict[str, str]:
    """Environment variables that its simulator looks for."""
    variables = {"DISPLAY": display or os.environ.get("DISPLAY") or ":1"}
    simulator = os.environ.get("COPPELIASIM_ROOT")
    if benchmark == "eb_manipulation" and simulator:
        libraries = [simulator, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        variables |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "QT_QPA_PLATFORM_PLUGIN_PATH": simulator}
    return variables
