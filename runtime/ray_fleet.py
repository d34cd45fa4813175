"""Workers of a crew as actors on Ray, which may be on any of its nodes, those that join later among them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from runtime.actors import Actor, gathered, surroundings, why
from runtime.cluster import RaySettings, ray_cluster
from runtime.crew import Answered, Crew, Event, Finished, Line, Lost, Ready, Unit, Worker

FETCH_S = 120.0  # that what a worker has sent may take to get here


@contextmanager
def ray_crew(settings: RaySettings, make: Callable[[], Worker]) -> Iterator[Crew]:
    """Start or join Ray, and yield a crew there; `make` is called in each worker's process. Raises: as
    `ray_cluster`."""
    with ray_cluster() as ray, Crew(RayFleet(ray, settings, make), settings) as crew:
        yield crew


class RayFleet:
    """A fleet (`runtime.crew.Fleet`) of actors. A handle is the actor's."""

    def __init__(self, ray: Any, settings: RaySettings, make: Callable[[], Worker]) -> None:
        self._ray, self._settings, self._make = ray, settings, make
        needs = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": 0, "max_task_retries": 0}
        self._host = ray.remote(**needs)(_Host)
        self._around = surroundings()
        self._awaited: dict[Any, Any] = {}  # what a worker is to say next: a reference or a stream, with its handle

    def room(self) -> int:
        cpus, gpus = self._settings.cpus, self._settings.gpus
        total = 0
        for node in self._ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            parts = [has.get(kind, 0.0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each]
            total += int(min(parts, default=has.get("CPU", 0.0)))
        return total

    def hire(self) -> Any:
        actor = self._host.remote(self._around)
        self._awaited[actor.ready.remote(self._make)] = actor
        return actor

    def begin(self, handle: Any, unit: Unit) -> None:
        self._awaited[handle.play.options(num_returns="streaming").remote(unit)] = handle

    def wait(self, timeout_s: float) -> Iterator[tuple[Any, Event]]:
        if not self._awaited:
            time.sleep(timeout_s)
            return
        ready, _ = self._ray.wait(list(self._awaited), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(list(self._awaited), num_returns=len(self._awaited), timeout=0)
        for each in ready:
            yield self._awaited[each], self._next(each)

    def dismiss(self, handle: Any) -> None:
        for each in [each for each, actor in self._awaited.items() if actor == handle]:
            del self._awaited[each]
        self._ray.kill(handle)

    def _next(self, each: Any) -> Event:
        """Take in what a worker says. Raises: what it raised."""
        streams = isinstance(each, self._ray.ObjectRefGenerator)
        try:
            said = self._ray.get(next(each) if streams else each, timeout=FETCH_S)
        except StopIteration:
            self._awaited.pop(each)
            return Finished()
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:  # the actor, its node, or what it had sent is gone
            self._ray.kill(self._awaited.pop(each))
            return Lost(why(error))
        if streams:
            return Answered(said)
        self._awaited.pop(each)
        return Ready()


class _Host(Actor):
    """The actor: a worker, and the thread that it works in, while this one sends what it says."""

    def ready(self, make: Callable[[], Worker]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._worker = self._thread.submit(make).result()

    def play(self, unit: Unit) -> Iterator[list[Line]]:
        said: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        work = self._thread.submit(self._worker.play, unit, lambda key, line: said.put((key, line)))
        work.add_done_callback(lambda _: said.put(None))
        yield from gathered(said)
        work.result()  # raises what the worker raised
