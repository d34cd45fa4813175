"""One process's part of the backend tests, run in-process (alone) or by torchrun (two ranks):

torchrun --nproc_per_node 2 -m tests.training.backend_cases OUT BACKEND,BACKEND... CASE,CASE...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training import grpo_trainers, sft_trainers
from training import distributed
from training.grpo import GrpoTrainer
from training.losses import group_advantages
from training.rollout import samples_of
from training.sft import SftTrainer

ROWS = [*sft_trainers.ROWS, sft_trainers.row(5)]  # batches of 5 and 1: ranks have 3 and 2 rows, then 1 and none
HELD_OUT = [sft_trainers.row(i) for i in (2, 3, 5)]  # ranks have 2 and 1


def sft_trainer(out: Path, backend: str, **settings: Any) -> SftTrainer:
    """Three steps, checkpoints after the second and third; what is random by rank (dropout, noise) is off."""
    common = {
        "batch_size": 5, "micro_batch_size": 3, "max_steps": 3, "save_every": 2, "keep": 3, "backend": backend,
        "optimizer": {"lr": 1e-3, "grad_clip": 0.5}, "validation": {"share": 0.3, "every": 2},
    }  # fmt: skip
    t = sft_trainers.trainer(out, ROWS, HELD_OUT, **(common | settings))
    t.compiler.eval()
    t.compiler.train = lambda mode=True: t.compiler
    t.compiler.projector.draw = lambda gaussian, *_: gaussian.mu
    return t


def sft(out: Path, backend: str) -> None:
    """Train (or go on training) to the end; the executor is untouched, whole as in slices."""
    t = sft_trainer(out / "sft", backend)
    t.resume()
    seen: list[dict[str, float]] = []
    t.run(lambda m: (print(m), seen.append(m)))
    if distributed.rank() == 0:
        (out / "validation.json").write_text(json.dumps({m["step"]: m["val_loss"] for m in seen if "val_loss" in m}))
    for (name, parameter), fresh in zip(
        t.executor.model.named_parameters(), sft_trainers.executor().model.parameters(), strict=True
    ):
        assert parameter.grad is None, name
        assert torch.equal(t.backend.whole(parameter), fresh), name


def mixed(out: Path, backend: str) -> None:
    """Train LoRA and projector in fp32 on frozen weights in bf16, as all large runs do. Rows are computed one by one: a
    row's rounding in bf16 follows its padding."""
    t = sft_trainer(out / "mixed", backend, dtype=torch.bfloat16, micro_batch_size=1, max_steps=2)
    frozen = [t.compiler.backbone.model.get_input_embeddings(), t.executor.model.get_input_embeddings()]
    assert all(module.weight.dtype == torch.bfloat16 for module in frozen)
    assert {p.dtype for p in t.compiler.parameters() if p.requires_grad} == {torch.float32}
    t.run(lambda m: print(m))
    assert {p.dtype for p in t.compiler.parameters() if p.requires_grad} == {torch.float32}


def recomputed(out: Path, backend: str) -> None:
    """Take the steps of `sft` with gradient checkpointing, which ZeRO-3 cannot."""
    if backend == "zero3":
        return
    t = sft_trainer(out / "recomputed", backend, gradient_checkpointing=True, max_steps=2)
    t.run(lambda m: print(m))


def resumed(out: Path, backend: str) -> None:
    """The last step, from a checkpoint that somebody else has written."""
    t = sft_trainer(out / "resumed", backend)
    assert t.resume() and t.step == 2
    t.run(lambda m: print(m))


def killed(out: Path, backend: str) -> None:
    """The last rank dies without a word after the second step."""
    for metrics in sft_trainer(out / "sft", backend).steps():
        if metrics["step"] == 2 and distributed.rank() == distributed.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def grpo_trainer(out: Path, backend: str, **settings: Any) -> GrpoTrainer:
    common = {
        "minibatches": 2, "iterations": 2, "micro_batch_size": 2, "backend": backend,
        "loss": {"kl": 0.1, "importance_cap": 2.0}, "optimizer": {"grad_clip": 0.5},
    }  # fmt: skip
    return grpo_trainers.trainer(out, **grpo_trainers.merged(common, settings))


def grpo(out: Path, backend: str, name: str = "grpo", **settings: Any) -> None:
    """Two updates on given samples, 3 and 2 and then 2 and none of them; then one whole update, rollouts and all."""
    t = grpo_trainer(out / name, backend, **settings)
    t.sampler.generator.manual_seed(0)
    samples = samples_of(grpo_trainers.played(t, t.sampler), t.sampler, t.pathwise)[:5]
    first, alone = distributed.rank() == 0, distributed.world_size() == 1
    t.learn(samples if alone else samples[:3] if first else samples[3:], 0)
    t.learn(samples[:2] if first else [], 1)
    weights = t.backend.weights()
    if first:
        save_file(weights, out / f"{name}.safetensors")
    t.step = 2
    metrics, _ = t.take_step()
    assert metrics["mismatch_kl"] < 1e-8, metrics  # what rolled out is what trains: its weights came along
    assert metrics["samples"] == 16 and metrics["grad_norm"] > 0
    assert all(p.grad is None for p in t.executor.model.parameters())
    assert t.executor.hash() == t.executor_hash
    t.save()


def pathwise(out: Path, backend: str) -> None:
    """As `grpo`, the executor in the gradient's path: whole on every process, whatever the backend."""
    grpo(out, backend, "pathwise", **grpo_trainers.PATHWISE)


def shared(out: Path, backend: str) -> None:
    """One task for two ranks: they share out its episodes. Those of rank 0 win, those of rank 1 lose."""
    make_env = partial(grpo_trainers.LuckyEnv, distributed.rank())
    t = grpo_trainers.trainer(out / "shared", make_env=make_env, tasks=1, group_size=5, updates=1, backend=backend)
    metrics, groups = t.take_step()
    assert [len(group.episodes) for group in groups] == [2 + distributed.rank()]
    advantages = group_advantages([1, 1, 0, 0, 0])
    assert groups[0].advantages == pytest.approx(advantages[2:] if distributed.rank() else advantages[:2])
    assert groups[0].informative and groups[0].leads == (distributed.rank() == 0)
    assert metrics["episodes"] == 5 and metrics["samples"] == 5 * 2 and metrics["skipped"] == 0
    assert metrics["reward"] == 0.4 and metrics["zero_variance_fraction"] == 0
    assert metrics["group_variance"] == pytest.approx(0.4 * 0.6)


CASES = {case.__name__: case for case in (shared, sft, mixed, recomputed, resumed, grpo, pathwise, killed)}


def main(out: Path, kinds: str, names: str) -> None:
    from training import backend as backends

    backends.Zero2.persistent = 0  # or ZeRO-3 would leave models as small as these whole
    with distributed.group():
        assert distributed.world_size() == 2
        for kind in kinds.split(","):
            for name in names.split(","):
                CASES[name](out / kind, kind)
    assert distributed.world_size() == 1  # left


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
