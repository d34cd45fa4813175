"""Peak of allocations."""

from __future__ import annotations

import gc

import torch

from benchmarks.measurement import peak_bytes

MIB = 2**20


def test_garbage_of_an_earlier_measurement_does_not_lower_the_peak():
    def leave_garbage() -> None:
        ring: list = [torch.zeros(8 * MIB, dtype=torch.uint8)]
        ring.append(ring)  # a cycle: it stays until the collector runs

    def run() -> None:
        gc.collect()
        torch.zeros(MIB, dtype=torch.uint8)

    gc.disable()
    try:
        assert peak_bytes(leave_garbage) >= 8 * MIB
        assert MIB <= peak_bytes(run) < 2 * MIB
    finally:
        gc.enable()
