"""The compile gate: steps are compiled only where it predicts guidance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.deliveries import find, recorded_step
from agent.episode import EpisodeLimits, run_episodes
from agent.records import compile_request, episode_from_json, executor_request
from compiler.checkpoint import CheckpointError
from compiler.gate import FILE, copy_gate, features, load_gate
from compiler.language import parse
from compiler.records import Compilation
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, to_yaml
from configs.training import GrpoConfig, SftConfig
from data_gen.collect import teacher_delivery
from data_gen.rows import SftRow, episode_rows, save_rows
from eval.rollouts import gate_of
from memcompiler.cli import app
from tests.fakes import CountingEnv, Recorder, entry, spec
from training.gate import _old_states, fit_gate_after_sft, train_gate
from training.grpo import delivery_gate

TASKS = 40


class Guess:
    """Returns a probability by the step, and records its requests."""

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
        f"t{task}",
        "train",
        "",
        t,
        "put a mug in sink",
        ("e",),
        (memory,),
        "goal: put a mug in sink",
        view,
        None,
        ("look",) * t,
        says,
        "go to sink 1",
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an SFT run, with a checkpoint in it."""
    rows, folder = [row(task, t) for task in range(TASKS) for t in range(6)], tmp_path / "run"
    save_rows(rows, tmp_path / "rows")
    (step := folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (folder / "config.resolved.yaml").write_text(to_yaml(SftConfig(rows=str(tmp_path / "rows"))))
    return folder


def test_only_the_first_step_and_those_that_the_gate_selects_are_compiled():
    executor, guess = Recorder(), Guess(0.0, 0.9, 0.1)
    delivery = find("compiled_gated").create(executor, 0, gate=guess)
    [episode] = run_episodes(CountingEnv, [spec(3)], delivery, executor, EpisodeLimits(5))
    assert [step.emission_kind for step in episode.steps] == ["HYBRID", "BRIEF", ""]
    assert [step.gate_probability for step in episode.steps] == [None, 0.9, 0.1] and len(guess.asked) == 2
    assert "compiler" not in episode.steps[2].seconds
    assert set(episode.steps[2].tokens) == {"executor_in", "executor_out"}
    assert episode.steps[2].brief_after == episode.steps[1].brief_after
    assert guess.asked[0].state is not None and guess.asked[0].history == (episode.steps[0].action,)
    back = episode_from_json(json.loads(json.dumps(episode.to_json())))
    assert [step.gate_probability for step in back.steps] == [None, 0.9, 0.1]
    read = [executor_request(recorded_step(back, t, spec(3).memory), executor).delivered for t in range(3)]
    assert read == [asked.delivered for asked in executor.seen] and not read[2].guidance


def test_a_missing_gate_is_an_error_that_names_the_command_which_fits_one():
    with pytest.raises(ValueError, match="compiled_gated needs a compile gate: run `memcompiler train gate`"):
        find("compiled_gated").create(Recorder(), 0)
    asked = ["deliveries=[none, compiled_gated]", "compiler.checkpoint=zoo/alfworld/checkpoint/adapter"]
    with pytest.raises(CheckpointError, match="compiled_gated needs a compile gate, and there is none beside"):
        gate_of(load_config(EvalConfig, None, ["deliveries=[compiled_gated]"]))
    with pytest.raises(
        CheckpointError, match=r"none beside compiler.checkpoint=None: run `memcompiler train gate RUN`"
    ):
        delivery_gate(load_config(GrpoConfig, None, ["delivery=compiled_gated"]))
    assert delivery_gate(load_config(GrpoConfig, None, [])) is None
    with pytest.raises(ConfigError, match="fitted after SFT"):
        load_config(
            SftConfig,
            None,
            [
                "rows=x",
                "validation.share=0.1",
                "evaluation.tasks=4",
                "evaluation.delivery=compiled_gated",
            ],
        )
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        gate_of(load_config(EvalConfig, None, asked))
    assert gate_of(load_config(EvalConfig, None, ["deliveries=[compiled]", "compiler.checkpoint=/nowhere"])) is None


def test_it_learns_from_rows_which_steps_are_guided_and_is_saved_beside_their_checkpoints(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = CliRunner().invoke(app, ["train", "gate", str(run), "--recall", "0.9"])
    assert made.exit_code == 0 and "steps are guided" in made.output, made.output
    need = load_gate(str(run))
    assert need is not None and need.manifest["recall"] >= 0.9 and need.manifest["rows"] == 6 * TASKS
    free, busy = (compile_request(row(TASKS, t).step_input()) for t in (0, 1))
    assert need(free) >= need.threshold > need(busy)
    assert need.sha256 == load_gate(str(run / "checkpoints" / "step-000001")).sha256  # type: ignore[union-attr]
    asked = load_config(
        EvalConfig, None, ["deliveries=[compiled_gated]", f"compiler.checkpoint={run}", "gate_threshold=0.7"]
    )
    other = gate_of(asked)
    assert other is not None and (other.threshold, other(free)) == (0.7, need(free)) and other.sha256 != need.sha256
    copy_gate(str(run), tmp_path / "on")
    assert (tmp_path / "on" / FILE).read_bytes() == (run / FILE).read_bytes()
    again = train_gate(run, recall=0.9)
    assert again.sha256 == need.sha256 and train_gate(run, recall=1.0).threshold <= need.threshold
    monkeypatch.setattr("training.gate.MOST", 2 * TASKS)
    assert train_gate(run).manifest["rows"] == 6 * 14  # all steps of every third task


def test_shared_words_of_two_lines_generalise_to_unseen_words(run: Path, tmp_path: Path):
    def row_of(thing: str, t: int) -> SftRow:
        """A row that is guided until the sought thing is in view."""
        view = f"You see a {thing if t % 2 else 'bowl'} 1." if t else "You see nothing."
        return replace(
            row(0, t),
            task_id=f"find {thing}",
            goal=f"take a {thing}",
            state=f"goal: take {thing}\nnow: find {thing}",
            observation=view,
            emission="." if t % 2 else "> it was there | go to sink 1",
        )

    save_rows([row_of(f"thing{n:c}", t) for n in range(ord("a"), ord("z")) for t in range(6)], tmp_path / "rows2")
    (run / "config.resolved.yaml").write_text(to_yaml(SftConfig(rows=str(tmp_path / "rows2"))))
    need = train_gate(run)
    assert need.manifest["share"] == 0.5 and need.manifest["recall"] == 1
    new = [compile_request(row_of("vase", t).step_input()) for t in range(4)]
    assert [need(step) >= need.threshold for step in new] == [True, False, True, False]


def test_rows_are_read_with_the_brief_states_that_a_gated_compiler_has():
    def told(task: str, t: int, guided: bool) -> SftRow:
        return replace(row(0, t), task_id=task, state=f"goal: {task}{t}", emission="> b | a" if guided else ".")

    rows = [told("a", 0, False), told("a", 1, False), told("a", 2, True), told("a", 3, False), told("a", 4, True)]
    rows += [told("b", 0, False), told("b", 1, True), told("b", 0, False), told("b", 1, False)]  # b was played twice
    states = [(row.task_id, state.removeprefix(f"goal: {row.task_id}")) for row, state, _ in _old_states(rows)]
    assert [guided for *_, guided in _old_states(rows)] == [row.emission != "." for row in rows]
    assert states == [*(("a", x) for x in "01133"), *(("b", x) for x in "0101")]


def test_a_gated_teacher_leaves_the_state_unchanged_at_unguided_steps():
    class Notes:
        """Notes every step, and guides at the third alone."""

        def compile(self, requests):
            made = (f"{'> a | go' if len(r.history) == 2 else ''}\n+ step{len(r.history)}: seen" for r in requests)
            return [Compilation(text, parse(text).emission) for text in (one.strip() for one in made)]

    executor, shares = Recorder(), (0.0, 1.0)
    played = [
        run_episodes(CountingEnv, [spec(5)], teacher_delivery(Notes(), True, share), executor, EpisodeLimits(5))[0]
        for share in shares
    ]
    noted = [[step.brief_after.count("seen") for step in episode.steps] for episode in played]
    assert noted == [[1, 2, 3, 4, 5], [1, 1, 2, 2, 2]]
    assert [step.emission_text for step in played[0].steps] == [step.emission_text for step in played[1].steps]
    assert [row.state.count("seen") for row in episode_rows(played[1], {"e1": entry(1, "the memory")})] == [
        0,
        1,
        1,
        2,
        2,
    ]
    half = run_episodes(
        CountingEnv,
        [spec(100 + n) for n in range(40)],
        teacher_delivery(Notes(), True, 0.5),
        executor,
        EpisodeLimits(3),
    )
    assert 8 < sum("step1" in episode.steps[1].brief_after for episode in half) < 32


def test_it_reads_state_view_and_actions_but_not_memory():
    one, other = (compile_request(row(0, 3, memory).step_input()) for memory in ("the mug was in sink 1", "a lamp"))
    assert (features([one]) != features([other])).nnz == 0
    apart = features([one]).indices.tolist()
    assert len(apart) == len(set(apart))
    moved = replace(row(0, 3), history=("look", "look", "take mug 1"))
    assert (features([one]) != features([compile_request(moved.step_input())])).nnz > 0


def test_a_gate_that_cannot_be_fitted_or_read_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(CheckpointError, match="no folder of an SFT run"):
        train_gate(tmp_path)
    train_gate(run)
    (run / FILE).write_bytes((run / FILE).read_bytes()[:-8] + bytes(8))
    with pytest.raises(CheckpointError, match=r"does not match the hash in gate.json"):
        load_gate(str(run))
    train_gate(run)
    (run / "gate.json").write_text((run / "gate.json").read_text().replace('"features": "2"', '"features": "1"'))
    with pytest.raises(CheckpointError, match="another version of this program: `memcompiler train gate RUN` fits"):
        load_gate(str(run))
    (run / FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="holds no need that can be read"):
        load_gate(str(run))
    save_rows([row(task, 1) for task in range(0, 8, 2)], tmp_path / "silent")
    (run / "config.resolved.yaml").write_text(to_yaml(SftConfig(rows=str(tmp_path / "silent"))))
    fit_gate_after_sft(run, 0)  # SFT does not end by it
    assert "0 are guided" in " ".join(capsys.readouterr().out.split())
    silent = CliRunner().invoke(app, ["train", "gate", str(run)])
    assert silent.exit_code and "of 4 rows 0 are guided" in silent.output
