"""Validation in SFT: tasks held out whole, the best and the last checkpoint kept, early stopping, resume."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiler import checkpoint
from configs.training import SftConfig
from data_gen.rows import save_rows, split_rows
from runtime.checksums import parse_row
from tests import tiny_models
from tests.commands.running import kill_after, memcompiler
from tests.training.sft_trainers import ROWS, executor, row, trainable
from training.evaluation import BestCheckpoint
from training.sft import SftTrainer, train_sft

MANY = [replace(row(i % 5), task_id=f"t{i // 3}", t=i % 3, history=()) for i in range(30)]  # ten tasks of three rows


def trainer(out: Path, patience: int | None = None, held_out=MANY[:3], **settings) -> SftTrainer:
    validation = {"share": 0.1, "every": 2, "patience": patience}
    common = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 8, "optimizer": {"lr": 1e-3}, "save_every": 4}
    config = SftConfig(**(common | {"validation": validation} | settings))
    return SftTrainer(config, tiny_models.memory_compiler(True), executor(), ROWS, out, None, held_out)


def script(trainer: SftTrainer, losses: list[float]) -> SftTrainer:
    """Have validation find these losses."""
    trainer.validate = lambda: {"loss": losses[trainer.step // 2 - 1]}
    return trainer


@pytest.mark.parametrize("seed", range(5))
def test_no_task_trains_and_validates(seed):
    training, held = split_rows(MANY, 0.2, seed)
    tasks = [{row.task_id for row in part} for part in (training, held)]
    assert not tasks[0] & tasks[1] and len(tasks[1]) == 2 and len(held) == 6
    assert sorted([*training, *held], key=MANY.index) == MANY
    assert [row.task_id for row in training] == [row.task_id for row in MANY if row.task_id in tasks[0]]  # in order


def test_which_tasks_are_held_out_follows_from_seed_and_names_alone():
    held = lambda rows, seed: {row.task_id for row in split_rows(rows, 0.3, seed)[1]}
    assert held(MANY, 0) == held(MANY[::-1], 0) != held(MANY, 1)
    assert split_rows(MANY, 0.0, 0) == (MANY, [])
    assert len(held(MANY, 0)) == 3 and len({row.task_id for row in split_rows(MANY, 0.01, 0)[1]}) == 1
    with pytest.raises(ValueError, match="rows of 1 tasks cannot be split"):
        split_rows(MANY[:3], 0.1, 0)


def test_the_validation_loss_is_the_loss_of_the_held_out_rows_alone_without_noise_and_dropout(tmp_path):
    """Two micro-batches of unequal length weigh as their tokens do, not as micro-batches."""
    t = trainer(tmp_path, label_smoothing=0.0)
    found, again = t.validate(), t.validate()
    assert found == again and t.compiler.training
    t.compiler.eval()
    examples = [t.examples[len(ROWS) + i] for i in range(3)]
    with torch.no_grad():
        scored = t.compiler.score([e.prompt for e in examples], [e.emission for e in examples])
        logprobs = scored.logits.log_softmax(-1).gather(2, scored.targets[..., None])[..., 0]
        soft = t.compiler.projector.to_embeddings(scored.gaussian.mu)
        nll, count = t.executor.action_nll([e.executor_prompt for e in examples], soft, [e.action for e in examples])
    assert found["loss_text"] == pytest.approx(-logprobs[scored.text_mask].mean().item(), abs=1e-4)
    assert found["loss_action"] == pytest.approx((nll.sum() / count.sum()).item(), abs=1e-4)
    weights = t.config.weights.model_dump()
    terms = {name.removeprefix("loss_"): value for name, value in found.items() if name != "loss"}
    assert found["loss"] == pytest.approx(sum(weights[name] * value for name, value in terms.items()))


def test_validation_changes_nothing_of_training(tmp_path):
    """Same weights, same metrics as without."""
    ours, plain = trainer(tmp_path / "ours"), trainer(tmp_path / "plain", held_out=())
    mine, theirs = list(ours.steps()), list(plain.steps())
    for name, value in trainable(plain).items():
        assert torch.equal(value, trainable(ours)[name]), name
    assert [m["step"] for m in mine if "val_loss" in m] == [2, 4, 6, 8] and not any("val_loss" in m for m in theirs)
    drop = lambda m: {k: v for k, v in m.items() if not k.startswith("val_") and k != "seconds"}
    assert [drop(m) for m in mine] == [drop(m) for m in theirs]
    assert "best" not in checkpoint.read_state(checkpoint.find(tmp_path / "plain"))


def test_the_best_and_the_last_checkpoint_are_kept_and_the_best_is_found(tmp_path):
    list(script(trainer(tmp_path, keep=1), [3.0, 1.0, 2.0, 4.0]).steps())
    folder = tmp_path / "checkpoints"
    assert [p.name for p in checkpoint.checkpoints(folder)] == ["step-000004", "step-000008"]
    assert checkpoint.find(tmp_path) == checkpoint.find(folder) == folder / "step-000004"
    assert checkpoint.latest(folder) == folder / "step-000008"
    assert checkpoint.find(folder / "step-000008") == folder / "step-000008"
    assert checkpoint.find(folder / "best").resolve() == folder / "step-000004"
    assert checkpoint.read_state(folder / "step-000008")["best"] == {"loss": 1.0, "step": 4, "since": 2}


def test_training_stops_after_so_many_validations_without_a_lower_loss(tmp_path):
    t = script(trainer(tmp_path, patience=2, max_steps=20), [3.0, 1.0, 1.0, math.nan, 0.5])
    list(t.steps())
    assert t.step == 8 and t.is_done
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step-000008"
    again = trainer(tmp_path, patience=2, max_steps=20)
    assert again.resume() and again.is_done and not list(again.steps())


def test_a_better_checkpoint_is_saved_when_it_is_found_and_the_count_begins_anew():
    best = BestCheckpoint()
    assert [best.update({"val_loss": loss}, step) for step, loss in enumerate([2.0, 2.0, 1.5, math.inf, 1.6], 1)] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert (
        best
        == BestCheckpoint(1.5, 3, 2)
        == BestCheckpoint.from_state({"best": json.loads(json.dumps(best.to_state()["best"]))})
    )
    assert BestCheckpoint().to_state() == {} and BestCheckpoint.from_state({}) == BestCheckpoint()


def test_a_run_that_is_cut_short_goes_on_to_the_same_best(tmp_path):
    """Cut before a checkpoint is marked as the best, and right before training would stop."""
    losses = [3.0, 1.0, 2.0, 2.5, 2.7]
    whole = script(trainer(tmp_path / "whole", patience=3, max_steps=20, keep=1), losses)
    list(whole.steps())
    part = script(trainer(tmp_path / "part", patience=3, max_steps=20, keep=1), losses)
    for metrics in part.steps():
        if metrics["step"] == 9:
            break
    (tmp_path / "part" / "checkpoints" / "best").unlink()
    again = script(trainer(tmp_path / "part", patience=3, max_steps=20, keep=1), losses)
    assert again.resume() and again.step == 8 and again.best == BestCheckpoint(1.0, 4, 2)
    list(again.steps())
    assert again.step == whole.step == 10
    names = [{p.name for p in (tmp_path / run / "checkpoints").iterdir()} for run in ("whole", "part")]
    assert names[0] == names[1] == {"best", "step-000004", "step-000010"}
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


def test_a_run_folder_says_which_tasks_were_held_out(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(SftTrainer, "steps", lambda self: seen.update(trainer=self) or iter(()))
    save_rows(MANY, tmp_path / "rows")
    config = SftConfig(rows=str(tmp_path / "rows"), allow_leakage=True, validation={"share": 0.2}, **TINY)
    train_sft(config, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "held_out.json").read_text())
    assert told["rows"] == len(seen["trainer"].validation_rows) == 6 and len(seen["trainer"].rows) == 24
    assert set(told["tasks"]) == {row.task_id for row in seen["trainer"].validation_rows}


TINY = {
    "compiler": {"model": "zoo/household/compiler", "dtype": "float32", "instructions": "none"},
    "executor": {"model": "zoo/household/executor", "dtype": "float32", "instructions": "none"},
}


@pytest.mark.slow
def test_after_kill_minus_9_a_run_that_validates_ends_as_if_nothing_had_been(tmp_path):
    """Killed before SFT's first checkpoint and again in its middle: weights, checkpoints and metrics are those of a run
    that was never stopped."""
    save_rows(MANY, tmp_path / "rows")
    common = [
        "train",
        "sft",
        "-c",
        "sft/quickstart",
        f"rows={tmp_path / 'rows'}",
        "allow_leakage=true",
        "max_steps=24",
        "batch_size=4",
        "save_every=7",
        "validation={share: 0.2, every: 2, patience: 3}",
    ]
    whole = memcompiler(*common, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    kill_after(2, common, tmp_path / "killed")
    kill_after(9, common, tmp_path / "killed")
    resumed = memcompiler(*common, "--out", str(tmp_path / "killed"))
    assert resumed.returncode == 0 and "resumed at step" in resumed.stdout, resumed.stdout + resumed.stderr[-2000:]
    found = {run: checkpoint.find(tmp_path / run) for run in ("whole", "killed")}
    assert found["whole"].name == found["killed"].name
    for run in found:
        assert {p.name for p in (tmp_path / run / "checkpoints").iterdir()} == {
            p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()
        }
    for file in ("projector.safetensors", "adapter/adapter_model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(found[run] / file) for run in found)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    texts = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("whole", "killed")]
    whole, killed = ([{**parse_row(line), "seconds": 0} for line in text.splitlines()] for text in texts)
    assert whole == killed and [row["step"] for row in whole] == list(range(1, len(whole) + 1))
