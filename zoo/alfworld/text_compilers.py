"""Loads a compiler of commands for play without soft tokens, in PyTorch or in vLLM."""

from __future__ import annotations

from typing import Literal

import torch

from compiler.build import load_compiler, load_served_compiler
from compiler.hf import MemoryCompiler
from compiler.records import Compiler, Decoding, Entries
from configs.models import CompilerConfig, Speed, VllmEngine
from lm.backbone import load_backbone, load_encoder
from soft_mem.projector import Projector, ProjectorConfig

Engine = Literal["hf", "vllm"]
ENTRIES: Entries = "commands"  # what the compiler of commands reads of raw trajectories
TOKENS = 256  # maximum tokens of an emission
PREFIX_MIB = 1024  # of prompts that PyTorch has read
VLLM = VllmEngine(max_model_len=4096)


def load_text_compiler(model: str, checkpoint: str | None = None, engine: Engine = "hf") -> Compiler:
    """Load a model folder with a checkpoint of SFT or GRPO, or without one."""
    if checkpoint:
        settings = CompilerConfig(
            model=model,
            checkpoint=checkpoint,
            dtype="float32",
            instructions="none",
            entries=ENTRIES,
            max_new_tokens=TOKENS,
            engine=engine,
            vllm=VLLM,
        )
        return load_served_compiler(settings) if engine == "vllm" else load_compiler(settings, None)
    decoding = Decoding(max_new_tokens=TOKENS)
    if engine == "vllm":
        from compiler.vllm import VllmCompiler, engine_settings
        from lm.vllm import load_engine

        served = load_engine(model, "float32", engine_settings(lora_rank=8), VLLM)
        width = served.model_config.hf_config.hidden_size
        return VllmCompiler(served, load_encoder(model), _unused_projector(width), decoding, entries=ENTRIES)
    backbone = load_backbone(model, torch.float32, "cpu")
    return MemoryCompiler(
        backbone,
        _unused_projector(backbone.hidden_size),
        decoding,
        speed=Speed(prefix_mib=PREFIX_MIB),
        entries=ENTRIES,
    )


def _unused_projector(width: int) -> Projector:
    """Create the projector that compilers require."""
    return Projector(ProjectorConfig(width, 8, 1))
