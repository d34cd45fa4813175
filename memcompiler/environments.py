"""From settings to environments: in this process where a step takes microseconds, else in a pool of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.environment import EMBODIED_BENCHES, EnvConfig

if TYPE_CHECKING:
    from envs.base import Environment, Task
    from envs.embodiedbench.adapter import EmbodiedBench
    from envs.pool import EnvironmentPool

# Worker processes where the settings do not say: a worker costs more than the native engine's whole step. The others
# are slow to start and are reused from episode to episode.
_WORKERS = {"household": 0, "alfworld": 0, "gymnasium": 0, "scienceworld": 4, **dict.fromkeys(EMBODIED_BENCHES, 1)}
_TEXTWORLD_WORKERS = 4


class Environments:
    """Where a run's environments come from. Close it after use (it is a context manager).

    `lease` gives one environment for one episode; hand it to `run_episodes`, which never takes more than `capacity`.
    Nothing is started before the first lease: EmbodiedBench's tasks are listed without EmbodiedBench.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.capacity = _workers(config) or sys.maxsize  # how many may be in an episode at once
        self._tasks: dict[str, list[Task]] = {}  # by split: listing thousands of games takes seconds
        self._pool: EnvironmentPool | None = None
        self._factory: Callable[[], Environment] | None = None

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> Environment:
        """Raises: FileNotFoundError, ModuleNotFoundError: what it needs is not installed; the message says what."""
        if not _workers(self.config):
            self._factory = self._factory or _factory(self.config)
            return self._factory()
        self._pool = self._pool or _pool(self.config)
        return self._pool.lease()

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, in an order that does not change.

        Raises:
            ValueError: no such split.
            FileNotFoundError: its data is not there.
        """
        if split not in self._tasks:
            self._tasks[split] = self._listed(split)
        return list(self._tasks[split])

    def _listed(self, split: str) -> list[Task]:
        if self.config.name in EMBODIED_BENCHES:
            return _bench(self.config).tasks(split)  # from files where it can, without a simulator
        env = self.lease()
        try:
            return env.tasks(split)
        finally:
            env.close()

    def close(self) -> None:
        """End all workers."""
        if self._pool:
            self._pool.close()


def _workers(config: EnvConfig) -> int:
    if config.workers is not None:
        return config.workers
    return _TEXTWORLD_WORKERS if config.engine == "textworld" else _WORKERS[config.name]


def _pool(config: EnvConfig) -> EnvironmentPool:
    if config.name in EMBODIED_BENCHES:
        return _bench(config).pool(_workers(config))
    from envs.pool import EnvironmentPool, WorkerSpec

    factory, arguments = _hosted(config)
    return EnvironmentPool(WorkerSpec(factory, arguments), _workers(config))


def _factory(config: EnvConfig) -> Callable[[], Environment]:
    name, arguments = _hosted(config)
    module, _, attribute = name.partition(":")
    make = getattr(import_module(module), attribute)
    return lambda: make(**arguments)


def _hosted(config: EnvConfig) -> tuple[str, Mapping[str, Any]]:
    """ "module:factory" and its arguments, all of them JSON values: the same in this process and in a worker."""
    root = str(Path(config.data_root).expanduser().resolve()) if config.data_root else None
    match config.name:
        case "household":
            arguments = {
                "source": "generated", "seed": config.seed, "scenes": dict(config.scenes), "images": config.images,
                "visual_share": config.visual_share,
            }  # fmt: skip
            return "envs.household:HouseholdEnvironment", arguments | (
                {"kinds": list(config.kinds)} if config.kinds is not None else {}
            )
        case "alfworld" if config.engine == "textworld":
            return "envs.household.textworld:TextWorldEnvironment", {"data_root": root, "images": config.images}
        case "alfworld":
            return "envs.household:HouseholdEnvironment", {
                "source": "alfworld", "data_root": root, "images": config.images
            }  # fmt: skip
        case "scienceworld":
            return "envs.scienceworld:ScienceWorldEnvironment", {
                "simplifications": config.simplifications, "admissible": config.admissible,
                "step_limit": config.step_limit,
                "tasks_file": str(Path(config.tasks_file).resolve()) if config.tasks_file else None,
            }  # fmt: skip
    assert config.gymnasium is not None
    return "envs.gymnasium_text:from_settings", config.gymnasium.model_dump(mode="json")


def _bench(config: EnvConfig) -> EmbodiedBench:
    from envs.embodiedbench.adapter import EmbodiedBench

    return EmbodiedBench(config.name, config.python, config.home, config.data_root, resolution=config.resolution)


def default_split(config: EnvConfig) -> str:
    """What is evaluated where the settings name no split."""
    if config.gymnasium is not None:
        return next(iter(config.gymnasium.splits))
    named = {"household": "test", "alfworld": "valid_seen", "scienceworld": scienceworld_split(config)}
    return named.get(config.name, "base")


def scienceworld_split(config: EnvConfig) -> str:
    """The paper evaluates on AgentSquare's tasks; without their file there is the simulator's own test split."""
    return "agentsquare" if config.tasks_file else "test"


def experience_split(config: EnvConfig, named: str | None, split: str) -> str:
    """The split whose episodes fill the bank: other tasks in the same scenes, never the tasks themselves."""
    return named or (f"{split}_experience" if config.name == "household" else "train")
