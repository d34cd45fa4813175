"""The Memory Compiler as an HTTP service: a bounded queue, one thread that compiles what waits as batches, and FastAPI.

    POST /adapter   weights of a folder, for a service that rolls out for training (403 elsewhere)
    POST /compile   a state in (`compiler.server.wire.CompileBody`), emission and soft tokens out (`CompileReply`)
    GET /health     the process lives
    GET /ready      503 until the compiler stands, and from when it has died or the service is leaving
    GET /metrics    for Prometheus, in its text format

What a client may meet: 401 a wrong key, 408 a body that does not arrive, 413 one that is too large, 422 one that cannot
be compiled as it is, 429 a full queue (Retry-After), 503 not ready, 504 out of time, 500 a failure of the compiler. The
log holds no request contents: of an exception, type and place are written down, never its message.

Needs fastapi and uvicorn, which come with the vLLM extras.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import ValidationError

from compiler.records import Compilation, CompileRequest, Decoding
from compiler.server.wire import AdapterBody, CompileBody, CompileReply, SamplingBody, Seconds
from configs.compiler import COMPILER_KEY

log = logging.getLogger("memcompiler.service")
RETRY_AFTER = {"Retry-After": "1"}


class Backend(Protocol):
    """What is served: `compiler.hf.MemoryCompiler`, `compiler.vllm.VllmCompiler`."""

    decoding: Decoding
    generator: Any
    projector: Any

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]: ...


@runtime_checkable
class SeededBackend(Protocol):
    """A backend that draws each row of a batch with a seed of its own, knows its cache and notices its death."""

    cached_tokens: list[int]  # of each prompt of the last batch, from the prefix cache

    @property
    def broken(self) -> str | None: ...

    def compile(self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None) -> list[Compilation]: ...


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    queue: int = 256  # requests that wait
    batch: int = 64  # requests of one batch
    timeout: float = 120.0  # seconds of one request, from its first byte to its answer
    body: int = 32 << 20  # bytes of one request
    gather: float = 0.005  # seconds that a batch waits for company


class Refusal(Exception):
    """A request that gets no compilation: its status and what the client is told."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compilation, and what the reply says beside it."""

    compilation: Compilation
    seed: int | None
    cached_tokens: int | None
    emb_std: float | None
    seconds: Seconds


@dataclass(slots=True)
class _Swap:
    """An order for other weights, which are in force for what is submitted after it."""

    folder: Path
    version: int
    future: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class _Job:
    request: CompileRequest
    decoding: Decoding
    seed: int | None  # None where nothing is drawn at random
    future: Future[Compiled] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)

    @property
    def group(self) -> tuple[float, float, bool]:
        return self.decoding.temperature, self.decoding.soft_temperature, self.seed is not None


