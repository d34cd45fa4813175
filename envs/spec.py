"""What the rest of the system knows of an environment: its settings and one `EnvSpec`, in the environment's own folder.

Importing a spec must be quick: whatever needs torch, numpy or a simulator is imported by the factory that it names.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from envs.base import Task
from envs.trajectories import TrajectoryReader
from runtime.settings import Seed, Settings

# What training and evaluation must not share, by dimension of `Task.isolation` (paper C.1). disjoint: no value on both
# sides. novel: evaluation has values that training lacks (and may share others).
Rule = Literal["disjoint", "novel"]

# What executors are told where an environment says nothing of its own: no commands, so that these are listed below it.
INSTRUCTIONS = """You are an agent with a goal. Each turn you see where you are and what is there. Answer with exactly \
one command and nothing else."""


class EnvSettings(Settings):
    """What every environment can be told; each adds its own. `env: alfworld` is short for `env: {name: alfworld}`."""

    HOW: ClassVar[frozenset[str]] = frozenset({"workers"})  # settings that say where and how it runs, not what happens

    name: str
    workers: int | None = Field(default=None, ge=0)  # processes that play; 0: this one (default: by environment)
    images: bool = True
    seed: Seed = 0  # of what the environment makes itself: another seed is another set of scenes


@dataclass(frozen=True, slots=True)
class Splits:
    """Which tasks are for what."""

    evaluation: str  # what is evaluated where nobody says
    held_out: tuple[str, ...] = ()  # nothing may be learnt from these; `leakage.held_out` names others
    # What may fill a bank, by the benchmark's isolation rule. From the split that is played to the one whose tasks the
    # expert plays: those alone that share scene or task type with a task that is played, or (None) all of them. A task
    # never reads its own episode.
    experience: Callable[[str], str] = lambda split: "train"
    related: Literal["scene", "kind"] | None = None
    per_kind: int | None = None  # so many of each task type, where the expert takes its time (default: all)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker hosts and in which Python."""

    factory: str  # "module:Class"; the repository is put on the worker's PYTHONPATH only if the module is in it
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the factory, JSON-ready
    python: str | None = None  # interpreter (3.9 or newer) to start; None for this one
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables to add


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How long each call may take, in seconds, and how many workers may be replaced before the pool gives up."""

    start_s: float = 180.0
    tasks_s: float = 180.0
    sequences_s: float = 180.0
    reset_s: float = 120.0
    proceed_s: float = 120.0
    step_s: float = 60.0
    ping_s: float = 60.0  # of a worker at rest, before it is used again
    expert_s: float = 120.0
    close_s: float = 5.0
    lease_s: float = 600.0  # how long a lease waits for a worker to come free
    beat_s: float = 1.0  # between signs of life while a call runs
    silence_s: float = 30.0  # without any sign of life: stopped. Above what a C call may hold the interpreter's lock
    restarts: int = 100


class Missing(Exception):
    """The part is not there (which for an extra is no fault)."""


@dataclass(frozen=True)
class Probe:
    """A look at a part of the installation, for `memcompiler doctor`. It travels to another process."""

    name: str
    run: Callable[[], str]  # of a module (or a partial of one): a detail; raises `Missing`, or else it is broken
    fix: str = ""  # a command to paste in the repository's folder
    core: bool = True
    seconds: float = 120.0


def is_installed(module: str, distribution: str | None = None) -> str:
    """Return the distribution's version without importing it (deepspeed's import takes seconds), or raise `Missing`."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise Missing("not installed")
    return importlib.metadata.version(distribution or module)


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in dict.fromkeys(distributions):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def imports(module: str, distribution: str | None = None) -> str:
    """Return the distribution's version after importing the module."""
    version = is_installed(module, distribution)
    importlib.import_module(module)
    return version


def source_sha256(modules: Iterable[str]) -> str:
    """Hash the text of modules (of a package, its own files). Raises: ModuleNotFoundError."""
    paths = [path for module in modules for path in _files(module)]
    text = json.dumps([[path.name, path.read_text(encoding="utf-8")] for path in paths], sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _files(module: str) -> list[Path]:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}, whose source is part of a version")
    origin = Path(found.origin)
    return sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]


def sync(extra: str = "") -> str:
    """Return the command that installs the locked packages, with those of an extra; by the uv that `make` uses."""
    uv = "uv" if shutil.which("uv") else ".uv/bin/uv"
    return f"{uv} sync --inexact" + (f" --extra {extra}" if extra else "")


def last_view(actions: Sequence[str]) -> Sequence[int]:
    """Name the last step: what was seen when the episode's last command was given."""
    return range(len(actions))[-1:]


class Told(NamedTuple):
    """What an executor is told about an environment (`executor.instructions: full`), under every delivery alike."""

    instructions: str
    lists_commands: bool = False  # the commands that are possible stand below them


@dataclass(frozen=True)
class EnvSpec:
    """One environment. The functions are given its settings."""

    name: str
    settings: type[EnvSettings]
    construct: Callable[[Any], WorkerSpec]  # how to make it, here or in a worker
    splits: Callable[[Any], Splits]
    workers: Callable[[Any], int] = lambda _: 0  # that play where the settings do not say: none for quick steps
    limits: PoolLimits | None = None  # of its workers; None for the pool's own
    expert: bool = True  # False where nobody knows the way: no bank fills itself then, and endpoints teach
    # A split's tasks without the environment; None where only the environment can list them.
    list_tasks: Callable[[Any, str], list[Task] | None] = lambda settings, split: None
    isolation: Mapping[str, Rule] = field(default_factory=dict)  # what every task must have; others must be disjoint
    packages: tuple[str, ...] = ()  # whose versions a result depends on
    sources: tuple[str, ...] = ()  # modules or packages of ours whose text is the engine's version
    extra: str = ""  # of pyproject.toml, which installs it
    probes: Callable[[], Sequence[Probe]] = tuple  # the fix of one that names none is to install the extra
    refusals: tuple[str, ...] = ()  # how an answer begins that refuses the action
    # What executors are told: what the agent is, the forms of its commands, that one is the whole answer.
    instructions: str = INSTRUCTIONS
    # Whether the possible commands are listed below: where they are a scene's skills, whose names nobody could guess.
    # (Default: where `instructions` names none.)
    lists_commands: bool | None = None
    # What compilers are told beside the emission language: the agent, what its memory holds, what to say and to note.
    compiling: str = ""
    # From an episode's commands to the steps whose views its memory entry keeps, the most telling first.
    views: Callable[[Sequence[str]], Sequence[int]] = last_view
    reader: TrajectoryReader = field(default_factory=TrajectoryReader)  # of its commands, for teachers

    @property
    def told(self) -> Told:
        """What executors are told, as they take it."""
        lists = self.lists_commands
        return Told(self.instructions, self.instructions == INSTRUCTIONS if lists is None else lists)
