"""Registry of environments (built-in, registered, or of the entry point group `memcompiler.environments`), and
`Environments`, which creates them from settings."""

import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, SerializeAsAny

from envs.base import Environment, Task, TaskSequence, is_persistent
from envs.command_reader import CommandReader
from envs.pool import EnvironmentPool
from envs.spec import EnvSettings, EnvSpec, ExecutorInstructions, source_sha256
from runtime.plugins import PluginError, Registry
from runtime.settings import did_you_mean

T = TypeVar("T")
GROUP = "memcompiler.environments"
DEFAULT = "household"
_ALL = Registry(
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
    """Return an environment, or None if the name is unknown, as in records of other installations."""
    try:
        return find(name)
    except PluginError:
        return None


def settings_of(value: Any) -> Any:
    """Return an environment's settings from its name, or from a mapping that may hold its name.

    Raises:
        ValueError: the environment is unknown, or does not have a setting.
    """
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value  # settings already, or a value that pydantic rejects
    given = {"name": DEFAULT, **value}
    spec = find(str(given["name"]))
    return spec.settings.model_validate(_without_foreign_defaults(spec, given))


def _without_foreign_defaults(spec: EnvSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Drop settings of other environments that are null or have their default."""
    fields, own, unknown = spec.settings.model_fields, dict(given), []
    for key in given:
        if key in fields:
            continue
        owners = [other for other in loaded() if key in other.settings.model_fields]
        if owners and given[key] in (None, owners[0].settings.model_fields[key].default):
            del own[key]
        elif owners:
            unknown.append(f"{key} (of {', '.join(owner.name for owner in owners)})")
        else:
            unknown.append(f"{key}{did_you_mean(key, fields)}")
    if unknown:
        raise ValueError(f"environment {spec.name} has no setting {'; '.join(unknown)}")
    return own


def default_settings() -> EnvSettings:
    return settings_of(DEFAULT)


def executor_instructions_for(settings: EnvSettings) -> ExecutorInstructions:
    """Return the executor's instructions for the environment."""
    return find(settings.name).worded(settings).executor_instructions


def compiler_instructions_for(settings: EnvSettings) -> str:
    """Return the compiler's instructions for the environment, besides the emission language."""
    return find(settings.name).worded(settings).compiler_instructions


def command_reader_for(settings: EnvSettings) -> CommandReader:
    """Return the reader of the environment's commands."""
    return find(settings.name).reader


def of_environments(told: Mapping[str, T]) -> T | Mapping[str, T]:
    """Return what models are told of the environments of a run: by name, or of the only one."""
    return next(iter(told.values())) if len(told) == 1 else told


def evaluation_split(settings: EnvSettings) -> str:
    """Return the default split of evaluations."""
    return find(settings.name).splits(settings).evaluation


def environment_version(name: str, packages: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions of the environment's packages, and the hash of its built-in engine's source (None without
    one)."""
    spec = find(name)
    engine = source_sha256(spec.sources) if spec.sources else None
    return {"packages": {package: packages.get(package) for package in spec.packages}, "engine_sha256": engine}


# Type of a setting `env`: the name selects the class of settings.
AnyEnvSettings = Annotated[SerializeAsAny[EnvSettings], BeforeValidator(settings_of)]


class Environments:
    """The environments of a run, in this process or, if steps are slow, in a pool that the first lease starts.

    `lease` returns one environment for one episode; `run_episodes` leases at most `capacity` at a time.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self.settings, self.spec = settings, find(settings.name)
        self._workers = self.spec.workers(settings) if settings.workers is None else settings.workers
        self.capacity = self._workers or sys.maxsize  # concurrent episodes
        self._tasks: dict[str, list[Task]] = {}  # by split: listing thousands of games takes seconds
        self._pool: EnvironmentPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> Environment:
        """Return an environment for one episode.

        Raises:
            FileNotFoundError, ModuleNotFoundError: a requirement is not installed; the message names it.
        """
        if self._pool is not None:
            return self._pool.lease()
        how = self.spec.construct(self.settings)
        if not self._workers:
            return resolve_name(how.factory)(**how.arguments)
        self._pool = EnvironmentPool(how, self._workers, self.spec.limits)
        return self._pool.lease()

    def tasks(self, split: str) -> list[Task]:
        """List a split in a fixed order. Raises: ValueError, if it is unknown; FileNotFoundError, without its data."""
        if split not in self._tasks:
            listed = self.spec.list_tasks(self.settings, split)
            self._tasks[split] = self._list(split) if listed is None else listed
        return list(self._tasks[split])

    def sequences(self, split: str) -> list[TaskSequence]:
        """List a split's sequences of tasks in one world. Raises: as `tasks`; EnvironmentFailure, if worlds do not
        persist."""
        env = self.lease()
        try:
            return list(is_persistent(env).sequences(split))
        finally:
            env.close()

    def close(self) -> None:
        """End all workers."""
        if self._pool:
            self._pool.close()

    def _list(self, split: str) -> list[Task]:
        env = self.lease()
        try:
            return env.tasks(split)
        finally:
            env.close()


def leases(envs: Mapping[str, Environments]) -> Callable[[], Environment] | Mapping[str, Callable[[], Environment]]:
    """Return what creates the environments of episodes: by name, or of the only one."""
    return of_environments({name: one.lease for name, one in envs.items()})
