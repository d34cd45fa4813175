"""`bench trl`: our steps and TRL's have the same losses and gradients, and the command compares what they take."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.trl.task import Measured, Sizes, make_models, make_task
from memcompiler.cli import app
from runtime.progress import disable_library_progress_bars


@pytest.mark.seconds
@pytest.mark.parametrize("stage", ["sft", "grpo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_have_trls_losses_and_gradients_also_after_updates(tmp_path: Path, stage, checkpointing):
    from benchmarks.trl import ours, theirs  # TRL imports Ray, which then reads whether clusters need a token

    disable_library_progress_bars()
    sizes = Sizes(batch=4, micro=2, steps=3, prompt=24, completion=8, common=16, soft=4)
    model, stand_in = make_models(tmp_path, hidden=32, layers=2)
    task = make_task(stage, model, stand_in, sizes=sizes, dtype="float32", checkpointing=checkpointing)
    mine, other = list[Measured](), list[Measured]()
    ours.run(task, tmp_path / "ours", wait=lambda: None, tell=mine.append)
    theirs.run(task, tmp_path / "theirs", wait=lambda: None, tell=other.append)
    assert len(mine) == len(other) == 3
    for a, b in zip(mine, other, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-4) and a.norm == pytest.approx(b.norm, abs=1e-4, rel=1e-4)
        assert a.tokens == b.tokens + 4 * 4 and b.busy > 0  # four memory tokens in each of four rows
    assert mine[0].norm != pytest.approx(mine[2].norm, rel=1e-3)


@pytest.mark.slow
def test_the_command_compares_both_sides_in_processes_of_their_own():
    sizes = ["--hidden", "32", "--layers", "1", "--batch", "2", "--micro", "1", "--prompt", "16", "--completion", "4"]
    done = CliRunner().invoke(app, ["bench", "trl", "grpo", *sizes, "--steps", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    mine, other = (
        [float(cell) for cell in line.split("|")[2:-1]]
        for line in done.output.splitlines()
        if line.startswith(("| MemCompiler", "| TRL"))
    )
    assert mine[-2:] == pytest.approx(other[-2:], abs=1e-4)  # loss and gradient norm after an update
    assert 0 <= mine[4] < mine[3] and 0 <= other[4] < other[3]  # what the steps added, and the whole process
    ratio = float(re.findall(r"^ratio: (\S+)$", done.output, re.M)[0])
    assert ratio == pytest.approx(other[1] / mine[1], rel=0.3)


def test_micro_batches_of_unequal_size_are_refused():
    done = CliRunner().invoke(app, ["bench", "trl", "sft", "--batch", "6", "--micro", "4"])
    assert done.exit_code == 2 and "must divide" in done.output
