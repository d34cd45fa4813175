"""`memcompiler eval` end to end on the tiny models: kill -9 and resume, a matrix, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.run_folder import RunFolderError
from eval import evaluate, model_cache
from eval.evaluate import run_eval
from memcompiler.cli import app
from runtime.checksums import parse_row
from runtime.errors import StopReason

ROOT = Path(__file__).parents[2]
TINY = {"model": "zoo/household/executor", "dtype": "float32", "instructions": "none", "max_new_tokens": 16}
PLAIN: dict[str, Any] = {
    "env": {"name": "household", "scenes": {"train": 2, "test": 3}},
    "executor": TINY,
    "limit": 8,
    "max_steps": 4,
    "concurrency": 4,
    "deliveries": ["none", "static", "static_top1", "disclosure", "expert_compiler"],
    "baseline": "none",
}
MATRIX = {
    **PLAIN,
    "deliveries": ["none", "static"],
    "limit": 3,
    "max_steps": 3,
    "baseline": {"memory": "one", "delivery": "none"},
    "matrix": {
        "memory": {"one": {"memory.k": 1}, "four": {"memory.k": 4}},
        "seed": {0: {"seed": 0}, 1: {"seed": 1, "env.seed": 1}},
    },
}
CLOCKED = ("seconds", "seconds_per_step", "latency", "git")


def config(settings: dict[str, Any], *overrides: str, folder: Path) -> EvalConfig:
    return load_config(EvalConfig, write(settings, folder), overrides)


def write(settings: dict[str, Any], folder: Path) -> Path:
    path = folder / "asked.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def without_clocks(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: without_clocks(inner) for key, inner in value.items() if key not in CLOCKED}


def read(path: Path) -> dict[str, Any]:
    return without_clocks(json.loads(path.read_text(encoding="utf-8")))


def lines(out: Path) -> list[dict[str, Any]]:
    return [parse_row(line) for file in sorted(out.rglob("episodes.jsonl")) for line in file.open()]


def number(out: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in out.rglob("episodes.jsonl"))


def kill_after(episodes: int, asked: Path, out: Path) -> None:
    """`memcompiler eval`, killed as soon as so many episodes are on disk."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memcompiler", "eval", "-c", str(asked), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline and number(out) < episodes:
        assert process.poll() is None, process.communicate()[0][-2000:]
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert number(out) >= episodes


@pytest.mark.slow
def test_kill_and_resume_give_the_same_result_and_play_nothing_twice(tmp_path):
    asked = write(PLAIN, tmp_path)
    whole = run_eval(load_config(EvalConfig, asked), tmp_path / "whole")
    killed = tmp_path / "killed"
    kill_after(10, asked, killed)
    assert not (killed / "results.json").exists()
    before = number(killed)
    content = (killed / "episodes.jsonl").read_bytes()
    kept = content[: content.rfind(b"\n") + 1]  # the kill may have torn a line itself
    with (killed / "episodes.jsonl").open("ab") as file:
        file.write(b'{"cell": {}, "delivery": "none", "task_id": "torn')
    run_eval(load_config(EvalConfig, asked), killed, "resume")
    assert read(killed / "results.json") == read(tmp_path / "whole" / "results.json") == without_clocks(whole)
    assert (killed / "episodes.jsonl").read_bytes().startswith(kept) and 10 <= before < 40
    played = Counter((row["delivery"], row["task_id"]) for row in lines(killed))
    assert set(played.values()) == {1} and len(played) == 5 * 8
    assert {row["task_id"] for row in lines(killed)} == {row["task_id"] for row in lines(tmp_path / "whole")}
    assert (killed / "report.html").exists()


