"""What `memcompiler plan` predicts for the parts that measure: computed beside them, on the CPU, and joined to their
rows when the table is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.parts import Row, Setup
from plan.budget import GPUS, Gpu

PLANNED = ("sft", "emission", "update")
OF_PLAN = ("part", "tflop", "plan_gib")  # what a row of the plan has besides the columns that it shares


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each step that is measured elsewhere."""
    from benchmarks.gpu import emission, sft, update

    for part, module in zip(PLANNED, (sft, emission, update), strict=True):
        for row in module.plan(setup):
            yield {"part": part, **row}


def joined(part: str, rows: Sequence[Row], planned: Sequence[Row], sheet_tflops: float | None) -> list[Row]:
    """Add to a part's rows what the plan says of the same step: TFLOP/s, MFU (the share of the data sheet's dense bf16
    rate), and the plan's peak memory beside the measured one."""
    known = [row for row in planned if row["part"] == part]
    return [{**row, **_compared(row, known, sheet_tflops)} for row in rows]


def _compared(row: Row, known: Sequence[Row], sheet_tflops: float | None) -> Row:
    for plan in known:
        shared = {name: value for name, value in plan.items() if name not in OF_PLAN}
        if all(row.get(name) == value for name, value in shared.items()):
            return _figures(row, plan, sheet_tflops)
    return {}


def _figures(row: Row, plan: Row, sheet_tflops: float | None) -> Row:
    found: dict[str, Any] = {}
    if row.get("seconds") and plan.get("tflop"):
        found["tflop_per_s"] = plan["tflop"] / row["seconds"]
        found["mfu"] = found["tflop_per_s"] / sheet_tflops if sheet_tflops else None
    if row.get("peak_gib") and plan.get("plan_gib"):
        found |= {"plan_gib": plan["plan_gib"], "plan_over_peak": plan["plan_gib"] / row["peak_gib"]}
    return found


def data_sheet(name: str) -> Gpu | None:
    """Find the GPU of this name among those whose dense bf16 rate the plan knows."""
    name = name.lower().replace(" ", "").replace("geforce", "")
    return next((gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name), None)
