"""Settings, installation check and launcher of EmbodiedBench's four benchmarks.

Tasks in files are listed without EmbodiedBench. A worker lists EB-Manipulation's, and EB-Habitat's from its pickles,
which only EmbodiedBench's process opens.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from envs.base import Task, task_from_json
from envs.command_reader import CommandReader
from envs.embodiedbench import tasks as task_files
from envs.embodiedbench.command_reader import AlfredReader, HabitatReader
from envs.embodiedbench.prompts import ALFRED, COMPILING, HABITAT, MANIPULATION, NAVIGATION
from envs.spec import EnvSettings, EnvSpec, NotInstalled, PoolLimits, Probe, Rule, Splits, WorkerSpec
from runtime.settings import PathName
from runtime.startup import expand_home

# A simulator's first start compiles shaders and loads scenes; listing EB-Manipulation loads each of its scenes.
LIMITS = PoolLimits(start_s=120, tasks_s=1800, reset_s=600, step_s=180, close_s=20, unresponsive_s=120)
HOME = "EMBODIEDBENCH_HOME"


class EmbodiedBenchSettings(EnvSettings):
    """Settings of one of the four benchmarks, with a simulator in every worker."""

    name: Literal["eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name of the benchmark."""
    HOW = EnvSettings.HOW | {"data_root", "python", "home"}
    data_root: PathName | None = None
    """Folder of task files (`envs/embodiedbench/tasks.py`); null: `home`."""
    python: PathName | None = None
    """EmbodiedBench's Python interpreter; null: the benchmark's environment variable (`INSTALLATIONS`)."""
    home: PathName | None = None
    """EmbodiedBench's checkout; null: $EMBODIEDBENCH_HOME, or the one that its Python imports."""
    resolution: int = Field(default=500, ge=64)
    """Side of the square picture in pixels."""

    @model_validator(mode="after")
    def _has_workers(self) -> Self:
        if self.workers == 0:
            raise ValueError(f"{self.name} plays in EmbodiedBench's Python: workers must be at least 1")
        return self


@dataclass(frozen=True, slots=True)
class Installation:
    """Requirements of one benchmark; EmbodiedBench has three conda environments for its four benchmarks."""

    variable: str  # environment variable with the interpreter
    conda: str  # EmbodiedBench's name of the conda environment
    modules: tuple[str, ...]  # imports of its environment class, besides `_SHARED_MODULES`; the simulator first
    data: str = ""  # data to download into the checkout, below embodiedbench/envs; "": none


_SHARED_MODULES = ("numpy", "PIL.Image", "embodiedbench")
INSTALLATIONS: Mapping[str, Installation] = {
    "eb_alfred": Installation(
        "EMBODIEDBENCH_PYTHON", "embench", ("ai2thor.controller", "gym"), "eb_alfred/data/json_2.1.0"
    ),
    "eb_habitat": Installation("EMBODIEDBENCH_PYTHON", "embench", ("habitat_sim", "habitat", "gym"), "eb_habitat/data"),
    "eb_navigation": Installation("EMBODIEDBENCH_NAV_PYTHON", "embench_nav", ("ai2thor.platform", "gym")),
    "eb_manipulation": Installation(
        "EMBODIEDBENCH_MAN_PYTHON", "embench_man", ("pyrep", "amsolver", "gymnasium"), "eb_manipulation/data"
    ),
}


def interpreter(benchmark: str, python: str | None = None) -> str:
    """Return EmbodiedBench's Python for a benchmark. Raises: FileNotFoundError, if it is not set or cannot run."""
    place = INSTALLATIONS[benchmark]
    named = python or _variable(place.variable)
    if not named:
        raise FileNotFoundError(
            f"{place.variable} is not set: install EmbodiedBench (docs/guides/embodiedbench.md), then "
            f"{_export(benchmark)}"
        )
    found = shutil.which(named)
    if not found:
        raise FileNotFoundError(f"{named} is not executable: set {place.variable} to EmbodiedBench's Python")
    return found


def worker_variables(benchmark: str) -> dict[str, str]:
    """Return a simulator's environment variables: the X display, and the folder of CoppeliaSim."""
    variables = {"DISPLAY": os.environ.get("DISPLAY") or ":1"}  # EmbodiedBench's startx opens display 1
    simulator = _variable("COPPELIASIM_ROOT")
    if benchmark == "eb_manipulation" and simulator:
        libraries = [simulator, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        variables |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "QT_QPA_PLATFORM_PLUGIN_PATH": simulator}
    return variables


