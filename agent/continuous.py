"""Runs episodes that do not wait for each other: a request reaches its backend when it is made."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from agent.batching import Backend, StepBatcher, results_of, takes_seeds
from compiler.records import batches_continuously
from configs.models import Batching

T = TypeVar("T")


def batcher_for(batching: Batching, owners: Sequence[object]) -> StepBatcher | ContinuousBatcher:
    """Create what runs episodes whose compiler and executor are `owners` (None where there is none)."""
    batched = [owner for owner in owners if owner is not None and getattr(owner, "batched", True)]
    return ContinuousBatcher() if batches_continuously(batching, batched) else StepBatcher()


class ContinuousBatcher:
    """Has the interface of `agent.batching.StepBatcher`, and calls the backend of each request in a thread, so that
    emissions, second passes and actions of different episodes overlap. Engines batch what is in them.

    An owner that is not thread-safe (without `concurrent = True`) gets what waits for it as one batch whenever it is
    free. Those batches depend on timing.
    """

    def __init__(self) -> None:
        self._shares: dict[Backend, _Share] = {}
        self._queues: dict[int, _Queue] = {}  # of owners that are not thread-safe, by id

    async def run(self, episodes: Sequence[Callable[[int], Awaitable[T]]], concurrency: int) -> list[T]:
        """Run all coroutines `episodes[i](i)`, at most `concurrency` at once. Results are in order."""
        results: dict[int, T] = {}
        queue = iter(list(enumerate(episodes)))

        async def work() -> None:
            for index, episode in queue:
                results[index] = await episode(index)

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(episodes)))))
        return [results[i] for i in range(len(episodes))]

    def seeds_requests_of(self, owner: object) -> bool:
        """Return whether each request of this owner has its own seed."""
        return takes_seeds(owner)

    async def call(self, index: int, backend: Backend, *arguments: Any) -> tuple[Any, float]:
        """Return the backend's result for one request, and this request's share of the backend's seconds, which are
        divided among the requests that are in it.

        Raises: what the backend raised for this request (if not thread-safe: for its batch), or returned as a result.
        """
        owner = getattr(backend, "__self__", backend)
        with self._shares.setdefault(backend, _Share()).counted() as spent:
            if getattr(owner, "concurrent", False):
                [result] = await in_thread(lambda: results_of(backend, [arguments]))
            else:
                result = await self._queues.setdefault(id(owner), _Queue()).put(backend, arguments)
        if isinstance(result, Exception):
            raise result
        return result, spent.seconds


async def in_thread(call: Callable[[], T]) -> T:
    """Call in a thread. The program can end while a call runs whose caller was cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # Ctrl-C has cancelled it
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = call(), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True, name="request").start()
    return await future


@dataclass(slots=True)
class _Spent:
    seconds: float = 0.0


class _Share:
    """Divides the seconds of a backend among the requests that are in it: their sum is the time in which it worked."""

    def __init__(self) -> None:
        self._inside, self._each, self._since = 0, 0.0, 0.0  # _each: of a request that was there all the time

    @contextmanager
    def counted(self) -> Iterator[_Spent]:
        self._advance(1)
        spent, before = _Spent(), self._each
        try:
            yield spent
        finally:
            self._advance(-1)
            spent.seconds = self._each - before

    def _advance(self, change: int) -> None:
        now = time.perf_counter()
        if self._inside:
            self._each += (now - self._since) / self._inside
        self._inside, self._since = self._inside + change, now


class _Queue:
    """Requests to an owner that is not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Backend, tuple[Any, ...], asyncio.Future]] = []
        self._server: asyncio.Task[None] | None = None

    def put(self, backend: Backend, arguments: tuple[Any, ...]) -> asyncio.Future:
        """Add a request; return the future of its result."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((backend, arguments, future))
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        return future

    async def _serve(self) -> None:
        """Serve until nothing waits, one batch per backend at a time."""
        await asyncio.sleep(0)  # for requests that are made at the same moment
        while self._waiting:
            backend = self._waiting[0][0]
            batch = [one for one in self._waiting if one[0] == backend]
            self._waiting = [one for one in self._waiting if one[0] != backend]
            batch = [one for one in batch if not one[2].done()]
            rows = [arguments for _, arguments, _ in batch]
            try:
                results = await in_thread(lambda backend=backend, rows=rows: results_of(backend, rows) if rows else [])
            except Exception as error:
                results = [error] * len(batch)
            for (_, _, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
