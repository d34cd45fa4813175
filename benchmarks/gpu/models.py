"""Models of the paper's shapes with random weights, made where they run: nothing is downloaded and nothing read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PAIRS, Setup
from benchmarks.plan_check import Case
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.load import load_config
from configs.models import Speed
from configs.training import SftConfig
from executor.hf import FrozenExecutor
from lm.architecture import untrained
from lm.backbone import Backbone
from lm.device import dtype_of
from plan.budget import Lengths
from plan.models import WordlessBackbone
from soft_mem.projector import Projector, ProjectorConfig
from training.sft import SftTrainer
from training.sft_data import Example

TINY = ("zoo/household/compiler", "zoo/household/executor")
SHORT = Lengths(prompt=64, emission=12, acting=40, action=4, memory=30, candidates=3)
FOR_EVER = 10**6  # steps: no checkpoint is due before


class RandomExecutor(FrozenExecutor):
    """A frozen executor that nobody hashes: to read tens of gigabytes takes longer than what is measured."""

    def hash(self) -> str:
        return ""


class Steps(SftTrainer):
    """SFT's own steps on one micro-batch of ready examples."""

    def __init__(
        self, config: SftConfig, compiler: MemoryCompiler, executor: FrozenExecutor, made: Sequence[Example]
    ) -> None:
        self.made = made
        rows: Any = made  # counted, never read
        super().__init__(config, compiler, executor, rows, Path("nowhere"))

    def executor_fingerprint(self) -> str:
        return ""

    def example(self, index: int) -> Example:
        return self.made[index]


def lengths_of(setup: Setup) -> Lengths:
    """Give the lengths of the paper's rows, which are the plan's own, or short ones."""
    return Lengths() if setup.size == "paper" else SHORT


def sft_config(case: Case, *more: str) -> SftConfig:
    """Make settings of a step that is one micro-batch of the case's rows."""
    steps = [f"batch_size={case.rows}", f"max_steps={FOR_EVER}", f"save_every={FOR_EVER}", "length_buckets=0"]
    steps += ["loader_workers=0"]  # examples are ready
    return load_config(SftConfig, "sft/paper", case.settings(*steps, *more))


def chosen(setup: Setup) -> Case:
    """Return the models of this setup, for one row at a time with gradient checkpointing."""
    if setup.size == "tiny":
        return Case("tiny", *TINY, "float32", 1, recompute=True)
    compiler, executor, _ = PAIRS[setup.pair]
    first, second = (model.rpartition("/")[2] for model in (compiler, executor))
    name = f"{first} twice" if first == second else f"{first} and {second}"
    return Case(name, compiler, executor, "bfloat16", 1, recompute=True)


def make_executor(config: SftConfig, device: str) -> RandomExecutor:
    """Make the executor that settings name; the same weights on every CPU, and on every GPU of a kind."""
    torch.manual_seed(0)
    with torch.device(device):
        model = untrained(config.executor.model, dtype_of(config.executor.dtype)).to(device)
    return RandomExecutor(WordlessBackbone(model), batch_size=config.executor.batch_size)


def make_compiler(config: SftConfig, width: int, device: str, decoding: Decoding | None = None) -> MemoryCompiler:
    """Make the compiler that settings name, for an executor of this width. It guesses nothing ahead: what random
    weights write repeats itself, which is guessed too well."""
    torch.manual_seed(1)
    with torch.device(device):
        backbone = WordlessBackbone(untrained(config.compiler.model, dtype_of(config.compiler.dtype)).to(device))
    soft = config.compiler.soft
    projector = Projector(
        ProjectorConfig(backbone.hidden_size, width, soft.n_tokens, soft.projector, normalise=soft.normalise)
    )
    return MemoryCompiler(backbone, projector, decoding, lora=config.compiler.lora, speed=Speed(drafts=0))


def attend_by(kind: str, *backbones: Backbone) -> None:
    """Change the kernels of attention."""
    for backbone in backbones:
        backbone.model.set_attn_implementation(kind)
        backbone.__dict__.pop("attends_fully", None)  # it was asked of the kernels before


def keep_layers(*backbones: Backbone) -> None:
    """Take gradient checkpointing back."""
    for backbone in backbones:
        backbone._recomputed = ()
