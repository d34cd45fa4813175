"""Lower bound of a step's seconds on this machine, from memory bandwidth and peak FLOP/s.

A pass over T tokens reads every weight once and makes two FLOPs per weight and token, so it takes at least the larger
of bytes / bandwidth and 2 x weights x T / peak. Both rates are measured with as many threads as the benchmark uses.
Attention to cached tokens and vector operations are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from lm.architecture import untrained
from lm.device import device_of, dtype_of

SIDE, TRIES = 2048, 8
LARGEST = 2**28  # elements of the matrix that measures bandwidth; larger than any cache


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Lower bounds of one model's passes on one machine.

    Attributes:
        weights: number of weights that multiply every token, the output head excluded.
        head: number of weights of the output head, which multiplies only the tokens whose successor is predicted.
        bandwidth: bytes/s of reading a matrix of the model's size.
        peak: FLOP/s of large matrix products.
    """

    weights: int
    head: int
    itemsize: int
    bandwidth: float
    peak: float

    def pass_seconds(self, tokens: float, predicted: float) -> float:
        """Bound one pass over `tokens` tokens, of which `predicted` go through the output head."""
        flops = 2 * (self.weights * tokens + self.head * predicted)
        return max((self.weights + self.head) * self.itemsize / self.bandwidth, flops / self.peak)

    def step_seconds(self, read: float, written: float, episodes: int = 1) -> float:
        """Bound a step of `episodes` episodes that each read uncached and write tokens one by one, without drafts."""
        prefill = self.pass_seconds(read * episodes, episodes)
        return prefill + max(0.0, written - 1) * self.pass_seconds(episodes, episodes)

    def __str__(self) -> str:
        size = (self.weights + self.head) / 1e6
        return f"{size:.1f} M weights, {self.bandwidth / 1e9:.1f} GB/s, {self.peak / 1e9:.0f} GFLOP/s"


def lower_bound(name: str, dtype: str) -> LowerBound:
    """Count a model's weights without loading them, and measure this machine.

    Raises: ConfigError, for an unknown model.
    """
    on: dict[str, Any] = {"device": device_of("auto"), "dtype": dtype_of(dtype)}
    with torch.device("meta"):
        model = untrained(name, on["dtype"])
    head = model.get_output_embeddings().weight
    tables = {id(head), id(model.get_input_embeddings().weight)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in tables)
    rows = max(1, min(weights + head.numel(), LARGEST) // SIDE)
    matrix, vector, square = (torch.randn(*shape, **on) for shape in ((rows, SIDE), (SIDE,), (SIDE, SIDE)))
    bandwidth = matrix.numel() * matrix.itemsize / _best_seconds(lambda: matrix @ vector)
    peak = 2 * SIDE**3 / _best_seconds(lambda: square @ square)
    return LowerBound(weights, head.numel(), itemsize=matrix.itemsize, bandwidth=bandwidth, peak=peak)


def _best_seconds(call: Callable[[], Any]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())  # synchronises the device
    return min(timer.timeit(1).mean for _ in range(TRIES))
