"""The compiler behind a bounded queue. One thread loads it, and then takes what waits: with lockstep batching a batch
at a time, with continuous batching each request at once, so that none waits for another one's longer emission.

A cancelled request frees the compiler: it leaves the queue, or the compiler, which checks before every token, stops
writing it. The log never holds request contents: of an exception, it names type and place without the message.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from compiler.base import TokenCompiler
from compiler.client import SamplingBody
from compiler.records import Compilation, CompileRequest, Decoding, StillWanted, batches_continuously
from configs.models import ServeConfig

log = logging.getLogger("memcompiler.service")
_STARTING, _LEAVING = "the compiler is starting", "the service is shutting down"
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Refusal(Exception):
    """An error reply: status and message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the reply: when to try again, where that may help."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


@dataclass(slots=True, eq=False)
class CompileJob:
    """A queued request, and the future of its result."""

    request: CompileRequest
    decoding: Decoding
    seed: int | None  # None if nothing is sampled at random
    result: Future[Any] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)
    queue_s: float = 0.0  # seconds until its batch began
    compile_s: float = 0.0  # seconds of its batch

    @property
    def group(self) -> tuple[float, float, bool]:
        """Return the sampling settings that the jobs of a batch share."""
        return self.decoding.temperature, self.decoding.soft_temperature, self.seed is not None


