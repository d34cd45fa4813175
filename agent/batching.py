"""Batches the requests of parallel episodes reproducibly: batches depend on the episodes, never on timing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Backend = Callable[..., list[Any]]  # lists of arguments, one item per request -> one result per request


def takes_seeds(owner: object) -> bool:
    """Return whether a compiler or executor can draw each request's tokens by a seed of its own."""
    return bool(getattr(owner, "takes_seeds", False))


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A pending request of the episode `index`: one argument for each list that the backend takes."""

    index: int
    backend: Backend
    arguments: tuple[Any, ...]
    future: asyncio.Future


class StepBatcher:
    """Runs episodes on one event loop. When all running episodes wait, each backend gets its pending requests as one
    batch, in episode order."""

    def __init__(self) -> None:
        self._live = 0
        self._pending: list[_Request] = []

    async def run(self, episodes: Sequence[Callable[[int], Awaitable[T]]], concurrency: int) -> list[T]:
        """Run all coroutines `episodes[i](i)`, at most `concurrency` at once. Results are in order."""
        results: dict[int, T] = {}
        queue = iter(list(enumerate(episodes)))
        self._live = min(concurrency, len(episodes))
        await asyncio.gather(*(self._worker(queue, results) for _ in range(self._live)))
        return [results[i] for i in range(len(episodes))]

    def seeds_requests_of(self, owner: object) -> bool:
        """Return whether each request of this owner has its own seed. In PyTorch the requests of a batch share the
        owner's random numbers."""
        return takes_seeds(owner) and getattr(owner, "concurrent", False)

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
        pending, self._pending = sorted(self._pending, key=lambda r: r.index), []
        for backend in dict.fromkeys(r.backend for r in pending):
            _serve([r for r in pending if r.backend == backend])


def _serve(batch: Sequence[_Request]) -> None:
    """Serve a batch: each request gets a result or an exception, and its share of the seconds."""
    started = time.perf_counter()
    try:
        results = results_of(batch[0].backend, [request.arguments for request in batch])
    except Exception as error:  # each episode converts it to its own failure
        results = [error] * len(batch)
    seconds = (time.perf_counter() - started) / len(batch)
    for request, result in zip(batch, results, strict=True):
        if request.future.done():  # Ctrl-C has cancelled it meanwhile
            continue
        if isinstance(result, Exception):
            request.future.set_exception(result)
        else:
            request.future.set_result((result, seconds))


def results_of(backend: Backend, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return one result per request. After a ValueError, try each request alone to find the bad one."""
    try:
        return backend(*map(list, zip(*rows, strict=True)))
    except ValueError as error:
        if len(rows) == 1:
            return [error]
        return [results_of(backend, [row])[0] for row in rows]


class Unbatched(StepBatcher):
    """Calls each backend at once, for a loop without other episodes to batch with."""

    def seeds_requests_of(self, owner: object) -> bool:
        return False

    async def call(self, index: int, backend: Backend, *arguments: Any) -> tuple[Any, float]:
        started = time.perf_counter()
        [answer] = backend(*([argument] for argument in arguments))
        if isinstance(answer, Exception):
            raise answer
        return answer, time.perf_counter() - started