class CompilerService:
    """Queue and thread. `make` loads the compiler, in that thread; all else is thread-safe.

    Args:
        reload: loads the weights of a folder as those of a version and returns their SHA-256; None where the service
            keeps what it has.
        weights: SHA-256 of what the checkpoint adds to its base, which /ready tells.
    """

    def __init__(
        self, make: Callable[[], Backend], limits: ServiceLimits | None = None, seed: int = 0,
        reload: Callable[[Backend, Path, int], str] | None = None, weights: str | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.metrics = limits or ServiceLimits(), Metrics()
        self.weights = weights
        self.failure: Exception | None = None  # why there is no compiler
        self.leaving = False
        self.active = 0  # requests that are being answered
        self._make, self._backend, self._reload = make, None, reload
        self._version: int | None = None  # of the weights that were last sent
        self._jobs: queue.Queue[_Job | _Swap] = queue.Queue(self.limits.queue)
        self._seeds = random.Random(seed)
        self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Why nothing can be compiled now; None when the service is ready."""
        if self.leaving:
            return "the service is shutting down"
        if self.failure is not None:
            return f"the compiler did not start: {self.failure}"
        if self._backend is None:
            return "the compiler is starting"
        broken = self._backend.broken if isinstance(self._backend, SeededBackend) else None
        return broken or (None if self._thread.is_alive() else "the compiler's thread died: start the service anew")

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def submit(self, request: CompileRequest, sampling: SamplingBody) -> Future[Compiled]:
        """Raises: Refusal, 503 or 429."""
        backend = self._backend
        if backend is None or self.trouble is not None:
            raise Refusal(503, self.trouble or "the compiler is starting", RETRY_AFTER)
        decoding = backend.decoding
        if sampling.temperature is not None:
            decoding = replace(decoding, temperature=sampling.temperature, latent_temperature=None)
        if sampling.latent_temperature is not None:
            decoding = replace(decoding, latent_temperature=sampling.latent_temperature)
        random_draw = decoding.temperature > 0 or decoding.soft_temperature > 0
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(31)
        job = _Job(request, decoding, seed if random_draw else None)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Refusal(429, f"{self.limits.queue} requests wait already: try again", RETRY_AFTER) from None
        return job.future

    def swap(self, folder: Path, version: int) -> Future[None]:
        """Weights for all that is submitted from now on. Several clients may send the same version: it is loaded once.

        Raises: Refusal, 403, 503 or 429.
        """
        if self._reload is None:
            raise Refusal(403, "this service keeps the weights it has: start it with adapters=FOLDER for training")
        if self._backend is None or self.trouble is not None:
            raise Refusal(503, self.trouble or "the compiler is starting", RETRY_AFTER)
        order = _Swap(folder, version)
        try:
            self._jobs.put_nowait(order)
        except queue.Full:
            raise Refusal(429, f"{self.limits.queue} requests wait already: try again", RETRY_AFTER) from None
        return order.future

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._backend = self._make()
        except Exception as error:
            self.failure = error
            return
        while True:
            jobs, order = self._collect()
            for _, group in groupby(sorted(jobs, key=lambda job: job.group), key=lambda job: job.group):
                live = [job for job in group if job.future.set_running_or_notify_cancel()]
                for batch in self._batches(live):
                    self._settle(batch)
            if order is not None and order.future.set_running_or_notify_cancel():
                self._obey(order)

    def _collect(self) -> tuple[list[_Job], _Swap | None]:
        """What waits, at most one batch, once something does; up to an order for other weights."""
        jobs: list[_Job] = []
        deadline = None  # of a batch that has begun
        while len(jobs) < self.limits.batch:
            try:
                item = self._jobs.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, _Swap):
                return jobs, item
            jobs.append(item)
            deadline = deadline or time.monotonic() + self.limits.gather
        return jobs, None

    def _obey(self, order: _Swap) -> None:
        assert self._backend is not None and self._reload is not None
        try:
            if order.version != self._version:
                self.weights = self._reload(self._backend, order.folder, order.version)
                self._version = order.version
            order.future.set_result(None)
        except Exception as error:
            order.future.set_exception(error)

    def _batches(self, jobs: Sequence[_Job]) -> Iterator[Sequence[_Job]]:
        """A backend with one stream of random numbers draws for one seed at a time."""
        if jobs and jobs[0].seed is not None and not isinstance(self._backend, SeededBackend):
            yield from ([job] for job in jobs)
        elif jobs:
            yield jobs

    def _settle(self, jobs: Sequence[_Job]) -> None:
        """Give every job its result. Where a batch fails, each of its jobs is tried alone: which one's fault is it?"""
        started = time.perf_counter()
        try:
            made = self._compile(jobs)
        except Exception as error:
            if len(jobs) > 1 and self.trouble in (None, "the service is shutting down"):
                for job in jobs:
                    self._settle([job])
                return
            self.metrics.count("failures_total")
            log.error("a batch of %d failed: %s", len(jobs), described(error))
            for job in jobs:
                job.future.set_exception(error)
            return
        seconds = time.perf_counter() - started
        self.metrics.batch(jobs, made, seconds)
        cached = self._backend.cached_tokens if isinstance(self._backend, SeededBackend) else [None] * len(jobs)
        config = getattr(self._backend.projector, "config", None)  # type: ignore[union-attr]
        emb_std = None if config is None else config.emb_std
        for job, compilation, tokens in zip(jobs, made, cached, strict=True):
            times = Seconds(queue=started - job.since, compile=seconds)
            job.future.set_result(Compiled(compilation, job.seed, tokens, emb_std, times))

    def _compile(self, jobs: Sequence[_Job]) -> list[Compilation]:
        backend, requests, own = self._backend, [job.request for job in jobs], [job.seed for job in jobs]
        assert backend is not None
        default, backend.decoding = backend.decoding, jobs[0].decoding
        try:
            if own[0] is None:
                return backend.compile(requests)
            if isinstance(backend, SeededBackend):
                return backend.compile(requests, seeds=own)  # type: ignore[arg-type]
            backend.generator.manual_seed(own[0])
            return backend.compile(requests)
        finally:
            backend.decoding = default


# -- HTTP -------------------------------------------------------------------------------------------------------------


def service_app(service: CompilerService, key: str | None = None) -> FastAPI:
    """The ASGI application. With a key, /compile wants it as a bearer token."""
    app = FastAPI(title="MemCompiler", docs_url=None, redoc_url=None)  # both pages would load scripts from elsewhere

    async def compile_state(request: Request) -> Response:
        started, headers = time.perf_counter(), None
        service.active += 1
        try:
            content = await _answer(service, request, key)
            status = 200
        except Refusal as refusal:
            status, headers = refusal.status, refusal.headers
            content = JSONResponse({"error": refusal.message}).body
        finally:
            service.active -= 1
        service.metrics.request(status, time.perf_counter() - started)
        return Response(content, status, headers, media_type="application/json")

    async def adapter(request: Request) -> JSONResponse:
        try:
            await _swap(service, request, key)
        except Refusal as refusal:
            return JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)
        return JSONResponse({"status": "loaded"})

    async def health() -> dict[str, str]:
        return {"status": "live"}

    async def ready() -> JSONResponse:
        trouble = service.trouble
        if trouble is not None:
            return JSONResponse({"status": "not ready", "error": trouble}, 503, RETRY_AFTER)
        return JSONResponse({"status": "ready", "weights": service.weights})

    async def metrics() -> PlainTextResponse:
        page = service.metrics.page(ready=service.trouble is None, waiting=service.waiting)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    body = {"required": True, "content": {"application/json": {"schema": CompileBody.model_json_schema()}}}
    app.add_api_route("/compile", compile_state, methods=["POST"], openapi_extra={"requestBody": body},
                      responses={200: {"model": CompileReply}}, response_model=None)  # fmt: skip
    app.add_api_route("/adapter", adapter, methods=["POST"], response_model=None)
    app.add_api_route("/health", health)
    app.add_api_route("/ready", ready, response_model=None)
    app.add_api_route("/metrics", metrics, response_model=None)
    return app


