"""Workers of a pool as Ray actors, on any node of the cluster, including nodes that join later."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from runtime.cluster import RaySettings, ray_cluster
from runtime.crew import Answered, Crew, Event, Finished, Line, Lost, Ready, Unit, Worker
from runtime.ray_actors import Actor, driver_context, in_batches, loss_reason

FETCH_S = 120.0  # time-out for fetching a worker's results


@contextmanager
def ray_crew(settings: RaySettings, make: Callable[[], Worker]) -> Iterator[Crew]:
    """Start or join Ray, and yield a worker pool there; `make` is called in each worker's process. Raises: as
    `ray_cluster`."""
    with ray_cluster() as ray, Crew(RayBackend(ray, settings, make), settings) as crew:
        yield crew


class RayBackend:
    """A `runtime.crew.WorkerBackend` of actors. A handle is the actor's."""

    def __init__(self, ray: Any, settings: RaySettings, make: Callable[[], Worker]) -> None:
        self._ray, self._settings, self._make = ray, settings, make
        needs = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": 0, "max_task_retries": 0}
        self._actor = ray.remote(**needs)(_WorkerActor)
        self._context = driver_context()
        self._pending: dict[Any, Any] = {}  # actor by the reference or stream of its next message

    def capacity(self) -> int:
        cpus, gpus = self._settings.cpus, self._settings.gpus
        total = 0
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            parts = [has.get(kind, 0.0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each]
            total += int(min(parts, default=has.get("CPU", 0.0)))
        return total

    def start(self) -> Any:
        actor = self._actor.remote(self._context)
        self._pending[actor.ready.remote(self._make)] = actor
        return actor

    def submit(self, handle: Any, unit: Unit) -> None:
        self._pending[handle.play.options(num_returns="streaming").remote(unit)] = handle

    def wait(self, timeout_s: float) -> Iterator[tuple[Any, Event]]:
        if not self._pending:
            time.sleep(timeout_s)
            return
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for message in ready:
            yield self._pending[message], self._next(message)

    def stop(self, handle: Any) -> None:
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
    """Runs a worker in a thread of its own, while the actor's thread sends results."""

    def ready(self, make: Callable[[], Worker]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._worker = self._thread.submit(make).result()

    def play(self, unit: Unit) -> Iterator[list[Line]]:
        lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        work = self._thread.submit(self._worker.play, unit, lambda key, line: lines.put((key, line)))
        work.add_done_callback(lambda _: lines.put(None))
        yield from in_batches(lines)
        work.result()  # raises what the worker raised
