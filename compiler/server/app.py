"""The HTTP application of the compiler service, and its process.

    POST /compile   a state in (`compiler.client.CompileBody`), emission and soft tokens out (`CompileReply`)
    GET /health     200 while the process runs
    GET /ready      200 once the compiler is loaded; 503 before, after it has died, and during shutdown
    GET /metrics    metrics in Prometheus' text format

Errors: 401 wrong key, 408 the body does not arrive, 413 the body is too large, 422 the body is invalid or cannot be
compiled, 429 the queue is full (Retry-After), 503 not ready, 504 time-out, 500 the compiler failed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from compiler import checkpoint
from compiler.base import TokenCompiler
from compiler.build import load_compiler, load_served_compiler, warn_about_compiler_inputs
from compiler.client import CompileBody, CompileReply, Timings
from compiler.prompt import Instructions
from compiler.records import Compilation
from compiler.server.service import CompileJob, CompilerService, Refusal
from configs.load import ConfigError
from configs.models import COMPILER_KEY, ServeConfig
from envs.registry import find
from runtime.http import KEEP_ALIVE_S, bound_socket, http_url

T = TypeVar("T")
GRACE_S = 10.0  # seconds beyond a request's time-out that a shutdown waits for running requests


def service_app(service: CompilerService, key: str | None = None) -> FastAPI:
    """Create the ASGI application. With a key, /compile requires it as a bearer token."""
    app = FastAPI(title="MemCompiler", docs_url=None, redoc_url=None)  # both pages load scripts from other hosts

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)

    body = {"required": True, "content": {"application/json": {"schema": CompileBody.model_json_schema()}}}

    @app.post("/compile", responses={200: {"model": CompileReply}}, openapi_extra={"requestBody": body})
    async def compile_state(request: Request) -> Response:
        with service.answering():
            call = _Call(service, request, key)
            compiler = service.check_ready()
            sent = await call.body()
            _check_environment(sent.environment, service.about.get("environments", ()))
            job = service.submit(await run_in_threadpool(sent.request), sent.sampling)
            compilation = await call.result(job)
            times = Timings(queue=job.queue_s, compile=job.compile_s)
            reply = CompileReply.of(
                compilation,
                tensors=sent.tensors,
                emb_std=compiler.projector.config.emb_std,
                seed=job.seed,
                seconds=times,
            )
        return Response(reply.model_dump_json(), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        service.check_ready()
        return {"status": "ready", "weights": service.weights, **service.about}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


class _Call:
    """One request to /compile. Errors are raised as Refusal."""

    def __init__(self, service: CompilerService, request: Request, key: str | None) -> None:
        self.service, self.request, self.timeout = service, request, service.config.timeout_s
        self.deadline = asyncio.get_running_loop().time() + self.timeout
        check_key(request, key, COMPILER_KEY)

    async def body(self) -> CompileBody:
        """Read and validate the body. Raises: Refusal, if it is too large, invalid or late."""
        raw = await read_body(self.request, self.service.config.max_body_mib, self.deadline)
        try:
            return await run_in_threadpool(CompileBody.model_validate_json, raw)
        except ValidationError as error:
            raise Refusal(422, problems(error)) from None

    async def result(self, job: CompileJob) -> Compilation:
        """Wait for a job's result. Cancel the job if the client disconnects, or after the time-out."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await unless_gone(self.request, asyncio.wrap_future(job.result))
        except TimeoutError:
            raise Refusal(504, f"no result within {self.timeout:g} s: send fewer requests at a time") from None
        finally:
            self.service.give_up(job)


def _check_environment(name: str, known: Sequence[str]) -> None:
    """Check the environment of a request. Raises: Refusal, if the service has no instructions for it, or those of
    several and the request names none."""
    if known and name not in known if name else len(known) > 1:
        raise Refusal(422, f"environment: must be one of {', '.join(known)}")


def check_key(request: Request, key: str | None, name: str) -> None:
    """Check the bearer token of a request, in constant time; without a key, nothing is required.

    Args:
        name: the environment variable of the key.

    Raises:
        Refusal: another token, or none.
    """
    header = request.headers.get("authorization", "").encode("latin-1")
    if key is not None and not hmac.compare_digest(header, f"Bearer {key}".encode()):
        raise Refusal(401, f"wrong or missing key: set {name} to the service's key")


