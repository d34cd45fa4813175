"""What the GPU check consists of: parts, most useful first, and what each of them is given."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.store import JsonLines

Size = Literal["tiny", "paper"]
Device = Literal["cpu", "cuda"]
Row = dict[str, Any]  # of a part's table: its columns in their order, units in their names


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a part measures: models of the paper's size, or tiny ones; `processes` share what is shared out."""

    device: Device
    size: Size
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A part: `runs` names its generator of rows, as module:function, which is imported in the part's own process.

    Attributes:
        limit_s: seconds after which it is ended; rows that it has given by then count.
        shared: torchrun starts as many processes as there are GPUs.
    """

    name: str
    runs: str
    limit_s: float
    shared: bool = False


PARTS = (
    Part("machine", "benchmarks.gpu.machine:measure", 120),
    Part("parity", "benchmarks.gpu.parity:measure", 240),
    Part("sft", "benchmarks.gpu.sft:measure", 480),
    Part("emission", "benchmarks.gpu.emission:measure", 420),
    Part("update", "benchmarks.gpu.update:measure", 300),
    Part("fsdp", "benchmarks.gpu.fsdp:measure", 300, shared=True),
    Part("vllm", "benchmarks.gpu.engine:measure", 300),
    Part("speculation", "benchmarks.gpu.engine:speculate", 240),
)


class Skipped(Exception):
    """Why a part has nothing to measure here. No failure."""


def run_inside(runs: str, setup: Setup, rows: Path) -> bool:
    """Run a part in this process: every row is on disk, in `rows`, before the next one is measured. What ends it, a
    reason to skip it or an error, is written there as well. Of several processes, the first writes.

    Returns:
        Whether it came to its end: no error, and no row that says `passed: False`.
    """
    file = JsonLines(rows) if int(os.environ.get("RANK", "0")) == 0 else None
    write: Callable[[Row], None] = file.append if file else lambda row: None
    good = True
    try:
        module, _, name = runs.partition(":")
        measured: Iterator[Row] = getattr(importlib.import_module(module), name)(setup)
        for row in measured:
            write({"row": row})
            good = good and row.get("passed") is not False
    except Skipped as reason:
        write({"skipped": str(reason)})
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: that a model has no room is a result, too
            write({"row": {"outcome": "out of memory"}})
            return good
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    return good
