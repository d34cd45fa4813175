"""Data parallelism over torch.distributed, small because only LoRA and projector have gradients.

Every rank holds the whole model, takes every world-th row of the global batch, and gradients are summed (losses are
weighted by global counts, so a sum is the exact gradient). Ranks without rows take part in the sum with zeros.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def init() -> None:
    """Join the process group that torchrun describes; nothing to do for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def micro_batches(batch: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """This rank's share of a global batch, in micro-batches."""
    mine = batch[rank() :: world_size()]
    for i in range(0, len(mine), size):
        yield mine[i : i + size]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    if not dist.is_initialized():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def gather_values(values: dict[str, float]) -> list[dict[str, float]]:
    """Every rank's numbers, in the order of ranks."""
    if not dist.is_initialized():
        return [values]
    shares: list[Any] = [None] * world_size()
    dist.all_gather_object(shares, values)
    return shares


def sum_values(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars summed over ranks. A rank without rows has no names of its own: names come from rank 0."""
    if not dist.is_initialized():
        return values
    names: list[list[str]] = [sorted(values)]
    dist.broadcast_object_list(names)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.stack([values.get(name, torch.zeros(())).float() for name in names[0]]).to(device)
    dist.all_reduce(total)
    return dict(zip(names[0], total.cpu(), strict=True))
