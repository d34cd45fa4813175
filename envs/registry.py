"""All environments by name (ours, registered ones, those of other packages), and from their settings to themselves.

Another package offers its `EnvSpec` as an entry point of the group `memcompiler.environments`, named as the
environment. It is loaded when it is asked for by name, and by `memcompiler doctor`.
"""

import difflib
import sys
from collections.abc import Mapping
from importlib import metadata
from pkgutil import resolve_name
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, SerializeAsAny

from envs.base import Environment, Task
from envs.pool import EnvironmentPool
from envs.spec import EnvSettings, EnvSpec, Told, source_sha256
from envs.trajectories import TrajectoryReader

GROUP = "memcompiler.environments"
DEFAULT = "household"
_PLACES = {
    "household": "household.environment:HOUSEHOLD",
    "alfworld": "alfworld.environment:ALFWORLD",
    "scienceworld": "scienceworld.environment:SCIENCEWORLD",
    "eb_alfred": "embodiedbench.spec:EB_ALFRED",
    "eb_habitat": "embodiedbench.spec:EB_HABITAT",
    "eb_navigation": "embodiedbench.spec:EB_NAVIGATION",
    "eb_manipulation": "embodiedbench.spec:EB_MANIPULATION",
    "gymnasium": "gymnasium.environment:GYMNASIUM",
}
BUILT_IN = {name: metadata.EntryPoint(name, f"envs.{place}", GROUP) for name, place in _PLACES.items()}
_known: dict[str, EnvSpec] = {}  # registered, or loaded from an entry point


class EnvironmentSpecError(ValueError):
    """An environment that does not exist, or whose package cannot be loaded. The message is ready to print."""


def register(spec: EnvSpec) -> None:
    """Add an environment of this program; EnvironmentSpecError where another one has that name."""
    if spec.name in BUILT_IN or _known.get(spec.name, spec) is not spec:
        raise EnvironmentSpecError(f"there is an environment {spec.name!r} already")
    _known[spec.name] = spec


def find(name: str) -> EnvSpec:
    """Return the environment of that name; EnvironmentSpecError where there is none that can be loaded."""
    if name in BUILT_IN:
        return BUILT_IN[name].load()
    if name not in _known:
        offered = next(iter(metadata.entry_points(group=GROUP, name=name)), None)
        if offered is None:
            close = difflib.get_close_matches(name, names(), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise EnvironmentSpecError(f"no environment {name!r}{meant}; there are {', '.join(names())}")
        register(_offered(offered))
    return _known[name]


def names() -> list[str]:
    """Return all names: ours first, then those registered, then those that installed packages offer."""
    return list(dict.fromkeys([*BUILT_IN, *_known, *sorted(e.name for e in metadata.entry_points(group=GROUP))]))


def loaded() -> list[EnvSpec]:
    """Return our environments and those of others that this process has asked for or registered."""
    return [*map(find, BUILT_IN), *_known.values()]


def known(name: str) -> EnvSpec | None:
    """Return the environment of that name, if there is one, for records that may be of anything."""
    try:
        return find(name)
    except EnvironmentSpecError:
        return None


def _offered(offered: metadata.EntryPoint) -> EnvSpec:
    where = f"the environment {offered.name!r} of {offered.dist.name if offered.dist else 'another package'}"
    try:
        spec = offered.load()
    except Exception as error:  # whatever the import of somebody else's module raises
        what = f"{type(error).__name__}: {error}"
        raise EnvironmentSpecError(f"{where} cannot be loaded ({offered.value}): {what}") from error
    if not isinstance(spec, EnvSpec) or spec.name != offered.name:
        raise EnvironmentSpecError(f"{where} is no EnvSpec of that name ({offered.value} is {spec!r:.80})")
    return spec


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
            close = difflib.get_close_matches(str(key), fields, n=1)
            strangers.append(f"{key}; did you mean {close[0]!r}?" if close else f"{key}; it has {', '.join(fields)}")
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
