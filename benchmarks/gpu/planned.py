"""Part `plan`: predictions of `memcompiler plan` for the measured steps, computed on the CPU beside the other parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.parts import Row, Setup
from plan.budget import GPUS, Gpu

PREDICTIONS = ("part", "tflop", "plan_gib")  # columns of a planned row that the measured row lacks


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each step that another part measures."""
    from benchmarks.gpu import emission, sft, update

    for part, module in (("sft", sft), ("emission", emission), ("update", update)):
        for row in module.plan(setup):
            yield {"part": part, **row}


def with_predictions(part: str, rows: Sequence[Row], planned: Sequence[Row], peak_tflops: float | None) -> list[Row]:
    """Add the plan's figures to measured rows.

    Args:
        peak_tflops: dense bf16 rate in the GPU's data sheet; the MFU is the measured share of it.
    """
    predictions = [row for row in planned if row["part"] == part]
    return [{**row, **_predictions_of(row, predictions, peak_tflops)} for row in rows]


def _predictions_of(row: Row, predictions: Sequence[Row], peak_tflops: float | None) -> Row:
    same = lambda plan: all(row.get(name) == value for name, value in plan.items() if name not in PREDICTIONS)
    plan = next(filter(same, predictions), {})
    found: Row = {}
    if row.get("seconds") and plan.get("tflop"):
        rate = plan["tflop"] / row["seconds"]
        found |= {"tflop_per_s": rate, "mfu": rate / peak_tflops if peak_tflops else None}
    if row.get("peak_gib") and plan.get("plan_gib"):
        found |= {"plan_gib": plan["plan_gib"], "plan_over_peak": plan["plan_gib"] / row["peak_gib"]}
    return found


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by the driver's name for it among those in the plan's table."""
    name = name.lower().replace(" ", "").replace("geforce", "")
    return next((gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name), None)
