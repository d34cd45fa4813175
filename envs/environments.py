"""From settings to environments: in this process where a step takes microseconds, else in a pool of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from envs.registry import find
from envs.worker import make

if TYPE_CHECKING:
    from envs.base import Environment, Task
    from envs.pool import EnvironmentPool
    from envs.spec import EnvSettings


class Environments:
    """Where a run's environments come from. Close it after use (it is a context manager).

    `lease` gives one environment for one episode; hand it to `run_episodes`, which never takes more than `capacity`.
    Nothing is started before the first lease: EmbodiedBench's tasks are listed without EmbodiedBench.
    """

    def __init__(self, settings: EnvSettings) -> None:
        self.settings, self.spec = settings, find(settings.name)
        self._workers = self.spec.workers(settings) if settings.workers is None else settings.workers
        self.capacity = self._workers or sys.maxsize  # how many may be in an episode at once
        self._tasks: dict[str, list[Task]] = {}  # by split: listing thousands of games takes seconds
        self._pool: EnvironmentPool | None = None
        self._make: Callable[[], Environment] | None = None

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> Environment:
        """Return an environment for one episode.

        Raises:
            FileNotFoundError, ModuleNotFoundError: what it needs is not installed; the message says what.
        """
        if self._workers:
            self._pool = self._pool or self._new_pool()
            return self._pool.lease()
        if self._make is None:
            how = self.spec.construct(self.settings)
            self._make = partial(make, how.factory, how.arguments)
        return self._make()

    def tasks(self, split: str) -> list[Task]:
        """Return all tasks of a split, in an order that does not change.

        Raises:
            ValueError: no such split.
            FileNotFoundError: its data is not there.
        """
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

    def _new_pool(self) -> EnvironmentPool:
        from envs.pool import EnvironmentPool

        return EnvironmentPool(self.spec.construct(self.settings), self._workers, self.spec.limits)
