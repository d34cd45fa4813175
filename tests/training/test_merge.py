"""A merged compiler: an ordinary model with its projector, which says and feels what base and adapter did."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from configs.load import load_config, to_yaml
from configs.models import CompilerConfig, Lora
from configs.training import SftConfig
from tests import tiny_models
from training.merge import merge

COMMON = {"dtype": "float32", "device": "cpu", "instructions": "none", "max_new_tokens": 8}


class Tabled:
    embedding_table = torch.zeros(10, 64)


@pytest.fixture(params=["zoo/household/compiler", "zoo/household/executor"])  # one that sees, one of text alone
def run(request, tmp_path) -> Path:
    """A run whose adapter changes what the compiler says."""
    settings = CompilerConfig(**COMMON, model=request.param, lora=Lora(alpha=64, rank=8, targets=("q_proj", "o_proj")))
    made = load_compiler(settings, Tabled(), seed=3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    checkpoint.save_weights(folder, made)
    (folder / "state.json").write_text(json.dumps({"environment": "household", "executor_reads": {"history": 7}}))
    (tmp_path / "run" / "config.resolved.yaml").write_text(to_yaml(SftConfig(compiler=settings)))
    (tmp_path / "run" / "manifest.json").write_text("{}")
    return tmp_path / "run"


def scores(compiler):
    with torch.no_grad():
        prompt = compiler.encode(tiny_models.request(0, image=compiler.encoder.is_vlm))
        scored = compiler.eval().score([prompt], [compiler.emission_ids("> a | go to shelf 1")])
    return scored.logits, scored.gaussian.mu, scored.gaussian.log_sigma


def test_a_merged_compiler_has_the_logits_and_soft_tokens_of_base_and_adapter(run, tmp_path):
    settings = load_config(SftConfig, run / "config.resolved.yaml").compiler
    theirs = load_compiler(settings.model_copy(update={"checkpoint": str(run)}), None)
    bare = load_compiler(settings, Tabled(), seed=3)
    out = merge(run, tmp_path / "merged")
    ours = load_compiler(CompilerConfig(**COMMON, checkpoint=str(out)), None)
    for a, b in zip(scores(theirs), scores(ours), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (scores(theirs)[0] - scores(bare)[0]).abs().max() > 0.1  # the adapter says something
    requests = [tiny_models.request(i, image=ours.encoder.is_vlm) for i in range(3)]
    assert [c.text for c in theirs.compile(requests)] == [c.text for c in ours.compile(requests)]
    assert any(p.requires_grad for n, p in ours.named_parameters() if "lora_" in n)  # to go on training


def test_the_folder_is_a_model_of_its_own_and_a_checkpoint(run, tmp_path):
    out = merge(run, tmp_path / "merged")
    assert checkpoint.find(out) == out and checkpoint.is_merged(out)
    assert not list(out.rglob("adapter*")) and {p.suffix for p in out.iterdir()} <= {
        ".json",
        ".safetensors",
        ".jinja",
        "",
    }
    assert checkpoint.environments(out) == ("household",) and checkpoint.executor_inputs(out) == {"history": 7}
    assert checkpoint.run_file(out, "manifest.json") == out / "manifest.json"
    index = json.loads((out / "model.safetensors.index.json").read_text())  # which files vLLM loads
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert set(index["weight_map"]) == set(load_file(out / "model.safetensors"))
    state = checkpoint.read_state(out)["merged"]
    assert state["sha256"] == checkpoint.sha256(checkpoint.find(run)) and state["base"].startswith("zoo/household/")
    before = checkpoint.sha256(out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert checkpoint.sha256(out) != before
    with pytest.raises(FileExistsError, match="choose another folder"):
        merge(run, out)
    with pytest.raises(checkpoint.CheckpointError, match="already merged"):
        merge(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_without_its_run_a_checkpoint_names_its_base_itself(run, tmp_path):
    alone = tmp_path / "downloaded"
    checkpoint.find(run).rename(alone)
    out = merge(alone, tmp_path / "merged", ["dtype=float32"])
    assert "zoo/household" in checkpoint.read_state(out)["merged"]["base"]


def test_a_served_merged_compiler_gets_no_adapter(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    compiler = tiny_models.memory_compiler(False)
    checkpoint.save_projector(tmp_path, compiler.projector.config, compiler.projector.state_dict())
    (tmp_path / "state.json").write_text("{}")
    asked: list = []

    class Recorder:
        def __init__(self, llm, encoder, projector, **settings):
            asked.append(projector.config)

        def load_adapter(self, *arguments):
            raise AssertionError("there is none")

    monkeypatch.setattr("compiler.vllm.VllmCompiler", Recorder)
    monkeypatch.setattr("compiler.vllm.engine_settings", lambda rank, ngram: asked.append(rank) or {})
    monkeypatch.setattr("lm.vllm.load_engine", lambda name, *rest: asked.append(name))
    monkeypatch.setattr("lm.backbone.load_encoder", lambda *arguments: None)
    load_served_compiler(CompilerConfig(engine="vllm", checkpoint=str(tmp_path), lora=Lora(rank=24)))
    assert asked == [24, str(tmp_path), compiler.projector.config]
