"""Peak of allocations."""

from __future__ import annotations

import gc

import torch

from benchmarks.measurement import peak_bytes

MIB = 2**20


def test_garbage_from_before_does_not_lower_the_peak():
    ring: list = [torch.zeros(8 * MIB, dtype=torch.uint8)]
    ring.append(ring)
    gc.disable()
    try:
        del ring  # stays until the collector runs

        def run() -> None:
            gc.collect()
            torch.zeros(MIB, dtype=torch.uint8)

        assert MIB <= peak_bytes(run) < 2 * MIB
    finally:
        gc.enable()
