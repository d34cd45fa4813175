"""Pool of workers that may be lost: hands out units of work, retries what a lost worker left, and records results.

    with ray_worker_pool(settings, make_worker) as pool:
        pool.run(units, record, broken)

A unit is a few items with the context that a worker needs for them. A worker answers item by item, with one line of
text each. If a worker is lost (its process or node died, or it is silent), its unanswered items go to another worker,
`retries` times; the last retry sends items one by one, so that an item that kills its worker affects no other. Then
`broken` creates the line that is recorded for the item. An answered item is never sent again.

`RayBackend` starts workers as Ray actors, on any node of the cluster, including nodes that join later.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

from runtime.cluster import ClusterError, RaySettings, ray_cluster
from runtime.ray_actors import Actor, driver_context, in_batches, loss_reason

log = logging.getLogger("memcompiler.cluster")
EVERY_S = 2.0  # between two checks of the available resources
FETCH_S = 120.0  # time-out for fetching a worker's results
TURN_S = 1.0  # longest wait for events before the clock is checked
ResultLine = tuple[str, str]  # an item's key and its result


class Worker(Protocol):
    """Processes units in its own process, where it is created."""

    def play(self, unit: WorkUnit, done: Callable[[str, str], None]) -> None:
        """Process all items of a unit; call `done(key, line)` after each."""
        ...


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Items by key, and the context that a worker needs. `lost`: why earlier workers of these items were lost."""

    context: Any
    items: Mapping[str, Any]
    lost: tuple[str, ...] = ()


# -- events of workers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has started and is free."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker has results of its unit."""

    lines: Sequence[ResultLine]


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has finished its unit and is free."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is lost, with its unanswered items."""

    reason: str


Event = Ready | Answered | Finished | Lost


# -- the driver --------------------------------------------------------------------------------------------------------

Broken = Callable[[Any, str, Any, str], str]  # (unit context, item key, item, reasons) -> line to record


@dataclass(slots=True)
class _WorkerState:
    """A requested or running worker, and the unanswered items of its unit."""

    last_event: float  # time.monotonic()
    is_ready: bool = False
    unit: WorkUnit | None = None
    items: dict[str, Any] = field(default_factory=dict)


class WorkerPool:
    """Workers that persist from one `run` to the next, as many as settings, resources and units allow. One more is
    always requested, for resources that are added later."""

    def __init__(self, backend: RayBackend, settings: RaySettings) -> None:
        self._backend, self._settings = backend, settings
        self._workers: dict[Any, _WorkerState] = {}
        self._queue: deque[WorkUnit] = deque()
        self._checked = float("-inf")  # last check of resources
        self._last_event = 0.0
        self._failed_starts = 0  # in a row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in list(self._workers):
            self._stop(handle)

    def run(self, units: Sequence[WorkUnit], record: Callable[[Sequence[ResultLine]], None], broken: Broken) -> None:
        """Process all units.

        Args:
            record: Receives results, a few lines at a time.
            broken: Creates the line of an item whose workers were lost `retries` + 1 times.

        Raises:
            ClusterError: No worker can be started.
            Exception: What a worker raised.
        """
        self._queue, self._last_event, self._checked = deque(units), time.monotonic(), float("-inf")
        while self._queue or self._busy():
            lines = self._check_workers(broken)
            free = [handle for handle, state in self._workers.items() if state.is_ready and state.unit is None]
            for handle in free[: len(self._queue)]:
                self._submit(handle, self._queue.popleft())
            try:
                for handle, event in self._backend.wait(TURN_S):
                    if handle in self._workers:  # not stopped meanwhile
                        lines += self._handle(handle, event, broken)
            finally:  # record other workers' results even if one raised
                if lines:
                    record(lines)
        for handle in [handle for handle, state in self._workers.items() if not state.is_ready]:
            self._stop(handle)

    def run_one(self, context: Any) -> str:
        """Have one worker process a unit with a single item; return its line."""
        answers: list[ResultLine] = []
        self.run([WorkUnit(context, {"": None})], answers.extend, _unanswered)
        return answers[0][1]

    def _busy(self) -> int:
        return sum(state.unit is not None for state in self._workers.values())

    def _submit(self, handle: Any, unit: WorkUnit) -> None:
        state = self._workers[handle]
        state.unit, state.items, state.last_event = unit, dict(unit.items), time.monotonic()
        self._backend.submit(handle, unit)

    def _handle(self, handle: Any, event: Event, broken: Broken) -> list[ResultLine]:
        """Update a worker's state; return lines to record."""
        state = self._workers[handle]
        state.last_event = self._last_event = time.monotonic()
        match event:
            case Ready():
                state.is_ready, self._failed_starts = True, 0
            case Answered(lines):
                for key, _ in lines:
                    del state.items[key]
                return list(lines)
            case Finished():
                if state.items:
                    raise ClusterError(
                        f"a worker finished without {len(state.items)} of its items ({next(iter(state.items))} first)"
                    )
                state.unit = None
            case Lost(reason):
                return self._lose(handle, reason, broken)
        return []

    def _lose(self, handle: Any, reason: str, broken: Broken) -> list[ResultLine]:
        """Remove a lost worker; put its items first in the queue, or return lines to record instead."""
        state, retries = self._workers.pop(handle), self._settings.retries
        log.warning("a worker is lost: %s", reason)
        if state.unit is None:
            self._failed_starts += not state.is_ready
            if self._failed_starts > retries:
                raise ClusterError(
                    f"{self._failed_starts} workers in a row were lost before they were ready, the last: {reason}"
                )
            return []
        lost = (*state.unit.lost, reason)
        if len(lost) > retries:
            reasons = f"{len(lost)} workers were lost over it: {'; '.join(lost)}"
            return [(key, broken(state.unit.context, key, item, reasons)) for key, item in state.items.items()]
        size = 1 if len(lost) == retries else max(1, len(state.items))
        self._queue.extendleft(reversed(list(split_into_units(state.unit.context, state.items, size, lost))))
        return []

    def _check_workers(self, broken: Broken) -> list[ResultLine]:
        """Request workers for free resources and drop silent ones, every few seconds; return lines to record."""
        if (now := time.monotonic()) - self._checked < EVERY_S:
            return []
        self._checked, silence, busy = now, self._settings.unresponsive_s, self._busy()
        wanted = min(busy + len(self._queue), self._settings.workers or self._backend.capacity() + 1)
        for _ in range(wanted - len(self._workers)):
            self._workers[self._backend.start()] = _WorkerState(now)
        if not any(state.is_ready for state in self._workers.values()) and now - self._last_event > silence:
            raise ClusterError(
                f"no worker started in {silence:g} s: one takes {self._settings.cpus:g} CPUs (ray.cpus) and "
                f"{self._settings.gpus:g} GPUs (ray.gpus), and no node has them free"
            )
        silent = [h for h, state in self._workers.items() if state.unit and now - state.last_event > silence]
        lines: list[ResultLine] = []
        for handle in silent:
            self._backend.stop(handle)
            lines += self._lose(handle, f"it was silent for {silence:g} s", broken)
        return lines

    def _stop(self, handle: Any) -> None:
        self._workers.pop(handle)
        self._backend.stop(handle)