async def read_body(request: Request, max_mib: float, deadline: float) -> bytes:
    """Read the body of a request. Raises: Refusal, if it is too large, or not there at the event loop's `deadline`."""
    most, received = int(max_mib * 2**20), bytearray()
    too_large = Refusal(413, f"a request may have at most {most:,} bytes: send fewer or smaller pictures")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and float(length) > most:
        raise too_large
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in request.stream():
                received += chunk
                if len(received) > most:
                    raise too_large
        return bytes(received)
    except TimeoutError:
        raise Refusal(408, "the request did not arrive in time") from None
    except ClientDisconnect:
        raise gone_client() from None


async def disconnected(request: Request) -> None:
    """Return when the client disconnects, after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await something for a client, after its body has been read.

    Raises:
        Refusal: 499, if the client disconnects before; the work is then cancelled.
    """
    wanted, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise gone_client()
        return wanted.result()
    finally:
        gone.cancel()
        wanted.cancel()  # does nothing once it is there


def gone_client() -> Refusal:
    return Refusal(499, "the client has gone")  # counted by the metrics, never sent


def problems(error: ValidationError) -> str:
    """List the invalid fields without quoting their values."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in found[:10])


# -- the process ------------------------------------------------------------------------------------------------------


def serve_compiler(config: ServeConfig, host: str, port: int, key: str | None = None) -> None:
    """Load a trained compiler and serve it until SIGTERM or SIGINT. A second signal cancels running requests.

    Raises:
        ConfigError: no checkpoint is set.
        ValueError: the port is taken.
        Exception: loading the compiler failed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    service = service_of(config)
    bound = bound_socket(host, port)
    settings: Any = {"log_level": "warning", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_S}
    server = uvicorn.Server(uvicorn.Config(service_app(service, key), **settings))
    shut_down_on_signal(server, service)
    service.start()
    threading.Thread(target=_announce, args=(server, service, http_url(*bound.getsockname()[:2])), daemon=True).start()
    server.run(sockets=[bound])
    if service.failure is not None:
        raise service.failure


def service_of(config: ServeConfig, gather_s: float = 0.005) -> CompilerService:
    """Create the service of a trained compiler, which is loaded when it starts; `gather_s` as of `CompilerService`.
    Raises: ConfigError, if no checkpoint is set; CheckpointError."""
    if config.compiler.checkpoint is None:
        raise ConfigError("serving needs a trained compiler: --checkpoint RUN")
    found = checkpoint.find(Path(config.compiler.checkpoint))
    environments = (config.env,) if config.env else checkpoint.environments(found)
    told = {name: find(name).compiler_instructions for name in environments}
    instructions = told if len(told) > 1 else next(iter(told.values()), "")
    warn_about_compiler_inputs(checkpoint.compiler_inputs(found), config.compiler, str(found))
    about = {
        "executor_reads": checkpoint.executor_inputs(found),
        "compiler_reads": config.compiler.reading,
        "environments": list(environments),
        "text": checkpoint.writes_text(found),
    }
    return CompilerService(lambda: _load(config, instructions), config, checkpoint.sha256(found), about, gather_s)


def _load(config: ServeConfig, instructions: Instructions) -> TokenCompiler:
    if config.compiler.engine == "vllm":
        return load_served_compiler(config.compiler, config.seed, instructions)
    return load_compiler(config.compiler, None, config.seed, instructions)  # a checkpoint needs no executor


def shut_down_on_signal(server: Any, service: CompilerService) -> None:
    """On the first signal, refuse new requests, wait for running ones and exit; on the second, exit at once."""

    def wait_and_leave() -> None:
        deadline = time.monotonic() + service.config.timeout_s + GRACE_S
        while service.active and time.monotonic() < deadline:
            time.sleep(0.05)
        server.should_exit = True

    def handle_exit(number: int, frame: object) -> None:
        if service.leaving:
            server.should_exit = server.force_exit = True
            return
        service.leaving = True
        threading.Thread(target=wait_and_leave, daemon=True).start()

    server.handle_exit = handle_exit


def _announce(server: Any, service: CompilerService, url: str) -> None:
    """Print the service's URL when it is ready; stop the server if loading fails."""
    print(f"starting at {url}", flush=True)
    while service.trouble is not None and service.failure is None and not service.leaving:
        time.sleep(0.05)
    if service.failure is not None:
        server.should_exit = True
    elif not service.leaving:
        print(f"ready: compiler.engine=http compiler.url={url}", flush=True)