def _check_key(request: Request, key: str | None) -> None:
    """Raises: Refusal."""
    if key is not None and not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {key}"):
        raise Refusal(401, f"wrong or missing key: set {COMPILER_KEY} as the service's is set")


async def _swap(service: CompilerService, request: Request, key: str | None) -> None:
    """Raises: Refusal."""
    _check_key(request, key)
    try:
        body = AdapterBody.model_validate_json(await _body(request, service.limits))
    except ValidationError as error:
        raise Refusal(422, problems(error)) from None
    future = asyncio.wrap_future(service.swap(Path(body.folder), body.version))
    try:
        await asyncio.wait_for(future, service.limits.timeout)
    except TimeoutError:
        raise Refusal(504, f"the weights were not loaded within {service.limits.timeout:g} s") from None
    except Exception as error:  # the weights before stay in force
        raise Refusal(422, f"{type(error).__name__}: {error}") from None


async def _answer(service: CompilerService, request: Request, key: str | None) -> bytes:
    """The reply's JSON. Raises: Refusal, for every reason."""
    _check_key(request, key)
    if trouble := service.trouble:
        raise Refusal(503, trouble, RETRY_AFTER)
    deadline = time.monotonic() + service.limits.timeout
    raw = await _body(request, service.limits)
    try:
        body = await run_in_threadpool(CompileBody.model_validate_json, raw)
        asked = await run_in_threadpool(body.request)
    except ValidationError as error:
        raise Refusal(422, problems(error)) from None
    future = asyncio.wrap_future(service.submit(asked, body.sampling))
    try:
        made = await asyncio.wait_for(future, max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise Refusal(504, f"no answer within {service.limits.timeout:g} s: ask less at a time") from None
    except ValueError as error:
        raise Refusal(422, str(error)) from None
    except Exception as error:
        raise Refusal(503 if service.trouble else 500, f"{type(error).__name__}: {error}") from None
    reply = CompileReply.of(
        made.compilation, body.tensors, made.emb_std, made.seed, made.cached_tokens, made.seconds
    )  # fmt: skip
    return reply.model_dump_json().encode()


async def _body(request: Request, limits: ServiceLimits) -> bytes:
    """Raises: Refusal, where it is too large (by its header, or in fact) or does not arrive."""
    too_large = Refusal(413, f"a request may have {limits.body:,} bytes: send fewer or smaller pictures")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body:
        raise too_large
    received = bytearray()
    try:
        async with asyncio.timeout(limits.timeout):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limits.body:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the request did not arrive within {limits.timeout:g} s") from None
    return bytes(received)


def problems(error: ValidationError) -> str:
    """What is wrong where, without repeating what was sent."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in found[:10])


def described(error: BaseException) -> str:
    """Type and place of an exception. Its message may quote what a client has sent."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__} at " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames))