def _unanswered(context: Any, key: str, item: Any, reasons: str) -> str:
    raise ClusterError(f"no worker could answer: {reasons}")


def split_into_units(
    context: Any, items: Mapping[str, Any], size: int, lost: tuple[str, ...] = ()
) -> Iterator[WorkUnit]:
    """Split items into units of `size`, in their order."""
    pairs = iter(items.items())
    while some := dict(islice(pairs, size)):
        yield WorkUnit(context, some, lost)


# -- on Ray ------------------------------------------------------------------------------------------------------------


class RayBackend:
    """Starts and stops workers as actors; a worker's handle is its actor. Tests have a backend without Ray."""

    def __init__(self, ray: Any, settings: RaySettings, make: Callable[[], Worker]) -> None:
        self._ray, self._settings, self._make = ray, settings, make
        needs = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": 0, "max_task_retries": 0}
        self._actor = ray.remote(**needs)(_WorkerActor)
        self._context = driver_context()
        self._pending: dict[Any, Any] = {}  # actor by the reference or stream of its next message

    def capacity(self) -> int:
        """Return how many workers the current resources can hold."""
        cpus, gpus = self._settings.cpus, self._settings.gpus
        total = 0
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            parts = [has.get(kind, 0.0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each]
            total += int(min(parts, default=has.get("CPU", 0.0)))
        return total

    def start(self) -> Any:
        """Request a worker, which is `Ready` once resources allow. Returns its handle."""
        actor = self._actor.remote(self._context)
        self._pending[actor.ready.remote(self._make)] = actor
        return actor

    def submit(self, handle: Any, unit: WorkUnit) -> None:
        """Send a unit to a free worker."""
        self._pending[handle.play.options(num_returns="streaming").remote(unit)] = handle

    def wait(self, timeout_s: float) -> Iterator[tuple[Any, Event]]:
        """Yield new events, waiting for the first. Raises: what a worker raised."""
        if not self._pending:
            time.sleep(timeout_s)
            return
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for message in ready:
            yield self._pending[message], self._next(message)

    def stop(self, handle: Any) -> None:
        """Stop a worker, or cancel its request."""
        self._pending = {message: actor for message, actor in self._pending.items() if actor != handle}
        self._ray.kill(handle)

    def _next(self, message: Any) -> Event:
        """Fetch a worker's message. Raises: what the worker raised."""
        streams = isinstance(message, self._ray.ObjectRefGenerator)
        try:
            value = self._ray.get(next(message) if streams else message, timeout=FETCH_S)
        except StopIteration:
            self._pending.pop(message)
            return Finished()
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # the actor, its node or its message is lost
            self._ray.kill(self._pending.pop(message))
            return Lost(loss_reason(error))
        if streams:
            return Answered(value)
        self._pending.pop(message)
        return Ready()


class _WorkerActor(Actor):
    """Runs a worker in a separate thread, while the actor's thread sends results."""

    def ready(self, make: Callable[[], Worker]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._worker = self._thread.submit(make).result()

    def play(self, unit: WorkUnit) -> Iterator[list[ResultLine]]:
        lines: queue.SimpleQueue[ResultLine | None] = queue.SimpleQueue()
        work = self._thread.submit(self._worker.play, unit, lambda key, line: lines.put((key, line)))
        work.add_done_callback(lambda _: lines.put(None))
        yield from in_batches(lines)
        work.result()  # raises what the worker raised


@contextmanager
def ray_worker_pool(settings: RaySettings, make: Callable[[], Worker]) -> Iterator[WorkerPool]:
    """Start or join Ray, and yield a worker pool there; `make` is called in each worker's process. Raises: as
    `ray_cluster`."""
    with ray_cluster() as ray, WorkerPool(RayBackend(ray, settings, make), settings) as pool:
        yield pool
