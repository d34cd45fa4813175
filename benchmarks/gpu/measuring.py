"""Seconds and bytes, on a GPU or a CPU; running out of memory is a result like others.

It imports torch alone, so that the first part answers where packages are missing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.parts import Row, Setup

OUTCOME, FULL = "outcome", "out of memory"


def settle(setup: Setup) -> None:
    """Wait until the device has done what it was told."""
    if setup.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(setup: Setup, run: Callable[[], object], times: int = 3) -> float:
    """Take the median of so many runs, in seconds. The caller warms up."""
    taken = []
    for _ in range(times):
        settle(setup)
        started = time.perf_counter()
        run()
        settle(setup)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def peak_beyond(setup: Setup, run: Callable[[], object]) -> int:
    """Count the bytes that torch's allocator gives out at most while it runs, beyond those held when it begins."""
    if setup.device == "cpu":
        from benchmarks.plan_check import peak

        return peak(run)
    settle(setup)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    settle(setup)
    return torch.cuda.max_memory_allocated() - before


def tried(setup: Setup, row: Row, measure: Callable[[], Row]) -> Row:
    """Complete a row by what is measured, or by saying that memory ran out."""
    try:
        found = {**row, OUTCOME: "ok", **measure()}
    except torch.OutOfMemoryError:
        found = {**row, OUTCOME: FULL}
    gc.collect()  # what an error's frames held, too
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return found
