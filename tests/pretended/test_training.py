"""SFT and GRPO on a pretended GPU: losses, gradients and updates are the CPU's; saving and resuming work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import grpo_trainers, sft_trainers
from training.grpo import GrpoTrainer
from training.sft import SftTrainer
from training.sft_losses import sft_losses

DEVICES = ("cpu", "cuda")
GRPO: dict[str, dict[str, Any]] = {
    "score": {"iterations": 2},
    "pathwise": grpo_trainers.PATHWISE,
}


def gradients(trainer: SftTrainer | GrpoTrainer) -> dict[str, torch.Tensor]:
    trained = ((n, p) for n, p in trainer.compiler.named_parameters() if p.requires_grad)
    return {name: torch.zeros(p.shape) if p.grad is None else p.grad.cpu() for name, p in trained}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("vlm", "latents"), [(False, ("gauss_nll", "soft_mse", "lm_head")), (True, ("gauss_nll",))])
def test_losses_and_their_gradients_are_the_cpu_s(
    vlm: bool, latents: tuple[str, ...], recompute: bool, tmp_path: Path
) -> None:
    for latent in latents[:1] if recompute else latents:
        found = []
        for device in DEVICES:
            made = sft_trainers.trainer(
                tmp_path / device, vlm=vlm, device=device, gradient_checkpointing=recompute, latent=latent
            )
            made.compiler.eval()
            examples = [made.examples[i] for i in range(4)]
            losses = sft_losses(made.compiler, made.executor, examples, made.config, temperature=0.0)
            assert set(losses) == {"text", "action", "entropy", "orth", "latent"}
            sum(value.sum() for value in losses.values()).backward()
            found.append(({name: value.detach() for name, value in losses.items()}, gradients(made)))
        assert_close(found[1][0], found[0][0])
        assert_close(found[1][1], found[0][1])


def test_compiler_and_executor_may_be_on_different_devices(tmp_path: Path) -> None:
    trainer, other = sft_trainers.trainer(tmp_path), sft_trainers.executor(device="cuda")
    trainer.compiler.eval()
    examples, found = [trainer.examples[i] for i in range(3)], list[dict[str, float]]()
    for latent in ("gauss_nll", "lm_head"):
        config = trainer.config.model_copy(update={"latent": latent})
        for executor in (trainer.executor, other):
            losses = sft_losses(trainer.compiler, executor, examples, config, temperature=0.0)
            found.append({name: float(value.detach().sum()) for name, value in losses.items()})
            sum(value.sum() for value in losses.values()).backward()
        assert found[-1] == pytest.approx(found[-2], rel=1e-4)
    assert all(value.abs().sum() > 0 for name, value in gradients(trainer).items() if "lora_B" in name)


def test_sft_takes_steps_validates_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    make = lambda name: sft_trainers.trainer(
        tmp_path / name,
        held_out=sft_trainers.ROWS[:2],
        device="cuda",
        vlm=False,
        max_steps=3,
        save_every=1,
        validation={"share": 0.1, "every": 3},
    )
    whole, metrics = make("whole"), list[dict[str, float]]()
    metrics += whole.steps()
    assert metrics[-1]["val_loss"] > 0 and metrics[-1]["loss"] < metrics[0]["loss"]
    resumed(make, whole, sft_trainers.trainable)


def resumed(make: Callable[[str], Any], whole: Any, trainable: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    """Stop a run after its first step, and let another trainer finish it from the checkpoint."""
    next(make("part").steps())
    again = make("part")
    assert again.resume() and again.step == 1
    assert {p.device for p in again.compiler.parameters()} == {torch.device("cuda:0")}
    list(again.steps())
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


@pytest.mark.parametrize("kind", GRPO)
def test_an_update_on_the_same_samples_is_the_cpu_s(kind: str, tmp_path: Path) -> None:
    on_cpu, here = (grpo_trainers.trainer(tmp_path / device, device=device, **GRPO[kind]) for device in DEVICES)
    samples = grpo_trainers.fresh_samples(on_cpu)
    expected, found = on_cpu.learn(samples), here.learn(samples)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5) and found["grad_norm"] > 0
    assert_close(grpo_trainers.trainable(here), grpo_trainers.trainable(on_cpu))


@pytest.mark.parametrize("kind", GRPO)
def test_grpo_plays_learns_and_resumes_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    short = {"updates": 2, "save_every": 1, "tasks": 1}
    make = lambda name: grpo_trainers.trainer(tmp_path / name, device="cuda", **short, **GRPO[kind])
    whole = make("whole")
    list(whole.steps())
    resumed(make, whole, grpo_trainers.trainable)


def test_rollouts_that_overlap_with_the_update_run_on_the_gpu(tmp_path: Path) -> None:
    settings = {"max_staleness": 1, "updates": 3, "save_every": 10, "tasks": 1, "loss": {"importance_cap": 2.0}}
    trainer = grpo_trainers.trainer(tmp_path, device="cuda", **settings)
    metrics = [made for made, _ in trainer.steps()]
    assert [made["staleness"] for made in metrics] == [0.0, 1.0, 1.0]
