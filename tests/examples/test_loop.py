"""`examples/loop.py` runs from a clone, and its task is solved with what memory knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.loop import main


def test_the_paper_s_loop_solves_its_task_with_what_memory_knows(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    assert main() is True
    told = capsys.readouterr().out
    assert told.rstrip().endswith("success: True")
    first = told.index("\n0  HYBRID: '> in home 2 the plate was in microwave 1 | go to microwave 1")
    act = told.index("-> go to microwave 1\n   You arrive at microwave 1.", first)
    folded = told.index("done: take plate 1 from microwave 1 ; heat plate 1 with microwave 1", act)
    assert "memory: 4 entries" in told[:first] and "Brief State at the end:" in told[act:folded]
