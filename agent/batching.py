"""Batches what many concurrent episodes wait for, reproducibly.

A `Cohort` runs coroutines side by side on one event loop. When every live one waits for a backend, the waiting
requests of each backend are handed over as one batch, in episode order: which requests share a batch depends on the
episodes only, never on timing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Batch = Callable[[Sequence[Any]], list[Any]]


class StepBatcher:
    """Episodes that move in step. Backends are plain callables from a list of requests to a list of results."""

    def __init__(self) -> None:
        self._live = 0
        self._waiting: list[tuple[int, Batch, Any, asyncio.Future]] = []

    async def run(self, episodes: Sequence[Callable[[int], Awaitable[T]]], concurrency: int) -> list[T]:
        """Run all coroutines `episodes[i](i)`, at most `concurrency` at once; results in order."""
        results: dict[int, T] = {}
        queue = iter(enumerate(episodes))
        self._live = min(concurrency, len(episodes))
        await asyncio.gather(*(self._worker(queue, results) for _ in range(self._live)))
        return [results[i] for i in range(len(episodes))]

    async def call(self, index: int, backend: Batch, request: Any) -> tuple[Any, float]:
        """Return what `backend` answers to `request`, and this request's share of the batch's seconds.

        An exception in a batch reaches every episode that waits for it. Only one episode is struck by a ValueError,
        which says that its request cannot be served (`_answers`), or by an exception that a backend returns in the
        place of its result.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((index, backend, request, future))
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
        self._forget_the_cancelled()
        if self._live and len(self._waiting) == self._live:
            asyncio.get_running_loop().call_soon(self._flush)

    def _forget_the_cancelled(self) -> None:
        """After Ctrl-C nobody waits for these any more."""
        self._waiting = [waiting for waiting in self._waiting if not waiting[3].done()]

    def _flush(self) -> None:
        self._forget_the_cancelled()
        if len(self._waiting) != self._live:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda w: w[0]), []
        for backend in dict.fromkeys(w[1] for w in waiting):
            mine = [w for w in waiting if w[1] == backend]
            started = time.perf_counter()
            try:
                results = _answers(backend, [request for _, _, request, _ in mine])
            except Exception as error:  # the episodes decide what a failed backend means to them
                for _, _, _, future in mine:
                    future.set_exception(error)
                continue
            seconds = (time.perf_counter() - started) / len(mine)
            for (_, _, _, future), result in zip(mine, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result((result, seconds))


def _answers(backend: Batch, requests: Sequence[Any]) -> list[Any]:
    """One result for each request. Where one of them is bad (ValueError), each is asked alone: which one is it?"""
    try:
        return backend(requests)
    except ValueError as error:
        if len(requests) == 1:
            return [error]
        return [_answers(backend, [request])[0] for request in requests]
