"""Trackers get what metrics.jsonl gets, once each, also when a run is killed and resumed."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import ConfigError, load_config
from configs.run_folder import RunFolder
from configs.training import MAY_CHANGE_ON_RESUME, GrpoConfig, SftConfig
from runtime.checksums import parse_row
from tests.training import grpo_trainers, sft_trainers
from training import trackers
from training.grpo import train_grpo
from training.sft import train_sft
from training.trainer import training_log


def scalars(out) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a run: name -> step -> value."""
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def logged(t, run, steps) -> None:
    """Take steps, and log them."""
    with training_log(t, run, t.config) as log:
        for metrics in steps:
            log(metrics, "")


def assert_as_in_metrics(out, unit: str) -> None:
    rows = [parse_row(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shown = scalars(out)
    assert {name for row in rows for name in row} == set(shown)
    for name, values in shown.items():
        written = {int(row[unit]): row[name] for row in rows if name in row}
        assert values == {step: pytest.approx(value, rel=1e-6) for step, value in written.items()}, name


def test_tensorboard_holds_what_metrics_jsonl_holds_and_a_resumed_run_goes_on(tmp_path):
    class Killed(Exception):
        pass

    def steps(t, killed):
        for metrics in t.steps():
            if metrics["step"] == 3 and killed:
                raise Killed
            yield metrics

    for killed in (True, False):
        t = sft_trainers.trainer(tmp_path, trackers=("tensorboard",), max_steps=5)
        run = RunFolder.create(tmp_path, t.config, on_exists="resume")
        if killed:
            with pytest.raises(Killed):
                logged(t, run, steps(t, killed))
            run.metrics.append({"step": 3, "loss": 9.0})  # written, but after the last checkpoint: taken again
        else:
            logged(t, run, steps(t, killed))
    assert sorted(scalars(tmp_path)["loss"]) == [1, 2, 3, 4, 5]
    assert_as_in_metrics(tmp_path, "step")


def test_grpo_is_tracked_by_updates(tmp_path):
    t = grpo_trainers.trainer(tmp_path, trackers=("tensorboard",), updates=2)
    logged(t, RunFolder.create(tmp_path, t.config), (metrics for metrics, _ in t.steps()))
    assert_as_in_metrics(tmp_path, "update")


def test_none_is_the_default_and_leaves_nothing(tmp_path):
    t = sft_trainers.trainer(tmp_path, max_steps=1)
    logged(t, RunFolder.create(tmp_path, t.config), t.steps())
    assert not (tmp_path / "tensorboard").exists() and not (tmp_path / trackers.IDENTITY).exists()


def test_trackers_may_change_on_resume_and_a_run_keeps_its_identity(tmp_path):
    RunFolder.create(tmp_path, SftConfig())
    first = trackers._identity(tmp_path)
    RunFolder.create(tmp_path, SftConfig(trackers=("wandb",)), on_exists="resume", ignore=MAY_CHANGE_ON_RESUME)
    assert trackers._identity(tmp_path) == first
    RunFolder.create(tmp_path, SftConfig(), on_exists="overwrite")
    assert trackers._identity(tmp_path) != first


@pytest.mark.parametrize(("command", "kind"), [(train_sft, SftConfig), (train_grpo, GrpoConfig)])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(tmp_path, monkeypatch, command, kind):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed: uv sync --extra trackers"):
        command(kind(trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="trackers"):
        load_config(kind, None, ["trackers=[mlflow]"])
