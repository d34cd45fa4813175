"""The compiler service under load: latency by number of clients, and whether a request is lost.

    python -m benchmarks.service_load                                    # the household's base, served in PyTorch
    python -m benchmarks.service_load --url http://127.0.0.1:8100        # one that is up, with whatever it compiles

Each client asks, waits for its answer and asks again (asyncio, one connection each), for so many seconds; what is under
way then is waited for. A request that is told to come back (429, 503 with Retry-After) does, and its latency counts
from when it was first sent; one that ends without an answer is lost. Requests are those of scripted episodes
(`benchmarks.scripted`): every client is another home, step by step. Without --url a service of its own is started: the
compiler base with a fresh adapter, which leaves it as it is, and projector. Ends with `lost: L`; status 1 unless 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from agent.episode import EpisodeSpec
from benchmarks.scripted import Script, observation, said_in
from compiler import checkpoint
from compiler.brief_state import BriefState, apply_ops
from compiler.build import load_compiler
from compiler.client import CompileBody, SamplingBody
from compiler.records import CompileRequest
from configs.models import CompilerConfig, Soft
from runtime.http import LOOPBACK, answers, free_port, http_url, retry_after
from runtime.processes import ChildProcess
from runtime.progress import quiet

console = Console(width=140)
MODEL, WIDTH, N_SOFT = "zoo/household/compiler", 128, 4
STEPS = 10  # of an episode; then its client begins another
TIMEOUT_S = 120.0  # of a request, from when it is first sent


@dataclass(slots=True)
class Met:
    """What so many clients met."""

    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # seconds, of those that were answered
    put_off: int = 0  # answers that said: later
    lost: list[str] = field(default_factory=list)  # why
    batch: float = 0.0  # requests that were compiled together, mean

    @property
    def sent(self) -> int:
        return len(self.latencies) + len(self.lost)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", help="of a service that is up")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--seconds", type=float, default=20.0, help="for each number of clients")
    options.add_argument("--memory-tokens", type=int, default=300)
    options.add_argument("--queue", type=int, default=256, help="of the service that is started")
    options.add_argument("--max-new-tokens", type=int, default=48, help="of the service that is started")
    asked = options.parse_args()
    quiet()
    script = Script(MODEL, MODEL, asked.memory_tokens, N_SOFT, said_in())
    with contextlib.ExitStack() as stack:
        url = asked.url or stack.enter_context(served(asked.queue, asked.max_new_tokens))
        asyncio.run(load(url, script, 1, 0.0))  # warms up
        met = [asyncio.run(load(url, script, clients, asked.seconds)) for clients in asked.clients]
    console.print(table_of(met))
    reasons = [why for one in met for why in one.lost]
    for why in sorted(set(reasons)):
        console.print(f"  {reasons.count(why)} lost: {why}", highlight=False)
    console.print(f"lost: {len(reasons)}", highlight=False)
    sys.exit(bool(reasons))


@contextlib.contextmanager
def served(queue: int, max_new_tokens: int) -> Iterator[str]:
    """Start a service of its own, in PyTorch; its URL. It ends with the block."""
    config = CompilerConfig(
        model=MODEL,
        dtype="float32",
        instructions="none",
        soft=Soft(n_tokens=N_SOFT, emb_std=0.02),
        max_new_tokens=max_new_tokens,
    )
    url, anyone = http_url(LOOPBACK, port := free_port()), SimpleNamespace(embedding_table=torch.zeros(1, WIDTH))
    with tempfile.TemporaryDirectory(prefix="memcompiler-load-") as folder:
        checkpoint.save_weights(Path(folder), load_compiler(config, anyone))
        command = [sys.executable, "-m", "memcompiler", "serve", "compiler", "-c", "serve/quickstart"]
        settings = [f"queue={queue}", f"compiler.max_new_tokens={max_new_tokens}", f"timeout_s={TIMEOUT_S}"]
        with ChildProcess([*command, "--checkpoint", folder, "--port", str(port), *settings], output="kept") as service:
            service.wait_until_ready(lambda: answers(f"{url}/ready"), 300)
            yield url


async def load(url: str, script: Script, clients: int, seconds: float) -> Met:
    """Have so many clients ask for so long, each at least once."""
    met, until = Met(clients), time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:
        before, started = await _compiled(client), time.perf_counter()
        await asyncio.gather(*(_ask(client, script.spec(home), script, until, met) for home in range(clients)))
        met.seconds = time.perf_counter() - started
        after = await _compiled(client)
    met.batch = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    return met


async def _ask(client: httpx.AsyncClient, spec: EpisodeSpec, script: Script, until: float, met: Met) -> None:
    """Be one client."""
    bodies = [CompileBody.of(request, SamplingBody(), ("mu",)) for request in requests_of(spec, script)]
    turn = 0
    while turn == 0 or time.perf_counter() < until:
        await _answered(client, bodies[turn % len(bodies)], met)
        turn += 1


async def _answered(client: httpx.AsyncClient, body: Any, met: Met) -> None:
    """Send one request, again where it is told to come back."""
    sent = time.perf_counter()
    while True:
        try:
            reply = await client.post("/compile", json=body)
        except httpx.HTTPError as error:
            return met.lost.append(f"{type(error).__name__}: {error}")
        if reply.status_code == 200:
            return met.latencies.append(time.perf_counter() - sent)
        wait = retry_after(reply.headers.get("Retry-After"))
        if not wait or time.perf_counter() + wait - sent > TIMEOUT_S:
            return met.lost.append(f"{reply.status_code}: {reply.text[:200]}")
        met.put_off += 1
        await asyncio.sleep(wait)


def requests_of(spec: EpisodeSpec, script: Script) -> list[CompileRequest]:
    """Make an episode's requests, as the loop asks them; soft tokens are asked for beside every emission."""
    state, made = BriefState(spec.goal), list[CompileRequest]()
    for t in range(STEPS):
        history = tuple(script.said(earlier).action for earlier in made)
        made.append(CompileRequest(spec.goal, spec.memory, state, observation(t).text, history=history))
        state, _ = apply_ops(script.emission(made[-1]).ops, state)
    return made


async def _compiled(client: httpx.AsyncClient) -> tuple[float, float]:
    """Read how many requests were compiled, in how many batches."""
    text = (await client.get("/metrics")).text
    found = [re.search(rf"^memcompiler_{name}_total (\S+)$", text, re.M) for name in ("compilations", "batches")]
    compilations, batches = (float(match[1]) if match else 0.0 for match in found)
    return compilations, batches


def table_of(met: Sequence[Met]) -> Table:
    table = Table(title="POST /compile; milliseconds from sending to answer")
    heads = (
        "clients",
        "requests",
        "lost",
        "told to come back",
        "requests/s",
        "batch, mean",
        "50 %",
        "90 %",
        "99 %",
        "most",
    )
    for name in heads:
        table.add_column(name, justify="right")
    for one in met:
        shares = np.quantile(one.latencies or [0.0], (0.5, 0.9, 0.99, 1.0))
        counts = (str(one.clients), str(one.sent), str(len(one.lost)), str(one.put_off))
        rate = f"{len(one.latencies) / one.seconds:.1f}"
        table.add_row(*counts, rate, f"{one.batch:.1f}", *(f"{1e3 * share:.0f}" for share in shares))
    return table


if __name__ == "__main__":
    main()
