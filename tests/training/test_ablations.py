"""Ablations that need training of their own, without Brief State or soft tokens; and how the latent channel starts."""

from dataclasses import replace

import pytest
import torch

from compiler import checkpoint
from compiler.build import load_compiler
from configs.load import load_config
from configs.models import CompilerConfig
from configs.training import GrpoConfig, GrpoOptimizer, SftConfig
from data_gen.rows import save_rows, without_brief_state
from soft_mem.projector import Projector, ProjectorConfig
from tests.training.sft_trainers import ROWS, row, trainable, trainer
from training.sft import SftTrainer, train_sft

TINY = {
    "compiler": {"model": "zoo/household/compiler", "dtype": "float32", "instructions": "none"},
    "executor": {"model": "zoo/household/executor", "dtype": "float32", "instructions": "none"},
}
HYBRID = replace(row(3), emission="> why | go to shelf 1\n+ plan: find mug\n~ done: yes")
BRIEF = replace(row(2), emission="+ plan: find mug")


def test_a_row_without_brief_state_has_the_actions_in_its_place_and_no_operations():
    assert without_brief_state(HYBRID) == replace(HYBRID, state="", emission="> why | go to shelf 1")
    assert without_brief_state(BRIEF).emission == "." and without_brief_state(ROWS[0]).emission == "."
    assert without_brief_state(ROWS[1]) == replace(ROWS[1], state="")  # guidance to the letter


def test_sft_without_brief_state_trains_on_such_rows_and_its_checkpoint_says_so(tmp_path, monkeypatch):
    seen = {}

    def steps(self):
        seen["trainer"] = self
        self.save()
        return iter(())

    monkeypatch.setattr(SftTrainer, "steps", steps)
    save_rows([*ROWS, HYBRID], tmp_path / "rows")
    config = SftConfig(rows=str(tmp_path / "rows"), allow_leakage=True, brief_state=False, **TINY)
    train_sft(config, tmp_path / "out")
    t = seen["trainer"]
    assert list(t.rows) == [replace(without_brief_state(row), environment="household") for row in [*ROWS, HYBRID]]
    read = t.compiler.backbone.tokenizer.decode(t.examples[5].prompt.ids)
    assert "did: look ; look ; look" in read
    assert t.compiler.backbone.tokenizer.decode(t.examples[5].emission[:-1]) == "> why | go to shelf 1"
    state = checkpoint.read_state(checkpoint.find(tmp_path / "out"))
    assert state["brief_state"] is False and "soft" not in state


def test_sft_without_soft_tokens_trains_the_text_channel_alone(tmp_path):
    """No loss passes through executor and projector, which stays as it was."""
    t = trainer(tmp_path, soft=False, max_steps=3)

    def never(*arguments, **settings):
        raise AssertionError("the executor is not asked")

    t.executor.action_nll = never
    before, projector = trainable(t), t.compiler.projector.linear.weight.clone()
    seen = list(t.steps())
    assert {name for name in seen[0] if name.startswith("loss_")} == {"loss_text"}
    assert torch.equal(t.compiler.projector.linear.weight, projector)
    assert all("lora_" in name for name in before)
    assert any(not torch.equal(value, trainable(t)[name]) for name, value in before.items())
    assert all(t.executor.placeholder not in t.examples[i].executor_prompt.ids for i in range(5))


def test_normalising_is_a_setting_of_new_projectors_and_checkpoints_keep_theirs(tmp_path):
    class Tabled:
        embedding_table = torch.zeros(10, 64)

    common = {"dtype": "float32", "device": "cpu", "instructions": "none"}
    made = load_compiler(CompilerConfig(**common, soft={"normalise": True}), Tabled())
    assert made.projector.config.normalise
    checkpoint.save_weights(tmp_path, made)
    again = load_compiler(CompilerConfig(**common, checkpoint=str(tmp_path)), None)
    assert again.projector.config == made.projector.config
    assert not load_compiler(CompilerConfig(**common), Tabled()).projector.config.normalise


def moved(optimizer: GrpoOptimizer, steps: int = 24, n: int = 16, tokens: int = 100) -> float:
    """Return by how many sigmas one update of Eq. 8 moves mu, at the paper's widths (3,584 to 5,120), on hidden states
    and advantages drawn at random. Only 64 of the 5,120 dimensions are computed: they are independent of each other."""
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(3584, 64, n))
    hidden, advantages = torch.randn(steps, n, 3584), torch.randn(steps, 1)
    before = projector(hidden)
    sampled = before.at(torch.randn_like(before.mu)).detach()
    logprobs = before.log_prob(sampled) * 64 / 5120  # the mean is over all dimensions
    rate, eps = optimizer.projector_lr or optimizer.lr, optimizer.projector_eps or optimizer.eps
    adam = torch.optim.AdamW(projector.parameters(), lr=rate, betas=optimizer.betas, eps=eps)
    (-advantages * (logprobs - logprobs.detach()).exp()).sum().div(steps * (tokens + n)).backward()
    adam.step()
    with torch.no_grad():
        change = (projector(hidden).mu - before.mu) / before.log_sigma.exp()
    return float(change.square().mean().sqrt())


def test_the_papers_grpo_moves_the_latent_channel():
    """With LoRA's rate and eps an update hardly moves mu, if its gradients are as large as at the paper's shapes."""
    ours = load_config(GrpoConfig, "grpo/paper").optimizer
    inert = GrpoOptimizer()
    assert (inert.lr, inert.eps, inert.projector_lr, inert.projector_eps) == (1e-6, 1e-5, None, None)
    assert moved(inert) < 0.001
    assert 0.01 < moved(ours) < 0.2
    assert (ours.lr, ours.eps) == (1e-6, 1e-5)  # of LoRA, as in the paper


def test_the_projector_has_an_eps_of_its_own(tmp_path):
    t = trainer(tmp_path, optimizer={"lr": 1e-3, "eps": 1e-5, "projector_eps": 1e-9})
    assert [group["eps"] for group in t.backend.optimizer.param_groups] == [1e-5, 1e-9]
    t = trainer(tmp_path, optimizer={"lr": 1e-3, "eps": 1e-5})
    assert [group["eps"] for group in t.backend.optimizer.param_groups] == [1e-5, 1e-5]
    with pytest.raises(ValueError, match="projector_eps"):
        SftConfig(optimizer={"projector_eps": 0.0})
