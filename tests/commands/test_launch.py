"""A node shared out: actors and rollout services as processes of their own that know each other by URLs and weights."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from configs.load import ConfigError, load_config, to_yaml
from configs.training import GrpoConfig
from memcompiler.cli import app
from training.launch import compiler_command, compiler_service, executor_command, launch_grpo, scratch_of, shared_out

ROOT = Path(__file__).parents[2]
SCENES = "env.scenes={train: 3, test: 1}"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "memcompiler", *arguments]


def run(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env
    )  # fmt: skip


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("launch")
    for step in (
        ("collect", "-c", "collect/quickstart", SCENES, "--out", f"{out}/collect"),
        ("train", "sft", "-c", "sft/quickstart", f"rows={out}/collect/rows", "max_steps=25", "--out", f"{out}/sft"),
    ):
        done = run(*step)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return out / "sft"


def settings(sft: Path, out: Path, **more: str) -> list[str]:
    return [
        "launch", "grpo", "-c", "grpo/quickstart", f"compiler.checkpoint={sft}", SCENES, "tasks=2", "group_size=4",
        "max_steps=8", "minibatches=1", "sampling.temperature=1.2", "optimizer.projector_lr=0.02",
        "env.visual_share=0.5", "save_every=1",
        *(f"{name.replace('__', '.')}={value}" for name, value in more.items()), "--out", str(out),
    ]  # fmt: skip


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_services_roll_out_with_the_actors_newest_weights(sft, tmp_path):
    out = tmp_path / "run"
    place = {"placement__actors": "1", "placement__rollouts": "2", "placement__executors": "0"}
    done = run(*settings(sft, out, updates="2", **place))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = metrics(out)
    assert [row["update"] for row in rows] == [1, 2] and not any(row["failures"] for row in rows)
    assert any(row.get("samples") for row in rows)  # it has learnt: the second update's weights are new ones
    # The trainer finds the services' log-probabilities to be its own: they have its weights, of this very update.
    assert all(row.get("mismatch_kl", 0.0) < 1e-5 for row in rows)
    scratch = scratch_of(out) / socket.gethostname()
    assert not list(scratch.parent.glob("memcompiler-rollout-*"))  # weights on their way are cleared away
    for i in range(2):
        assert "ready: compiler.engine=http" in (scratch / f"rollout-{i}.log").read_text()


@pytest.mark.slow
def test_a_service_that_dies_ends_the_run_with_its_last_words_and_leaves_nothing(sft, tmp_path):
    out = tmp_path / "run"
    place = {"placement__actors": "1", "placement__rollouts": "1", "placement__executors": "0"}
    process = subprocess.Popen(
        command(*settings(sft, out, updates="50", **place)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(_pid_of(scratch_of(out) / socket.gethostname() / "serve.yaml"), signal.SIGKILL)
        words = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 1 and "rollout-0 ended (-9)" in words, words[-3000:]
    assert not [pid for pid in _pids() if str(out) in _words(pid)]


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing(sft, tmp_path):
    out = tmp_path / "run"
    place = {"placement__actors": "1", "placement__rollouts": "1", "placement__executors": "0"}
    process = subprocess.Popen(
        command(*settings(sft, out, updates="50", **place)), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = scratch_of(out) / socket.gethostname() / "rollout-0.log"
    deadline = time.monotonic() + 400
    while not (log.exists() and "ready" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.wait()
    while left := [pid for pid in _pids() if str(out) in _words(pid)]:
        assert time.monotonic() < deadline, [_words(pid) for pid in left]
        time.sleep(0.2)


def test_gpus_are_shared_out_in_order(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7,0,1,2")
    assert shared_out(4, 3, 1) == (["3,4,5,6"], ["7", "0", "1"], ["2"])
    with pytest.raises(ConfigError, match=r"asks for 4 \+ 4 \+ 1 GPUs and 8 are there"):
        shared_out(4, 4, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert shared_out(1, 2, 0) == ([""], ["", ""], [])


def test_the_paper_rolls_out_and_acts_in_vllm(tmp_path):
    config = load_config(GrpoConfig, "grpo/paper", ["compiler.timeout_s=300"])
    (tmp_path / "serve.yaml").write_text(to_yaml(compiler_service(config, tmp_path, own_gpu=True)))
    rollout = CliRunner().invoke(app, [*compiler_command(tmp_path, 8100)[3:], "--print-config"])
    assert rollout.exit_code == 0, rollout.output
    served = yaml.safe_load(rollout.output)
    assert served["compiler"]["engine"] == "vllm" and served["compiler"]["checkpoint"] == config.compiler.checkpoint
    assert served["compiler"]["vllm"]["gpu_memory_utilization"] == 0.9  # the GPU is its own
    assert served["timeout_s"] == 300 and served["adapters"] == str(tmp_path)
    command = executor_command(config, own_gpu=False, port=8000)[3:]
    at = command.index("--")
    acting = CliRunner().invoke(app, [*command[:at], "--dry-run", *command[at:]])
    assert acting.exit_code == 0, acting.output
    printed = shlex.split(acting.output)
    assert any("vllm" in word for word in printed[:3]) and config.executor.model in printed
    assert printed[printed.index("--gpu-memory-utilization") + 1] == "0.45"


def test_rollouts_on_gpus_are_refused_without_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = load_config(
        GrpoConfig, "grpo/paper",
        ["compiler.engine=hf", "placement.actors=1", "placement.rollouts=1", "placement.executors=0"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"compiler\.engine=vllm"):
        launch_grpo(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _words(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _pid_of(word: Path) -> int:
    [found] = [pid for pid in _pids() if str(word) in _words(pid)]
    return found
