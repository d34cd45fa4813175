"""Measure the compiler service under load: latency by number of clients, and lost requests.

    memcompiler bench serving load                                # starts a service of the household's compiler base
    memcompiler bench serving load --url http://127.0.0.1:8100    # a running service
    memcompiler bench serving load --step-ms 100                  # a simulated engine, lockstep and continuous
    memcompiler bench serving load --slow 8 --half-open 8 --cancelling 8    # beside clients that behave badly

Each client sends its next request when the last one is answered. A client that is put off (429 or 503 with
Retry-After) retries, and its latency counts from the first attempt. A request that ends without an answer is lost.
Every client plays its own scripted home (`benchmarks.serving.scripted`). Exit status 1 if a request is lost, or gets
another answer than before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import numpy as np
import torch
import typer

from agent.episode import EpisodeSpec
from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.in_thread import serving
from benchmarks.serving.request import Request
from benchmarks.serving.scripted import Script, read_script
from benchmarks.serving.traffic import TIMEOUT_S, LoadResult, Traffic, run_clients
from benchmarks.simulated_engine import simulated_compiler, simulated_vllm
from benchmarks.sizes import HEADS
from compiler import checkpoint
from compiler.build import load_compiler
from compiler.client import CompileBody, SamplingBody
from configs.models import Batching, CompilerConfig, ServeConfig, Soft, model_path
from eval.table import markdown_table
from lm.backbone import load_encoder
from runtime.http import LOOPBACK, free_port, http_url, responds
from runtime.processes import ChildProcess
from runtime.progress import disable_library_progress_bars
from soft_mem.projector import Projector, ProjectorConfig

MODEL, EXECUTOR_WIDTH, N_SOFT = "zoo/household/compiler", 128, 4
SIMULATED = "zoo/household/executor"  # model whose tokens a simulated engine writes: a text model
STEPS = 10  # of an episode, which then repeats


def measure_load(
    url: Annotated[str | None, typer.Option(help="Running service (default: start one).")] = None,
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients.")] = "1,8,64",
    seconds: Annotated[float, typer.Option(min=0, help="Duration for each number of clients.")] = 20.0,
    memory_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an episode's memory.")] = 300,
    queue: Annotated[int, typer.Option(min=1, help="Queue length of the started service.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest emission of the started service.")] = 48,
    engine: Annotated[str, typer.Option(help="Engine of the started service: hf or vllm.")] = "hf",
    batching: Annotated[str, typer.Option(help="lockstep, continuous or auto, of the started service.")] = "auto",
    step_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of a simulated engine's step; 0: none.")] = 0,
    slow: Annotated[int, typer.Option(min=0, help="Further clients that send a request in pieces.")] = 0,
    half_open: Annotated[int, typer.Option(min=0, help="Further clients that send half a request and wait.")] = 0,
    cancelling: Annotated[int, typer.Option(min=0, help="Further clients that close before the answer.")] = 0,
) -> None:
    """Measure latency and lost requests of the compiler service by number of clients."""
    disable_library_progress_bars()
    script = Script(MODEL, MODEL, memory_tokens, read_script())
    numbers, results, lost = [int(number) for number in clients.split(",")], list[LoadResult](), list[str]()
    if step_ms:
        services = {way: partial(simulated_service, step_ms / 1e3, way, queue) for way in ("lockstep", "continuous")}
    else:
        services = {"": partial(started_service, queue, max_new_tokens, engine, batching)}
    for way, service in services.items():
        bad = BadClients(slow, half_open, cancelling)
        with contextlib.nullcontext((url, None)) if url else service() as (at, pid):
            asyncio.run(load(at, script, 1, 0.0))  # warm-up
            measured = [asyncio.run(load(at, script, number, seconds, bad, pid)) for number in numbers]
        typer.echo("\n".join([*([f"{way}:"] if way else []), *table(measured), *details(measured, bad)]))
        results += measured
        lost += bad.lost
    for result in results:
        lost += [*result.lost, *[f"put off for {TIMEOUT_S:g} s"] * result.given_up]
    for reason in sorted(set(lost)):
        typer.echo(f"  {lost.count(reason)} lost: {reason}")
    different = sum(result.different for result in results)
    typer.echo(f"lost: {len(lost)}, different: {different}")
    raise typer.Exit(bool(lost or different))


@contextlib.contextmanager
def simulated_service(step_s: float, batching: Batching, queue: int) -> Iterator[tuple[str, int]]:
    """Serve a compiler on a simulated engine from a thread; yield its URL and process, and stop it at the end."""
    from compiler.server.app import service_app
    from compiler.server.service import CompilerService

    encoder = load_encoder(model_path(SIMULATED))
    projector = Projector(ProjectorConfig(8, EXECUTOR_WIDTH, N_SOFT))
    config = ServeConfig(queue=queue, timeout_s=TIMEOUT_S, batching=batching)
    with simulated_vllm():
        service = CompilerService(lambda: simulated_compiler(encoder, projector, step_s), config)
        service.start()
        with serving(service_app(service)) as url:
            deadline = time.monotonic() + 60
            while not responds(f"{url}/ready") and time.monotonic() < deadline:
                time.sleep(0.05)
            yield url, os.getpid()


@contextlib.contextmanager
def started_service(queue: int, max_new_tokens: int, engine: str, batching: str) -> Iterator[tuple[str, int]]:
    """Start a service with a fresh adapter and projector; yield its URL and process, and stop it at the end."""
    soft = Soft(n_tokens=N_SOFT, emb_std=0.02)
    config = CompilerConfig(model=MODEL, dtype="float32", instructions="none", soft=soft, max_new_tokens=max_new_tokens)
    url = http_url(LOOPBACK, port := free_port())
    with tempfile.TemporaryDirectory(prefix="memcompiler-load-") as folder:
        executor = SimpleNamespace(embedding_table=torch.zeros(1, EXECUTOR_WIDTH))
        checkpoint.save_weights(Path(folder), load_compiler(config, executor))
        command = [sys.executable, "-m", "memcompiler", "serve", "compiler", "-c", "serve/quickstart"]
        settings = [f"queue={queue}", f"compiler.max_new_tokens={max_new_tokens}", f"timeout_s={TIMEOUT_S}"]
        settings += [f"compiler.engine={engine}", f"batching={batching}"]
        with ChildProcess([*command, "--checkpoint", folder, "--port", str(port), *settings], output="kept") as service:
            service.wait_until_ready(lambda: responds(f"{url}/ready"), 300)
            yield url, service.pid


async def load(
    url: str, script: Script, clients: int, seconds: float, bad: BadClients | None = None, pid: int | None = None
) -> LoadResult:
    """Load a compiler service, as `run_clients`; each client plays a home of its own."""
    before = await _compile_counts(url)
    result = await run_clients(url, compile_traffic(script), clients, seconds, bad=bad, pid=pid)
    after = await _compile_counts(url)
    result.batch = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    return result


def compile_traffic(script: Script) -> Traffic:
    """Return the requests of clients that repeat the steps of a scripted episode."""

    def requests(number: int) -> Iterator[list[Request]]:
        spec = script.spec(number)
        bodies = compile_bodies(script, spec, STEPS)
        return itertools.cycle([[Request(f"{spec.task.id}, {turn}", body)] for turn, body in enumerate(bodies)])

    return Traffic("/compile", requests, lambda reply: reply["text"])


def compile_bodies(script: Script, spec: EpisodeSpec, steps: int) -> list[Any]:
    """Return the compile requests of a scripted episode as bodies for the service."""
    return [CompileBody.of(request, SamplingBody(), ("mu",)) for request in script.compile_requests(spec, steps)]


async def _compile_counts(url: str) -> tuple[float, float]:
    """Read the numbers of compiled requests and of batches from the service's metrics."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        text = (await client.get("/metrics")).text
    found = [re.search(rf"^memcompiler_{name}_total (\S+)$", text, re.M) for name in ("compilations", "batches")]
    compilations, batches = (float(match[1]) if match else 0.0 for match in found)
    return compilations, batches


def details(results: Sequence[LoadResult], bad: BadClients) -> list[str]:
    """Return what the bad clients did, and the sizes of the service."""
    did = [f"beside them: {', '.join(f'{n} {what}' for what, n in sorted(bad.did.items()))}"] if bad.did else []
    rows = [result.sizes.row(f"service, {result.clients} clients") for result in results if result.sizes.done]
    return [*did, *(["", *markdown_table(HEADS, rows)] if rows else [])]


def table(results: Sequence[LoadResult]) -> list[str]:
    heads = [
        "clients",
        "requests",
        "lost",
        "retries",
        "requests/s",
        "mean batch",
        "50 %, ms",
        "90 %",
        "99 %",
        "maximum",
    ]
    rows = []
    for result in results:
        counts = [result.clients, result.sent, len(result.lost) + result.given_up, result.retries]
        rates = [f"{result.served:.1f}", f"{result.batch:.1f}"]
        quantiles = np.quantile(result.latencies or [0.0], (0.5, 0.9, 0.99, 1.0))
        rows.append([*map(str, counts), *rates, *(f"{1e3 * seconds:.0f}" for seconds in quantiles)])
    return markdown_table(heads, rows)
