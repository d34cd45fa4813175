"""Load the proxy with ten times the requests that it can serve, beside clients that behave badly.

    memcompiler bench serving overload --seconds 600 --slow 8 --half-open 8 --cancelling 8

Starts `memcompiler serve proxy` with the compiler that it ships and `on_failure=refuse`, in front of an upstream that
answers at once with a checksum of what it was sent, and commits some episodes to its memory. First, as many clients as
queue and batch hold measure how many requests a second are served. Then further clients make about `--times` as many
attempts a second, each one a second after the other: most are put off (429 with Retry-After) and try again. Clients
play conversations, each several times in new sessions, and give one up in which a request was put off for two minutes.
A request is lost if it was neither answered nor put off, and different if the upstream was sent something else than
when the same turn was played before. Exit status 1 if one is lost or different.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.load import details
from benchmarks.serving.proxy import scripted_upstream
from benchmarks.serving.traffic import TIMEOUT_S, LoadResult, Request, Traffic, run_clients
from eval.table import markdown_table
from runtime.http import LOOPBACK, free_port, http_url, responds
from runtime.processes import ChildProcess

PATH = "/v1/chat/completions"
GOALS = [
    f"put a {thing} in {place}" for thing in ("mug", "book", "plate", "pen") for place in ("desk", "shelf", "drawer")
]
TURNS = 5  # of a conversation
FIRST = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a desk 1, a drawer 2, a "
    "drawer 1, a fridge 1, a shelf 3, a shelf 2, and a shelf 1.\n\nYour task is to: {}."
)
PACE_S = 1.0  # seconds between two attempts of a client: those that Retry-After asks for
IDLE_S = 60.0  # seconds after which a session that is not continued ends
MINUTE_S = 60.0
READY_S = 600.0  # in which the proxy starts, on a busy machine


def measure_overload(
    seconds: Annotated[float, typer.Option(min=0, help="Duration of the overload.")] = 60.0,
    times: Annotated[float, typer.Option(min=1, help="Offered requests, as a multiple of those served.")] = 10.0,
    alone: Annotated[float, typer.Option(min=0, help="Seconds that measure how many are served.")] = 20.0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for the compiler, and of a batch.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest emission.")] = 24,
    slow: Annotated[int, typer.Option(min=0, help="Further clients that send a request in pieces.")] = 0,
    half_open: Annotated[int, typer.Option(min=0, help="Further clients that send half a request and wait.")] = 0,
    cancelling: Annotated[int, typer.Option(min=0, help="Further clients that close before the answer.")] = 0,
) -> None:
    """Load the proxy with ten times what it can serve, and count what is lost."""
    bad = BadClients(slow, half_open, cancelling)
    with scripted_upstream() as upstream, started_proxy(f"{upstream}/v1", queue, max_new_tokens) as (url, pid):
        remember(url)
        served = asyncio.run(run_clients(url, traffic("alone"), 2 * queue, alone))
        result = asyncio.run(overload(url, served, seconds, times, bad, pid))
        typer.echo("\n".join([*report(url, served, result, bad), *details([result], bad)]))
    lost = served.lost + result.lost + bad.lost
    for reason in sorted(set(lost)):
        typer.echo(f"  {lost.count(reason)} lost: {reason}")
    different = served.different + result.different
    typer.echo(f"lost: {len(lost)}, different: {different}")
    raise typer.Exit(bool(lost or different))


def remember(url: str) -> None:
    """Play the first turn of each conversation, and commit it to the proxy's memory."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for number, goal in enumerate(GOALS):
            session, end = f"first-{number}", {"success": True, "rationale": f"the {goal.split()[2]} was in shelf 2"}
            said = conversation(goal, 0)
            client.post(PATH, json=said, headers={"X-Memcompiler-Session": session}).raise_for_status()
            client.post(f"/sessions/{session}/end", json=end).raise_for_status()


async def overload(
    url: str, served: LoadResult, seconds: float, times: float, bad: BadClients, pid: int | None
) -> LoadResult:
    """Load a proxy with so many times the requests that it served to clients whom it had room for."""
    attempt_s = PACE_S + float(np.median(served.accepted or [0.0]))  # a refusal takes no longer than an answer
    clients = served.clients + math.ceil(times * served.served * attempt_s)
    texts = served.texts  # the answers must be the same
    return await run_clients(url, traffic("overload"), clients, seconds, pace_s=PACE_S, bad=bad, pid=pid, texts=texts)


def traffic(name: str) -> Traffic:
    """Return the requests of agents that play one conversation after the other.

    Args:
        name: begins the names of their sessions, which are new ones.
    """

    def requests(number: int) -> Iterator[list[Request]]:
        for again in itertools.count():
            goal = GOALS[(number + again) % len(GOALS)]
            session = {"X-Memcompiler-Session": f"{name}-{number}-{again}"}
            yield [Request(f"{goal}, {turn}", conversation(goal, turn), session) for turn in range(TURNS)]

    return Traffic(PATH, requests, lambda reply: reply["choices"][0]["message"]["content"])


def conversation(goal: str, turn: int) -> dict[str, Any]:
    """Return the request of a turn of a conversation in ALFWorld's words."""
    messages = [{"role": "user", "content": FIRST.format(goal)}]
    for n in range(1, turn + 1):
        messages += [{"role": "assistant", "content": f"> go to shelf {n}"}]
        messages += [{"role": "user", "content": f"You arrive at shelf {n}. On the shelf {n}, you see a plate {n}."}]
    return {"model": "m", "messages": messages}


def report(url: str, alone: LoadResult, over: LoadResult, bad: BadClients) -> list[str]:
    """Return a table of the requests that were served alone and under too many, and the proxy's memory."""
    heads = [
        "",
        "clients",
        "offered/s",
        "served/s",
        "put off",
        "given up",
        "accepted: 50 %, ms",
        "99 %",
        "with retries",
    ]
    rows = []
    for name, result in {"alone": alone, "too many": over}.items():
        middle, most = (1e3 * np.quantile(result.accepted or [0.0], share) for share in (0.5, 0.99))
        rates = [f"{result.offered:.1f}", f"{result.served:.1f}", str(result.retries), str(result.given_up)]
        late = 1e3 * np.quantile(result.latencies or [0.0], 0.99)
        rows.append([name, str(result.clients), *rates, *(f"{ms:.0f}" for ms in (middle, most, late))])
    times = [offered / max(alone.served, 1e-9) for offered in (over.offered, sum(bad.did.values()) / over.seconds)]
    said = [f"offered were {times[0]:.1f} times the requests that are served alone, and {times[1]:.1f} by bad clients"]
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
        settings += ["mapping.preset=react", "reads_state=true"]  # every answer depends on what was compiled
        settings += [f"compiler.max_new_tokens={max_new_tokens}", f"sessions.idle_s={IDLE_S}"]
        command = [sys.executable, "-m", "memcompiler", "serve", "proxy", "-c", "serve/proxy", *settings]
        with ChildProcess([*command, "--out", folder, "--port", str(port)], output="kept") as proxy:
            proxy.wait_until_ready(lambda: responds(f"{url}/ready"), READY_S)
            yield url, proxy.pid
