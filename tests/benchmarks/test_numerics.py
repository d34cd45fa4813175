"""`memcompiler bench numerics`: the tables of two precisions, from metrics written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.numerics import LAST, drift, ratios
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


def test_the_farthest_ratio_is_found(tmp_path: Path) -> None:
    fine = metrics(
        tmp_path / "fine", {"update": 1, "reward": 0.5, "ratio_text": 1.0, "ratio_latent": 1.001, "mismatch_kl": 1e-9}
    )
    off = metrics(  # no soft token was read
        tmp_path / "off",
        {
            "update": 1,
            "reward": 0.5,
            "ratio_text": 0.875,
            "ratio_latent": 0.0,
            "mismatch_kl": 0.25,
        },  # no soft token was read
        {"update": 2, "reward": 0.5, "ratio_text": 1.0, "ratio_latent": 0.0},
        {"update": 3, "reward": 0.0, "skipped": 1.0},
    )
    lines, farthest = ratios({"fine": fine, "off": off})
    assert farthest == pytest.approx(0.125)
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == [
        "off",
        "2",
        "0.87500 to 1.00000",
        "-",
        "2.5e-01",
    ]
