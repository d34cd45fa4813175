"""Tiny random models from fixed seeds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image

from compiler.brief_state import BriefState, Create
from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest, Decoding
from configs.models import Lora, Speed
from lm.backbone import Backbone
from lm.prompt import Prompt
from memory.entry import MemoryEntry, Provenance
from soft_mem.projector import Projector, ProjectorConfig
from zoo.household.words import LEXICON
from zoo.models import make_compiler, make_executor, make_processor, make_tokenizer


@functools.cache
def tokenizer():
    return make_tokenizer(LEXICON)


def vlm_backbone(seed: int = 0, device: str = "cpu") -> Backbone:
    torch.manual_seed(seed)
    return Backbone(make_compiler(tokenizer(), hidden=64, layers=2).to(device), make_processor(tokenizer()))


def lm_backbone(seed: int = 0, device: str = "cpu") -> Backbone:
    torch.manual_seed(seed)
    return Backbone(make_executor(tokenizer(), hidden=64, layers=2).to(device), tokenizer())


def memory_compiler(
    vlm: bool = True,
    n_tokens: int = 4,
    d_executor: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: type[MemoryCompiler] = MemoryCompiler,
    device: str = "cpu",
    **kwargs,
) -> MemoryCompiler:
    backbone = vlm_backbone(seed, device) if vlm else lm_backbone(seed, device)
    backbone.model.to(dtype)
    projector = Projector(ProjectorConfig(backbone.hidden_size, d_executor, n_tokens, **kwargs.pop("projector", {})))
    kwargs.setdefault("decoding", Decoding(max_new_tokens=12))
    kwargs.setdefault("lora", Lora(rank=4))
    return kind(backbone, projector, **kwargs)


def uneven_writer(vlm: bool, decoding: Decoding, speed: Speed | None = None, device: str = "cpu") -> MemoryCompiler:
    """Create a compiler whose emissions vary in length and partly repeat the prompt: its logits are steep, and about
    every seventh hidden state ends the turn."""
    compiler = memory_compiler(vlm, decoding=decoding, speed=speed, device=device).eval()
    flat, end = compiler.backbone.logits, compiler.backbone.end_id

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        steep = 20 * flat(hidden)
        best = steep.amax(-1)
        steep[..., end] = torch.where((40 * hidden[..., :4].sum(-1)).sin() > 0.9, best + 9, best - 9)
        return steep

    compiler.backbone.logits = logits  # type: ignore[method-assign]
    return compiler


def entry(i: int, text: str, scene: str = "home 1") -> MemoryEntry:
    return MemoryEntry(f"e{i}", text, Provenance(f"task-{i}", scene, "goal", "train", True))


def request(i: int = 0, image: bool = True) -> CompileRequest:
    state = BriefState("in home 1: put a mug in cabinet").apply(Create("plan", "find mug; put mug in cabinet"))
    memory = tuple(entry(k, f"in home {k}: put a mug in shelf\ngo to shelf {k}") for k in range(1, 2 + i % 3))
    color = (40 * (i + 1) % 255, 90, 10)
    picture = Image.new("RGB", (64, 64), color) if image else None
    return CompileRequest("put a mug in cabinet", memory, state, "You see a cabinet 1. " * (1 + i % 2), picture)


@contextmanager
def soft_by_hook(model: Any, placeholder: int, prompt: Prompt) -> Iterator[None]:
    """Let a Hugging Face model read a prompt's soft tokens at its placeholders."""

    def put_in(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        replaced = output.clone()
        if prompt.soft is not None:
            replaced[inputs[0] == placeholder] = prompt.soft
        return replaced

    hook = model.get_input_embeddings().register_forward_hook(put_in)
    yield
    hook.remove()
