"""`memcompiler bench numerics`: the tables of precisions and samplers, from metrics written by hand."""

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


def test_a_sampler_is_compared_with_the_trainer_over_all_updates(tmp_path: Path) -> None:
    update = lambda n, apart: {
        **{"update": n, "reward": 1.0, "apart": apart, "apart_text": apart, "apart_text_max": 4 * apart},
        **{"apart_latent": 0.0, "apart_latent_max": 0.0, "importance_text": 1 + apart, "importance_latent": 1.0},
        **{"ratio_text": 1.0, "ratio_latent": 1.0},
    }
    skipped = {"update": 2, "reward": 1.0, "skipped": 1.0}
    learnt = metrics(tmp_path / "learnt", update(1, 0.01), skipped, update(3, 0.03))
    _, heads, _, row, none = ratios({("bf16", "hf"): learnt, ("fp32", "hf"): metrics(tmp_path / "none", skipped)})
    found = cells(row)
    assert len(found) == len(cells(heads)) == len(cells(none)) and found[:3] == ["bf16", "hf", "2"]
    assert [float(x) for x in found[3:]] == pytest.approx([0.02, 0.12, 0, 0, 1.02, 1, 1, 1])
    assert cells(none)[2].startswith("0: no group")
