"""Process group: rank, world size, and small values summed or gathered over all ranks.

Values are pickled (torch's object collectives): the processes of a group trust each other.
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

TIMEOUT = "MEMCOMPILER_DIST_TIMEOUT"  # minutes that a collective waits for the slowest rank (default: 30)
SETTLE_S = 0.3  # for threads of the group to release tensors


@contextmanager
def group() -> Iterator[None]:
    """Join the process group of torchrun or `accelerate launch`, and leave it at the end; does nothing in a single
    process. Raises: ValueError, for accelerate's plugins that share models, because `backend` does that.

    It waits before it leaves: a process that exits at once may abort, because a gloo thread releases a collective's
    tensors late (pytorch#179291), and torchrun would report a finished run as failed.
    """
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() in (
            "true",
            "1",
        ):
            raise ValueError(
                f"accelerate's {plugin} is not supported: use accelerate launch --multi_gpu and set backend"
            )
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
    barrier()  # leaving closes connections that other ranks may still read from
    time.sleep(SETTLE_S)
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n: int) -> range:
    """Return this rank's contiguous part of 0..n-1; parts differ by one at most."""
    return range(rank() * n // world_size(), (rank() + 1) * n // world_size())


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather(value: T) -> list[T]:
    """Gather every rank's value, in rank order. Every rank must call it."""
    if not dist.is_initialized():
        return [value]
    shares: list[Any] = [None] * world_size()
    dist.all_gather_object(shares, value)
    return shares


def from_first(compute: Callable[[], T]) -> T:
    """Compute a value on rank 0, and return it on all ranks. Every rank must call it."""
    return gather(compute() if rank() == 0 else None)[0]  # pyright: ignore[reportReturnType]  (rank 0 computes it)


def once_per_node(compute: Callable[[], T]) -> T:
    """Compute a value in one process of each node, and return it on all ranks. Every rank must call it. Raises:
    RuntimeError, if nodes disagree."""
    found = gather((compute(),) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else ())
    first, *others = [value for share in found for value in share]
    if any(other != first for other in others):
        raise RuntimeError(f"the nodes of this run have different values: {first} and {others}")
    return first


def total(values: Mapping[str, float]) -> dict[str, float]:
    """Sum numbers by name over all ranks; a rank may lack names. Every rank must call it."""
    shares = gather(dict(values))
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0.0) for share in shares) for name in names}
