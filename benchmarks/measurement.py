"""Measure allocated bytes on the CPU and the seconds of wrapped calls."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of torch's CPU allocations during `run`, in bytes beyond those held before it."""
    gc.collect()  # garbage from before, freed during the run, would count against what the run takes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def resident_bytes(
    models: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> int:
    """Count the bytes of weights and AdamW moments; `local` maps a sharded tensor to this process's shard."""
    moments = [tensor for state in (optimizer.state.values() if optimizer else ()) for tensor in state.values()]
    return sum(local(t).nbytes for t in [*(p for model in models for p in model.parameters()), *moments])


@dataclass(slots=True)
class Stopwatch:
    """Sum the seconds of wrapped calls, device work included."""

    seconds: float = 0.0

    def wrap(self, call: Callable[..., Any], counts: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """Time `call` whenever `counts` holds for its arguments."""
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

        def timed(*arguments: Any, **options: Any) -> Any:
            if not counts(*arguments, **options):
                return call(*arguments, **options)
            wait()
            started = time.perf_counter()
            result = call(*arguments, **options)
            wait()
            self.seconds += time.perf_counter() - started
            return result

        return timed