def construct(settings: EmbodiedBenchSettings) -> WorkerSpec:
    """Return the worker of the settings. Raises: FileNotFoundError, if EmbodiedBench's Python is not set."""
    home, data_root = _home(settings), settings.data_root
    arguments = {
        "benchmark": settings.name,
        "home": str(Path(home).resolve()) if home else "",
        "data_root": str(Path(data_root).resolve()) if data_root else "",
        "resolution": settings.resolution,
    }
    python, variables = interpreter(settings.name, settings.python), worker_variables(settings.name)
    return WorkerSpec("envs.embodiedbench.hosted:host", arguments, python, variables)


def _home(settings: EmbodiedBenchSettings) -> str:
    return settings.home or _variable(HOME)


def _variable(name: str) -> str:
    """Return the path in an environment variable; "" if it is not set."""
    return expand_home(os.environ.get(name, ""))


def list_tasks(settings: EmbodiedBenchSettings, split: str) -> list[Task] | None:
    """List a split from the official files, in their order; None if only the simulator can list it.

    Raises:
        ValueError: the split is unknown.
        FileNotFoundError: there are neither task files nor EmbodiedBench's Python; the message names the settings.
    """
    root = settings.data_root or _home(settings)
    try:
        return [task_from_json(fields) for fields in task_files.list_tasks(settings.name, split, root)]
    except task_files.NoTaskFile as missing:
        try:
            interpreter(settings.name, settings.python)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"cannot list {settings.name} {split}: {missing}; {error}") from missing
        return None


# Code for EmbodiedBench's Python: import the named modules, then report the version and the package's folder.
_IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import embodiedbench
print(json.dumps({"python": sys.version.split()[0], "package": list(embodiedbench.__path__)[0]}))
"""


def import_all(benchmark: str, seconds: float = 100.0) -> str:
    """Check that EmbodiedBench's Python imports the simulator and that the checkout has its data."""
    place = INSTALLATIONS[benchmark]
    if not os.environ.get(place.variable):
        raise NotInstalled(f"{place.variable} is not set")
    command = [interpreter(benchmark), "-c", _IMPORT_ALL, *place.modules, *_SHARED_MODULES]
    paths = [path for path in (_variable(HOME), os.environ.get("PYTHONPATH")) if path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths)}
    with tempfile.TemporaryDirectory() as folder:  # some of these modules write into the working directory
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"its Python did not import in {seconds:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"its Python failed: {lines[-1]}")
    found = json.loads([line for line in done.stdout.splitlines() if line.startswith('{"python"')][-1])
    if place.data and not Path(found["package"], "envs", place.data).exists():
        raise NotInstalled(f"embodiedbench/envs/{place.data} is not in the checkout")
    return f"Python {found['python']} imports {place.modules[0].split('.')[0]}; not started"


def _export(benchmark: str) -> str:
    place = INSTALLATIONS[benchmark]
    return f'export {place.variable}="$(conda run -n {place.conda} which python)"'


_SHARED = ("base", "common_sense", "complex_instruction", "visual_appearance", "long_horizon")


READERS = {"eb_alfred": AlfredReader(), "eb_habitat": HabitatReader()}


def _spec(
    benchmark: str, instructions: str, held_out: tuple[str, ...] = (), *, expert: bool = False, **isolation: Rule
) -> EnvSpec:
    fix = f"{_export(benchmark)}  # to install: docs/guides/embodiedbench.md"
    return EnvSpec(
        benchmark,
        EmbodiedBenchSettings,
        construct,
        splits=lambda _: Splits("base", held_out),
        workers=lambda _: 1,
        limits=LIMITS,
        expert=expert,
        list_tasks=list_tasks,
        isolation=isolation,
        sources=("envs.embodiedbench",),
        probes=lambda: [Probe(benchmark, partial(import_all, benchmark), fix, core=False)],
        refusals=("Last action is invalid",),
        instructions=instructions,
        lists_commands=benchmark != "eb_manipulation",  # since actions must match the scene's skills
        compiler_instructions=COMPILING[benchmark],
        reader=READERS.get(benchmark, CommandReader()),
    )


# Its expert plays the demonstrations in the annotations, without which the simulator starts no episode.
EB_ALFRED = _spec("eb_alfred", ALFRED, (*_SHARED, "spatial"), expert=True, episode="disjoint")
# "novel", since most tasks are about known objects: the paper's test set adds 5 categories to training's 28.
EB_HABITAT = _spec(
    "eb_habitat", HABITAT, (*_SHARED, "spatial_relationship"), object="novel", template="disjoint", scene="disjoint"
)
EB_NAVIGATION = _spec("eb_navigation", NAVIGATION)
EB_MANIPULATION = _spec("eb_manipulation", MANIPULATION)
