"""Compiler and executor as their settings name them, on shapes: no weights, no tokenizer. Where the model's folder or
name is not at hand, the architecture that ships under its name in `plan/known/` stands in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest, Decoding
from configs.load import ConfigError
from configs.models import CompilerConfig, ExecutorConfig, model_path
from executor.hf import FrozenExecutor
from lm.backbone import Backbone
from lm.device import dtype_of
from lm.prompt import Prompt
from plan.shapes import Ledger
from soft_mem.projector import Projector, ProjectorConfig

KNOWN = Path(__file__).parent / "known"
QUANTISED: Mapping[str, Callable[[int, int], float]] = {
    "8bit": lambda rows, columns: rows * columns + 4 * rows,  # with a scale for each row
    "4bit": lambda rows, columns: rows * columns * (1 / 2 + 1 / 64 + 4 / (64 * 256)),  # one for 64, itself of 8 bits
}
"""Bytes of a linear layer's weight by `executor.quantize`, as `lm.backbone.quantization` asks bitsandbytes for it."""
PAD, MEMORY, END, WORD = 0, 1, 2, 3  # all the token ids that there are here


def model_config(name: str) -> Any:
    """Find a model's Hugging Face config: here, in the cache, under `known/` (by name, or the last part of a folder's),
    or on the hub. Raises: ConfigError, where there is none."""
    path = model_path(name)
    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(path)
    for where in ({"local_files_only": True}, None, {}):
        shipped = _shipped(name)
        if where is None and shipped is not None:
            return AutoConfig.from_pretrained(shipped)
        if where is None or (where == {} and Path(name).is_absolute()):
            continue
        try:
            return AutoConfig.from_pretrained(path, **where)
        except (OSError, ValueError):
            continue
    names = ", ".join(sorted(folder.parent.name + "/" + folder.name for folder in KNOWN.glob("*/*")))
    raise ConfigError(f"no model {name!r} here, and none of that name ships: name a folder, or one of {names}")


def _shipped(name: str) -> Path | None:
    """Find an architecture by the last two parts of a name, or by the last (`executor` alone says nothing)."""
    known, parts = sorted(KNOWN.glob("*/*")), Path(name).parts
    found = [folder for folder in known if folder.parts[-2:] == parts[-2:]]
    found += [folder for folder in known if folder.name == parts[-1] and "-" in folder.name]
    return found[0] if found else None


class _NoTokenizer:
    def convert_ids_to_tokens(self, id: int) -> str:
        return str(id)

    def decode(self, ids: Sequence[int], **settings: Any) -> str:
        return ""


class WordlessBackbone(Backbone):
    """A backbone without a tokenizer. Its text is `i:n`: n tokens, which are other ones for another i."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokenizer, self.suppressed = model, _NoTokenizer(), [MEMORY]
        self.is_vlm = hasattr(model.config, "vision_config")
        self.pad_id, self.memory_id, self.end_id, self.image_id = PAD, MEMORY, END, -1

    def ids(self, text: str) -> tuple[int, ...]:
        which, _, n = text.partition(":")
        return (WORD + int(which),) * int(n)


class ShapedBackbone(WordlessBackbone):
    """Such a backbone on shapes."""

    def __init__(self, name: str, dtype: torch.dtype, ledger: Ledger, kind: str) -> None:
        with torch.device("meta"):
            model = untrained(name, dtype)
        ledger.adopt(model, kind)
        ledger.vocabulary.add(model.config.get_text_config().vocab_size)
        super().__init__(model)


def untrained(name: str, dtype: torch.dtype) -> Any:
    """Make a model of this architecture, in evaluation mode, on torch's default device: its weights are random, or on
    "meta" shapes alone. Raises: ConfigError, where nobody knows the name."""
    config = model_config(name)
    auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype).eval()


class ShapedCompiler(MemoryCompiler):
    """The compiler on shapes. What it samples are zeros, which never end an emission."""

    prompt: Prompt  # of every request

    def encode(self, request: CompileRequest) -> Prompt:
        return self.prompt

    def logprobs(self, logits: Tensor) -> Tensor:
        """Compute them on shapes; a decoder gets real zeros, for it chooses by them."""
        shaped = super().logprobs(logits)
        return shaped if torch.is_grad_enabled() else torch.zeros(shaped.shape)


class ShapedExecutor(FrozenExecutor):
    """The executor on shapes, which adds up the FLOPs of its forward passes."""

    flops = 0

    def hash(self) -> str:
        return ""

    def action_nll(self, *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        ledger: Ledger = next(self.model.parameters()).ledger
        before = ledger.flops
        result = super().action_nll(*args, **settings)
        self.flops += ledger.flops - before
        return result


def shaped_executor(config: ExecutorConfig, ledger: Ledger) -> ShapedExecutor:
    backbone = ShapedBackbone(config.model, dtype_of(config.dtype), ledger, "executor weights")
    if config.quantize:
        ledger.live["executor weights"] -= _saved(backbone.model, QUANTISED[config.quantize])
    mode = "choice" if config.mode == "choice" else "generate"
    return ShapedExecutor(backbone, mode, max_new_tokens=config.max_new_tokens, batch_size=config.batch_size)


def _saved(model: Any, size: Callable[[int, int], float]) -> int:
    """Count the bytes that quantisation saves: bitsandbytes takes all linear layers but the output head."""
    head = model.get_output_embeddings()
    linear = [part.weight for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    return round(sum(weight.nbytes - size(*weight.shape) for weight in linear))


def shaped_compiler(config: CompilerConfig, d_executor: int, ledger: Ledger, decoding: Decoding) -> ShapedCompiler:
    """Make the compiler with a fresh adapter and projector, as settings say them."""
    backbone = ShapedBackbone(config.model, dtype_of(config.dtype), ledger, "compiler weights")
    soft = config.soft
    settings = ProjectorConfig(
        backbone.hidden_size, d_executor, soft.n_tokens, soft.projector, normalise=soft.normalise
    )
    with torch.device("meta"):
        projector = Projector(settings)
    ledger.adopt(projector, "adapter and projector")
    compiler = ShapedCompiler(backbone, projector, decoding, lora=config.lora)
    ledger.adopt(compiler, "adapter and projector")
    ledger.trained |= {tuple(p.shape) for p in compiler.parameters() if p.requires_grad}
    return compiler


def prompt_of(tokens: int, soft: int = 0) -> Prompt:
    """Make a prompt of so many tokens, `soft` of which are places for soft tokens."""
    return Prompt((MEMORY,) * soft + (WORD,) * (tokens - soft))
