"""The compiler behind a queue: one thread that loads it, compiles what waits in batches, and takes other weights.

A request that is given up frees the compiler: it leaves the queue, or the compiler, which asks before every token
whether somebody still waits, stops at it. The log holds no request contents: of an exception, type and place are
written down, never its message.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from compiler.records import Compilation, CompileRequest, Decoding, Wanted
from compiler.server.metrics import ServiceMetrics
from compiler.server.queue import CompileJob, JobQueue, Refusal, WeightsJob
from compiler.server.wire import SamplingBody

log = logging.getLogger("memcompiler.service")
_STARTING, _LEAVING = "the compiler is starting", "the service is shutting down"


class ServedCompiler(Protocol):
    """What is served: `compiler.hf.MemoryCompiler`, `compiler.vllm.VllmCompiler`."""

    decoding: Decoding
    projector: Any

    @property
    def broken(self) -> str | None: ...  # why it will never compile again

    def compile(
        self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None, wanted: Wanted = ...
    ) -> list[Compilation]: ...


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    queue: int = 256  # requests that wait
    batch: int = 64  # requests of one batch
    timeout: float = 120.0  # seconds of one request, from its first byte to its answer
    body: int = 32 << 20  # bytes of one request
    gather: float = 0.005  # seconds that a batch waits for company


class CompilerService:
    """Queue and thread. `load` makes the compiler, in that thread; all else is thread-safe.

    Args:
        reload: loads the weights of a folder as those of a version and returns their SHA-256; None where the service
            keeps what it has.
        weights: SHA-256 of what the checkpoint adds to its base, which /ready tells.
    """

    def __init__(
        self, load: Callable[[], ServedCompiler], limits: ServiceLimits | None = None, seed: int = 0,
        reload: Callable[[Any, Path, int], str] | None = None, weights: str | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.weights = limits or ServiceLimits(), weights
        self.failure: Exception | None = None  # why there is no compiler
        self.leaving = False
        self.active = 0  # requests that are being answered
        self.compiler: ServedCompiler | None = None
        self.queue = JobQueue(self.limits.queue)
        self.metrics = ServiceMetrics(lambda: self.trouble is None, lambda: len(self.queue))
        self._load, self._reload = load, reload
        self._version: int | None = None  # of the weights that were last sent
        self._seeds = random.Random(seed)
        self._thread = threading.Thread(target=self._work, name="compiler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Why nothing can be compiled now; None when the service is ready."""
        return _LEAVING if self.leaving else self._broken

    @property
    def _broken(self) -> str | None:
        if self.failure is not None:
            return f"the compiler did not start: {self.failure}"
        if self.compiler is None:
            return _STARTING
        dead = None if self._thread.is_alive() else "the compiler's thread died: start the service anew"
        return self.compiler.broken or dead

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request, whatever the answer, and have a service that leaves wait for it."""
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

    def check_ready(self) -> ServedCompiler:
        """The compiler. Raises: Refusal, 503."""
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
        self.queue.put(job)
        return job

    def swap(self, folder: Path, version: int) -> WeightsJob:
        """Order weights for all that is submitted from now on. Several clients may send the same version: it is loaded
        once. Raises: Refusal, 403, 503 or 429."""
        if self._reload is None:
            raise Refusal(403, "this service keeps the weights it has: start it with adapters=FOLDER for training")
        self.check_ready()
        job = WeightsJob(folder, version)
        self.queue.put(job)
        return job

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self.compiler = self._load()
        except Exception as error:
            self.failure = error
            return
        while True:
            jobs, weights = self.queue.take(self.limits.batch, self.limits.gather)
            jobs = [job for job in jobs if job.result.set_running_or_notify_cancel()]
            for _, group in groupby(sorted(jobs, key=lambda job: job.group), key=lambda job: job.group):
                self._settle(self.compiler, list(group))
            if weights is not None and weights.result.set_running_or_notify_cancel():
                self._take_weights(self.compiler, weights)

    def _take_weights(self, compiler: ServedCompiler, order: WeightsJob) -> None:
        assert self._reload is not None
        try:
            if order.version != self._version:
                self.weights = self._reload(compiler, order.folder, order.version)
                self._version = order.version
            order.result.set_result(None)
        except Exception as error:
            order.result.set_exception(error)

    def _settle(self, compiler: ServedCompiler, jobs: Sequence[CompileJob]) -> None:
        """Give every job its result. Where a batch fails, each of its jobs is tried alone: which one's fault is it?"""
        jobs = [job for job in jobs if not job.given_up]
        if not jobs:
            return
        started = time.perf_counter()
        try:
            made = _compile(compiler, jobs)
        except Exception as error:
            if len(jobs) > 1 and self._broken is None:
                for job in jobs:
                    self._settle(compiler, [job])
                return
            self.metrics.failures.inc()
            log.error("a batch of %d failed: %s", len(jobs), described(error))
            for job in jobs:
                job.result.set_exception(error)
            return
        for job in jobs:
            job.queue_s, job.compile_s = started - job.since, time.perf_counter() - started
        self.metrics.count_batch(jobs, made)
        for job, compilation in zip(jobs, made, strict=True):
            job.result.set_result(compilation)


def _compile(compiler: ServedCompiler, jobs: Sequence[CompileJob]) -> list[Compilation]:
    seeds = [job.seed for job in jobs if job.seed is not None]
    default, compiler.decoding = compiler.decoding, jobs[0].decoding
    try:
        return compiler.compile([job.request for job in jobs], seeds or None, lambda i: not jobs[i].given_up)
    finally:
        compiler.decoding = default


def described(error: BaseException) -> str:
    """Type and place of an exception. Its message may quote what a client has sent."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__} at " + " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames))
