"""Create models of the paper's shapes with random weights on the device: nothing is downloaded or read from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PAIRS, Setup
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
ENDLESS = 10**6  # steps, so that no checkpoint is due


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Compiler and executor in a precision, with the rows of a micro-batch."""

    name: str
    compiler: str  # folder or name
    executor: str
    dtype: str
    rows: int
    checkpointing: bool = False

    def settings(self, *more: str) -> list[str]:
        """Return training settings for this pair, followed by `more`."""
        settings = [f"gradient_checkpointing={self.checkpointing}", f"micro_batch_size={self.rows}"]
        for role, model in (("compiler", self.compiler), ("executor", self.executor)):
            settings += [f"{role}.model={model}", f"{role}.dtype={self.dtype}"]
        return [*settings, *more]


class RandomExecutor(FrozenExecutor):
    """A frozen executor without its hash, which would take longer than the measurements."""

    def hash(self) -> str:
        return ""


class FixedBatchTrainer(SftTrainer):
    """An SFT trainer whose every step takes the same micro-batch."""

    def __init__(
        self, config: SftConfig, compiler: MemoryCompiler, executor: FrozenExecutor, examples: Sequence[Example]
    ) -> None:
        rows: Any = examples  # only their number is read
        super().__init__(config, compiler, executor, rows, Path("nowhere"))
        self.examples: Any = examples  # instead of encoding rows

    def executor_fingerprint(self) -> str:
        return ""


def lengths_of(setup: Setup) -> Lengths:
    """Return the plan's default lengths, those of the paper's rows, or short ones."""
    return Lengths() if setup.size == "paper" else SHORT


def sft_config(pair: ModelPair, *more: str) -> SftConfig:
    """Return SFT settings whose step is one micro-batch."""
    steps = [f"batch_size={pair.rows}", f"max_steps={ENDLESS}", f"save_every={ENDLESS}", "length_buckets=0"]
    return load_config(SftConfig, "sft/paper", pair.settings(*steps, "loader_workers=0", *more))


def model_pair(setup: Setup) -> ModelPair:
    """Return the models of this setup, with one row per micro-batch and gradient checkpointing."""
    if setup.size == "tiny":
        return ModelPair("tiny", *TINY, "float32", 1, checkpointing=True)
    compiler, executor, _ = PAIRS[setup.pair]
    first, second = (model.rpartition("/")[2] for model in (compiler, executor))
    name = f"{first} twice" if first == second else f"{first} and {second}"
    return ModelPair(name, compiler, executor=executor, dtype="bfloat16", rows=1, checkpointing=True)


def make_executor(config: SftConfig, device: str) -> RandomExecutor:
    """Create the configured executor from a fixed seed."""
    torch.manual_seed(0)
    with torch.device(device):
        model = untrained(config.executor.model, dtype_of(config.executor.dtype)).to(device)
    return RandomExecutor(WordlessBackbone(model), batch_size=config.executor.batch_size)


def make_compiler(config: SftConfig, width: int, device: str, decoding: Decoding | None = None) -> MemoryCompiler:
    """Create the configured compiler for an executor of this width, without drafts.

    Random weights write repetitive text, which drafts predict too well.
    """
    torch.manual_seed(1)
    with torch.device(device):
        backbone = WordlessBackbone(untrained(config.compiler.model, dtype_of(config.compiler.dtype)).to(device))
    soft = config.compiler.soft
    projector = Projector(
        ProjectorConfig(backbone.hidden_size, width, soft.n_tokens, soft.projector, normalise=soft.normalise)
    )
    return MemoryCompiler(backbone, projector, decoding, lora=config.compiler.lora, speed=Speed(drafts=0))


def set_attention(kind: str, *backbones: Backbone) -> None:
    """Switch the attention implementation."""
    for backbone in backbones:
        backbone.model.set_attn_implementation(kind)
        backbone.__dict__.pop("attends_fully", None)  # cached for the previous implementation


def disable_checkpointing(*backbones: Backbone) -> None:
    """Switch gradient checkpointing off."""
    for backbone in backbones:
        backbone._recomputed = ()
