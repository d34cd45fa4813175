"""The experiment `memory_worth` at small scale: the same search under every delivery, and truncated episodes."""

import json
import sys
from pathlib import Path

import pytest

from agent.records import Episode, StepRecord
from experiments.memory_worth import run as memory_worth


def episode(task: str, steps: int, success: bool) -> Episode:
    played = [StepRecord(t, "", None, None, "", progress=(t + 1) / steps) for t in range(steps)]
    return Episode(task, "", "", "", "", "", "none", 0, steps=played, success=success, progress=float(success))


def test_within_a_limit_a_longer_episode_has_failed_with_the_progress_it_had() -> None:
    short, long = memory_worth.truncated([episode("a", 3, True), episode("b", 8, True)], 4)
    assert (short.success, short.progress, long.success, long.progress, len(long.steps)) == (True, 1, False, 0.5, 4)


def test_guidance_helps_the_searcher_in_generated_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["env.name=household", "env.scenes={train: 1, test: 4}", "env.visual_share=0", "env.images=false"]
    monkeypatch.setattr(sys, "argv", ["memory_worth", "--out", str(tmp_path), "--seeds", "0", "--", *own])
    memory_worth.main()
    within = json.loads((tmp_path / "memory_worth.json").read_text())["within"]["10"]
    assert within["expert_compiler"]["success"]["mean"] > within["none"]["success"]["mean"] + 0.2
    assert "| 10 | expert as compiler |" in capsys.readouterr().out