class ServiceMetrics:
    """The Prometheus metrics of one service, in their own registry."""

    def __init__(self, ready: Callable[[], float], waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        here: Any = {"namespace": "memcompiler", "registry": self.registry}
        counter, seconds = partial(Counter, **here), partial(Histogram, buckets=_BUCKETS, **here)
        self.requests = counter("requests", "Replies to /compile by status.", ("code",))
        self.seconds = seconds("request_seconds", "From first byte to reply.")
        self.queued = seconds("queue_seconds", "Time in the queue.")
        self.compiled = seconds("compile_seconds", "Time of one batch.")
        self.batches = counter("batches", "Compiled batches.")
        self.compilations = counter("compilations", "Compiled requests.")
        self.failures = counter("failures", "Requests that failed to compile.")
        self.tokens_in = counter("tokens_in", "Prompt tokens.")
        self.tokens_out = counter("tokens_out", "Emission tokens and memory tokens.")
        self.parse_errors = counter("parse_errors", "Emissions that do not parse.")
        Gauge("ready", "1 where /ready answers 200.", **here).set_function(ready)
        Gauge("waiting", "Requests in the queue.", **here).set_function(waiting)

    def count_batch(self, jobs: Sequence[CompileJob], compilations: Sequence[Compilation]) -> None:
        """Record one compiled batch."""
        self.batches.inc()
        self.compiled.observe(jobs[0].compile_s)
        for job, compilation in zip(jobs, compilations, strict=True):
            self.queued.observe(job.queue_s)
            self.compilations.inc()
            self.tokens_in.inc(compilation.tokens_in)
            self.tokens_out.inc(compilation.tokens_out)
            self.parse_errors.inc(compilation.parse_error is not None)


class CompilerService:
    """Queue and worker thread of a compiler. Thread-safe.

    Args:
        load: loads the compiler, in the worker thread.
        weights: SHA-256 of adapter and projector, which /ready reports.
        about: further fields of /ready: what the executor read in training, and the environment.
        gather_s: seconds to wait for more requests before a batch begins.
    """

    def __init__(
        self,
        load: Callable[[], TokenCompiler],
        config: ServeConfig,
        weights: str | None = None,
        about: Mapping[str, Any] | None = None,
        gather_s: float = 0.005,
    ) -> None:
        self.config, self.weights, self.gather_s = config, weights, gather_s
        self.about = dict(about or {})
        self.failure: Exception | None = None  # why loading failed
        self.leaving = False
        self.active = 0  # requests without a reply yet
        self.compiler: TokenCompiler | None = None
        self.queue: list[CompileJob] = []  # first come, first served
        self._compiling = 0  # requests, with continuous batching
        self.metrics = ServiceMetrics(lambda: self.trouble is None, lambda: len(self.queue))
        self._changed = threading.Condition()
        self._load = load
        self._seeds = random.Random(config.seed)
        self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)

    def start(self) -> None:
        """Start the worker thread, which loads the compiler."""
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Return why nothing can be compiled now; None if the service is ready."""
        return _LEAVING if self.leaving else self._broken

    @property
    def _broken(self) -> str | None:
        if self.failure is not None:
            return f"the compiler did not start: {self.failure}"
        if self.compiler is None:
            return _STARTING
        dead = None if self._thread.is_alive() else "the compiler's thread died: restart the service"
        return self.compiler.broken or dead

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request and its status; a service that shuts down waits for it."""
        self.active += 1
        started, status = time.perf_counter(), 200
        try:
            yield
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            self.active -= 1
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.seconds.observe(time.perf_counter() - started)

    def check_ready(self) -> TokenCompiler:
        """Return the compiler. Raises: Refusal, 503."""
        if self.compiler is None or self.trouble is not None:
            raise Refusal(503, self.trouble or _STARTING)
        return self.compiler

    def submit(self, request: CompileRequest, sampling: SamplingBody) -> CompileJob:
        """Queue a request. Raises: Refusal, 503 or 429."""
        decoding = self.check_ready().decoding
        if sampling.temperature is not None:
            decoding = replace(decoding, temperature=sampling.temperature, latent_temperature=None)
        if sampling.latent_temperature is not None:
            decoding = replace(decoding, latent_temperature=sampling.latent_temperature)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(31)
        job = CompileJob(request, decoding, seed if decoding.draws else None)
        with self._changed:
            if len(self.queue) >= self.config.queue:
                raise Refusal(429, f"{self.config.queue} requests wait already: try again")
            self.queue.append(job)
            self._changed.notify_all()
        return job

    def give_up(self, job: CompileJob) -> None:
        """Cancel a job, and remove it from the queue."""
        job.result.cancel()
        with self._changed:
            if job in self.queue:
                self.queue.remove(job)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self.compiler = self._load()
        except Exception as error:
            self.failure = error
            return
        if batches_continuously(self.config.batching, [self.compiler]):
            self._compile_continuously(self.compiler)
        while True:
            jobs = sorted(self._take(), key=attrgetter("group"))
            for _, group in groupby(jobs, key=attrgetter("group")):
                self._compile(list(group), partial(_compile_batch, self.compiler))

    def _compile_continuously(self, compiler: TokenCompiler) -> NoReturn:
        """Compile each request in a thread of its own, up to `batch` at a time; the engine batches them."""

        def work(job: CompileJob) -> None:
            try:
                self._compile([job], partial(_compile_alone, compiler))
            finally:
                with self._changed:
                    self._compiling -= 1
                    self._changed.notify_all()

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.queue and self._compiling < self.config.batch)
                job = self.queue.pop(0)
                self._compiling += 1
            threading.Thread(target=work, args=(job,), daemon=True, name="compile").start()

    def _take(self) -> list[CompileJob]:
        """Wait for jobs, then `gather_s` for more, and take a batch."""
        most = self.config.batch
        with self._changed:
            self._changed.wait_for(lambda: self.queue)
            self._changed.wait_for(lambda: len(self.queue) >= most, self.gather_s)
            jobs, self.queue = self.queue[:most], self.queue[most:]
            return jobs

    def _compile(self, jobs: Sequence[CompileJob], compile: CompileJobs) -> None:
        """Compile jobs and set their results. If a batch fails, compile each job alone, to find the one at fault."""
        jobs = [job for job in jobs if not job.result.cancelled()]
        if not jobs:
            return
        started = time.perf_counter()
        try:
            compilations = compile(jobs)
        except Exception as error:
            if len(jobs) > 1 and self._broken is None:
                for job in jobs:
                    self._compile([job], compile)
                return
            self.metrics.failures.inc()
            log.error("a batch of %d failed: %s", len(jobs), described(error))
            for job in jobs:
                _settle(job, self._refusal(error))
            return
        for job in jobs:
            job.queue_s, job.compile_s = started - job.since, time.perf_counter() - started
        self.metrics.count_batch(jobs, compilations)
        for job, compilation in zip(jobs, compilations, strict=True):
            _settle(job, compilation)

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, ValueError):
            return Refusal(422, str(error))
        return Refusal(503 if self.trouble else 500, f"{type(error).__name__}: {error}")


CompileJobs = Callable[[Sequence[CompileJob]], list[Compilation]]  # of one group


def _compile_batch(compiler: TokenCompiler, jobs: Sequence[CompileJob]) -> list[Compilation]:
    """Compile a batch; nothing else may use the compiler meanwhile."""
    default, compiler.decoding = compiler.decoding, jobs[0].decoding
    try:
        return compiler.compile(*_arguments(jobs))
    finally:
        compiler.decoding = default


def _compile_alone(compiler: Any, jobs: Sequence[CompileJob]) -> list[Compilation]:
    """Compile beside other threads."""
    return compiler.compile(*_arguments(jobs), decoding=jobs[0].decoding)


def _arguments(jobs: Sequence[CompileJob]) -> tuple[list[CompileRequest], list[int] | None, StillWanted]:
    seeds = [job.seed for job in jobs if job.seed is not None]
    return [job.request for job in jobs], seeds or None, lambda i: not jobs[i].result.cancelled()


def _settle(job: CompileJob, result: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if isinstance(result, Refusal):
            job.result.set_exception(result)
        else:
            job.result.set_result(result)


def described(error: BaseException) -> str:
    """Name type and place of an exception without its message, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__} at " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames))
