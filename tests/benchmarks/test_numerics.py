"""`memcompiler bench numerics`: the tables of two precisions, from metrics written by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.numerics import LAST, drift
from runtime.store import JsonLines


def metrics(run: Path, *rows: dict[str, float]) -> Path:
    run.mkdir()
    JsonLines(run / "metrics.jsonl").append(*rows)
    return run


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_losses_are_compared_at_equal_steps(tmp_path: Path) -> None:
    fp32 = metrics(tmp_path / "fp32", *({"step": n, "loss": 4.0 - n} for n in (1, 2)))
    bf16 = metrics(tmp_path / "bf16", *({"step": n, "loss": 4.0 - 1.5 * n} for n in (1, 2, 3)))
    title, heads, _, row = drift({"fp32": fp32, "bf16": bf16})
    assert title == "SFT, 2 steps:" and f"fp32, last {LAST}" in heads
    assert cells(row) == ["loss", "3.0000", "2.5000", "2.5000", "1.7500", "0.7500", "1.0000"]
