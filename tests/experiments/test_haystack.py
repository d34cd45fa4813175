"""The curve of memory size: results are sorted by delivery and entries, and drawn."""

from pathlib import Path
from typing import Any

from experiments.haystack.run import curves_of, plot, table


def test_results_are_sorted_by_delivery_and_size_and_drawn(tmp_path: Path) -> None:
    rate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    summary: dict[str, Any] = {
        "success": {"n": 7},
        "success_at": {"15": rate, "30": rate},
        "executor_tokens_per_step": 500,
    }
    names = [f"entries={k}/{delivery}" for k in (16, 1) for delivery in ("static", "compiled_text")]
    curves = curves_of({"results": dict.fromkeys(names, summary)}, "trained")
    assert [(title, list(by_size)) for title, by_size in curves.items()] == [
        ("trained: static memory", [1, 16]),
        ("trained: compiled, text only", [1, 16]),
    ]
    assert table(curves)[2].split(" | ")[1:] == ["1", "7", "50.0 [40.0, 60.0]", "50.0 [40.0, 60.0]", "500 |"]
    plot(curves, tmp_path / "haystack.png")
    assert (tmp_path / "haystack.png").stat().st_size > 10_000
