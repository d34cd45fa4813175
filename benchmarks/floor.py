"""The least that a step can take on a machine: its weights have to be read, and its products have to be made.

A pass of a model over T tokens reads every weight once and makes two FLOPs of a weight and token, so that it takes at
least the longer of bytes / bandwidth and 2 x weights x T / peak. Writing is bound by the first, reading a prompt by the
second. Both are measured where the benchmark runs, with as many threads: the best of some products of large matrices,
and of some products of a matrix as large as the model with one vector, so that a model that fits into a cache is read
out of it. Attention to what a cache holds, and vectors, are left out: a floor stays one without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from lm.architecture import untrained
from lm.device import device_of, dtype_of

SIZE, TRIES = 2048, 8
LARGE = 2**28  # numbers of a matrix that no cache holds: one of a larger model tells nothing more


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one model on one machine.

    Attributes:
        weights: what multiplies every token, its output head left out.
        head: of the output head, which multiplies the tokens alone that something follows.
        read: bytes a second, of a matrix as large as the model.
        made: FLOPs a second, at most.
    """

    weights: int
    head: int
    itemsize: int
    read: float
    made: float

    def seconds(self, columns: float, heads: float) -> float:
        """Bound a pass over so many tokens, of which so many are scored against the vocabulary."""
        flops = 2 * (self.weights * columns + self.head * heads)
        return max((self.weights + self.head) * self.itemsize / self.read, flops / self.made)

    def step(self, read: float, written: float, episodes: int = 1) -> float:
        """Bound a step of some episodes side by side, each of which reads so many tokens that no cache holds and writes
        so many one by one: guessing ahead may stay below."""
        return self.seconds(read * episodes, episodes) + max(0.0, written - 1) * self.seconds(episodes, episodes)

    @property
    def words(self) -> str:
        size = (self.weights + self.head) / 1e6
        return f"{size:.1f} M weights, {self.read / 1e9:.1f} GB/s, {self.made / 1e9:.0f} GFLOP/s"


def floor_of(name: str, dtype: str) -> Floor:
    """Count the weights of a model that is never loaded, and measure the machine at its size. A tower for pictures
    counts, too. Raises: ConfigError, where nobody knows the model."""
    on: dict[str, Any] = {"device": device_of("auto"), "dtype": dtype_of(dtype)}
    with torch.device("meta"):
        model = untrained(name, on["dtype"])
    head = model.get_output_embeddings().weight
    tables = {id(head), id(model.get_input_embeddings().weight)}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in tables)
    rows = max(1, min(weights + head.numel(), LARGE) // SIZE)
    matrix, vector, square = (torch.randn(*shape, **on) for shape in ((rows, SIZE), (SIZE,), (SIZE, SIZE)))
    read = matrix.numel() * matrix.itemsize / _best(lambda: matrix @ vector)
    return Floor(weights, head.numel(), matrix.itemsize, read, 2 * SIZE**3 / _best(lambda: square @ square))


def _best(call: Callable[[], Any]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())  # it waits for the device
    return min(timer.timeit(1).mean for _ in range(TRIES))
