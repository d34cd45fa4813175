"""What waits for the compiler: a bounded queue, first come first served, which a request may leave before its turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from compiler.records import Compilation, CompileRequest, Decoding


class Refusal(Exception):
    """A request that gets no answer of its own: the status, and what the client is told."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(slots=True, eq=False)
class CompileJob:
    """A request with the result that somebody waits for, unless it is given up."""

    request: CompileRequest
    decoding: Decoding
    seed: int | None  # of its draws; None where nothing is drawn at random
    result: Future[Compilation] = field(default_factory=Future)
    given_up: bool = False  # nobody waits any more: the compiler looks at it before every token
    since: float = field(default_factory=time.perf_counter)
    queue_s: float = 0.0  # seconds until its batch began
    compile_s: float = 0.0  # seconds of its batch

    @property
    def group(self) -> tuple[float, float, bool]:
        """What jobs must have in common to be compiled in one batch."""
        return self.decoding.temperature, self.decoding.soft_temperature, self.seed is not None


@dataclass(slots=True, eq=False)
class WeightsJob:
    """An order for other weights, which are in force for what is submitted after it."""

    folder: Path
    version: int
    result: Future[None] = field(default_factory=Future)
    given_up: bool = False


class JobQueue:
    """The queue of one compiler thread; all methods are thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[CompileJob | WeightsJob] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: CompileJob | WeightsJob) -> None:
        """Raises: Refusal, 429, where the queue is full."""
        with self._changed:
            if len(self._jobs) >= self.size:
                raise Refusal(429, f"{self.size} requests wait already: try again")
            self._jobs.append(job)
            self._changed.notify()

    def give_up(self, job: CompileJob | WeightsJob) -> None:
        """Take a job out if it still waits, and have the compiler stop if it works for nobody else."""
        with self._changed:
            job.given_up = True
            if job in self._jobs:
                self._jobs.remove(job)

    def take(self, most: int, gather_s: float) -> tuple[list[CompileJob], WeightsJob | None]:
        """Wait for jobs, `gather_s` for company, and take at most `most`, up to an order for other weights."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs)
            self._changed.wait_for(lambda: len(self._jobs) >= most, gather_s)
            jobs: list[CompileJob] = []
            while self._jobs and len(jobs) < most:
                job = self._jobs.pop(0)
                if isinstance(job, WeightsJob):
                    return jobs, job
                jobs.append(job)
            return jobs, None
