"""`memcompiler bench soak`: every fault of a worker costs one episode, and a lost or grown one is seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import soak as module
from benchmarks.sizes import Sizes, process_sizes
from benchmarks.soak import SoakResult, soak

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see memory and processes")


@linux
@pytest.mark.slow
def test_every_fault_costs_one_episode_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 4.0)
    result = soak(200, 4, 0.06, tmp_path / "faults")
    assert result.is_sound(), (result.wrong, result.parent, result.workers, result.left)
    assert result.ends.total() == 200 and 3 < result.faults.total() == result.ends["environment_failure"] < 60


def test_growth_is_seen() -> None:
    flat, grown = (
        Sizes([500, 1000, 1500, 2000], [90.0, *mib], [9] * 4, [2] * 4) for mib in ([99] * 3, [150, 151, 152])
    )
    assert abs(flat.slope) < 1e-3 and not flat.has_grown and not grown.has_grown
    assert grown.slope == pytest.approx(2 * 1024)  # KiB per 1,000 episodes: 1 MiB in 500
    grown.mib[-1] = 200.0
    assert grown.has_grown and not SoakResult(parent=grown, workers=flat).is_sound()
    flat.handles[-1] = 30
    assert flat.has_grown


@linux
def test_sizes_of_a_process(tmp_path: Path) -> None:
    before = process_sizes(os.getpid())
    with (tmp_path / "file").open("w"):
        after = process_sizes(os.getpid())
    assert before and after and after[1] == before[1] + 1 and after[0] > 1 and after[2] >= 1
    assert process_sizes(2**22 + 1) is None
