"""All environments by name (ours, registered ones, those of other packages: entry points of the group
`memcompiler.environments`), and from their settings to themselves.
"""

import sys
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, SerializeAsAny

from envs.base import Environment, Task, TaskSequence, living
from envs.pool import EnvironmentPool
from envs.spec import EnvSettings, EnvSpec, Told, source_sha256
from envs.trajectories import TrajectoryReader
from runtime.plugins import PluginError, Plugins
from runtime.settings import did_you_mean

GROUP = "memcompiler.environments"
DEFAULT = "household"
_ALL = Plugins(
    "environment",
    GROUP,
    EnvSpec,
    {
        "household": "envs.household.environment:HOUSEHOLD",
        "alfworld": "envs.alfworld.environment:ALFWORLD",
        "scienceworld": "envs.scienceworld.environment:SCIENCEWORLD",
        "eb_alfred": "envs.embodiedbench.spec:EB_ALFRED",
        "eb_habitat": "envs.embodiedbench.spec:EB_HABITAT",
        "eb_navigation": "envs.embodiedbench.spec:EB_NAVIGATION",
        "eb_manipulation": "envs.embodiedbench.spec:EB_MANIPULATION",
        "gymnasium": "envs.gymnasium.environment:GYMNASIUM",
    },
)
BUILT_IN = _ALL.built_in
register, find, names, loaded = _ALL.register, _ALL.find, _ALL.names, _ALL.loaded


def known(name: str) -> EnvSpec | None:
    """Return the environment of that name, if there is one, for records that may be of anything."""
    try:
        return find(name)
    except PluginError:
        return None


def settings_of(value: Any) -> Any:
    """Return an environment's settings from its name or from a mapping that may hold its name.

    ValueError for no such environment, or a setting that it does not have.
    """
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value  # settings already, or something that is none: pydantic says so
    given = {"name": DEFAULT, **value}
    spec = find(str(given["name"]))
    return spec.settings.model_validate(_without_strangers(spec, given))


def _without_strangers(spec: EnvSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what another environment has and what says nothing here: null, or its default there."""
    fields, kept, strangers = spec.settings.model_fields, dict(given), []
    for key in given:
        if key in fields:
            continue
        owners = [other for other in loaded() if key in other.settings.model_fields]
        if owners and given[key] in (None, owners[0].settings.model_fields[key].default):
            del kept[key]
        elif owners:
            strangers.append(f"{key} (of {', '.join(owner.name for owner in owners)})")
        else:
            strangers.append(f"{key}{did_you_mean(key, fields)}")
    if strangers:
        raise ValueError(f"environment {spec.name} has no setting {'; '.join(strangers)}")
    return kept


def default_settings() -> EnvSettings:
    return settings_of(DEFAULT)


def executor_told(settings: EnvSettings) -> Told:
    """Return what executors are told about the environment."""
    return find(settings.name).told


def compiler_told(settings: EnvSettings) -> str:
    """Return what compilers are told about the environment, beside the emission language."""
    return find(settings.name).compiling


def reader_of(settings: EnvSettings) -> TrajectoryReader:
    """Return how the environment's commands read."""
    return find(settings.name).reader


def evaluation_split(settings: EnvSettings) -> str:
    """Return the split that is evaluated where nobody names one."""
    return find(settings.name).splits(settings).evaluation


def environment_version(name: str, packages: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions of the packages that the environment comes from, and the hash of our own engine's source
    (None where it has none). EmbodiedBench's version is its checkout's, in a Python of its own; settings name it."""
    spec = find(name)
    engine = source_sha256(spec.sources) if spec.sources else None
    return {"packages": {package: packages.get(package) for package in spec.packages}, "engine_sha256": engine}


# The type of a setting `env`: which of the environments' settings it is follows from its name.
AnyEnvSettings = Annotated[SerializeAsAny[EnvSettings], BeforeValidator(settings_of)]


class Environments:
    """Where a run's environments come from: this process where a step takes microseconds, else a pool of workers.

    `lease` gives one environment for one episode; hand it to `run_episodes`, which never takes more than `capacity`.
    Nothing is started before the first lease: EmbodiedBench's tasks are listed without EmbodiedBench.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self.settings, self.spec = settings, find(settings.name)
        self._workers = self.spec.workers(settings) if settings.workers is None else settings.workers
        self.capacity = self._workers or sys.maxsize  # how many may be in an episode at once
        self._tasks: dict[str, list[Task]] = {}  # by split: listing thousands of games takes seconds
        self._pool: EnvironmentPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> Environment:
        """Return an environment for one episode.

        FileNotFoundError or ModuleNotFoundError where what it needs is not installed; the message says what.
        """
        if self._pool is not None:
            return self._pool.lease()
        how = self.spec.construct(self.settings)
        if not self._workers:
            return resolve_name(how.factory)(**how.arguments)
        self._pool = EnvironmentPool(how, self._workers, self.spec.limits)
        return self._pool.lease()

    def tasks(self, split: str) -> list[Task]:
        """List a split, in an order that does not change; ValueError for none, FileNotFoundError without its data."""
        if split not in self._tasks:
            listed = self.spec.list_tasks(self.settings, split)
            self._tasks[split] = self._ask(split) if listed is None else listed
        return list(self._tasks[split])

    def sequences(self, split: str) -> list[TaskSequence]:
        """List a split's sequences of tasks in one world. Raises: as `tasks`; EnvironmentFailure where worlds do not go
        on."""
        env = self.lease()
        try:
            return list(living(env).sequences(split))
        finally:
            env.close()

    def close(self) -> None:
        """End all workers."""
        if self._pool:
            self._pool.close()

    def _ask(self, split: str) -> list[Task]:
        env = self.lease()
        try:
            return env.tasks(split)
        finally:
            env.close()
