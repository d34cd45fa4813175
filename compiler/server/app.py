"""The compiler service's HTTP side.

    POST /adapter   weights of a folder, for a service that rolls out for training (403 elsewhere)
    POST /compile   a state in (`compiler.server.wire.CompileBody`), emission and soft tokens out (`CompileReply`)
    GET /health     the process lives
    GET /ready      503 until the compiler stands, and from when it has died or the service is leaving
    GET /metrics    for Prometheus, in its text format

What a client may meet: 401 a wrong key, 408 a body that does not arrive, 413 one that is too large, 422 one that cannot
be compiled as it is, 429 a full queue (Retry-After), 503 not ready, 504 out of time, 500 a failure of the compiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from compiler.records import CompileRequest
from compiler.server.queue import CompileJob, Refusal, WeightsJob
from compiler.server.service import CompilerService, ServiceLimits
from compiler.server.wire import AdapterBody, CompileBody, CompileReply, Seconds
from configs.models import COMPILER_KEY


def service_app(service: CompilerService, key: str | None = None) -> FastAPI:
    """Make the ASGI application. With a key, /compile and /adapter want it as a bearer token."""
    app = FastAPI(title="MemCompiler", docs_url=None, redoc_url=None)  # both pages would load scripts from elsewhere

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> JSONResponse:
        again = {"Retry-After": "1"} if refusal.status in (429, 503) else None
        return JSONResponse({"error": refusal.message}, refusal.status, again)

    body = {"required": True, "content": {"application/json": {"schema": CompileBody.model_json_schema()}}}

    @app.post("/compile", responses={200: {"model": CompileReply}}, openapi_extra={"requestBody": body})
    async def compile_state(request: Request) -> Response:
        with service.answering():
            reply = await _compile(service, request, key)
        return Response(reply.model_dump_json(), media_type="application/json")

    @app.post("/adapter")
    async def adapter(request: Request) -> dict[str, str]:
        await _swap(service, request, key)
        return {"status": "loaded"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> dict[str, str | None]:
        service.check_ready()
        return {"status": "ready", "weights": service.weights}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=service.metrics.content_type)

    return app


async def _compile(service: CompilerService, request: Request, key: str | None) -> CompileReply:
    """Raises: Refusal, for every reason."""
    _check_key(request, key)
    compiler, seconds = service.check_ready(), service.limits.timeout
    deadline = asyncio.get_running_loop().time() + seconds
    sent, asked = await run_in_threadpool(_read, await _body(request, service.limits, deadline))
    job = service.submit(asked, sent.sampling)
    try:
        async with _until(deadline, Refusal(504, f"no answer within {seconds:g} s: ask less at a time")):
            made = await _result(service, request, job)
    except ValueError as error:
        raise Refusal(422, str(error)) from None
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(503 if service.trouble else 500, f"{type(error).__name__}: {error}") from None
    times = Seconds(queue=job.queue_s, compile=job.compile_s)
    return CompileReply.of(made, sent.tensors, compiler.projector.config.emb_std, job.seed, times)


async def _swap(service: CompilerService, request: Request, key: str | None) -> None:
    """Raises: Refusal."""
    _check_key(request, key)
    seconds = service.limits.timeout
    deadline = asyncio.get_running_loop().time() + seconds
    raw = await _body(request, service.limits, deadline)
    try:
        order = AdapterBody.model_validate_json(raw)
    except ValidationError as error:
        raise Refusal(422, problems(error)) from None
    job = service.swap(Path(order.folder), order.version)
    try:
        async with _until(deadline, Refusal(504, f"the weights were not loaded within {seconds:g} s")):
            await _result(service, request, job)
    except Refusal:
        raise
    except Exception as error:  # the weights before stay in force
        raise Refusal(422, f"{type(error).__name__}: {error}") from None


def _check_key(request: Request, key: str | None) -> None:
    """Raises: Refusal."""
    if key is not None and not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {key}"):
        raise Refusal(401, f"wrong or missing key: set {COMPILER_KEY} as the service's is set")


async def _body(request: Request, limits: ServiceLimits, deadline: float) -> bytes:
    """Raises: Refusal, where it is too large (by its header, or in fact) or does not arrive."""
    too_large = Refusal(413, f"a request may have {limits.body:,} bytes: send fewer or smaller pictures")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body:
        raise too_large
    received = bytearray()
    async with _until(deadline, Refusal(408, f"the request did not arrive within {limits.timeout:g} s")):
        try:
            async for chunk in request.stream():
                received += chunk
                if len(received) > limits.body:
                    raise too_large
        except ClientDisconnect:
            raise _gone() from None
    return bytes(received)


def _read(raw: bytes) -> tuple[CompileBody, CompileRequest]:
    """Raises: Refusal, 422."""
    try:
        body = CompileBody.model_validate_json(raw)
        return body, body.request()
    except ValidationError as error:
        raise Refusal(422, problems(error)) from None


async def _result(service: CompilerService, request: Request, job: CompileJob | WeightsJob) -> Any:
    """What a job results in. It is given up where the client goes, or this task is cancelled (its time is over).

    Raises:
        Refusal: the client has gone.
        Exception: what the compiler raised.
    """
    result: Future[Any] = job.result
    answer, gone = asyncio.wrap_future(result), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _gone()
        return answer.result()
    finally:
        service.queue.give_up(job)
        answer.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection. The whole body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def _until(deadline: float, late: Refusal) -> AsyncIterator[None]:
    """Cancel what runs in the block at the event loop's time `deadline`. Raises: Refusal, `late`, where it has."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():  # one of the compiler's own
            raise
        raise late from None


def _gone() -> Refusal:
    return Refusal(499, "the client has gone")  # for the metrics: nobody reads it


def problems(error: ValidationError) -> str:
    """Say what is wrong where, without repeating what was sent."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in found[:10])
