"""Measure seconds and bytes on a GPU or CPU; running out of memory is an outcome like others.

This module imports torch alone, so that the part `machine` runs where packages are missing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.parts import FULL, OUTCOME, Row, Setup


def synchronize(setup: Setup) -> None:
    """Wait until the device has finished its work."""
    if setup.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(setup: Setup, run: Callable[[], object], times: int = 3) -> float:
    """Return the median seconds of several runs, without a warm-up."""
    seconds = []
    for _ in range(times):
        synchronize(setup)
        started = time.perf_counter()
        run()
        synchronize(setup)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peak_beyond(setup: Setup, run: Callable[[], object]) -> int:
    """Return the peak of torch's allocations during `run`, in bytes beyond those held before it."""
    if setup.device == "cpu":
        from benchmarks.measurement import peak_bytes

        return peak_bytes(run)
    synchronize(setup)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize(setup)
    return torch.cuda.max_memory_allocated() - before


def completed(setup: Setup, row: Row, measure: Callable[[], Row]) -> Row:
    """Add the measurements to a row, or the outcome `out of memory`."""
    try:
        row = {**row, OUTCOME: "ok", **measure()}
    except torch.OutOfMemoryError:
        row = {**row, OUTCOME: FULL}
    gc.collect()  # frees the tensors in an error's frames
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return row
