"""Small SFT trainers on rows of a made-up home."""

from __future__ import annotations

import io

import torch
from PIL import Image

from configs.training import SftConfig
from data_gen.rows import SftRow
from executor.hf import FrozenExecutor
from executor.records import FULL_VIEW
from tests import tiny_models
from training.sft import SftTrainer


def png(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (color, 10, 200)).save(buffer, format="PNG")
    return buffer.getvalue()


def row(i: int) -> SftRow:
    return SftRow(
        task_id=f"t{i}",
        split="train",
        family="text",
        t=0,
        goal=f"in home {i + 1}: put a mug in cabinet",
        memory_ids=("a", "b")[: 1 + i % 2],
        memory_texts=(f"in home {i + 1}: put a mug in shelf", "in home 9: heat an egg")[: 1 + i % 2],
        state=f"goal: in home {i + 1}: put a mug in cabinet",
        observation="You see a cabinet 1.",
        image=png(40 * i) if i != 1 else None,
        history=("look",) * i,
        emission=f"> in home {i + 1} the mug was in shelf {i + 1} | go to shelf {i + 1}" if i % 2 else ".",
        action=f"go to shelf {i + 1}",
    )


ROWS = [row(i) for i in range(5)]


def executor(dtype: torch.dtype = torch.float32, device: str = "cpu") -> FrozenExecutor:
    backbone = tiny_models.lm_backbone(seed=1, device=device)
    backbone.model.to(dtype)
    return FrozenExecutor(backbone, reads=FULL_VIEW)


def trainer(tmp_path, rows=ROWS, held_out=(), dtype=torch.float32, vlm=True, device="cpu", **settings) -> SftTrainer:
    defaults = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 6, "optimizer": {"lr": 1e-3}, "save_every": 2}
    config = SftConfig(**(defaults | settings))
    compiler = tiny_models.memory_compiler(vlm, dtype=dtype, device=device)
    return SftTrainer(config, compiler, executor(dtype, device), rows, tmp_path, None, held_out)


def trainable(trainer: SftTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.compiler.named_parameters() if p.requires_grad}
