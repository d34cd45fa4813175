"""Compiler and executor from their settings, on shapes: no weights, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest, Decoding
from configs.models import CompilerConfig, ExecutorConfig
from executor.hf import FrozenExecutor
from lm.architecture import untrained
from lm.backbone import Backbone
from lm.device import dtype_of
from lm.prompt import Prompt
from plan.shapes import Ledger
from soft_mem.projector import Projector, ProjectorConfig

QUANTISED: Mapping[str, Callable[[int, int], float]] = {
    "8bit": lambda rows, columns: rows * columns + 4 * rows,  # a scale per row
    "4bit": lambda rows, columns: rows * columns * (1 / 2 + 1 / 64 + 4 / (64 * 256)),  # an 8-bit scale per 64
}
"""Bytes of a linear layer's weight by `executor.quantize`, as bitsandbytes stores it (`lm.backbone.quantization`)."""
PAD, MEMORY, END, WORD = 0, 1, 2, 3  # the only token ids


class _NoTokenizer:
    def convert_ids_to_tokens(self, id: int) -> str:
        return str(id)

    def decode(self, ids: Sequence[int], **settings: Any) -> str:
        return ""


class WordlessBackbone(Backbone):
    """A backbone without a tokenizer. Text `i:n` is n tokens with id WORD + i."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokenizer, self.suppressed = model, _NoTokenizer(), [MEMORY]
        self.is_vlm = hasattr(model.config, "vision_config")
        self.pad_id, self.memory_id, self.end_id, self.image_id = PAD, MEMORY, END, -1

    def ids(self, text: str) -> tuple[int, ...]:
        which, _, n = text.partition(":")
        return (WORD + int(which),) * int(n)


class ShapedBackbone(WordlessBackbone):
    """A backbone without a tokenizer, on shapes."""

    def __init__(self, name: str, dtype: torch.dtype, ledger: Ledger, kind: str) -> None:
        with torch.device("meta"):
            model = untrained(name, dtype)
        ledger.adopt(model, kind)
        ledger.vocabulary.add(model.config.get_text_config().vocab_size)
        super().__init__(model)


class ShapedCompiler(MemoryCompiler):
    """The compiler on shapes. It samples token 0, which never ends an emission."""

    prompt: Prompt  # of every request

    def encode(self, request: CompileRequest) -> Prompt:
        return self.prompt

    def logprobs(self, logits: Tensor) -> Tensor:
        """Compute log-probabilities on shapes; return real zeros to a decoder, which samples from them."""
        shaped = super().logprobs(logits)
        return shaped if torch.is_grad_enabled() else torch.zeros(shaped.shape)


class ShapedExecutor(FrozenExecutor):
    """The executor on shapes. `flops`: of its forward passes in `action_nll`."""

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
    """Count the bytes that quantisation saves in all linear layers except the output head."""
    head = model.get_output_embeddings()
    linear = [part.weight for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    return round(sum(weight.nbytes - size(*weight.shape) for weight in linear))


def shaped_compiler(config: CompilerConfig, d_executor: int, ledger: Ledger, decoding: Decoding) -> ShapedCompiler:
    """Create the compiler with a new adapter and projector."""
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
    """Create a prompt of `tokens` tokens, the first `soft` of which are placeholders for soft tokens."""
    return Prompt((MEMORY,) * soft + (WORD,) * (tokens - soft))