# -- metrics ----------------------------------------------------------------------------------------------------------

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Metrics:
    """Counters in Prometheus' text format. By hand: its client library comes with vLLM only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def count(self, name: str, by: float = 1) -> None:
        with self._lock:
            self._values[name] = self._values.get(name, 0) + by

    def request(self, status: int, seconds: float) -> None:
        """One answered request, whatever the answer."""
        self.count(f'requests_total{{code="{status}"}}')
        self.count("request_seconds_sum", seconds)
        self.count("request_seconds_count")
        for bound in (*_BUCKETS, float("inf")):
            self.count(f'request_seconds_bucket{{le="{"+Inf" if bound == float("inf") else bound}"}}', seconds <= bound)

    def batch(self, jobs: Sequence[_Job], made: Sequence[Compilation], seconds: float) -> None:
        """One compiled batch."""
        self.count("batches_total")
        self.count("compilations_total", len(jobs))
        self.count("compile_seconds_total", seconds)
        self.count("tokens_in_total", sum(c.tokens_in for c in made))
        self.count("tokens_out_total", sum(c.tokens_out for c in made))
        self.count("parse_errors_total", sum(c.parse_error is not None for c in made))

    def page(self, ready: bool, waiting: int) -> str:
        with self._lock:
            values = {**self._values, "ready": float(ready), "waiting": float(waiting)}
        lines, seen = [], set()
        for name, value in values.items():
            family = name.partition("{")[0]
            family = family.rpartition("_")[0] if family.startswith("request_seconds") else family
            if family not in seen:
                seen.add(family)
                lines.append(f"# TYPE memcompiler_{family} {_kind(family)}")
            lines.append(f"memcompiler_{name} {value:g}" if value != int(value) else f"memcompiler_{name} {int(value)}")
        return "\n".join(lines) + "\n"


def _kind(family: str) -> str:
    return "counter" if family.endswith("_total") else "histogram" if family == "request_seconds" else "gauge"
