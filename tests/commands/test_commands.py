"""The commands end to end at reduced size: quickstart, evaluation on real games, kill -9 and resume."""

import errno
import json
import re
import shlex
import sqlite3
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.run_folder import RunFolder
from eval.evaluate import run_eval
from memcompiler.cli import app
from memcompiler.options import OneLineErrors
from runtime.checksums import parse_row
from tests.commands.running import ROOT, kill_after, memcompiler, memcompiler_process

GAMES = ROOT.parent / "shared" / "data" / "alfworld"
SMALL = [
    "collect.env.scenes={train: 4, test: 3}",
    "sft.max_steps=4",
    "sft.batch_size=4",
    "eval.limit=6",
    "eval.max_steps=4",
    "grpo.updates=1",
    "grpo.tasks=2",
    "grpo.group_size=2",
    "grpo.max_steps=3",
]
DELIVERIES = ("none", "static", "compiled_text", "compiled")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "run"
    done = memcompiler("quickstart", "--out", str(out), *SMALL)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "executor unchanged: True" in done.stdout
    return out


def check_results(path: Path, deliveries=DELIVERIES) -> dict:
    results = json.loads(path.read_text())
    for name in deliveries:
        row = results["results"][name]
        assert set(row["success"]) >= {"mean", "low", "high", "n"} and row["success"]["n"] > 0
        assert 0 <= row["success"]["low"] <= row["success"]["mean"] <= row["success"]["high"] <= 1
        assert row["executor_tokens_per_step"] > 0
        assert (row["parse_error_rate"] is None) == (name in ("none", "static"))
    assert results["environment"] and results["split"] and results["seed"] is not None
    return results


@pytest.mark.slow  # whichever is first waits for the quickstart, which every part of the suite would make
def test_quickstart_writes_results_report_and_plots(quickstart):
    results = check_results(quickstart / "results.json")
    shown = {
        "compiled_low_confidence",
        "compiled_gated",
        "expert_compiler",
        "expert_random_entry",
        "compiled_shuffled_soft",
    }
    assert shown <= set(results["results"])
    assert set(results["seconds"]) == {"collect", "sft", "grpo", "eval", "total"}
    page = (quickstart / "report.html").read_text()
    assert "<html" in page and not re.search(r'(?:src|href)="https?://', page)
    assert all((quickstart / "plots" / f"{name}.png").stat().st_size > 5_000 for name in ("deliveries", "steps"))
    [budget] = results["results"]["compiled"]["success_at"]
    assert results["paired_difference"]["compiled_grpo - compiled"]["at"][budget]["n"] > 0
    for run in (quickstart / "sft", quickstart / "eval"):
        assert (run / "config.resolved.yaml").exists() and (run / "environment.json").exists()


@pytest.mark.slow
def test_the_checkpoint_is_complete_and_small(quickstart):
    [checkpoint] = sorted((quickstart / "sft" / "checkpoints").iterdir())[-1:]
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == 4 and state["bank_version"] >= 1 and len(state["executor_hash"]) == 64
    assert sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()) < 4 * 2**20  # no frozen model in it


