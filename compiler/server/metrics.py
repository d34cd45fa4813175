"""What a compiler service counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from compiler.records import Compilation
from compiler.server.queue import CompileJob

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class ServiceMetrics:
    """The metrics of one service, in a registry of their own."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, ready: Callable[[], float], waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests to /compile by status.", "code")
        self.seconds = self._histogram("request_seconds", "From first byte to answer.")
        self.queued = self._histogram("queue_seconds", "Wait for the compiler.")
        self.compiled = self._histogram("compile_seconds", "Of one batch.")
        self.batches = self._counter("batches", "Compiled batches.")
        self.compilations = self._counter("compilations", "Compiled requests.")
        self.failures = self._counter("failures", "Requests that could not be compiled.")
        self.tokens_in = self._counter("tokens_in", "Tokens of prompts.")
        self.tokens_out = self._counter("tokens_out", "Tokens of emissions and memory tokens.")
        self.parse_errors = self._counter("parse_errors", "Emissions that cannot be read.")
        for name, about, value in (
            ("ready", "1 where /ready answers 200.", ready), ("waiting", "Requests in the queue.", waiting)
        ):  # fmt: skip
            Gauge(f"memcompiler_{name}", about, registry=self.registry).set_function(value)

    def count_batch(self, jobs: Sequence[CompileJob], made: Sequence[Compilation]) -> None:
        """Count one batch that was compiled."""
        self.batches.inc()
        self.compiled.observe(jobs[0].compile_s)
        for job, compilation in zip(jobs, made, strict=True):
            self.queued.observe(job.queue_s)
            self.compilations.inc()
            self.tokens_in.inc(compilation.tokens_in)
            self.tokens_out.inc(compilation.tokens_out)
            self.parse_errors.inc(compilation.parse_error is not None)

    def page(self) -> bytes:
        """Write all of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"memcompiler_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"memcompiler_{name}", about, registry=self.registry, buckets=_BUCKETS)
