"""The Hub: what `push` uploads, and that it loads again, against a stand-in on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler import checkpoint
from compiler.checkpoint import CheckpointError
from compiler.gate import load_gate
from configs.load import ConfigError
from memcompiler.hub import MODELS, model_card, model_settings, push
from tests import hub_server

LOADS = """
import json, sys
import memcompiler as mc
compiler, executor = mc.load("someone/alfworld", "executor.device=cpu", revision="main")
gate = mc.load_gate("hub:someone/alfworld")
try:
    mc.load("someone/else")
except RuntimeError as error:
    failure = str(error)
print(json.dumps([gate.sha256, executor.reads.goal_last, compiler.projector.config.n_tokens, failure]))
"""


@pytest.fixture
def hub() -> Iterator[hub_server.Hub]:
    with hub_server.serving() as server:
        yield server


def run(hub: hub_server.Hub, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: the client reads its variables when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": "hf_x", "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, **own}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_pushed_compiler_loads_from_its_repository(hub: hub_server.Hub, tmp_path: Path, repository: Path) -> None:
    pushed = run(hub, tmp_path, "-m", "memcompiler", "push", "zoo/alfworld", "someone/alfworld")
    assert pushed.returncode == 0 and pushed.stdout.strip() == "hub:someone/alfworld", pushed.stderr[-3000:]
    files = hub.files["someone/alfworld"]
    assert hub.private["someone/alfworld"] is True
    assert set(files) == {
        "README.md",
        MODELS,
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "gate.json",
        "gate.safetensors",
        "projector.json",
        "projector.safetensors",
        "state.json",
    }
    files["evil.bin"] = b"a pickle"
    loaded = run(hub, tmp_path, "-c", LOADS)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    gate = load_gate(str(repository / "zoo" / "alfworld" / "checkpoint"))
    assert gate is not None
    *found, failure = json.loads(loaded.stdout.splitlines()[-1])
    assert found == [gate.sha256, True, 4] and "cannot download hub:someone/else" in failure
    assert not list(tmp_path.rglob("evil.bin")) and list(tmp_path.rglob("adapter_model.safetensors"))


def run_folder(folder: Path, **settings: Any) -> Path:
    """An SFT run with what `push` reads of it."""
    step = folder / "checkpoints" / "step-000003"
    (step / "adapter").mkdir(parents=True)
    state = {"stage": "sft", "step": 3, "executor_hash": "abc", "environment": "household", "bank": str(folder)}
    (step / "state.json").write_text(json.dumps(state))
    (step / "projector.json").write_text(json.dumps({"n_tokens": 16}))
    (step / "optimizer.safetensors").write_text("moments")
    (step / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    models = {"compiler": {"model": "org/base"}, "executor": {"model": "org/executor", "reads_state": True}}
    (folder / "config.resolved.yaml").write_text(json.dumps({"rows": "rows", **models, **settings}))
    return folder


class FakeHub:
    """Keeps what is uploaded."""

    files: dict[str, str]

    def create_repo(self, repo: str, **options: object) -> None:
        assert options["private"] is True

    def upload_folder(self, folder_path: Path, **_: object) -> None:
        FakeHub.files = {str(p.relative_to(folder_path)): p.read_text() for p in folder_path.rglob("*") if p.is_file()}


def test_push_uploads_settings_and_results_but_no_optimizer_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    run = run_folder(tmp_path / "sft", executor={"model": "org/executor", "device": "cpu", "reads_state": True})
    success = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
    results = {"environment": "household", "split": "test", "results": {"compiled": {"success": success}}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert push(run, "someone/compiler") == "hub:someone/compiler"
    files = FakeHub.files
    assert set(files) == {"README.md", MODELS, "adapter/adapter_config.json", "projector.json", "state.json"}
    assert str(tmp_path) not in "".join(files.values())
    models = json.loads(files[MODELS])
    assert models["env"] == "household" and "device" not in models["executor"]
    assert models["executor"]["reads_state"] is True and models["compiler"]["model"] == "org/base"
    card = files["README.md"]
    assert "| executor_hash | abc |" in card and "| n_tokens | 16 |" in card
    assert "## Results on household test" in card and "| compiled | 50.0 % [25.0, 75.0] | 8 |" in card


def test_what_nobody_else_could_load_is_not_pushed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "sft", executor={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"executor\.model is a local folder"):
        push(run, "someone/compiler")
    with pytest.raises(CheckpointError, match="nothing was trained"):
        push("zoo/household", "someone/compiler")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        push(tmp_path / "none", "someone/compiler")


def test_a_repository_sets_no_endpoints_and_no_keys(tmp_path: Path) -> None:
    settings = {"compiler": {}, "executor": {"engine": "api", "api": {"base_url": "https://evil.example"}}}
    (tmp_path / MODELS).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"must not set: executor\.api, executor\.engine"):
        model_settings(tmp_path)


def test_a_run_s_settings_and_overrides_make_its_models(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "sft")
    config = model_settings(run, ["executor.device=cpu", "compiler.max_new_tokens=7"])
    assert (config.executor.model, config.executor.reads_state, config.executor.device) == ("org/executor", True, "cpu")
    assert config.compiler.checkpoint == str(run / "checkpoints" / "step-000003")
    assert config.compiler.max_new_tokens == 7 and config.env.name == "household"
    assert "merged, in this repository" in model_card(
        checkpoint.find(run), {"env": "household", "compiler": {}, "executor": {}}, {}
    )