@pytest.mark.seconds
def test_the_result_says_what_it_depends_on(tmp_path):
    results = run_eval(config(PLAIN, "limit=4", "max_steps=3", folder=tmp_path), tmp_path / "run")
    assert results["complete"] is True and results["n_tasks"] == 4 and results["split"] == "test"
    for key in ("tasks_sha256", "memory_sha256", "executor_hash"):
        assert len(results[key]) == 64
    assert results["tasks_sha256"] == json.loads((tmp_path / "run" / "manifest.json").read_text())["sha256"]
    assert results["versions"]["torch"] and results["config"]["limit"] == 4 and results["compiler_hash"] is None
    assert results["prompts"]["executor_layout"] and results["prompts"]["compiler_layout"] is None
    assert len(results["environment_version"]["engine_sha256"]) == 64
    none, disclosure = results["results"]["none"], results["results"]["disclosure"]
    assert none["usage"]["executor"]["calls"] == 12 and none["usage"]["executor"]["tokens_in"] > 0
    assert none["usage"]["compiler"]["calls"] == 0 and disclosure["usage"]["compiler"]["calls"] == 12
    assert none["grounding_failure_rate"] == 0 and none["op_error_rate"] is None
    assert set(results["paired_difference"]) == {
        f"{name} - none" for name in ("static", "static_top1", "disclosure", "expert_compiler")
    }
    assert results["paired_difference"]["static - none"]["at"].keys() == none["success_at"].keys() == {"3"}
    assert none["success_at"]["3"] == none["success"]
    assert none["errors"]["failed"] == 4 - round(4 * none["success"]["mean"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Kinds of failure" in page and "never found" in page


@pytest.mark.seconds
def test_a_matrix_loads_its_executor_once_and_resumes_by_cells(tmp_path, monkeypatch):
    loads = []
    load = model_cache.load_executor
    monkeypatch.setattr(model_cache, "load_executor", lambda *given: loads.append(given) or load(*given))
    asked, out = config(MATRIX, folder=tmp_path), tmp_path / "run"
    results = run_eval(asked, out)
    assert len(loads) == 1 and number(out) == 4 * 2 * 3 and len(list((tmp_path / "experience").iterdir())) == 2
    assert set(results["results"]) == {f"memory={k}/{name}" for k in ("one", "four") for name in ("none", "static")}
    for summary in results["results"].values():
        assert summary["success"]["n"] == 6 and set(summary["success_by_seed"]) == {"0", "1"}
        assert summary["success_at"] == {"3": summary["success"]}
    assert results["results"]["memory=four/static"]["levels"] == {"memory": "four"}
    against = {f"{name} - memory=one/none" for name in results["results"] if name != "memory=one/none"}
    assert against == set(results["paired_difference"])
    assert all(pair["n"] == pair["at"]["3"]["n"] == 6 for pair in results["paired_difference"].values())
    assert set(results["cells"]) == {f"memory={k},seed={s}" for k in ("one", "four") for s in "01"}
    assert {row["cell"]["memory"] for row in lines(out)} == {"one", "four"}
    assert "memory=four" in (out / "report.html").read_text()

    # Two cells are lost: one whole, one but for an episode. Only they are played, and only they load a model.
    episodes = out / "cells" / "memory=four,seed=1" / "episodes.jsonl"
    last = episodes.read_text().splitlines(keepends=True)
    episodes.write_text("".join(last[:-1]))
    (episodes.parent / "results.json").unlink()
    loads.clear()
    again = run_eval(asked, out, "resume")
    assert without_clocks(again) == without_clocks(results) and len(loads) == 1
    assert episodes.read_text().splitlines(keepends=True)[:-1] == last[:-1]
    loads.clear()
    assert without_clocks(run_eval(asked, out, "resume")) == without_clocks(results) and not loads


@pytest.mark.seconds
def test_an_interrupted_matrix_says_what_is_missing_and_has_no_report(tmp_path, monkeypatch):
    asked, out = config(MATRIX, folder=tmp_path), tmp_path / "run"
    whole, cells = evaluate.evaluate, []

    def interrupted(cell, *rest, **options):
        if len(cells) == 2:
            raise KeyboardInterrupt
        cells.append(cell.name)
        return whole(cell, *rest, **options)

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_eval(asked, out)
    results = read(out / "results.json")
    assert results["complete"] is False and len(results["missing"]) == 2 and "results" not in results
    told = CliRunner().invoke(app, ["report", str(out)])
    assert told.exit_code != 0 and not (out / "report.html").exists()


@pytest.mark.seconds
def test_other_settings_data_or_prompts_are_refused(tmp_path, monkeypatch):
    asked, out = config(PLAIN, "deliveries=[none]", "limit=2", "max_steps=2", folder=tmp_path), tmp_path / "run"
    run_eval(asked, out)
    with pytest.raises(RunFolderError, match="max_steps"):
        run_eval(config(PLAIN, "deliveries=[none]", "limit=2", "max_steps=3", folder=tmp_path), out, "resume")
    (out / "results.json").unlink()
    monkeypatch.setattr("eval.provenance._executor_layout", lambda context: "another prompt")
    with pytest.raises(RunFolderError, match="other prompts"):
        run_eval(asked, out, "resume")
    assert not (out / "results.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["deliveries=[]"], "deliveries"),
        (["baseline=static", "deliveries=[none]"], "baseline"),
        (["deliveries=[compiled]", "baseline=null"], "compiler.checkpoint"),
        (["deliveries=[compiled]", "baseline=null", "compiler.checkpoint=/nowhere"], "no checkpoint in /nowhere"),
        (["matrix={memory: {a: {memory.kk: 1}}}"], "memory=a"),
        (["matrix={memory: {}}"], "at least one level"),
        (["limit=0"], "greater than 0"),
    ],
)
def test_what_cannot_be_evaluated_is_said_at_once(overrides, message, tmp_path):
    """Before a model is loaded where settings alone show it, and never with a result left behind."""
    out = tmp_path / "run"
    told = CliRunner().invoke(app, ["eval", "-c", str(write(PLAIN, tmp_path)), *overrides, "--out", str(out)])
    assert told.exit_code in (1, 2) and message in told.output and "Traceback" not in told.output
    assert not list(out.rglob("results.json"))


def test_episodes_that_depend_on_each_other_are_played_again_as_a_whole(tmp_path):
    from eval.runs import EpisodeRecord
    from tests.fakes import one_step_episode as episode

    record = EpisodeRecord(tmp_path)
    for name in ("none", "compiled_shuffled_soft"):
        record.append(episode("t0", name))
    evaluate._drop_interrupted(record, tasks=2)
    assert record.played() == {"none": ["t0"]}
    lost = replace(episode("t1", "compiled_shuffled_soft"), stop_reason=StopReason.WORKER_FAILURE)
    for each in (episode("t0", "compiled_shuffled_soft"), lost, episode("t1")):
        record.append(each)
    evaluate._drop_interrupted(record, tasks=2)
    assert record.played() == {"none": ["t0", "t1"]}
