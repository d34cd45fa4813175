"""What the rest of the system knows of an environment: its settings and one `EnvSpec`, in the environment's own folder.

Importing a spec must be quick: whatever needs torch, numpy or a simulator is imported by the factory that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from envs.base import Task
from envs.probe import Probe
from envs.worker_process import PoolLimits, WorkerSpec
from runtime.settings import Settings

# What training and evaluation must not share, by dimension of `Task.isolation` (paper C.1). disjoint: no value on both
# sides. novel: evaluation has values that training lacks (and may share others).
Rule = Literal["disjoint", "novel"]

INSTRUCTIONS = """You are an agent with a goal. Each turn you see where you are and what is there. Answer with exactly \
one command and nothing else."""


class EnvSettings(Settings):
    """What every environment can be told; each adds its own. `env: alfworld` is short for `env: {name: alfworld}`."""

    name: str
    workers: int | None = Field(default=None, ge=0)  # processes that play; 0: this one (default: by environment)
    images: bool = True
    seed: int = 0  # of what the environment makes itself: another seed is another set of scenes


@dataclass(frozen=True, slots=True)
class Splits:
    """Which tasks are for what.

    Attributes:
        evaluation: what is evaluated where nobody says.
        held_out: nothing may be learnt from these; `leakage.held_out` names others.
        training: what fills a bank, unless `experience` says otherwise.
        experience: from the split that is played to the one whose episodes fill its bank: other tasks in the same
            scenes, never the tasks themselves.
    """

    evaluation: str
    held_out: tuple[str, ...] = ()
    training: str = "train"
    experience: Callable[[str], str] | None = None


def _no_workers(_: Any) -> int:
    return 0


def _no_probes() -> Sequence[Probe]:
    return ()


def _not_listed(_: Any, split: str) -> list[Task] | None:
    return None


@dataclass(frozen=True)
class EnvSpec:
    """One environment. The functions are given its settings.

    Attributes:
        construct: how to make it, here or in a worker: "module:factory" and arguments that are JSON values.
        splits: which tasks are for what.
        workers: processes that play where the settings do not say: none where a step takes microseconds.
        limits: of its workers; None for the pool's own.
        list_tasks: a split's tasks without the environment; None where only the environment can list them.
        isolation: the dimensions that every task must have, and how each is read. Further ones must be disjoint.
        packages: whose versions a result depends on.
        sources: modules or packages of ours whose text is the engine's version.
        extra: the extra of pyproject.toml that installs it.
        probes: what `memcompiler doctor` looks at; the fix of one that names none is to install the extra.
        refusals: how an answer begins that refuses the action.
        instructions: what executors are told (`executor.instructions: full`).
    """

    name: str
    settings: type[EnvSettings]
    construct: Callable[[Any], WorkerSpec]
    splits: Callable[[Any], Splits]
    workers: Callable[[Any], int] = _no_workers
    limits: PoolLimits | None = None
    list_tasks: Callable[[Any, str], list[Task] | None] = _not_listed
    isolation: Mapping[str, Rule] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    extra: str = ""
    probes: Callable[[], Sequence[Probe]] = _no_probes
    refusals: tuple[str, ...] = ()
    instructions: str = INSTRUCTIONS
