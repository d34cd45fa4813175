"""`memcompiler bench overlap`: what it counts as computing; no test asserts a duration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.overlap import WatchedRun, covered, watched
from memcompiler.cli import app
from tests.training.grpo_trainers import trainer


def test_shares_by_hand() -> None:
    assert covered([(5.0, 9.0), (1.0, 3.0), (2.0, 4.0), (2.0, 2.5)], (2.5, 8.0)) == 1.5 + 3.0
    run = WatchedRun(
        rollouts=[(0.0, 2.0), (2.0, 4.0), (5.0, 6.0)], updates=[(3.0, 5.0), (8.0, 9.0)], steps=[(0.0, 5.0), (5.0, 10.0)]
    )
    assert run.shares == {"rollouts": 0.5, "updates": 0.3, "both": pytest.approx(0.1), "either": 0.7}
    assert run.seconds_per_update == 5.0


@pytest.mark.seconds
@pytest.mark.parametrize(("seconds", "played"), [(float("inf"), 3), (0.0, 2)], ids=["to the end", "cut short"])
def test_a_run_is_watched_and_leaves_no_rollout_behind(tmp_path: Path, seconds: float, played: int) -> None:
    t = trainer(tmp_path, max_staleness=1, updates=3, tasks=1, save_every=10, loss={"importance_cap": 2.0})
    with watched(seconds) as run:
        list(t.steps())
    assert t.is_done and t.step == len(run.steps) == len(run.updates) == played and not t._ahead._rollouts
    assert len(run.rollouts) >= 4 * played  # two steps of an update's episodes, each compiled and acted on
    shares = run.shares
    assert 0 < shares["updates"] < shares["either"] <= 1 and 0 <= shares["both"] < shares["rollouts"]
    assert shares["either"] == pytest.approx(shares["rollouts"] + shares["updates"] - shares["both"])


@pytest.mark.parametrize(
    ("arguments", "message"), [(["cluster=ray"], "leave cluster=ray out"), (["--staleness", "1,x"], "such as 0,1,2")]
)
def test_bad_input_gives_one_clear_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "overlap", *arguments])
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output
