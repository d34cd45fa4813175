"""`memcompiler report paper`: tables and figures of a real small run, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from compiler.build import load_compiler
from configs.evaluation import EvalConfig
from envs.spec import ExecutorInstructions
from executor.build import load_executor
from memcompiler.cli import app
from runtime.checksums import parse_row

COMPILER: dict[str, Any] = {
    "model": "zoo/household/compiler",
    "dtype": "float32",
    "instructions": "none",
    "max_new_tokens": 24,
    "soft": {"n_tokens": 4, "emb_std": "auto"},
}
SMALL: dict[str, Any] = {
    "env": {"name": "household", "scenes": {"train": 2, "test": 3}, "visual_share": 0.5},
    "compiler": COMPILER,
    "executor": {
        "model": "zoo/household/executor",
        "dtype": "float32",
        "instructions": "none",
        "max_new_tokens": 16,
        "reads_state": True,
        "soft_on": "always",
    },
    "memory": {"k": 2},
    "deliveries": ["none", "static", "compiled_text", "compiled"],
    "baseline": "none",
    "limit": 4,
    "max_steps": 4,
}


def checkpoint(folder: Path) -> Path:
    """An untrained compiler: what it says does not matter here, only that all of it comes back."""
    from compiler.checkpoint import save_weights

    folder.mkdir()
    config = EvalConfig.model_validate(SMALL)
    save_weights(folder, load_compiler(config.compiler, load_executor(config.executor, ExecutorInstructions(""))))  # type: ignore[arg-type]
    return folder


def told(*arguments: object) -> str:
    """Output of a command that must succeed."""
    answer = CliRunner().invoke(app, ["report", "paper", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return answer.output


def refused(*arguments: object) -> str:
    answer = CliRunner().invoke(app, ["report", "paper", *map(str, arguments)])
    assert answer.exit_code in (1, 2) and "Traceback" not in answer.output
    return answer.output


@pytest.mark.slow
def test_tables_and_figures_of_a_small_run(tmp_path: Path) -> None:
    settings = {**SMALL, "compiler": {**COMPILER, "checkpoint": str(checkpoint(tmp_path / "checkpoint"))}}
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    answer = CliRunner().invoke(app, ["eval", "-c", str(tmp_path / "asked.yaml"), "--out", str(run)])
    assert answer.exit_code == 0, answer.output

    shown = told("--table", 3, run)
    results = json.loads((run / "results.json").read_text())["results"]
    table = json.loads((run / "paper" / "table3.json").read_text())
    [full] = [r for r in table["rows"] if r["method"] == "MemCompiler (Full)" and r["source"] == "measured"]
    assert full["executor"] == "executor" and full["cells"]["AlfWorld"] is None
    assert full["cells"]["household test"]["value"] == pytest.approx(100 * results["compiled"]["success"]["mean"])
    assert "**measured**" in shown and "paper; not measured" in shown and (run / "paper" / "table3.png").exists()
    told("--table", 5, run, "--out", tmp_path / "elsewhere")
    [row] = [
        r for r in json.loads((tmp_path / "elsewhere" / "table5.json").read_text())["rows"] if "SCMC," in r["method"]
    ]
    assert row["cells"]["Exec In"]["n"] == 4 and row["cells"]["Compiler tokens"]["value"] > 0

    told("--figure", 3, run)
    figure = json.loads((run / "paper" / "figure3.json").read_text())["deliveries"]
    steps = sum(len(e["steps"]) for e in map(parse_row, (run / "episodes.jsonl").open()) if e["delivery"] == "static")
    assert figure["static"]["steps_with_memory"] == steps and "soft" not in figure["static"]["logit"]
    assert figure["compiled"]["logit"]["soft"]["by_step"][0]["n"] == figure["compiled"]["episodes"] == 4
    share = figure["static"]["share"]["memory"]["by_step"][0]
    assert 0 < share["low"] <= share["mean"] <= share["high"] < 1

    told("--figure", 4, run, "--limit", 3)
    figure = json.loads((run / "paper" / "figure4.json").read_text())
    apart = figure["separability"]["compiler"]
    assert apart["episodes"] == 3 and 0 <= apart["probe"] <= 1 and len(figure["points"]["compiler"]) == apart["n"]
    first = (run / "paper" / "figure4.json").read_bytes()
    told("--figure", 4, run, "--limit", 3)
    assert (run / "paper" / "figure4.json").read_bytes() == first and (run / "paper" / "figure4.png").exists()

    other = checkpoint(tmp_path / "other")
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "projector.safetensors")
    save_file({k: 1.5 * w for k, w in weights.items()}, other / "projector.safetensors")
    assert "is not the run's" in refused("--figure", 3, run, f"compiler.checkpoint={other}")


def run_folder(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(SMALL | settings))
    return folder


def test_what_cannot_be_shown_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.paper.figures.load_frozen", lambda *_: pytest.fail("loaded a model"))
    assert "config.resolved.yaml does not exist" in refused("--figure", 3, tmp_path)
    assert "results.json does not exist" in refused("--table", 2, tmp_path)
    matrix = run_folder(tmp_path / "matrix", matrix={"memory": {"one": {"memory.k": 1}, "four": {"memory.k": 4}}})
    (matrix / "cells" / "memory=one").mkdir(parents=True)
    assert "cells/NAME" in refused("--figure", 3, matrix) and "memory=one" in refused("--figure", 4, matrix)
    closed = run_folder(tmp_path / "seed=0", executor={"engine": "api", "api": {"model": "m"}})
    assert "closed model" in refused("--figure", 3, closed)
    assert "there is no figure 5" in refused("--figure", 5, closed)
    assert "there is no table 7" in refused("--table", 7, closed)
    assert "no such run" in refused("--table", 3, closed, "seed=1")
    assert "exactly one run, received 2" in refused("--figure", 3, closed, tmp_path)
    for arguments in ((closed,), ("--table", 1, "--figure", 3, closed)):
        assert "--table N or --figure N" in refused(*arguments)

    empty = run_folder(tmp_path / "empty")
    assert "episodes.jsonl does not exist" in refused("--figure", 4, empty)
    (empty / "episodes.jsonl").write_text("")
    assert "has no episode of static, compiled" in refused("--figure", 3, empty)


def test_a_table_of_the_paper_alone() -> None:
    shown = told("--table", 3)
    assert "MemCompiler (Full)" in shown and "No run was given" in shown and "**measured**" not in shown
