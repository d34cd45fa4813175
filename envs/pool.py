"""Environments in worker processes: started on demand, reused between episodes, replaced after failures.

    homes = WorkerSpec("envs.household.environment:HouseholdEnvironment", {"images": False})
    with EnvironmentPool(homes, size=4) as pool:
        env = pool.lease()  # an `Environment`; run_episodes(pool.lease, jobs, ...) respects the pool's capacity

A worker that times out, dies, stops its heartbeats or sends an invalid answer is killed with its process group, and the
episode gets an `EnvironmentFailure` with the reason; the next lease gets a new worker, up to `PoolLimits.restarts`.
Workers end with the parent: on `close`, garbage collection or exit, and on Linux even if the parent is killed.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from envs.base import (
    EnvironmentFailure,
    Observation,
    Task,
    TaskSequence,
    Transition,
    sequence_from_json,
    task_from_json,
)
from envs.spec import PoolLimits, WorkerSpec
from envs.worker import task_to_json
from envs.worker_process import HostedError, Worker, WorkerFailure, end_workers
from runtime.pictures import open_picture

T = TypeVar("T")


@dataclass(slots=True)
class PoolCounters:
    started: int = 0
    restarted: int = 0  # replacements of lost ones
    lost: int = 0  # died or were killed
    killed: int = 0  # lost ones that the pool killed
    failures: Counter[str] = field(default_factory=Counter)  # by WorkerFailure.name or the hosted exception's name


def _end_all(workers: set[Worker], patience_s: float, owner: int) -> None:
    if os.getpid() == owner:  # a fork must not end its parent's workers
        end_workers(workers, patience_s)
        workers.clear()


class EnvironmentPool:
    """Thread-safe pool of at most `capacity` environments, each in a worker that is started on demand."""

    def __init__(self, spec: WorkerSpec, size: int, limits: PoolLimits | None = None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, not {size}")
        self.spec, self.capacity, self.limits = spec, size, limits or PoolLimits()
        self.name = spec.factory.rpartition(":")[2]  # until the first worker reports its environment's name
        self.counters = PoolCounters()
        self._changed = threading.Condition()
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._taken, self._last_failure, self._closed = 0, "", False
        self._end = weakref.finalize(self, _end_all, self._workers, self.limits.close_s, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(self) -> "Lease":
        """Return an `Environment` that has a worker from its first call to `close`."""
        return Lease(self)

    def close(self) -> None:
        """Close the environments of idle workers, and end all workers; busy ones are killed."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._changed.notify_all()
        self._end()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the live workers, which are also their group ids."""
        with self._changed:
            return sorted(worker.pid for worker in self._workers)

    def take(self) -> Worker:
        """Take an idle or new worker (one with `name` None needs `hello` first); return it by `give_back` or `lose`.

        Raises:
            EnvironmentFailure: no worker is available.
        """
        while True:
            worker = self._next()
            try:
                if worker.name is not None:  # a killed process may seem alive until its threads end
                    worker.call("ping", lambda *_: None)
                return worker
            except WorkerFailure as failure:
                self.lose(worker, failure)

    def give_back(self, worker: Worker) -> None:
        """Return a worker; kill it if it is in a call or its environment failed twice in a row."""
        if worker.mid_call:
            self.lose(worker, WorkerFailure("abandoned", f"worker {worker.pid} was abandoned during a call"))
        elif worker.strikes > 1:
            self.lose(worker, WorkerFailure("faulty", f"the environment of worker {worker.pid} failed repeatedly"))
        else:
            with self._changed:
                self._taken -= 1
                self._idle += [] if self._closed else [worker]
                self._changed.notify()

    def lose(self, worker: Worker, failure: WorkerFailure) -> None:
        """Kill a worker after a failure."""
        with self._changed:
            if worker in self._workers:  # false once the pool is closed
                self._workers.remove(worker)
                self.counters.killed += worker.child.status is None
                self._count_lost(failure)
        end_workers([worker], 0.0)
        with self._changed:
            self._taken -= 1
            self._changed.notify()

    def count(self, failure: str) -> None:
        """Count a failure after which the worker is still usable."""
        with self._changed:
            self.counters.failures[failure] += 1

    def _next(self) -> Worker:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._taken < self.capacity, self.limits.lease_s):
                raise EnvironmentFailure(
                    f"no worker became free in {self.limits.lease_s:g} s: this pool plays at most {self.capacity} "
                    "episodes at once; close some environments, or enlarge the pool"
                )
            if self._closed:
                raise EnvironmentFailure("the environment pool is closed")
            worker = self._idle.pop() if self._idle else self._start()
            self._taken += 1
            return worker

    def _count_lost(self, failure: WorkerFailure) -> None:
        self.counters.lost += 1
        self.counters.failures[failure.name] += 1
        self._last_failure = str(failure)

    def _start(self) -> Worker:
        counters = self.counters
        replacing = counters.lost > counters.restarted
        if replacing and counters.restarted >= self.limits.restarts:
            raise EnvironmentFailure(
                f"the pool's restart budget is spent ({self.limits.restarts}): {counters.lost} workers were lost, "
                f"failures {dict(counters.failures)}; raise PoolLimits.restarts only if you expect that many. "
                f"Last failure: {self._last_failure}"
            )
        counters.started += 1
        counters.restarted += replacing
        try:
            worker = Worker(self.spec, self.limits)
        except WorkerFailure as failure:
            self._count_lost(failure)
            raise
        self._workers.add(worker)
        return worker


class Lease:
    """An `Environment` in a worker process, which it takes at the first call and returns on `close`."""

    in_process = False

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._worker: Worker | None = None
        self._closed = False
        self._lock = threading.Lock()  # another thread may close during a call

    @property
    def name(self) -> str:
        return self._pool.name

    def tasks(self, split: str) -> list[Task]:
        """List a split. Raises: ValueError and FileNotFoundError, as the hosted environment does."""
        return self._listed("tasks", split, task_from_json)

    def sequences(self, split: str) -> list[TaskSequence]:
        """List a split's sequences. Raises: as `tasks`; EnvironmentFailure, if the hosted environment has none."""
        return self._listed("sequences", split, sequence_from_json)

    def _listed(self, call: str, split: str, decode: Callable[[Mapping[str, Any]], T]) -> list[T]:
        try:
            return self._call(call, lambda value, _: [decode(fields) for fields in value], split=split)
        except HostedError as error:
            known = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}
            if error.type in known:
                raise known[error.type](error.plain_message) from error
            raise

    def reset(self, task: Task) -> Observation:
        """Start an episode, with a new worker if this lease has none."""
        return self._call("reset", _observation, task=task_to_json(task))

    def proceed(self, task: Task) -> Observation:
        """Start another task in the live world."""
        return self._call("proceed", _observation, task=task_to_json(task))

    def step(self, action: str) -> Transition:
        return self._call("step", _transition, action=action)

    def expert(self) -> list[str] | None:
        return self._call("expert", lambda value, _: value)

    def close(self) -> None:
        """Return the worker; kill it if it is in a call of another thread or in an interrupted one."""
        with self._lock:
            self._closed = True
        worker = self._detach()
        if worker is not None:
            self._pool.give_back(worker)

    def _call(self, name: str, decode: Callable[[Any, list[bytes]], T], **arguments: Any) -> T:
        worker = self._hold(name)
        try:
            if worker.name is None:
                worker.hello()
                self._pool.name = worker.name or ""
            result = worker.call(name, decode, **arguments)
        except WorkerFailure as failure:
            if self._detach() is not None:
                self._pool.lose(worker, failure)
            raise
        except HostedError as error:
            worker.strikes += name in ("reset", "proceed", "step")
            self._pool.count(error.type)
            raise
        if name == "step":
            worker.strikes = 0
        return result

    def _hold(self, name: str) -> Worker:
        """Mark the worker as in a call, so that `close` kills it. Raises: EnvironmentFailure, after `close`."""
        if self._worker is None and name in ("reset", "tasks", "sequences") and not self._closed:
            self._worker = self._pool.take()
            if self._closed:  # by another thread, while this one took the worker
                self.close()
        with self._lock:
            if self._closed:
                raise EnvironmentFailure(f"{name}: this environment is closed; lease another one")
            if self._worker is None:
                raise EnvironmentFailure(f"{name}: no live episode: call reset(task) first")
            self._worker.mid_call = True
            return self._worker

    def _detach(self) -> Worker | None:
        """Release and return the worker; return None if it was released already."""
        with self._lock:
            worker, self._worker = self._worker, None
        return worker


def _observation(value: Mapping[str, Any], blobs: list[bytes]) -> Observation:
    picture, commands = None, value["admissible"]
    if value["image"]:
        picture = open_picture(blobs[0])
    beliefs = tuple((key, text) for key, text in value.get("beliefs", ()))
    return Observation(value["text"], picture, None if commands is None else tuple(commands), beliefs)


def _transition(value: Mapping[str, Any], blobs: list[bytes]) -> Transition:
    observation = _observation(value["observation"], blobs)
    return Transition(
        observation,
        value["progress"],
        success=value["success"],
        done=value["done"],
        truncated=value.get("truncated", False),
    )
