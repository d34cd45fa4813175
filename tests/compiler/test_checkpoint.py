"""A checkpoint's adapter says what it is: rank, alpha, dropout and targets are its own, whatever the settings say."""

import logging

import pytest
import torch

from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.hf import layer_of
from configs.models import CompilerConfig, Lora
from tests import tiny_models

SETTINGS = {"dtype": "float32", "device": "cpu", "instructions": "none", "max_new_tokens": 8}


class Tabled:
    """What a new projector wants to know of an executor."""

    embedding_table = torch.zeros(10, 64)


def trained(folder, **lora):
    """A compiler whose adapter changes what it says, saved in `folder`."""
    made = load_compiler(CompilerConfig(**SETTINGS, lora=Lora(**lora)), Tabled(), seed=3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    checkpoint.save_weights(folder, made)
    return made.eval()


def logits(compiler):
    with torch.no_grad():
        return compiler.score([compiler.encode(tiny_models.request(0))], [compiler.emission_ids("> a | go")]).logits


def test_lora_may_begin_at_a_later_layer_and_a_checkpoint_says_so(tmp_path, caplog):
    made = trained(tmp_path, first_layer=2)
    assert {layer_of(name) for name, p in made.policy.named_parameters() if p.requires_grad} == {2, 3}
    config = CompilerConfig(**SETTINGS, checkpoint=str(tmp_path), lora=Lora(first_layer=0))
    ours = load_compiler(config, None)
    assert {layer_of(name) for name, p in ours.policy.named_parameters() if p.requires_grad} == {2, 3}
    [record] = caplog.records
    assert "compiler.lora.first_layer is 0 in the settings, but 2 in the adapter" in record.getMessage()


def test_alpha_rank_dropout_and_targets_are_the_adapters(tmp_path, caplog):
    theirs = trained(tmp_path, alpha=64, rank=8, dropout=0.3, targets=("q_proj", "o_proj"))
    with caplog.at_level(logging.WARNING):
        ours = load_compiler(CompilerConfig(**SETTINGS, checkpoint=str(tmp_path)), None)
    assert torch.equal(logits(theirs), logits(ours.eval()))
    config = ours.policy.peft_config["default"]
    assert (config.lora_alpha, config.r, config.lora_dropout) == (64, 8, 0.3)
    assert any(p.requires_grad for n, p in ours.named_parameters() if "lora_" in n)  # to go on training
    assert not caplog.records  # defaults contradict nothing


def test_settings_that_contradict_the_adapter_are_reported_and_do_not_count(tmp_path, caplog):
    theirs = trained(tmp_path, alpha=64)
    config = CompilerConfig(**SETTINGS, checkpoint=str(tmp_path), lora=Lora(alpha=32, rank=16))
    with caplog.at_level(logging.WARNING):
        ours = load_compiler(config, None)
    assert torch.equal(logits(theirs), logits(ours.eval()))
    [record] = caplog.records
    assert "compiler.lora.alpha is 32 in the settings, but 64 in the adapter" in record.getMessage()


def test_weights_that_would_mean_something_else_are_refused(tmp_path):
    """As when an adapter is sent to a running service: shapes do not distinguish alpha 64 from alpha 32."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    compiler = trained(tmp_path / "a", alpha=32)
    trained(tmp_path / "b", alpha=64)
    checkpoint.load(tmp_path / "a", compiler)
    with pytest.raises(checkpoint.CheckpointError, match="lora_alpha = 64, the compiler has 32"):
        checkpoint.load(tmp_path / "b", compiler)


def test_an_adapter_that_cannot_be_read_is_refused_by_name(tmp_path):
    trained(tmp_path)
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(checkpoint.CheckpointError, match="of type IA3, not LORA"):
        load_compiler(CompilerConfig(**SETTINGS, checkpoint=str(tmp_path)), None)


def test_a_served_compilers_highest_rank_is_the_adapters(tmp_path, monkeypatch):
    trained(tmp_path, rank=24)
    asked = []

    class Recorder:
        def __init__(self, *arguments, **settings):
            pass

        def load_adapter(self, *arguments):
            pass

    monkeypatch.setattr("compiler.vllm.VllmCompiler", Recorder)
    monkeypatch.setattr("compiler.vllm.engine_settings", lambda rank, ngram: asked.append(rank) or {})
    monkeypatch.setattr("lm.vllm.load_engine", lambda *arguments: None)
    load_served_compiler(CompilerConfig(engine="vllm", checkpoint=str(tmp_path)))
    assert asked == [24]
