"""Backend tests of one process, run in-process (one rank) or by torchrun (two ranks):

torchrun --nproc_per_node 2 -m tests.training.backend_cases OUT BACKEND,BACKEND... CASE,CASE...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.training import SftConfig
from envs.base import EnvironmentFailure, Observation, Task
from envs.registry import find
from tests.training import grpo_trainers, sft_trainers
from training import backend as backends
from training import distributed
from training.grpo import GrpoTrainer
from training.losses import group_advantages
from training.rollout import samples_of
from training.sft import SftTrainer, load_models

ROWS = [*sft_trainers.ROWS, sft_trainers.row(5)]  # batches of 5 and 1: ranks have 3 and 2 rows, then 1 and none
HELD_OUT = [sft_trainers.row(i) for i in (2, 3, 5)]  # ranks have 2 and 1


def sft_trainer(out: Path, backend: str, **settings: Any) -> SftTrainer:
    """Take three steps, with checkpoints after the second and third, without noise and dropout."""
    common = {
        "batch_size": 5,
        "micro_batch_size": 3,
        "max_steps": 3,
        "save_every": 2,
        "keep": 3,
        "backend": backend,
        "optimizer": {"lr": 1e-3, "grad_clip": 0.5},
        "validation": {"share": 0.3, "every": 2},
    }
    t = sft_trainers.trainer(out, ROWS, HELD_OUT, **(common | settings))
    t.compiler.eval()
    t.compiler.train = lambda mode=True: t.compiler
    t.compiler.projector.draw = lambda gaussian, *_: gaussian.mu
    return t


def sft(out: Path, backend: str) -> None:
    """Train (or resume) to the end; assert that the executor is unchanged, whole or sharded."""
    t = sft_trainer(out / "sft", backend)
    t.resume()
    seen: list[dict[str, float]] = []
    for metrics in t.steps():
        seen.append(metrics)
        print(metrics)
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
    print(*t.steps())
    assert {p.dtype for p in t.compiler.parameters() if p.requires_grad} == {torch.float32}


def recomputed(out: Path, backend: str) -> None:
    """Take the steps of `sft` with gradient checkpointing, which ZeRO-3 cannot."""
    if backend == "zero3":
        return
    t = sft_trainer(out / "recomputed", backend, gradient_checkpointing=True, max_steps=2)
    print(*t.steps())


def resumed(out: Path, backend: str) -> None:
    """Take the last step from a checkpoint of another run."""
    t = sft_trainer(out / "resumed", backend)
    assert t.resume() and t.step == 2
    print(*t.steps())


def killed(out: Path, backend: str) -> None:
    """Kill the last rank after the second step."""
    for metrics in sft_trainer(out / "sft", backend).steps():
        if metrics["step"] == 2 and distributed.rank() == distributed.world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def grpo_trainer(out: Path, backend: str, **settings: Any) -> GrpoTrainer:
    common = {
        "minibatches": 2,
        "iterations": 2,
        "micro_batch_size": 2,
        "backend": backend,
        "loss": {"importance_cap": 2.0},
        "optimizer": {"grad_clip": 0.5},
    }
    return grpo_trainers.trainer(out, **grpo_trainers.merged(common, settings))


def grpo(out: Path, backend: str, name: str = "grpo", **settings: Any) -> None:
    """Make two updates on given samples (3 and 2 by rank, then 2 and 0), then one complete update with rollouts."""
    t = grpo_trainer(out / name, backend, **settings)
    t._set_sampler(t._snapshot(), t.step)
    t.sampler.generator.manual_seed(0)
    samples = samples_of(grpo_trainers.played(t, t.sampler), t.sampler, t.policy.pathwise)[:5]
    first, alone = distributed.rank() == 0, distributed.world_size() == 1
    t.learn(samples if alone else samples[:3] if first else samples[3:], 0)
    t.learn(samples[:2] if first else [], 1)
    weights = t.backend.weights()
    if first:
        save_file(weights, out / f"{name}.safetensors")
    t.step = 2
    metrics, _ = t.take_step()
    assert metrics["mismatch_kl"] < 1e-8, metrics  # rollouts used the trained weights
    assert metrics["samples"] == 16 and metrics["grad_norm"] > 0
    assert all(p.grad is None for p in t.executor.model.parameters())
    assert t.executor.hash() == t.executor_hash
    t.save()


def pathwise(out: Path, backend: str) -> None:
    """As `grpo`, with the gradient through the executor, which every process holds whole under any backend."""
    grpo(out, backend, "pathwise", **grpo_trainers.PATHWISE)


def served(out: Path, backend: str) -> None:
    """As `grpo`, with rollouts by an engine."""
    grpo(out, backend, "served", served=True)


def shared(out: Path, backend: str) -> None:
    """Split the episodes of one task between two ranks; rank 0's win, rank 1's lose."""
    make_env = partial(grpo_trainers.LuckyEnv, distributed.rank())
    t = grpo_trainers.trainer(out / "shared", make_env=make_env, tasks=1, group_size=5, updates=1, backend=backend)
    metrics, groups = t.take_step()
    assert [len(group.episodes) for group in groups] == [2 + distributed.rank()]
    advantages = group_advantages([1, 1, 0, 0, 0])
    assert groups[0].advantages == pytest.approx(advantages[2:] if distributed.rank() else advantages[:2])
    assert groups[0].has_variance and groups[0].is_first == (distributed.rank() == 0)
    assert metrics["episodes"] == 5 and metrics["samples"] == 5 * 2 and metrics["skipped"] == 0
    assert metrics["reward"] == 0.4 and metrics["zero_variance_fraction"] == 0
    assert metrics["group_variance"] == pytest.approx(0.4 * 0.6)


class Held(TorchDispatchMode):
    """Peak bytes of the tensor storages that this process creates inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._add(tensor.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self.live += (size := storage.nbytes())
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def sliced(out: Path, backend: str) -> None:
    """Load the shipped models as `train sft` does, and take steps. With sharded weights, the last of two ranks, which
    receives them from the first, never holds more than its half and one tensor in transfer."""
    settings = {
        "compiler": {"model": "zoo/household/compiler", "soft": {"n_tokens": 4, "emb_std": "auto"}},
        "executor": {"model": "zoo/household/executor", "soft_on": "always"},
    }
    for role in settings.values():
        role |= {"dtype": "float32", "instructions": "none"}
    config = SftConfig(
        **settings,
        batch_size=5,
        micro_batch_size=3,
        max_steps=2,
        save_every=2,
        backend=backend,
        optimizer={"lr": 1e-3},
    )
    with Held() as held, pytest.MonkeyPatch.context() as patch:
        compiler, executor = load_models(config, {"household": find("household")})
        read = held.live
        sizes = [p.numel() * p.element_size() for model in (compiler, executor.model) for p in model.parameters()]
        wrap, most = backends.Replicated._wrap, list[int]()  # called when shards are distributed
        patch.setattr(backends.Replicated, "_wrap", lambda *args: (most.append(held.most), wrap(*args))[1])
        t = SftTrainer(config, compiler, executor, ROWS, out / "sliced")
    if distributed.rank() > 0 and backends.BACKENDS[backend].is_sharded:
        print({"models": sum(sizes), "largest": max(sizes), "read": read, "most": most})
        assert read < 0.02 * sum(sizes)  # of the projector, which is created on its device, and buffers
        assert most[0] < 0.75 * sum(sizes)  # its half, the vision tower, and one layer or table in transfer
    t.compiler.eval()
    t.compiler.train = lambda mode=True: t.compiler
    t.compiler.projector.draw = lambda gaussian, *_: gaussian.mu
    seen: list[dict[str, float]] = []
    seen += t.steps()
    if distributed.rank() == 0:
        (out / "sliced.json").write_text(json.dumps([[m["loss"] for m in seen], t.executor_hash]))


class FatedEnv(grpo_trainers.LuckyEnv):
    """The task's kind decides whether an episode succeeds or its environment fails."""

    def __init__(self) -> None:
        super().__init__(1)

    def reset(self, task: Task) -> Observation:
        if task.kind == "broken":
            raise EnvironmentFailure("the simulator is gone")
        self.number = 0 if task.kind == "easy" else 1
        return super().reset(task)


FATES = [grpo_trainers.spec(i, kind) for i, kind in enumerate(("easy", "hard", "easy", "broken", "easy"), 10)]


def evaluated(out: Path, backend: str) -> None:
    """Evaluate five held-out tasks on one or two ranks: one breaks, and three succeed in two steps each."""
    t = grpo_trainers.trainer(
        out / "evaluated",
        make_env=FatedEnv,
        held_out=FATES,
        backend=backend,
        updates=1,
        evaluation={"tasks": 5, "every": 1},
    )
    metrics, _ = t.take_step()
    found = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    assert found == {"eval_success": 0.75, "eval_episode_steps": 2.0, "eval_failures": 1.0}, found
    assert t.best.by == "success" and (t.best.value, t.best.step) == (0.75, 1)


CASES = {
    case.__name__: case
    for case in (shared, evaluated, sliced, sft, mixed, recomputed, resumed, grpo, pathwise, served, killed)
}


def main(out: Path, kinds: str, names: str) -> None:
    backends.Zero2.persistent = 0  # otherwise ZeRO-3 does not shard such small models
    with distributed.group():
        assert distributed.world_size() == 2
        for kind in kinds.split(","):
            for name in names.split(","):
                CASES[name](out / kind, kind)
    assert distributed.world_size() == 1  # left


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
