"""Load the proxy with ten times the requests that it can serve, beside clients that behave badly.

    memcompiler bench serving overload --seconds 600 --slow 8 --half-open 8 --cancelling 8

Starts `memcompiler serve proxy` with the compiler that it ships and `on_failure=refuse`, in front of an upstream that
answers at once with a checksum of what it was sent, and commits some episodes to its memory. First, as many clients as
the queue holds measure how many requests a second are served. Then `--times` as many clients make one attempt a second
each: most are put off (429 with Retry-After) and try again. Clients play conversations, each several times in new
sessions. A request is lost if it gets no answer within two minutes of its first attempt, and different if the upstream
was sent something else than when the same turn was played before. Exit status 1 if one is lost or different.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from typing import Annotated

import httpx
import numpy as np
import typer

from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.in_thread import serving
from benchmarks.serving.load import details
from benchmarks.serving.proxy import checksum_api, conversation
from benchmarks.serving.traffic import TIMEOUT_S, LoadResult, Request, Traffic, run_clients
from eval.table import markdown_table
from runtime.http import LOOPBACK, free_port, http_url, responds
from runtime.processes import ChildProcess

PATH = "/v1/chat/completions"
CONVERSATIONS, TURNS = 16, 5  # that are played
PACE_S = 1.0  # seconds between two attempts of a client: those that Retry-After asks for
IDLE_S = 60.0  # seconds after which a session that is not continued ends
MINUTE_S = 60.0
READY_S = 600.0  # in which the proxy starts, on a busy machine


def measure_overload(
    seconds: Annotated[float, typer.Option(min=0, help="Duration of the overload.")] = 60.0,
    times: Annotated[float, typer.Option(min=1, help="Offered requests, as a multiple of those served.")] = 10.0,
    alone: Annotated[float, typer.Option(min=0, help="Seconds that measure how many are served.")] = 20.0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for the compiler.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest emission.")] = 24,
    slow: Annotated[int, typer.Option(min=0, help="Further clients that send a request in pieces.")] = 0,
    half_open: Annotated[int, typer.Option(min=0, help="Further clients that send half a request and wait.")] = 0,
    cancelling: Annotated[int, typer.Option(min=0, help="Further clients that close before the answer.")] = 0,
) -> None:
    """Load the proxy with ten times what it can serve, and count what is lost."""
    bad = BadClients(slow, half_open, cancelling)
    with serving(checksum_api) as upstream, started_proxy(f"{upstream}/v1", queue, max_new_tokens) as (url, pid):
        remember(url)
        served = asyncio.run(run_clients(url, traffic(), queue, alone))
        result = asyncio.run(overload(url, served, seconds, times, bad, pid))
    typer.echo("\n".join([*report(served, result), *details([result], bad)]))
    lost = served.lost + result.lost + bad.lost
    for reason in sorted(set(lost)):
        typer.echo(f"  {lost.count(reason)} lost: {reason}")
    different = served.different + result.different
    typer.echo(f"lost: {len(lost)}, different: {different}")
    raise typer.Exit(bool(lost or different))


def remember(url: str) -> None:
    """Play the first turn of each conversation, and commit it to the proxy's memory."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for number in range(CONVERSATIONS):
            session = {"X-Memcompiler-Session": f"first-{number}"}
            client.post(PATH, json=conversation(number, 0), headers=session).raise_for_status()
            client.post(f"/sessions/first-{number}/end", json={"success": True}).raise_for_status()


async def overload(
    url: str, served: LoadResult, seconds: float, times: float, bad: BadClients, pid: int | None
) -> LoadResult:
    """Load a proxy with so many times the requests that it served."""
    clients = math.ceil(times * served.served * PACE_S)
    texts = served.texts  # the answers must be the same
    return await run_clients(url, traffic(), clients, seconds, pace_s=PACE_S, bad=bad, pid=pid, texts=texts)


def traffic() -> Traffic:
    """Return the requests of agents that play one conversation again and again, each time in a new session."""

    def requests(number: int) -> Iterator[Request]:
        for again in itertools.count():
            played = (number + again) % CONVERSATIONS
            session = {"X-Memcompiler-Session": f"client-{number}-{again}"}
            for turn in range(TURNS):
                yield Request(f"{played}, {turn}", conversation(played, turn), session)

    return Traffic(PATH, requests, lambda reply: reply["choices"][0]["message"]["content"])


def report(url: str, alone: LoadResult, over: LoadResult) -> list[str]:
    """Return a table of the requests that were served alone and under too many, and the proxy's memory."""
    heads = ["", "clients", "offered/s", "served/s", "put off", "accepted: 50 %, ms", "99 %", "with retries: 99 %, ms"]
    rows = []
    for name, result in {"alone": alone, "too many": over}.items():
        middle, most = (1e3 * np.quantile(result.accepted or [0.0], share) for share in (0.5, 0.99))
        rates = [f"{result.offered:.1f}", f"{result.served:.1f}", str(result.retries)]
        late = 1e3 * np.quantile(result.latencies or [0.0], 0.99)
        rows.append([name, str(result.clients), *rates, *(f"{ms:.0f}" for ms in (middle, most, late))])
    said = [f"offered were {over.offered / max(alone.served, 1e-9):.1f} times the requests that are served alone"]
    if over.sizes.mib:
        minute = over.sizes.mib_after(MINUTE_S)
        after = f"{minute:.0f} after a minute, " if minute is not None else ""
        said += [f"memory of the proxy: {over.sizes.mib[0]:.0f} MiB, {after}{over.sizes.mib[-1]:.0f} at the end"]
    return [*markdown_table(heads, rows), *said, f"ready at the end: {responds(f'{url}/ready')}"]


@contextlib.contextmanager
def started_proxy(upstream: str, queue: int, max_new_tokens: int) -> Iterator[tuple[str, int]]:
    """Start a proxy; yield its URL and process, and stop it at the end."""
    url = http_url(LOOPBACK, port := free_port())
    with tempfile.TemporaryDirectory(prefix="memcompiler-overload-") as folder:
        settings = [f"upstream.url={upstream}", f"queue={queue}", f"batch={queue}", "on_failure=refuse"]
        settings += [f"compiler.max_new_tokens={max_new_tokens}", f"sessions.idle_s={IDLE_S}"]
        command = [sys.executable, "-m", "memcompiler", "serve", "proxy", "-c", "serve/proxy", *settings]
        with ChildProcess([*command, "--out", folder, "--port", str(port)], output="kept") as proxy:
            proxy.wait_until_ready(lambda: responds(f"{url}/ready"), READY_S)
            yield url, proxy.pid
