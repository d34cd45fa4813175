"""Gradient checkpointing: the same gradients, also through a frozen model, and every layer computed a second time."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.backbone import Backbone
from tests import tiny_models
from tests.training import grpo_trainers, sft_trainers
from training.sft_losses import sft_losses

COMMANDS = ("go to shelf 1", "go to cabinet 2", "look")


def executor(recompute: bool) -> tuple[FrozenExecutor, list[int]]:
    """A frozen executor, and how often its first layer has run."""
    made = FrozenExecutor(tiny_models.lm_backbone(seed=1))
    if recompute:
        made.backbone.enable_gradient_checkpointing()
    return made, runs_of(made.backbone)


def runs_of(backbone: Backbone) -> list[int]:
    runs = [0]
    layer = getattr(backbone.body, "language_model", backbone.body).layers[0]
    layer.mlp.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    return runs


def request(i: int = 0) -> ExecutorRequest:
    soft = 0.3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(i))
    return ExecutorRequest("put a mug", MemoryBlock(soft=soft), ("look",) * i, "You see nothing.", COMMANDS)


def test_gradients_through_a_frozen_executor_to_soft_tokens_are_equal():
    """Scored as SFT does (`action_nll`) and as GRPO's pathwise gradient does (`candidate_logprobs`, a tree's mask)."""
    found = []
    for recompute in (False, True):
        model, runs = executor(recompute)
        assert not model.model.training
        prompts = [model.encode(request(i)) for i in range(2)]
        given = torch.stack([p.soft for p in prompts]).requires_grad_()
        model.action_nll([replace(p, soft=None) for p in prompts], given, [model.action_ids("look")] * 2)[
            0
        ].sum().backward()
        own = prompts[0].soft.clone().requires_grad_()
        model.candidate_logprobs([replace(prompts[0], soft=own)], [COMMANDS])[0][1].backward()
        assert given.grad.abs().sum() > 0 and own.grad.abs().sum() > 0
        assert runs[0] == (4 if recompute else 2)  # both passes once more
        assert all(p.grad is None for p in model.model.parameters()) and not model.model.training
        found.append((given.grad, own.grad))
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_nothing_is_computed_again_where_no_gradient_comes_back():
    """A cache would be lost in transformers' own checkpointing, for a model that counts as training."""
    answers = []
    for recompute in (False, True):
        model, runs = executor(recompute)
        model.mode = "generate"
        answers.append(([action.text for action in model.act([request(0), request(1)])], runs[0]))
    assert answers[0] == answers[1] and answers[0][1] <= model.max_new_tokens  # one pass for each token


def test_an_sft_step_has_the_same_gradients_with_dropout_and_noise(tmp_path):
    gradients = []
    for recompute in (False, True):
        t = sft_trainers.trainer(tmp_path / str(recompute), gradient_checkpointing=recompute)
        runs = [runs_of(model.backbone) for model in (t.compiler, t.executor)]
        t.compiler.train()
        torch.manual_seed(0)
        losses = sft_losses(t.compiler, t.executor, [t.examples[i] for i in range(3)], t.config)
        sum(value.sum() for value in losses.values()).backward()
        assert [r[0] for r in runs] == ([2, 2] if recompute else [1, 1])
        gradients.append({n: p.grad for n, p in t.compiler.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys() and any(g.abs().sum() > 0 for g in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(gradient, recomputed[name], atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("channel", [{}, grpo_trainers.PATHWISE])
def test_a_grpo_update_has_the_same_weights(tmp_path, channel):
    """It trains in evaluation mode: LoRA's dropout is off."""
    weights = []
    for recompute in (False, True):
        settings = grpo_trainers.merged({"gradient_checkpointing": recompute, "updates": 1}, channel)
        t = grpo_trainers.trainer(tmp_path / str(recompute), **settings)
        runs = runs_of(t.compiler.backbone)
        t.take_step()
        weights.append((t.backend.weights(), runs[0]))
    assert weights[1][1] > weights[0][1]
    for name, value in weights[0][0].items():
        torch.testing.assert_close(value, weights[1][0][name], atol=0, rtol=0, msg=name)


class _Layer(GradientCheckpointingLayer):
    """One that drops out by its own mode, as some models' do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.modes = nn.Linear(4, 4), []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return nn.functional.dropout(self.linear(hidden), 0.5, self.training)


@pytest.mark.parametrize("mode", [True, False])
def test_a_layers_own_mode_is_the_same_in_both_passes(mode):
    backbone = tiny_models.lm_backbone()
    backbone.model = nn.Sequential(_Layer()).train(mode)
    backbone.enable_gradient_checkpointing()
    read = torch.ones(2, 4, requires_grad=True)
    with backbone._checkpointing(True):
        out = backbone.model(read)
    out.sum().backward()
    [layer] = backbone.model
    assert layer.modes == [mode, mode] and layer.training is mode and not layer.gradient_checkpointing
    if not mode:
        assert torch.equal(out, layer.linear(read))


def test_a_model_without_such_layers_says_so():
    backbone = tiny_models.lm_backbone()
    backbone.model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="Linear has no gradient checkpointing"):
        backbone.enable_gradient_checkpointing()
