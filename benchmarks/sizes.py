"""Resident memory, file handles and threads of processes over time (Linux)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

GROWTH_MIB, GROWTH = 64.0, 10  # memory, and handles or threads, that a process may gain after the first measurement
HEADS = ["process", "MiB, first", "last", "maximum", "KiB per 1,000", "handles: first, maximum", "threads"]


@dataclass
class Sizes:
    """Sizes of one process, or of the largest of several, measured several times."""

    done: list[int] = field(default_factory=list)  # episodes or requests so far
    mib: list[float] = field(default_factory=list)  # resident memory
    handles: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of `time.monotonic()`

    def measure(self, done: int, pids: Iterable[int]) -> None:
        """Add a measurement; nothing if all processes have ended."""
        found = [sizes for pid in pids if (sizes := process_sizes(pid)) is not None]
        if found:
            mib, handles, threads = (max(column) for column in zip(*found, strict=True))
            self.done.append(done)
            self.mib.append(mib)
            self.handles.append(int(handles))
            self.threads.append(int(threads))
            self.times.append(time.monotonic())

    @property
    def slope(self) -> float:
        """KiB of memory per 1,000 episodes or requests: least squares, without the first measurement."""
        x, y = np.array(self.done[1:], float), np.array(self.mib[1:])
        return float(np.polyfit(x, y, 1)[0] * 1024 * 1000) if len(set(x)) > 1 else 0.0

    def mib_after(self, seconds: float) -> float | None:
        """Return the resident memory so many seconds after the first measurement; None if there were fewer."""
        found = (mib for mib, at in zip(self.mib, self.times, strict=True) if at - self.times[0] >= seconds)
        return next(found, None)

    @property
    def has_grown(self) -> bool:
        return (
            self.mib[-1] - self.mib[0] > GROWTH_MIB
            or self.handles[-1] - self.handles[0] > GROWTH
            or self.threads[-1] - self.threads[0] > GROWTH
        )

    def row(self, name: str) -> list[str]:
        memory = [self.mib[0], self.mib[-1], max(self.mib)]
        rest = [f"{self.handles[0]}, {max(self.handles)}", f"{self.threads[0]}, {max(self.threads)}"]
        return [name, *(f"{value:.1f}" for value in memory), f"{self.slope:.1f}", *rest]


def process_sizes(pid: int) -> tuple[float, int, int] | None:
    """Return resident MiB, open file handles and threads of a process; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident, threads = (re.search(rf"^{name}:\s+(\d+)", status, re.M) for name in ("VmRSS", "Threads"))
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return (int(resident[1]) / 1024, handles, int(threads[1])) if resident and threads else None
