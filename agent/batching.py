"""Batches the requests of parallel episodes reproducibly: batches depend on the episodes, never on timing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Backend = Callable[..., list[Any]]  # lists of arguments, one item per request -> one result per request


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A pending request of the episode `index`: one argument for each list that the backend takes."""

    index: int
    backend: Backend
    arguments: tuple[Any, ...]
    future: asyncio.Future


class StepBatcher:
    """Runs episodes on one event loop and batches their requests.

    When every live episode waits, each backend gets its pending requests as one batch, in episode order.

    With two halves (episodes of even and of odd index), both are served at the same time, each backend in a thread.
    Where both wait for the same backend, the half that was served less recently goes first. From then on, one half
    compiles while the other acts.
    """

    def __init__(self, halves: int = 1) -> None:
        self._live, self._halves = 0, halves
        self._pending: list[_Request] = []
        self._last_served = [0] * halves  # round in which each half was served last
        self._round = 0
        self._serving: asyncio.Task | None = None  # keeps the task from being garbage-collected

    async def run(self, episodes: Sequence[Callable[[int], Awaitable[T]]], concurrency: int) -> list[T]:
        """Run all coroutines `episodes[i](i)`, at most `concurrency` at once. Results are in order."""
        results: dict[int, T] = {}
        halves = self._halves = min(self._halves, concurrency)
        numbered, workers = list(enumerate(episodes)), []
        for half in range(halves):  # a queue each, or timing would decide which half plays an episode
            own, most = numbered[half::halves], len(range(half, concurrency, halves))
            queue = iter(own)
            workers += [self._worker(queue, results) for _ in range(min(len(own), most))]
        self._live = len(workers)
        await asyncio.gather(*workers)
        return [results[i] for i in range(len(episodes))]

    async def call(self, index: int, backend: Backend, *arguments: Any) -> tuple[Any, float]:
        """Return the backend's result for one request, and this request's share of the batch's seconds.

        An exception of a batch reaches every episode in it. A ValueError (a request that cannot be served), or an
        exception that the backend returns as a result, reaches one episode only.
        """
        future = asyncio.get_running_loop().create_future()
        self._pending.append(_Request(index, backend, arguments, future))
        self._flush_if_all_wait()
        return await future

    async def _worker(self, queue: Iterator[tuple[int, Callable[[int], Awaitable[T]]]], results: dict[int, T]) -> None:
        try:
            for index, episode in queue:
                results[index] = await episode(index)
        finally:
            self._live -= 1
            self._flush_if_all_wait()

    def _flush_if_all_wait(self) -> None:
        self._drop_cancelled()
        if self._live and len(self._pending) == self._live:
            asyncio.get_running_loop().call_soon(self._flush)

    def _drop_cancelled(self) -> None:
        """Drop requests that Ctrl-C has cancelled."""
        self._pending = [request for request in self._pending if not request.future.done()]

    def _flush(self) -> None:
        self._drop_cancelled()
        if not self._pending or len(self._pending) != self._live:
            return
        chosen = self._take_turns()
        batches = [[r for r in chosen if r.backend == backend] for backend in dict.fromkeys(r.backend for r in chosen)]
        if self._halves > 1 and len(batches) > 1:
            self._serving = asyncio.create_task(self._serve_at_once(batches))
            return
        for batch in batches:
            _deliver(batch, *_timed(batch))

    def _take_turns(self) -> list[_Request]:
        """Take the pending requests to serve now, in episode order. A half waits if another half, which is due before
        it, needs the same backend."""
        self._round += 1
        pending = sorted(self._pending, key=lambda r: r.index)
        taken: list[_Request] = []
        for half in sorted(range(self._halves), key=lambda half: self._last_served[half]):
            own = [r for r in pending if r.index % self._halves == half]
            if own and not any(r.backend == other.backend for r in own for other in taken):
                taken, self._last_served[half] = [*taken, *own], self._round
        self._pending = [r for r in pending if r not in taken]
        return sorted(taken, key=lambda r: r.index)

    async def _serve_at_once(self, batches: Sequence[Sequence[_Request]]) -> None:
        served = await asyncio.gather(*(asyncio.to_thread(_timed, batch) for batch in batches))
        for batch, results in zip(batches, served, strict=True):
            _deliver(batch, *results)


def _timed(batch: Sequence[_Request]) -> tuple[list[Any], float]:
    """Serve a batch: a result or an exception for each request, and the seconds per request."""
    started = time.perf_counter()
    try:
        results = _results(batch[0].backend, [request.arguments for request in batch])
    except Exception as error:  # each episode converts it to a failure of its own
        results = [error] * len(batch)
    return results, (time.perf_counter() - started) / len(batch)


def _deliver(batch: Sequence[_Request], results: Sequence[Any], seconds: float) -> None:
    for request, result in zip(batch, results, strict=True):
        if request.future.done():  # cancelled while the batch was served
            continue
        if isinstance(result, Exception):
            request.future.set_exception(result)
        else:
            request.future.set_result((result, seconds))


def _results(backend: Backend, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return one result per request. After a ValueError, try each request alone to find the bad one."""
    try:
        return backend(*map(list, zip(*rows, strict=True)))
    except ValueError as error:
        if len(rows) == 1:
            return [error]
        return [_results(backend, [row])[0] for row in rows]
