"""A run's folder: nothing is lost when the process is killed, nothing is mixed up when it comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from configs import run_folder
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.run_folder import (
    RunFolder,
    RunFolderError,
    describe_environment,
    describe_run,
    memory_lock,
    output_folder,
)
from configs.training import GrpoConfig, SftConfig
from runtime.checksums import SUMS
from runtime.lock import LOCK
from runtime.store import RecordError


class Inner(BaseModel):
    lr: float = 0.1
    name: str = "${not.a.reference}"


class Settings(BaseModel):
    steps: int = 10
    inner: Inner = Inner()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Facts about this machine do not change during a test."""
    facts = describe_environment() if not hasattr(quick, "facts") else quick.facts  # type: ignore[attr-defined]
    quick.facts = facts  # type: ignore[attr-defined]
    monkeypatch.setattr(run_folder, "describe_environment", lambda: dict(facts))


def environment(run: RunFolder) -> dict:
    return json.loads((run.path / "environment.json").read_text())


# --- starting and coming back ---


def resumed(run: RunFolder) -> bool:
    """Whether the run was there before: its environment.json says on what it went on."""
    return "resumed" in json.loads((run.path / "environment.json").read_text())


def test_a_new_run(tmp_path):
    with RunFolder.create(tmp_path / "deep" / "run", Settings(steps=3)) as run:
        assert not resumed(run) and environment(run)["kind"] == "Settings"
    assert {entry.name for entry in run.path.iterdir()} == {
        "config.resolved.yaml",
        "environment.json",
        SUMS,
        "checkpoints",
    }
    assert (run.path / "checkpoints").is_dir()
    assert load_config(Settings, run.path / "config.resolved.yaml") == Settings(steps=3)


def test_an_empty_folder_and_one_with_a_killed_write_are_new(tmp_path):
    (tmp_path / ".config.resolved.yaml.123.tmp").write_text("half")
    assert not resumed(RunFolder.create(tmp_path, Settings(), on_exists="raise"))


def test_resume_of_the_same_configuration(tmp_path):
    RunFolder.create(tmp_path, Settings()).metrics.append({"step": 1})
    run = RunFolder.create(tmp_path, Settings(), on_exists="resume")
    assert resumed(run) and list(run.metrics) == [{"step": 1}]


@pytest.mark.parametrize("on_exists", ["resume", "raise"])
def test_another_configuration_shows_what_differs_in_one_line(tmp_path, on_exists):
    RunFolder.create(tmp_path, Settings())
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(tmp_path, Settings(steps=11, inner=Inner(lr=0.2)), on_exists=on_exists)
    message = str(caught.value)
    assert "inner.lr: 0.1 in the run, 0.2 now" in message and "steps: 10 in the run, 11 now" in message
    assert "name" not in message and "or --on-exists overwrite" in message and "\n" not in message


def test_ignored_keys_may_differ_and_the_first_configuration_stays(tmp_path):
    RunFolder.create(tmp_path, Settings(steps=10))
    run = RunFolder.create(tmp_path, Settings(steps=20), on_exists="resume", ignore=["steps"])
    assert load_config(Settings, run.path / "config.resolved.yaml").steps == 10


def test_raise_refuses_even_the_same(tmp_path):
    RunFolder.create(tmp_path, Settings())
    with pytest.raises(RunFolderError, match="holds a run of `Settings` of the same settings"):
        RunFolder.create(tmp_path, Settings(), on_exists="raise")


