"""Measures what the proxy adds to the latency of a chat request, beside the compiler's own time.

    memcompiler bench serving proxy

Client, proxy and an upstream that answers at once are three processes on loopback. The client plays conversations that
grow by a turn a request, one request at a time: to the upstream itself, and through the proxy under each delivery. The
compiler is a stand-in that takes a fixed time, which is measured inside the proxy and subtracted. On a busy machine the
latencies are those of waiting for a processor; the proxy's own processor time, in the last column, is not.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest, Decoding
from configs.models import CompilerConfig, ServeConfig
from configs.proxy import ProxyConfig
from eval.table import markdown_table
from memory.entry import MemoryEntry, Provenance
from runtime.http import LOOPBACK, bound_socket, http_url, responds

SYSTEM = "You are an agent in a household. Answer with one command. " * 40
VIEW = "On the shelf 1, you see a mug 1, a plate 2, a book 1, and a cellphone 3. " * 4
DELIVERIES = ("none", "static", "compiled")
ENTRIES = 100  # in the memory
READY_S = 120.0
FORK: Any = multiprocessing.get_context("fork")


class TimedCompiler:
    """A compiler that takes a fixed time, and tells how long it took."""

    broken = None

    def __init__(self, seconds: float, took: Any) -> None:
        self.seconds, self.took, self.decoding = seconds, took, Decoding()
        self.projector = SimpleNamespace(config=SimpleNamespace(emb_std=None))

    def compile(self, requests: Sequence[CompileRequest], seeds: Any = None, wanted: Any = None) -> list[Compilation]:
        started = time.perf_counter()
        time.sleep(self.seconds)
        emission = Emission("go to cabinet 2", "in home 1 the mug was in cabinet 2")
        made = [Compilation(render(emission), emission, request=request) for request in requests]
        self.took.put(time.perf_counter() - started)
        return made


def measure_proxy(
    requests: Annotated[int, typer.Option(min=10, max=10_000, help="Requests of each kind.")] = 200,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Turns of a conversation.")] = 10,
    compile_ms: Annotated[float, typer.Option(min=0, max=1000, help="Milliseconds of a compilation.")] = 20.0,
) -> None:
    """Measure the latency that the proxy adds to a chat request, beside compiling."""
    took, sockets = FORK.SimpleQueue(), [bound_socket(LOOPBACK, 0) for _ in range(2)]
    urls = [http_url(LOOPBACK, bound.getsockname()[1]) for bound in sockets]
    with tempfile.TemporaryDirectory(prefix="memcompiler-proxy-") as folder:
        work = (Path(folder), f"{urls[0]}/v1", compile_ms / 1e3, took, sockets[1])
        with forked(_serve_upstream, sockets[0]), forked(_serve_proxy, *work) as proxy:
            _wait_until_ready(urls)
            typer.echo("\n".join(measured_rows(urls, took, lambda: _processor_seconds(proxy), requests, turns)))


@contextlib.contextmanager
def forked(target: Callable[..., object], *arguments: Any) -> Iterator[int | None]:
    """Run a function in a child process; yield its id, and terminate it at the end."""
    child = FORK.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child.pid
    finally:
        child.terminate()
        child.join(10)


@contextlib.contextmanager
def scripted_upstream() -> Iterator[str]:
    """Serve the scripted upstream in a process of its own; yield its URL."""
    with contextlib.closing(bound_socket(LOOPBACK, 0)) as bound, forked(_serve_upstream, bound):
        yield http_url(LOOPBACK, bound.getsockname()[1])


def _wait_until_ready(urls: Sequence[str]) -> None:
    until = time.monotonic() + READY_S
    while not all(responds(f"{url}/health") for url in urls):
        if time.monotonic() > until:
            raise RuntimeError(f"upstream and proxy did not start within {READY_S:g} s")
        time.sleep(0.1)


def _processor_seconds(pid: int | None) -> float:
    """Return the processor time of a process so far (Linux)."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measured_rows(
    urls: Sequence[str], took: Any, processor: Callable[[], float], requests: int, turns: int
) -> list[str]:
    """Send all requests, the kinds by turns, so that other load meets all of them; return a table."""
    kinds = {"the upstream alone": (urls[0], ""), **{f"proxy, {name}": (urls[1], name) for name in DELIVERIES}}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    busy: dict[str, list[float]] = {kind: [] for kind in kinds}
    compiled: list[float] = []
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        for number in range(-turns, requests):  # the first conversation is a warm-up
            body = _conversation(number // turns, number % turns)
            for kind, (url, name) in kinds.items():
                headers = {"X-Memcompiler-Deliver": name} if name else {}
                busy_before, started = processor(), time.perf_counter()
                client.post(f"{url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
                seconds = time.perf_counter() - started
                own = took.get() if name == "compiled" else 0.0
                if number >= 0:
                    spent[kind].append(seconds - own)
                    busy[kind].append(processor() - busy_before)
                    compiled += [own] * bool(own)
    base = np.quantile(spent["the upstream alone"], (0.5, 0.9))
    rows = [["compiling (subtracted below)", *_ms(np.quantile(compiled, (0.5, 0.9))), "", "", ""]]
    for kind, values in spent.items():
        quantiles = np.quantile(values, (0.5, 0.9))
        rows.append([kind, *_ms(quantiles), *_ms(quantiles - base), *_ms([np.median(busy[kind])])])
    heads = ["", "50 %, ms", "90 %", "added, 50 %", "added, 90 %", "processor, 50 %"]
    return markdown_table(heads, rows)


def _ms(seconds: Any) -> list[str]:
    return [f"{1e3 * value:.2f}" for value in seconds]


def _conversation(number: int, turn: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Task {number}: find it. {VIEW}"}]
    for past in range(turn):
        messages.append({"role": "assistant", "content": f"go to shelf {past}"})
        messages.append({"role": "user", "content": f"{past}. {VIEW}"})
    return {"model": "m", "messages": messages}


# -- the two servers ---------------------------------------------------------------------------------------------------


async def checksum_api(scope: Any, receive: Any, send: Any) -> None:
    """Answer as an OpenAI API, at once, with a checksum of what was sent."""
    if scope["type"] != "http":
        return
    sent, more = 0, True
    while more:
        part = await receive()
        sent, more = zlib.crc32(part.get("body", b""), sent), part.get("more_body", False)
    message = {"role": "assistant", "content": f"go to shelf {sent}"}
    answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def _serve_upstream(bound: Any) -> None:
    import uvicorn

    uvicorn.run(checksum_api, fd=bound.fileno(), log_level="critical", lifespan="off")


def _serve_proxy(folder: Path, upstream: str, seconds: float, took: Any, bound: Any) -> None:
    import uvicorn

    config = ProxyConfig.model_validate({"upstream": {"url": upstream}})
    app = timed_proxy(folder, config, TimedCompiler(seconds, took))
    uvicorn.run(app, fd=bound.fileno(), log_level="critical")


def timed_proxy(folder: Path, config: ProxyConfig, clock: Any) -> Any:
    """Create the application of a proxy with a stand-in compiler and a memory of `ENTRIES` entries."""
    from compiler.server.service import CompilerService
    from data_gen.memory_factory import initialise_memory, open_memory
    from proxy.app import Proxy, proxy_app
    from proxy.guide import Guide
    from proxy.mapping import mapped
    from proxy.serve import compile_in
    from proxy.sessions import SessionStore
    from proxy.upstream import Upstream

    memory: Any = open_memory(config.memory, folder / "bank")
    initialise_memory(memory)
    memory.write(
        MemoryEntry(f"e{i}", f"Task {i}: find it\ngo to shelf {i}", Provenance(f"t{i}", "", f"Task {i}", "train", True))
        for i in range(ENTRIES)
    )
    served = ServeConfig(compiler=CompilerConfig(), queue=config.queue, batch=config.batch)
    service = CompilerService(lambda: clock, served, gather_s=0.0)
    service.start()
    guide = Guide(
        config=config,
        mapping=mapped(config.mapping),
        store=SessionStore(folder / "sessions", config.sessions),
        memory=memory,
        compile=compile_in(service),
        compiler=clock,
    )
    return proxy_app(Proxy(guide, Upstream(config.upstream)))
