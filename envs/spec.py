"""The description of an environment for the rest of the system: its settings and one `EnvSpec`.

Importing a spec must be quick: the factory that it names imports torch, numpy or a simulator.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from envs.base import Task
from envs.command_reader import CommandReader
from runtime.settings import Seed, Settings

# Isolation rule by dimension of `Task.isolation` (paper C.1). disjoint: training and evaluation share no value. novel:
# evaluation also has values that training lacks.
Rule = Literal["disjoint", "novel"]

# Default instructions of executors; they name no commands, so the admissible ones are listed below them.
INSTRUCTIONS = """You are an agent with a goal. Each turn you see where you are and what is there. Answer with exactly \
one command and nothing else."""


class EnvSettings(Settings):
    """Settings of every environment; each adds its own. `env: alfworld` is short for `env: {name: alfworld}`."""

    HOW: ClassVar[frozenset[str]] = frozenset({"workers"})  # settings that do not affect results

    name: str
    """Name of the environment."""
    workers: int | None = Field(default=None, ge=0)
    """Worker processes; 0: play in this process; null: the environment's default."""
    images: bool = True
    """Observations have pictures."""
    seed: Seed = 0
    """Seed of generated scenes."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The roles of an environment's splits."""

    evaluation: str  # the default split of evaluations
    held_out: tuple[str, ...] = ()  # must not be learned from; `leakage.held_out` adds others
    # The split whose tasks the expert plays to fill the bank for a played split.
    experience: Callable[[str], str] = lambda split: "train"
    related: Literal["scene", "kind"] | None = None  # only tasks that share this with a played task; None: all
    per_kind: int | None = None  # maximum tasks of each type, for slow experts; None: all


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The object that a worker hosts, and its interpreter."""

    factory: str  # "module:Class"; the worker's PYTHONPATH gets the repository only if the module is in it
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the factory, JSON-ready
    python: str | None = None  # interpreter (3.9 or newer); None: this one
    env: Mapping[str, str] = field(default_factory=dict)  # additional environment variables


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Time limits of each call in seconds, and how many workers may be replaced."""

    start_s: float = 180.0
    tasks_s: float = 180.0
    sequences_s: float = 180.0
    reset_s: float = 120.0
    proceed_s: float = 120.0
    step_s: float = 60.0
    ping_s: float = 60.0  # of an idle worker before reuse
    expert_s: float = 120.0
    close_s: float = 5.0
    lease_s: float = 600.0  # wait of a lease for a free worker
    beat_s: float = 1.0  # interval of heartbeats while a call runs
    unresponsive_s: float = 30.0  # without a heartbeat: killed (C calls may hold the interpreter's lock for long)
    restarts: int = 100


class NotInstalled(Exception):
    """A part is not installed; for an optional part this is no error."""


@dataclass(frozen=True)
class Probe:
    """A check of one part of the installation, for `memcompiler doctor`. Picklable."""

    name: str
    # A module-level function (or a partial of one) that returns a detail; it raises `NotInstalled` if the part is not
    # installed, another exception if it is broken.
    run: Callable[[], str]
    fix: str = ""  # shell command to run in the repository
    core: bool = True
    seconds: float = 120.0


def installed_version(module: str, distribution: str | None = None) -> str:
    """Return the distribution's version without importing it. Raises: NotInstalled."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise NotInstalled("not installed")
    return importlib.metadata.version(distribution or module)


def package_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    versions = {}
    for name in dict.fromkeys(distributions):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def imported_version(module: str, distribution: str | None = None) -> str:
    """Import a module and return its distribution's version."""
    version = installed_version(module, distribution)
    importlib.import_module(module)
    return version


def source_sha256(modules: Iterable[str]) -> str:
    """Hash the source of modules (for a package, its own files). Raises: ModuleNotFoundError."""
    paths = [path for module in modules for path in _files(module)]
    text = json.dumps([[path.name, path.read_text(encoding="utf-8")] for path in paths], sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _files(module: str) -> list[Path]:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no module {module!r}, whose source is part of a version")
    origin = Path(found.origin)
    return sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]


def install_command(extra: str = "") -> str:
    """Return the command that installs the locked packages, including an extra's, with the uv that `make` uses."""
    uv = "uv" if shutil.which("uv") else ".uv/bin/uv"
    return f"{uv} sync --inexact" + (f" --extra {extra}" if extra else "")


def last_view(actions: Sequence[str]) -> Sequence[int]:
    """Return the index of an episode's last step."""
    return range(len(actions))[-1:]


class ExecutorInstructions(NamedTuple):
    """An executor's instructions for an environment (`executor.instructions: full`), the same under every delivery."""

    instructions: str
    lists_commands: bool = False  # list the admissible commands below them


@dataclass(frozen=True)
class EnvSpec:
    """One environment. Its functions receive its settings."""

    name: str
    settings: type[EnvSettings]
    construct: Callable[[Any], WorkerSpec]  # factory and arguments, for this process or a worker
    splits: Callable[[Any], Splits]
    workers: Callable[[Any], int] = lambda _: 0  # default number of workers; 0: this process, for quick steps
    limits: PoolLimits | None = None  # of its workers; None: the pool's defaults
    expert: bool = True  # False: no expert to fill banks; endpoints teach instead
    # Lists a split's tasks without starting the environment; returns None if only the environment can list them.
    list_tasks: Callable[[Any, str], list[Task] | None] = lambda settings, split: None
    isolation: Mapping[str, Rule] = field(default_factory=dict)  # of every task; other dimensions must be disjoint
    packages: tuple[str, ...] = ()  # results record their versions
    sources: tuple[str, ...] = ()  # own modules or packages whose source hash is the engine's version
    extra: str = ""  # the extra of pyproject.toml that installs it
    probes: Callable[[], Sequence[Probe]] = tuple  # default fix of a probe: install the extra
    refusals: tuple[str, ...] = ()  # prefixes of answers that refuse an action
    instructions: str = INSTRUCTIONS  # of executors: the agent, and the forms of its commands
    lists_commands: bool | None = None  # list the admissible commands below; None: only below the default instructions
    # Instructions of compilers, besides the emission language: the agent, its memory, and what to say and note.
    compiler_instructions: str = ""
    # Writes instructions in the words of the environment's settings.
    reworded: Callable[[Any, str], str] = lambda settings, text: text
    # Selects the steps whose views a memory entry stores, from an episode's commands; the most informative first.
    views: Callable[[Sequence[str]], Sequence[int]] = last_view
    # Reads its commands and views, for teachers and for memory systems that follow episodes.
    reader: CommandReader = field(default_factory=CommandReader)

    def worded(self, settings: Any) -> Self:
        """Return the environment with the instructions that its settings need."""
        executor, compiler = (self.reworded(settings, text) for text in (self.instructions, self.compiler_instructions))
        if (executor, compiler) == (self.instructions, self.compiler_instructions):
            return self
        return replace(self, instructions=executor, compiler_instructions=compiler)

    @property
    def executor_instructions(self) -> ExecutorInstructions:
        """Return the executor's instructions."""
        lists = self.lists_commands
        return ExecutorInstructions(self.instructions, self.instructions == INSTRUCTIONS if lists is None else lists)
