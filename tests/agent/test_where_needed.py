"""Compiling only where a guess from the step alone says that there is something to say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.deliveries import find, recorded_step
from agent.episode import Limits, run_episodes
from agent.records import compile_request, episode_from_json, executor_request
from compiler.checkpoint import CheckpointError
from compiler.need import FILE, features, keep_need, need_of
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, to_yaml
from configs.training import SftConfig
from data_gen.rows import SftRow, save_rows
from eval.players import needed_by
from memcompiler.cli import app
from tests.fakes import CountingEnv, Recorder, spec
from training.need import leave_need, train_need

TASKS = 40


class Guess:
    """Gives likelihoods by the step, and keeps what it is asked."""

    threshold = 0.5

    def __init__(self, *likely):
        self.likely, self.asked = likely, []

    def __call__(self, request):
        self.asked.append(request)
        return self.likely[len(request.history)]


def row(task: int, t: int, memory: str = "the mug was in sink 1") -> SftRow:
    """Who has nothing in hand is guided, but for every tenth; a teacher says nothing on the way."""
    free = (task + t) % 2 == 0
    says = "> it was there | go to sink 1" if free and (task + t) % 20 else "."
    view = "You see a sink 1. You hold nothing." if free else "You see a mug 1. You hold a mug 1."
    return SftRow(
        f"t{task}", "train", "", t, "put a mug in sink", ("e",), (memory,), "goal: put a mug in sink", view, None,
        ("look",) * t, says, "go to sink 1",
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an SFT run, with a checkpoint in it."""
    rows, folder = [row(task, t) for task in range(TASKS) for t in range(6)], tmp_path / "run"
    save_rows(rows, tmp_path / "rows")
    (step := folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (folder / "config.resolved.yaml").write_text(to_yaml(SftConfig(rows=str(tmp_path / "rows"))))
    return folder


def test_steps_that_are_not_likely_to_need_it_are_not_compiled_but_for_the_first():
    executor, guess = Recorder(), Guess(0.0, 0.9, 0.1)
    delivery = find("compiled_needed").make(executor, 0, need=guess)
    [episode] = run_episodes(CountingEnv, [spec(3)], delivery, executor, Limits(5))
    assert [step.emission_kind for step in episode.steps] == ["HYBRID", "BRIEF", ""]
    assert [step.needed for step in episode.steps] == [None, 0.9, 0.1] and len(guess.asked) == 2
    assert "compiler" not in episode.steps[2].seconds
    assert set(episode.steps[2].tokens) == {"executor_in", "executor_out"}
    assert episode.steps[2].brief_after == episode.steps[1].brief_after
    assert guess.asked[0].state is not None and guess.asked[0].history == (episode.steps[0].action,)
    back = episode_from_json(json.loads(json.dumps(episode.to_json())))
    assert [step.needed for step in back.steps] == [None, 0.9, 0.1]
    read = [executor_request(recorded_step(back, t, spec(3).memory), executor).delivered for t in range(3)]
    assert read == [asked.delivered for asked in executor.seen] and not read[2].guidance


def test_without_it_the_delivery_says_what_makes_it():
    with pytest.raises(ValueError, match="compiled_needed needs what `memcompiler train need` leaves"):
        find("compiled_needed").make(Recorder(), 0)
    asked = ["deliveries=[none, compiled_needed]", "compiler.checkpoint=zoo/alfworld/checkpoint/adapter"]
    with pytest.raises(ConfigError, match=r"asks what `memcompiler train need RUN` leaves"):
        needed_by(load_config(EvalConfig, None, ["deliveries=[compiled_needed]"]))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        needed_by(load_config(EvalConfig, None, asked))
    assert needed_by(load_config(EvalConfig, None, ["deliveries=[compiled]", "compiler.checkpoint=/nowhere"])) is None


def test_it_learns_from_rows_which_steps_are_guided_and_stands_beside_their_checkpoints(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = CliRunner().invoke(app, ["train", "need", str(run), "--recall", "0.9"])
    assert made.exit_code == 0 and "steps are guided" in made.output, made.output
    need = need_of(str(run))
    assert need is not None and need.manifest["recall"] >= 0.9 and need.manifest["rows"] == 6 * TASKS
    free, busy = (compile_request(row(TASKS, t).step_input()) for t in (0, 1))
    assert need(free) >= need.threshold > need(busy)
    assert need.sha256 == need_of(str(run / "checkpoints" / "step-000001")).sha256  # type: ignore[union-attr]
    asked = load_config(EvalConfig, None, ["deliveries=[compiled_needed]", f"compiler.checkpoint={run}", "needed=0.7"])
    other = needed_by(asked)
    assert other is not None and (other.threshold, other(free)) == (0.7, need(free)) and other.sha256 != need.sha256
    keep_need(str(run), tmp_path / "on")
    assert (tmp_path / "on" / FILE).read_bytes() == (run / FILE).read_bytes()
    again = train_need(run, recall=0.9)
    assert again.sha256 == need.sha256 and train_need(run, recall=1.0).threshold <= need.threshold
    monkeypatch.setattr("training.need.MOST", 2 * TASKS)
    assert train_need(run).manifest["rows"] == 2 * TASKS  # every third of six steps


def test_it_sees_state_view_and_last_actions_and_neither_memory_nor_a_words_place_in_another_line():
    one, other = (compile_request(row(0, 3, memory).step_input()) for memory in ("the mug was in sink 1", "a lamp"))
    assert (features([one]) != features([other])).nnz == 0
    apart = features([one]).indices.tolist()
    assert len(apart) == len(set(apart))
    moved = replace(row(0, 3), history=("look", "look", "take mug 1"))
    assert (features([one]) != features([compile_request(moved.step_input())])).nnz > 0


def test_what_cannot_be_fitted_or_read_is_a_clear_error(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(CheckpointError, match="no folder of an SFT run"):
        train_need(tmp_path)
    train_need(run)
    (run / FILE).write_bytes((run / FILE).read_bytes()[:-8] + bytes(8))
    with pytest.raises(CheckpointError, match=r"is not what need.json tells of"):
        need_of(str(run))
    (run / FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="holds no need that can be read"):
        need_of(str(run))
    save_rows([row(task, 1) for task in range(0, 8, 2)], tmp_path / "silent")
    (run / "config.resolved.yaml").write_text(to_yaml(SftConfig(rows=str(tmp_path / "silent"))))
    leave_need(run, 0)  # SFT does not end by it
    assert "0 are guided" in " ".join(capsys.readouterr().out.split())
    silent = CliRunner().invoke(app, ["train", "need", str(run)])
    assert silent.exit_code and "of 4 rows 0 are guided" in silent.output
