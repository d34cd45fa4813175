"""What the GPU check consists of: parts, most useful first, and what each of them is given."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.store import JsonLines

Size = Literal["tiny", "paper"]
Device = Literal["cpu", "cuda"]
Row = dict[str, Any]  # of a part's table: its columns in their order, units in their names

SEES_7B, READS_7B, READS_14B = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct"
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Compiler, executor, and the GiB that the plan says one row of SFT with gradient checkpointing takes on one GPU.
PAIRS = (
    (SEES_7B, READS_14B, 45.9),
    (READS_7B, READS_14B, 44.6),
    (SEES_7B, READS_7B, 31.2),
    (READS_7B, READS_7B, 30.0),
    (SMALL, SMALL, 1.7),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every part measures.

    Attributes:
        size: models of the paper's size, or tiny ones.
        processes: that share models in slices.
        pair: index of the models in `PAIRS`, the largest that fit.
    """

    device: Device
    size: Size
    processes: int = 1
    pair: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check.

    Attributes:
        runs: its generator of rows, as module:function, which is imported in the part's own process.
        share: of the time, relative to the parts that are still to come.
        packages: it is skipped without one of them.
        shared: torchrun starts a process for each GPU; skipped where there is one.
        beside: it needs no GPU, and runs beside all others.
    """

    name: str
    runs: str
    share: float
    packages: tuple[str, ...] = ()
    shared: bool = False
    beside: bool = False

    def skipped(self, setup: Setup) -> str | None:
        """Return why there is nothing to measure here, without starting a process; None where there is."""
        if self.shared and setup.processes < 2:
            return f"one {setup.device} device: slices are for several"
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed" if missing else None


VLLM = ("vllm", "datasets")  # vLLM imports datasets when it loads a folder
PARTS = (
    Part("plan", "benchmarks.gpu.planned:measure", 0, beside=True),
    Part("machine", "benchmarks.gpu.machine:measure", 30),
    Part("parity", "benchmarks.gpu.parity:measure", 70),
    Part("sft", "benchmarks.gpu.sft:measure", 130),
    Part("emission", "benchmarks.gpu.emission:measure", 100),
    Part("update", "benchmarks.gpu.update:measure", 80),
    Part("learning", "benchmarks.gpu.learning:measure", 110),
    Part("fsdp", "benchmarks.gpu.fsdp:measure", 120, shared=True),
    Part("vllm", "benchmarks.gpu.engine:measure", 120, packages=VLLM),
    Part("speculation", "benchmarks.gpu.engine:speculate", 100, packages=VLLM),
)


def largest_pair(free_gib: float) -> int:
    """Return the index of the first pair that fits into this memory; of the last one where none does."""
    return next((i for i, (_, _, gib) in enumerate(PAIRS) if gib <= free_gib), len(PAIRS) - 1)


def run_inside(runs: str, setup: Setup, rows: Path) -> bool:
    """Run a part in this process: every row is on disk, in `rows`, before the next one is measured. An error that ends
    it is written there as well. Of several processes, the first writes.

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
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: that a model has no room is a result, too
            write({"row": {"outcome": "out of memory"}})
            return good
        write({"error": f"{type(error).__name__}: {error}"})
        raise
    return good
