"""Parts of the GPU check, most useful first, and their common setup."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.store import JsonLines

Size = Literal["tiny", "paper"]
Device = Literal["cpu", "cuda"]
Row = dict[str, Any]  # columns in order, with units in their names
OUTCOME, FULL = "outcome", "out of memory"

VL_7B, TEXT_7B, TEXT_14B = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct"
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Compiler, executor, and the planned GiB of one row of SFT with gradient checkpointing on one GPU.
PAIRS = (
    (VL_7B, TEXT_14B, 45.9),
    (TEXT_7B, TEXT_14B, 44.6),
    (VL_7B, TEXT_7B, 31.2),
    (TEXT_7B, TEXT_7B, 30.0),
    (SMALL, SMALL, 1.7),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """Setup of all parts.

    Attributes:
        size: models of the paper's size, or tiny ones.
        processes: number of processes that shard a model.
        pair: index of the models in `PAIRS`.
    """

    device: Device
    size: Size
    processes: int = 1
    pair: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check.

    Attributes:
        runs: generator of rows as module:function, imported in the part's own process.
        share: weight of its time limit among the remaining parts.
        packages: required packages; the part is skipped without one of them.
        sharded: torchrun starts one process per GPU; skipped on a single GPU.
        background: needs no GPU and runs beside the other parts.
    """

    name: str
    runs: str
    share: float
    packages: tuple[str, ...] = ()
    sharded: bool = False
    background: bool = False

    def skip_reason(self, setup: Setup) -> str | None:
        """Return why this part cannot run here; None if it can."""
        if self.sharded and setup.processes < 2:
            return f"one {setup.device} device: shards are for several"
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed" if missing else None


VLLM = ("vllm", "datasets")  # vLLM imports datasets when it loads a folder
PARTS = (
    Part("plan", "benchmarks.gpu.planned:measure", 0, background=True),
    Part("machine", "benchmarks.gpu.machine:measure", 30),
    Part("parity", "benchmarks.gpu.parity:measure", 70),
    Part("sft", "benchmarks.gpu.sft:measure", 130),
    Part("emission", "benchmarks.gpu.emission:measure", 100),
    Part("update", "benchmarks.gpu.update:measure", 80),
    Part("learning", "benchmarks.gpu.learning:measure", 110),
    Part("fsdp", "benchmarks.gpu.fsdp:measure", 120, sharded=True),
    Part("vllm", "benchmarks.gpu.vllm_engine:measure", 120, packages=VLLM),
    Part("speculation", "benchmarks.gpu.vllm_engine:speculate", 100, packages=VLLM),
)


def largest_pair(free_gib: float) -> int:
    """Return the index of the first pair that fits into this memory; the last index if none does."""
    return next((i for i, (_, _, gib) in enumerate(PAIRS) if gib <= free_gib), len(PAIRS) - 1)


def run_inside(runs: str, setup: Setup, rows: Path) -> bool:
    """Run a part in this process; append each row, and a final error, to `rows` as it appears (rank 0 only).

    Returns:
        Whether no row has `passed: False`.
    """
    file = JsonLines(rows) if int(os.environ.get("RANK", "0")) == 0 else None
    write = file.append if file else lambda row: None
    passed = True
    try:
        module, _, name = runs.partition(":")
        measured: Iterator[Row] = getattr(importlib.import_module(module), name)(setup)
        for row in measured:
            write({"row": row})
            passed = passed and row.get("passed") is not False
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            write({"error": f"{type(error).__name__}: {error}"})
            raise
        write({"row": {OUTCOME: FULL}})  # models too large for this device are a result
    return passed
