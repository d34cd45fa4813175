"""The cost of a solved task on a small recorded run, beside numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from agent.records import Episode, StepRecord
from configs.models import model_path
from eval.cost import cost_of, parameters_of, ratio_of
from eval.metrics import results
from memcompiler.cli import app
from runtime.errors import StopReason

COMPILED = {"compiler_in": 100, "compiler_cached": 60, "compiler_out": 10, "executor_in": 20, "executor_out": 2}
STATIC = {"executor_in": 200, "executor_out": 2}
SIZES = ["--compiler-parameters", "1e6", "--executor-parameters", "2e6"]


def episode(task: str, delivery: str, steps: int, success: bool, stop: StopReason = StopReason.STEP_LIMIT) -> Episode:
    tokens = COMPILED if delivery == "compiled" else STATIC
    seconds = {"executor": 0.5, **({"compiler": 0.25} if delivery == "compiled" else {})}
    played = [StepRecord(t, "", None, None, "", tokens=dict(tokens), seconds=dict(seconds)) for t in range(steps)]
    reason = StopReason.SUCCESS if success and stop is StopReason.STEP_LIMIT else stop
    return Episode(task, "", "", "", "", "", delivery, 0, steps=played, success=success, stop_reason=reason)


EPISODES = [
    episode("t0", "compiled", 2, True),
    episode("t1", "compiled", 3, False),
    episode("t0", "static", 3, True),
    episode("t1", "static", 4, True),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as `memcompiler eval` leaves it."""
    played = {name: [e for e in EPISODES if e.delivery == name] for name in ("compiled", "static")}
    meta = {"environment": "household", "split": "test", "seed": 0, "max_steps": 4}
    (tmp_path / "results.json").write_text(json.dumps(results(played, meta)))
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(e.to_json()) + "\n" for e in EPISODES))
    settings = "compiler: {engine: hf, model: zoo/household/compiler}\nexecutor: {engine: scripted, model: none}\n"
    (tmp_path / "config.resolved.yaml").write_text(settings)
    return tmp_path


def asked(run: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["bench", "cost", str(run), *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_cost_is_that_of_all_episodes_over_those_that_were_solved(run: Path) -> None:
    # Compiled: 5 steps, one task solved: 2 x 5 x (110 x 1e6 + 22 x 2e6) = 1.54 GFLOP.
    # Static: 7 steps, two tasks solved: 2 x 7 x 202 x 2e6 / 2 = 2.828 GFLOP.
    said = asked(run, *SIZES)
    assert said.splitlines()[-1] == "cost ratio: 0.54"
    compiled = next(line for line in said.splitlines() if line.startswith("| compiled"))
    for cell in ("1 of 2", "500.0 (300.0)", "50.0", "1.2", "100.0 (?)", "10.0", "2.5", "1.5", "385.0"):
        assert cell in compiled
    # Within 3 steps static solves one task, too: 2 x 6 x 202 x 2e6 = 4.848 GFLOP.
    assert asked(run, *SIZES, "--steps", "3").splitlines()[-1] == "cost ratio: 0.32"
    assert asked(run, *SIZES, "--delivery", "static", "--over", "static").splitlines()[-1] == "cost ratio: 1.00"


def test_where_nothing_was_solved_there_is_no_ratio(run: Path) -> None:
    assert (
        asked(run, *SIZES, "--steps", "1").splitlines()[-1]
        == "cost ratio: undefined (compiled and static solved nothing)"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--over", "none"], "no episodes under none"), (["--steps", "9"], "gave its episodes 4 steps")],
)
def test_what_the_run_has_not_is_refused(run: Path, options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", "cost", str(run), *SIZES, *options])
    assert done.exit_code and says in " ".join((done.output + str(done.exception)).split())


def test_an_episode_that_broke_costs_and_solves_nothing() -> None:
    broken = episode("t0", "static", 2, True, StopReason.EXECUTOR_FAILURE)
    cost = cost_of("static", [broken, episode("t1", "static", 1, True)], {"compiler": 1.0, "executor": 1.0}, 4)
    assert cost.successes == 1 and sum(cost.flops.values()) == 2 * 3 * 202


def test_the_interval_comes_from_the_tasks() -> None:
    sizes = {"compiler": 1e6, "executor": 2e6}
    many = [[episode(f"t{i}", name, 2 + i % 3, True) for i in range(60)] for name in ("compiled", "static")]
    compiled, static = (cost_of(e[0].delivery, e, sizes, 4) for e in many)
    value, low, high = ratio_of(compiled, static)
    assert low == pytest.approx(value) == high  # every task has the same ratio
    value, low, high = ratio_of(
        compiled,
        cost_of("static", [*many[1][:50], *(episode(f"t{i}", "static", 4, False) for i in range(50, 60))], sizes, 4),
    )
    assert low < value < high


def test_a_models_size_is_counted_without_its_weights() -> None:
    with safe_open(Path(model_path("zoo/household/compiler")) / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 - not a dict
    assert parameters_of({"engine": "hf", "model": "zoo/household/compiler"}) == stored
    assert parameters_of({"engine": "scripted", "model": "none"}) == 0
    with pytest.raises(ValueError, match="--executor-parameters"):
        parameters_of({"engine": "api", "model": "none"})
