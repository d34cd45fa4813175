"""A run's folder: nothing is lost when the process is killed, nothing is mixed up when it comes back."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from configs import run_folder
from configs.load import load_config
from configs.run_folder import RunFolder, RunFolderError, describe_environment


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
    run = RunFolder.create(tmp_path / "deep" / "run", Settings(steps=3))
    assert not resumed(run)
    assert {entry.name for entry in run.path.iterdir()} == {"config.resolved.yaml", "environment.json", "checkpoints"}
    assert (run.path / "checkpoints").is_dir()
    assert load_config(Settings, run.path / "config.resolved.yaml") == Settings(steps=3)


def test_an_empty_folder_and_one_with_a_killed_write_are_new(tmp_path):
    (tmp_path / ".config.resolved.yaml.123.tmp").write_text("half")
    assert not resumed(RunFolder.create(tmp_path, Settings(), on_exists="raise"))


def test_resume_of_the_same_configuration(tmp_path):
    RunFolder.create(tmp_path, Settings()).metrics.append({"step": 1})
    run = RunFolder.create(tmp_path, Settings(), on_exists="resume")
    assert resumed(run) and list(run.metrics) == [{"step": 1}]


@pytest.mark.parametrize("on_exists", ["resume", "raise", "ask"])
def test_another_configuration_shows_what_differs(tmp_path, on_exists):
    RunFolder.create(tmp_path, Settings())
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(tmp_path, Settings(steps=11, inner=Inner(lr=0.2)), on_exists=on_exists)
    message = str(caught.value)
    assert "inner.lr: 0.1 there, 0.2 here" in message and "steps: 10 there, 11 here" in message
    assert "name" not in message and "--on-exists resume" in message


def test_ignored_keys_may_differ_and_the_first_configuration_stays(tmp_path):
    RunFolder.create(tmp_path, Settings(steps=10))
    run = RunFolder.create(tmp_path, Settings(steps=20), on_exists="resume", ignore=["steps"])
    assert load_config(Settings, run.path / "config.resolved.yaml").steps == 10


def test_raise_and_ask_without_a_terminal_refuse_even_the_same(tmp_path):
    RunFolder.create(tmp_path, Settings())
    for on_exists in ("raise", "ask"):
        with pytest.raises(RunFolderError, match=r"holds a run of the same configuration\.\n.*--on-exists resume"):
            RunFolder.create(tmp_path, Settings(), on_exists=on_exists)


def test_overwrite_deletes_everything(tmp_path):
    run = RunFolder.create(tmp_path, Settings())
    run.metrics.append({"step": 1})
    (run.path / "checkpoints" / "step-1").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "link").symlink_to(outside)
    run = RunFolder.create(tmp_path, Settings(steps=1), on_exists="overwrite")
    assert not resumed(run) and list(run.metrics) == [] and not list((run.path / "checkpoints").iterdir())
    assert load_config(Settings, tmp_path / "config.resolved.yaml").steps == 1
    assert (outside / "kept").exists() and not (tmp_path / "link").exists()


@pytest.mark.parametrize("on_exists", ["ask", "resume", "raise", "overwrite"])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path, on_exists):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="not a run"):
        RunFolder.create(tmp_path, Settings(), on_exists=on_exists)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_and_an_unknown_choice(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "file", Settings())
    with pytest.raises(RunFolderError, match="one of ask, resume, raise, overwrite; received 'force'"):
        RunFolder.create(tmp_path / "new", Settings(), on_exists="force")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "steps", "outcome"),
    [("r\n", 10, "resumed"), ("x\n\nResume\n", 10, "resumed"), ("o\n", 11, "new"), ("q\n", 10, "refused"),
     ("", 10, "refused"), ("r\nq\n", 11, "refused")],
)  # fmt: skip
def test_ask_on_a_terminal(tmp_path, monkeypatch, typed, steps, outcome):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    RunFolder.create(tmp_path, Settings())
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys, "stderr", screen)
    if outcome == "refused":
        with pytest.raises(RunFolderError):
            RunFolder.create(tmp_path, Settings(steps=steps))
    else:
        assert resumed(RunFolder.create(tmp_path, Settings(steps=steps))) == (outcome == "resumed")
    assert ("[r]esume" in screen.getvalue()) == (steps == 10)
    assert "[o]verwrite, [q]uit?" in screen.getvalue()


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
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


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
