"""The parts of the GPU check on a pretended GPU, with tiny models."""

from __future__ import annotations

import importlib
from itertools import islice
from typing import Any

import pytest

from benchmarks.gpu import parity
from benchmarks.gpu.parts import PARTS, Setup

SETUP = Setup("cuda", "tiny")


def test_parity_holds() -> None:
    parity.disable_tf32()
    rows = list(parity.compare("float32", *(parity.make_models("float32", device) for device in ("cpu", "cuda"))))
    assert all(row["passed"] for row in rows)


@pytest.mark.parametrize(("name", "enough"), [("machine", 99), ("sft", 1), ("emission", 2), ("update", 1)])
def test_a_part_gives_rows(name: str, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = next(part for part in PARTS if part.name == name)
    module, _, function = part.runs.partition(":")
    measured: Any = importlib.import_module(module)
    if hasattr(measured, "ROWS"):
        monkeypatch.setattr(measured, "ROWS", (1,))
    rows = list(islice(getattr(measured, function)(SETUP), enough))
    assert rows and all(row.get("passed") is not False for row in rows)
