"""Clients that load a server: each sends its next request when the last one is answered, and retries when put off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx

from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.request import Request
from benchmarks.sizes import Sizes
from runtime.http import retry_after

TIMEOUT_S = 120.0  # of a request, from its first attempt


@dataclass(frozen=True, slots=True)
class Traffic:
    """What clients ask a server.

    Attributes:
        path: of all requests.
        requests: returns what the client of this number asks, without an end: lists of requests, of which each follows
            from the ones before it. If one is not answered, the rest of its list is left out.
        answer: reads the answer in the JSON of a reply.
    """

    path: str
    requests: Callable[[int], Iterator[Sequence[Request]]]
    answer: Callable[[Any], str]


@dataclass(slots=True)
class LoadResult:
    """Answers and losses of a number of concurrent clients."""

    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # seconds, of answered requests, from their first attempt
    accepted: list[float] = field(default_factory=list)  # seconds, of their last attempt, which was answered
    retries: int = 0
    lost: list[str] = field(default_factory=list)  # reasons
    given_up: int = 0  # requests that were put off for `TIMEOUT_S`
    batch: float = 0.0  # mean number of requests compiled together
    texts: dict[str, str] = field(default_factory=dict)  # request -> its first answer
    different: int = 0  # answers that are not the first one to the same request
    sizes: Sizes = field(default_factory=Sizes)  # of the server

    @property
    def sent(self) -> int:
        return len(self.latencies) + len(self.lost) + self.given_up

    @property
    def served(self) -> float:
        """Return the answers per second."""
        return len(self.latencies) / self.seconds

    @property
    def offered(self) -> float:
        """Return the attempts per second."""
        return (self.sent + self.retries) / self.seconds


async def run_clients(
    url: str,
    traffic: Traffic,
    clients: int,
    seconds: float,
    *,
    pace_s: float = 0.0,
    bad: BadClients | None = None,
    pid: int | None = None,
    texts: dict[str, str] | None = None,
) -> LoadResult:
    """Run concurrent clients for a number of seconds; each sends at least one request.

    Args:
        pace_s: least seconds between two attempts of a client.
        bad: further clients, beside them.
        pid: process of the server, whose sizes are measured.
        texts: answers of before, by the requests' names.
    """
    result, until = LoadResult(clients, texts=texts or {}), time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:
        started = time.perf_counter()
        beside = asyncio.gather(
            (bad or BadClients()).run(url, traffic.path, chain.from_iterable(traffic.requests(clients)), until),
            _measure(result, pid, until),
        )
        run = [_Client(client, traffic, result, pace_s).run(number, until) for number in range(clients)]
        await asyncio.gather(*run)
        result.seconds = time.perf_counter() - started
        await beside
    return result


async def _measure(result: LoadResult, pid: int | None, until: float) -> None:
    """Measure the server's process every second."""
    while pid is not None and time.perf_counter() < until:
        result.sizes.measure(len(result.latencies), [pid])
        await asyncio.sleep(1.0)


@dataclass(frozen=True, slots=True)
class _Client:
    """One client."""

    client: httpx.AsyncClient
    traffic: Traffic
    result: LoadResult
    pace_s: float

    async def run(self, number: int, until: float) -> None:
        """Send one request after the other until `time.perf_counter()` is so much; the first one in any case."""
        await asyncio.sleep(self.pace_s * number / self.result.clients)  # clients begin one after the other
        for requests in self.traffic.requests(number):
            for request in requests:
                began = time.perf_counter()
                answered = await self._send(request)
                if time.perf_counter() >= until:
                    return
                await asyncio.sleep(max(0.0, began + self.pace_s - time.perf_counter()))
                if not answered:
                    break

    async def _send(self, request: Request) -> bool:
        """Send one request, and retry while the server puts it off; return whether it was answered."""
        sent = time.perf_counter()
        while True:
            began = time.perf_counter()
            try:
                reply = await self.client.post(self.traffic.path, json=request.body, headers=request.headers)
            except httpx.HTTPError as error:
                self.result.lost.append(f"{type(error).__name__}: {error}")
                return False
            if reply.status_code == 200:
                self._note(request, self.traffic.answer(reply.json()), sent, began)
                return True
            wait = retry_after(reply.headers.get("Retry-After"))
            if not wait:
                self.result.lost.append(f"{reply.status_code}: {reply.text[:200]}")
                return False
            if time.perf_counter() + wait - sent > TIMEOUT_S:
                self.result.given_up += 1
                return False
            self.result.retries += 1
            await asyncio.sleep(max(wait, began + self.pace_s - time.perf_counter()))

    def _note(self, request: Request, text: str, sent: float, began: float) -> None:
        """Note the answer to a request that was first sent at `sent`, and last at `began`."""
        now = time.perf_counter()
        self.result.different += self.result.texts.setdefault(request.name, text) != text
        self.result.latencies.append(now - sent)
        self.result.accepted.append(now - began)
