"""Clients that a service must bear beside its other ones: slow, half-open and cancelling connections."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.request import Request

SLOW_S, PIECES = 5.0, 20  # how long a slow client takes to send a request, and in how many pieces
CANCEL_S = 0.2  # a cancelling client waits up to so long for its answer
PAUSE_S = 0.5  # after a refusal
OK, PUT_OFF = (b"200",), (b"429", b"503")


@dataclass
class BadClients:
    """Numbers of bad clients, and what they did.

    Attributes:
        slow: send their request in pieces, and then read the answer.
        half_open: send half a request and keep the connection.
        cancelling: close the connection before the answer.
        did: slow requests that were answered or put off, half-open connections, cancelled requests.
        lost: why slow requests have no answer.
    """

    slow: int = 0
    half_open: int = 0
    cancelling: int = 0
    did: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    async def run(self, url: str, path: str, requests: Iterator[Request], until: float) -> None:
        """Run all clients until `time.perf_counter()` is so much; a slow request is then still answered. Each of their
        attempts takes the next request."""
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        packed = (_packed(host, path, request) for request in requests)
        kinds = [self._slow] * self.slow + [self._half_open] * self.half_open + [self._cancelling] * self.cancelling
        await asyncio.gather(*(_again(client, host, port, packed, until) for client in kinds))

    async def _slow(self, connection: Connection, request: bytes, until: float) -> None:
        size = -(-len(request) // PIECES)
        for at in range(0, len(request), size):
            connection[1].write(request[at : at + size])
            await connection[1].drain()
            await asyncio.sleep(SLOW_S / PIECES)
        status = (await connection[0].read()).partition(b" ")[2][:3]
        if status in OK + PUT_OFF:
            self.did["slow requests answered" if status in OK else "slow requests put off"] += 1
        else:
            self.lost.append(f"a slow client got {status.decode(errors='replace') or 'no status'}")
        if status not in OK:
            await asyncio.sleep(PAUSE_S)

    async def _half_open(self, connection: Connection, request: bytes, until: float) -> None:
        connection[1].write(request[: len(request) // 2])
        self.did["half-open connections"] += 1
        await asyncio.wait_for(connection[0].read(), max(0.0, until - time.perf_counter()))

    async def _cancelling(self, connection: Connection, request: bytes, until: float) -> None:
        connection[1].write(request)
        await connection[1].drain()
        await asyncio.sleep(random.uniform(0, CANCEL_S))
        self.did["cancelled requests"] += 1


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _again(client: Any, host: str, port: int, requests: Iterator[bytes], until: float) -> None:
    """Run a client over one connection after the other. What the service closes, as it may, is opened again."""
    while time.perf_counter() < until:
        try:
            connection = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(PAUSE_S)
            continue
        try:
            await client(connection, next(requests), until)
        except (OSError, TimeoutError):
            pass
        finally:
            connection[1].transport.abort()


def _packed(host: str, path: str, request: Request) -> bytes:
    content = json.dumps(request.body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    more = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"{head}{more}Content-Length: {len(content)}\r\n\r\n".encode() + content
