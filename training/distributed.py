"""The process group: who we are, and small numbers summed or gathered over all ranks. `backend.py` does the training.

Numbers travel as pickled objects (torch's object collectives): the processes of a group trust each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = "MEMCOMPILER_DIST_TIMEOUT"  # minutes that a collective waits for the slowest rank (default 30)
SETTLE = 0.3  # seconds in which threads of the group let go of what they hold: microseconds of work, but not at once


@contextmanager
def group() -> Iterator[None]:
    """Join the process group that torchrun or `accelerate launch` describes, and leave it at the end; nothing to do for
    a single process. Raises: ValueError, for accelerate's own ways to share models: `backend` says which.

    A process that ends at once may abort on its way out, and torchrun takes a finished run for a failed one: a thread
    of gloo's lets go of a collective's tensors a moment after everybody has the result (pytorch#179291), and destroying
    the group waits for no thread while FSDP or DeepSpeed hold on to it. After an error torchrun ends the others.
    """
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() in ("true", "1"):  # transformers would load by it
            raise ValueError(f"accelerate's {plugin} is not used here: accelerate launch --multi_gpu, and set backend")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    try:
        timeout = timedelta(minutes=float(os.environ.get(TIMEOUT, "30")))
    except ValueError as error:
        raise ValueError(f"{TIMEOUT} must be minutes, not {os.environ[TIMEOUT]!r}") from error
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timeout)
    yield
    barrier()  # whoever leaves closes connections that others may still read from
    time.sleep(SETTLE)
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n: int) -> range:
    """Choose this rank's part of 0..n-1: neighbours, as many as the others have or one more."""
    return range(rank() * n // world_size(), (rank() + 1) * n // world_size())


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather(value: T) -> list[T]:
    """Collect every rank's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    shares: list[Any] = [None] * world_size()
    dist.all_gather_object(shares, value)
    return shares


def from_first(compute: Callable[[], T]) -> T:
    """Give what rank 0 computes. Every rank has to call it."""
    return gather(compute() if rank() == 0 else None)[0]  # pyright: ignore[reportReturnType]  (rank 0 has it)


def once_per_node(compute: Callable[[], T]) -> T:
    """Give what one process of each node computes, for what all of a node would find alike. Every rank has to call it.
    Raises: RuntimeError, where nodes do not agree."""
    found = gather((compute(),) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else ())
    first, *others = [value for share in found for value in share]
    if any(other != first for other in others):
        raise RuntimeError(f"the nodes of this run do not hold the same: {first} and {others}")
    return first


def total(values: Mapping[str, float]) -> dict[str, float]:
    """Sum numbers by name over all ranks. A rank without rows may lack names."""
    shares = gather(dict(values))
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0.0) for share in shares) for name in names}