def test_overwrite_deletes_what_this_kind_of_run_writes_and_nothing_else(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    run = RunFolder.create(tmp_path / "run", CollectConfig())
    names = ("episodes.jsonl", "collect.json", "rows/data-0.arrow", "rows/state.json", "plots/rows.png")
    for name in (*names, "rows/notes.txt", "plots/mine.png", "thesis.tex", "metrics.jsonl"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    (run.path / "bank").symlink_to(outside)
    run = RunFolder.create(tmp_path / "run", CollectConfig(limit=3), on_exists="overwrite")
    assert not resumed(run) and load_config(CollectConfig, run.path / "config.resolved.yaml").limit == 3
    assert not any((run.path / name).exists() for name in (*names, "bank")) and (outside / "kept").exists()
    assert all((run.path / name).exists() for name in ("rows/notes.txt", "plots/mine.png", "thesis.tex"))


HOLDS = {
    "checkpoint": ("checkpoints/step-000003/state.json", "with 1 checkpoint, which"),
    "best": ("checkpoints/best", "which"),
    "sub-run": ("eval/config.resolved.yaml", r"and other runs \(eval\), which"),
    "deep sub-run": ("a/b/config.resolved.yaml", r"and other runs \(a/b\), which"),
}


@pytest.mark.parametrize(("file", "said"), HOLDS.values(), ids=HOLDS)
def test_overwrite_never_deletes_checkpoints_and_other_runs(tmp_path, file, said):
    run = RunFolder.create(tmp_path, SftConfig())
    run.metrics.append({"step": 1})
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    before = content(tmp_path)
    with pytest.raises(RunFolderError, match=said):
        RunFolder.create(tmp_path, SftConfig(), on_exists="overwrite")
    assert content(tmp_path) == before


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK}


KINDS = {
    "collect": (CollectConfig(), ""),
    "train sft": (SftConfig(), ""),
    "train grpo": (GrpoConfig(), ""),
    "eval": (EvalConfig(), ""),
    "bench rollout": (GrpoConfig(), "bench rollout"),
    "Settings": (Settings(), ""),
}


@pytest.mark.parametrize("on_exists", run_folder.ON_EXISTS)
@pytest.mark.parametrize("there", KINDS)
def test_a_run_of_another_kind_is_named_and_left_alone(tmp_path, there, on_exists):
    config, kind = KINDS[there]
    RunFolder.create(tmp_path, config, kind=kind)
    before = content(tmp_path)
    for other in KINDS.keys() - {there}:
        config, kind = KINDS[other]
        with pytest.raises(RunFolderError, match=f"holds a run of `{there}`, not of `{other}`"):
            RunFolder.create(tmp_path, config, kind=kind, on_exists=on_exists)
    assert content(tmp_path) == before


def test_a_run_of_an_earlier_version_is_resumed_and_never_overwritten(tmp_path):
    RunFolder.create(tmp_path, EvalConfig())
    (tmp_path / SUMS).unlink()
    (tmp_path / "environment.json").write_text("{}")
    with pytest.raises(RunFolderError, match="holds a run of an earlier version, which"):
        RunFolder.create(tmp_path, EvalConfig(), on_exists="overwrite")
    with pytest.raises(RunFolderError, match="holds a run of an earlier version with other settings"):
        RunFolder.create(tmp_path, EvalConfig(limit=3))
    assert environment(RunFolder.create(tmp_path, EvalConfig()))["kind"] == "eval"


def test_an_overwrite_that_a_kill_cut_short_can_only_be_repeated(tmp_path, monkeypatch):
    RunFolder.create(tmp_path, EvalConfig())
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_delete_run", _no_space)
        with pytest.raises(OSError, match="no space"):
            RunFolder.create(tmp_path, EvalConfig(limit=2), on_exists="overwrite")
    for config in (EvalConfig(), EvalConfig(limit=2)):
        with pytest.raises(RunFolderError, match=r"with other settings|has begun to delete"):
            RunFolder.create(tmp_path, config)
    assert not resumed(RunFolder.create(tmp_path, EvalConfig(limit=2), on_exists="overwrite"))
    assert resumed(RunFolder.create(tmp_path, EvalConfig(limit=2)))


@pytest.mark.parametrize("damaged", ["", "{", "[]", "\x00\x00"])
def test_a_damaged_environment_is_named(tmp_path, damaged):
    RunFolder.create(tmp_path, Settings())
    (tmp_path / "environment.json").write_text(damaged)
    with pytest.raises(RecordError, match=r"environment\.json is damaged"):
        RunFolder.create(tmp_path, Settings())


# --- inputs ---

SETS = {
    "rows": lambda path: SftConfig(rows=(str(path),)),
    "pattern": lambda path: SftConfig(rows=f"{path.parent}/in*"),
    "checkpoint": lambda path: EvalConfig.model_validate({"compiler": {"checkpoint": str(path)}}),
    "matrix": lambda path: EvalConfig.model_validate({"matrix": {"compiler.checkpoint": [str(path)]}}),
    "bank": lambda path: EvalConfig.model_validate({"memory": {"bank": str(path)}}),
    "model": lambda path: GrpoConfig.model_validate({"executor": {"model": str(path)}}),
}


@pytest.mark.parametrize("on_exists", ["resume", "overwrite"])
@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_an_output_that_is_contains_or_lies_inside_an_input_is_refused(tmp_path, make, on_exists):
    given = tmp_path / "a" / "input"
    given.mkdir(parents=True)
    (given / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = content(tmp_path)
    for out in (given, given / "new", tmp_path / "a", tmp_path / "link", tmp_path / "link" / "input" / "x"):
        with pytest.raises(RunFolderError, match=r"(is|contains|lies inside) an input of this command, .*input"):
            RunFolder.create(out, make(given), on_exists=on_exists)
    assert content(tmp_path) == before and not (given / "new").exists()
    RunFolder.create(tmp_path / "a" / "beside", make(given))


@pytest.mark.parametrize("on_exists", run_folder.ON_EXISTS)
def test_a_folder_that_is_no_run_is_never_touched(tmp_path, on_exists):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="not a run"):
        RunFolder.create(tmp_path, Settings(), on_exists=on_exists)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_and_an_unknown_choice(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "file", Settings())
    with pytest.raises(RunFolderError, match="one of resume, raise, overwrite; received 'force'"):
        RunFolder.create(tmp_path / "new", Settings(), on_exists="force")  # type: ignore[arg-type]


# --- one writer ---


def in_child(call: Callable[[], object]) -> str:
    """Call it in a forked process; returns what it raised, if anything."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            call()
        except Exception as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_a_second_writer_of_a_run_or_of_a_memory_in_it_is_refused_and_readers_are_not(tmp_path):
    def importing() -> None:
        with memory_lock(tmp_path / "run" / "memory" / "static", "bank import"):
            pass

    create = lambda: RunFolder.create(tmp_path / "run", CollectConfig())
    with create() as run:
        run.metrics.append({"step": 1})
        held = f"FolderInUse: {tmp_path / 'run'} is being written by `memcompiler collect` (process {os.getpid()} on "
        assert in_child(create).startswith(held) and in_child(importing).startswith(held)
        assert not in_child(lambda: describe_run(run.path)) and not in_child(lambda: list(run.metrics))
        assert not in_child(lambda: RunFolder.create(tmp_path / "run", CollectConfig(), lock=False))  # a worker of it
    assert not in_child(create) and not in_child(importing)
    with memory_lock(tmp_path / "run" / "memory" / "static", "bank import"):
        assert "is being written by `memcompiler bank import`" in in_child(create)


def test_an_error_in_a_run_names_its_folder(tmp_path):
    with pytest.raises(OSError, match="no space") as caught, RunFolder.create(tmp_path, Settings()):
        _no_space()
    assert caught.value.__notes__ == [f"run folder {tmp_path}"] and not (tmp_path / LOCK).exists()


# --- commands that keep no run ---


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"config.resolved.yaml": "", "environment.json": '{"kind": "eval"}'}, "holds a run of `eval`"),
        ({"answers.jsonl": "mine"}, r"answers\.jsonl was not written by this command"),
        ({"asked.json": '{"other": 1}'}, r"asked\.json was not written by this command"),
        ({"asked.json": "{"}, r"asked\.json is damaged"),
    ],
)
def test_a_command_leaves_files_alone_that_it_did_not_write(tmp_path, there, said):
    for name, text in there.items():
        (tmp_path / name).write_text(text)
    before = content(tmp_path)
    with (
        pytest.raises(ValueError, match=said),
        output_folder(tmp_path, "qa", ("asked.json", "answers.jsonl"), "reader"),
    ):
        pass
    assert content(tmp_path) == before


def test_a_command_writes_where_its_own_files_or_other_names_are(tmp_path):
    (tmp_path / "notes.txt").touch()
    for _ in range(2):
        with output_folder(tmp_path, "qa", ("asked.json", "answers.jsonl"), "reader"):
            (tmp_path / "asked.json").write_text('{"reader": 1}')
            (tmp_path / "answers.jsonl").touch()
            again = lambda: output_folder(tmp_path, "qa", ("asked.json",), "reader").__enter__()
            assert "is being written by `memcompiler qa`" in in_child(again)


# --- metrics ---


def test_metrics_are_strict_json_and_take_numpy(tmp_path):
    run = RunFolder.create(tmp_path, Settings())
    run.metrics.append({"step": np.int64(1), "loss": float("nan"), "deep": {"x": [float("inf"), np.float32(0.5)]}})
    run.metrics.append({"text": "a\u2028b\nc"})
    assert list(run.metrics) == [{"step": 1, "loss": None, "deep": {"x": [None, 0.5]}}, {"text": "a\u2028b\nc"}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", "\x00\x00"])
def test_a_torn_last_line_is_tolerated_and_cut_on_resume(tmp_path, torn):
    run = RunFolder.create(tmp_path, Settings())
    run.metrics.append({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert list(run.metrics) == [{"step": 1}]
    run = RunFolder.create(tmp_path, Settings(), on_exists="resume")
    run.metrics.append({"step": 2})
    assert list(run.metrics) == [{"step": 1}, {"step": 2}]


def test_rows_behind_the_checkpoint_are_dropped(tmp_path):
    run = RunFolder.create(tmp_path, Settings())
    for step in range(5):
        run.metrics.append({"step": step})
    run.metrics.keep(lambda row: row["step"] <= 2)
    run.metrics.append({"step": 3})
    assert [row["step"] for row in list(run.metrics)] == [0, 1, 2, 3]


def test_rows_survive_a_kill(tmp_path, repository: Path):
    code = textwrap.dedent(f"""
        from pydantic import BaseModel
        from configs.run_folder import RunFolder
        class Settings(BaseModel):
            steps: int = 1
        run = RunFolder.create({str(tmp_path)!r}, Settings())
        step = 0
        while True:
            run.metrics.append({{"step": step}})
            print(step, flush=True)
            step += 1
    """)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=repository, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    seen += [int(line) for line in process.stdout]
    process.wait()

    class Settings(BaseModel):
        steps: int = 1

    rows = list(RunFolder.create(tmp_path, Settings(), on_exists="resume").metrics)
    assert [row["step"] for row in rows][: len(seen)] == seen == list(range(len(seen)))


# --- other files ---


def test_write_json_is_atomic(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, Settings())
    path = run.write_json("analysis/results.json", {"success": np.float64(0.5), "path": Path("a")})
    assert json.loads(path.read_text()) == {"success": 0.5, "path": "a"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _no_space)
        with pytest.raises(OSError, match="no space"):
            run.write_json("analysis/results.json", {"success": 1.0})
    with pytest.raises(TypeError):
        run.write_json("analysis/results.json", {"success": object()})
    assert json.loads(path.read_text())["success"] == 0.5
    assert {entry.name for entry in path.parent.iterdir()} == {"results.json", SUMS}


@pytest.mark.parametrize("name", ["../results.json", "/tmp/results.json", "a/../../b.json"])
def test_write_json_stays_inside(tmp_path, name):
    run = RunFolder.create(tmp_path / "run", Settings())
    with pytest.raises(ValueError, match="not inside"):
        run.write_json(name, {})


def _no_space(*_: object) -> None:
    raise OSError("no space")


# --- what the environment says, and what it does not ---


def test_environment_names_code_packages_and_machine(tmp_path):
    facts = environment(RunFolder.create(tmp_path, Settings()))
    assert facts["packages"].keys() >= {"torch", "transformers", "peft", "trl", "lancedb"}
    assert facts["python"].startswith("3.") and facts["cpus"] >= 1 and isinstance(facts["gpus"], list)
    assert facts["git"] is None or facts["git"].keys() == {"commit", "dirty"}
    assert facts["started"].endswith("+00:00")


def test_environment_holds_nothing_private(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada.l")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run = RunFolder.create(tmp_path, Settings())
    run.record(
        data=Path("/home/ada.l/games"),
        home="/home/ada.l",
        other=["/home/ada.l2/x", "/mnt/home/ada.l/x", f"{run_folder.REPOSITORY}/assets/x"],
    )
    facts = environment(run)
    assert facts["data"] == "~/games" and facts["home"] == "~"
    assert facts["other"] == ["/home/ada.l2/x", "/mnt/home/ada.l/x", "./assets/x"]
    text = json.dumps(describe_environment())
    for private in (os.uname().nodename, "hf_secret", str(run_folder.REPOSITORY)):
        assert private not in text


def test_git_commit_and_dirt(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(run_folder, "REPOSITORY", tmp_path)
    assert run_folder._git() is None
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    clean = run_folder._git()
    assert clean is not None and len(str(clean["commit"])) == 40 and clean["dirty"] is False
    (tmp_path / "code.py").write_text("2")
    assert run_folder._git() == {**clean, "dirty": True}
    monkeypatch.setattr(run_folder, "REPOSITORY", tmp_path / "inside-another-repository")
    assert run_folder._git() is None


def test_facts_that_change_between_sessions_are_kept_beside_the_first(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, Settings())
    assert run.record(data_hash="abc", device="cpu") == []
    assert run.record(device="cuda") == []  # the same session may correct itself
    first = dict(run_folder.describe_environment())
    monkeypatch.setattr(
        run_folder, "describe_environment", lambda: {**first, "packages": {"torch": "9"}, "started": "later"}
    )
    run = RunFolder.create(tmp_path, Settings(), on_exists="resume")
    assert run.record(data_hash="xyz", device="cuda", split="test") == ["data_hash"]
    facts = environment(run)
    assert (facts["data_hash"], facts["device"], facts["split"]) == ("abc", "cuda", "test")
    assert facts["packages"] == first["packages"]
    assert facts["resumed"] == [{"packages": {"torch": "9"}, "started": "later", "data_hash": "xyz"}]