@pytest.mark.slow
def test_eval_of_a_checkpoint_on_the_generated_scenes(quickstart, tmp_path):
    done = memcompiler(
        "eval",
        "-c",
        "eval/quickstart",
        f"compiler.checkpoint={quickstart / 'sft'}",
        "limit=4",
        "max_steps=3",
        "env.scenes={test: 2}",
        "--out",
        str(tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_results(tmp_path / "run" / "results.json")


@pytest.mark.alfworld
@pytest.mark.skipif(not GAMES.exists(), reason="the real ALFWorld games are not at ../shared/data")
def test_eval_on_real_alfworld_games(quickstart, tmp_path):
    done = memcompiler(
        "eval",
        "-c",
        "eval/quickstart",
        f"compiler.checkpoint={quickstart / 'sft'}",
        "env=alfworld",
        "memory.experience_split=valid_seen",
        "limit=3",
        "max_steps=3",
        "--out",
        str(tmp_path / "run"),
        ALFWORLD_DATA=str(GAMES),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = check_results(tmp_path / "run" / "results.json")
    assert (results["environment"], results["split"]) == ("alfworld", "valid_seen")


def assert_same_weights(folder: Path, step: int) -> None:
    """`whole` and `killed` in the folder end with equal bits."""
    for file in ("projector.safetensors", "adapter/adapter_model.safetensors"):
        a, b = (load_file(folder / run / "checkpoints" / f"step-{step:06d}" / file) for run in ("whole", "killed"))
        assert a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


@pytest.mark.slow
def test_grpo_continues_an_sft_checkpoint_and_survives_a_kill(quickstart, tmp_path):
    common = [
        "train",
        "grpo",
        "-c",
        "grpo/quickstart",
        f"compiler.checkpoint={quickstart / 'sft'}",
        "updates=3",
        "env.scenes={train: 2, test: 1}",
        "limit=6",
        "tasks=3",
        "group_size=4",
        "max_steps=6",
        "save_every=1",
    ]
    whole = memcompiler(*common, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stdout[-2000:] + whole.stderr[-3000:]
    rows = [parse_row(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3] and any(not row["skipped"] for row in rows)
    names = {"reward", "zero_variance_fraction", "seconds_env", "seconds_compiler", "seconds_executor"}
    assert all(names | {"seconds_update"} <= set(row) for row in rows)
    assert all({"clip_low", "clip_high", "mismatch_kl"} <= set(row) for row in rows if not row["skipped"])
    assert max(row.get("mismatch_kl", 0) for row in rows) < 1e-6  # HF samples, HF scores
    assert (tmp_path / "whole" / "plots" / "training.png").stat().st_size > 5_000
    assert json.loads((tmp_path / "whole" / "leakage.json").read_text())["clean"] is True

    kill_after(1, common, tmp_path / "killed")
    resumed = memcompiler(*common, "--out", str(tmp_path / "killed"))
    assert resumed.returncode == 0 and "resumed at update 1" in resumed.stdout, resumed.stdout + resumed.stderr[-2000:]
    assert_same_weights(tmp_path, 3)
    played = [
        [(row["update"], row["task"], row["success"]) for row in map(parse_row, path.read_text().splitlines())]
        for path in (tmp_path / run / "rollouts.jsonl" for run in ("whole", "killed"))
    ]
    assert played[0] == played[1] and len(played[0]) == 3 * 3 * 4


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_engines_play_the_same_episodes_and_roll_out_for_grpo(quickstart, tmp_path):
    pytest.importorskip("vllm")
    played = {}
    for engine in ("hf", "vllm"):
        run = memcompiler_process if engine == "vllm" else memcompiler  # an engine ends with its process
        done = run(
            "eval",
            "-c",
            "eval/quickstart",
            f"compiler.checkpoint={quickstart / 'sft'}",
            f"compiler.engine={engine}",
            f"executor.engine={engine}",
            "env.scenes={train: 2, test: 2}",
            "limit=3",
            "max_steps=3",
            "deliveries=[static, compiled]",
            "--out",
            str(tmp_path / engine),
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        rows = map(parse_row, (tmp_path / engine / "episodes.jsonl").read_text().splitlines())
        steps = {f"{row['delivery']} {row['task_id']}": row["steps"] for row in rows}  # engines end them in any order
        played[engine] = {name: [(s["emission_text"], s["action"]) for s in row] for name, row in steps.items()}
    assert played["hf"] == played["vllm"] and len(played["hf"]) == 6
    done = memcompiler_process(
        "train",
        "grpo",
        "-c",
        "grpo/quickstart",
        f"compiler.checkpoint={quickstart / 'sft'}",
        "compiler.engine=vllm",
        "env.scenes={train: 2, test: 1}",
        "updates=2",
        "tasks=3",
        "group_size=4",
        "max_steps=6",
        "loss.importance_cap=2",
        "--out",
        str(tmp_path / "grpo"),
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = [parse_row(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and any(not row["skipped"] for row in rows)
    assert max(row.get("mismatch_kl", 0) for row in rows) < 1e-4  # the second update's engine has the new weights


def test_help_answers_at_once():
    started = time.perf_counter()
    assert memcompiler_process("--help").returncode == 0
    assert time.perf_counter() - started < 10  # far below a torch import under load; typically 0.3 s
    assert loaded("torch", by="memcompiler.cli") == "False"


@pytest.mark.seconds
def test_who_drives_evaluation_and_collection_waits_for_no_models():
    """Bad settings are refused before any is loaded, and where workers play there is none here."""
    assert loaded("transformers.modeling_utils", by="eval.evaluate, data_gen.collect") == "False"


@pytest.mark.seconds
@pytest.mark.parametrize("arguments", [["eval", "--help"], ["collect", "--no-such-option"]])
def test_help_and_usage_errors_import_no_torch(arguments):
    run = f"CliRunner().invoke(memcompiler.cli.app, {arguments})"
    code = f"import sys, memcompiler.cli; from typer.testing import CliRunner; {run}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def loaded(module: str, by: str) -> str:
    """Say whether importing some modules of ours imports another one."""
    code = f"import sys, {by}; print('{module}' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "sft", "epoch=3"], "did you mean"),
        (["train", "sft", "rows=/nowhere"], "memcompiler collect"),
        (["eval", "limit=0", "deliveries=[none]"], "greater than 0"),
        (["eval", "split=nope", "limit=1", "deliveries=[none]"], "test"),
        (["eval", "deliveries=[magic]"], "magic"),
        (["eval", "deliveries=[compiled]", "limit=1", "env.scenes={test: 1}"], "checkpoint"),
    ],
)
def test_bad_input_gives_one_clear_line(arguments, message, tmp_path):
    small = [] if arguments[0] == "train" else ["executor.dtype=float32", "executor.instructions=none"]
    result = CliRunner().invoke(app, [*arguments, *small, "--out", str(tmp_path / "run")])
    assert result.exit_code in (1, 2)
    assert message in result.output, result.output
    assert "Traceback" not in result.output


FULL = "free some space and run the same command again"
FAILS = {
    "full": (OSError(errno.ENOSPC, "No space left on device", "out/x/episodes.jsonl"), FULL),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded", "out/x"), FULL),
    "of a library": (RuntimeError("I/O error: No space left on device (os error 28)\nBacktrace:"), FULL),
    "sqlite": (sqlite3.OperationalError("database or disk is full"), FULL),
    "sqlite, read-only": (sqlite3.OperationalError("attempt to write a readonly database"), "readonly database"),
    "read-only": (OSError(errno.EROFS, "Read-only file system", "out/x/.lock"), "Read-only file system"),
    "forbidden": (PermissionError(errno.EACCES, "Permission denied", "out/x"), "Permission denied"),
    "long": (OSError(errno.ENAMETOOLONG, "File name too long", "out/x"), "File name too long"),
    "input": (BrokenProcessPool("boom"), None),
    "connection": (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
}


@pytest.mark.parametrize(("error", "said"), FAILS.values(), ids=FAILS)
def test_a_disk_that_cannot_be_written_ends_in_one_line_with_the_path(error, said, tmp_path):
    group = typer.Typer(cls=OneLineErrors)

    @group.command()
    def collect() -> None:
        with RunFolder.create(tmp_path, CollectConfig()):
            raise error

    group.command("other")(lambda: None)
    result = CliRunner().invoke(group, ["collect"])
    if said is None:
        assert result.exception is error
    else:
        assert result.exit_code == 1 and result.output.count("\n") == 1 and said in result.output
        assert getattr(error, "filename", None) or str(tmp_path) in result.output


FOREIGN = {
    "report": ["report", "{run}", "--out", "{file}"],
    "plan": ["plan", "-c", "sft/quickstart", "--json", "{file}"],
    "bank export": ["bank", "export", "{run}/bank", "{file}"],
    "leakage": ["leakage", "--train", "{manifest}", "--eval", "{manifest}", "--out", "{run}"],
    "qa": ["qa", "--data", "{data}", "--model", "m", "--engine", "endpoint", "--out", "{run}"],
    "qa beside its data": ["qa", "--data", "{data}", "--model", "m", "--engine", "endpoint", "--out", "{folder}"],
    "router": ["train", "router", "--out", "{run}"],
    "questions": ["data", "questions", "api.model=m", "--out", "{run}"],
    "recall": ["bench", "memory", "recall", "--data", "{data}", "--out", "{run}"],
    "merge": ["merge", "{run}", "--out", "{run}/merged"],
    "zoo": ["zoo", "executor", "--out", "{run}", "--work", "{folder}/work"],
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("evaluated") / "run"
    run_eval(load_config(EvalConfig, None, ["deliveries=[none]", "limit=1", "max_steps=1", "memory.k=0"]), run)
    return run


@pytest.mark.seconds
@pytest.mark.parametrize("command", FOREIGN.values(), ids=FOREIGN)
def test_no_command_writes_over_a_run_or_a_file_that_is_not_its_own(command, evaluated):
    tmp_path = evaluated.parent
    names = {name: tmp_path / name for name in ("run", "file", "data")} | {"folder": tmp_path}
    names["manifest"] = names["run"] / "manifest.json"
    names["file"].write_text('{"mine": 1}')
    names["data"].write_text(json.dumps([{"sample_id": "1", "qa": [], "conversation": {}}]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = CliRunner().invoke(app, [part.format_map(names) for part in command])
    assert result.exit_code == 1 and "Traceback" not in result.output, result.output
    assert any(said in result.output for said in ("another", "exists")), result.output
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_home_is_expanded_in_options_as_in_settings(monkeypatch):
    """A shell expands neither `--model=~/m` nor a quoted `~/m`."""
    monkeypatch.setenv("HOME", "/the/home")
    command = ["serve", "executor", "--dry-run"]
    for given in (["--model=~/m ü"], ["--model", "~/m ü"]):
        printed = CliRunner().invoke(app, [*command, *given, "--", "--download-dir=~/d", "--seed=~"])
        assert printed.exit_code == 0, printed.output
        words = shlex.split(printed.output)
        assert "/the/home/m ü" in words and words[-2:] == ["--download-dir=/the/home/d", "--seed=/the/home"]
    refused = CliRunner().invoke(app, [*command, "--model=~no-such-user/m"])
    assert refused.exit_code == 2 and "no-such-user" in refused.output
