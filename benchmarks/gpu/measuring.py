"""Seconds, bytes and rates, on a GPU or a CPU; running out of memory is a result like others.

It imports torch alone, and the plan where it is asked for, so that the first part answers where packages are missing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.parts import Row, Setup

if TYPE_CHECKING:
    from plan.budget import Gpu

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


def data_sheet() -> Gpu | None:
    """Find this GPU among those whose dense bf16 rate the plan knows; None for another one, or a CPU."""
    from plan.budget import GPUS

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower().replace(" ", "").replace("geforce", "")
    return next((gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name), None)


def rates(flops: float, seconds: float) -> Row:
    """Say what so many FLOPs in so many seconds are: TFLOP/s, and the share of the data sheet's (MFU)."""
    gpu = data_sheet()
    reached = flops / seconds / 1e12
    return {"tflop_per_s": reached, "mfu": reached / gpu.tflops if gpu else None}
