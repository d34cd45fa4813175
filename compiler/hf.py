"""The Memory Compiler pi_C in transformers (paper Eq. 3 and 5): a LoRA-tuned (V)LM, N memory tokens, a projector."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from compiler.base import Draft, Generators, TokenCompiler, no_text
from compiler.decoding import Decoder
from compiler.prompt import Instructions
from compiler.records import Compilation, CompileRequest, Decoding, Entries, History, StillWanted, never_cancelled
from configs.models import Lora, Speed
from lm.backbone import Backbone
from lm.device import to_device
from lm.prefixes import PrefixCache
from lm.prompt import Prompt
from lm.shared_prefixes import Sharing, read_rows
from lm.vision import vision_modules
from soft_mem.projector import Gaussian, Projector


@dataclass(frozen=True, slots=True)
class CompilerScores:
    """Results of one forward pass over [prompt | emission | memory tokens]."""

    logits: Tensor  # (B, E, V), predict the emission's E tokens
    text_mask: Tensor  # (B, E), True at tokens that are no padding
    targets: Tensor  # (B, E), the emission's token ids
    h_text: Tensor  # (B, E, d), hidden states at the emission's tokens
    h_soft: Tensor  # (B, N, d), hidden states at the memory tokens
    gaussian: Gaussian


class MemoryCompiler(TokenCompiler, nn.Module):
    """Compiles requests in batches. SFT and GRPO train this module."""

    def __init__(
        self,
        backbone: Backbone,
        projector: Projector,
        decoding: Decoding | None = None,
        instructions: Instructions = "",
        lora: Lora | LoraConfig | None = None,
        seed: int = 0,
        speed: Speed | None = None,
        history: History = 1,
        entries: Entries = "whole",
    ) -> None:
        super().__init__()
        if projector.config.d_compiler != backbone.hidden_size:
            raise ValueError(
                f"projector reads {projector.config.d_compiler}-d states, the compiler has {backbone.hidden_size}"
            )
        self.backbone, self.encoder, self.context = backbone, backbone, backbone.context
        self.decoding, self.instructions, self.speed = decoding or Decoding(), instructions, speed or Speed()
        self.history: History = history
        self.entries: Entries = entries
        self.projector = projector.to(backbone.device)
        backbone.model.requires_grad_(False)
        self.policy: Any = _with_lora(backbone, lora) if lora else backbone.model
        self.generator = torch.Generator(device=backbone.device).manual_seed(seed)
        self.weight_version = 0
        self._prefixes = PrefixCache(self.speed.prefix_mib)

    def current_prefixes(self) -> PrefixCache:
        """Return the prefix cache of the current weights; parameter versions reveal any in-place update."""
        trained = (parameter for parameter in self.policy.parameters() if parameter.requires_grad)
        return self._prefixes.of_weights((self.weight_version, *(parameter._version for parameter in trained)))

    def emission_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise an emission with its end-of-turn token, as SFT trains and decoding produces it."""
        return (*self.backbone.ids(text), self.backbone.end_id)

    def score(
        self, prompts: Sequence[Prompt], emissions: Sequence[Sequence[int]], sharing: Sharing = "never"
    ) -> CompilerScores:
        """Compute the emissions' logits and the soft tokens' Gaussian. Memory tokens follow the end-of-turn token, or
        the prompt where an emission has no tokens.

        Args:
            sharing: whether what prompts begin with in common is read once (`lm.shared_prefixes`).
        """
        memory = (self.backbone.memory_id,) * self.n_tokens
        read = read_rows(self.backbone, prompts, [(*emission, *memory) for emission in emissions], sharing)
        hidden = read.hidden
        begins = [len(prompt.ids) - skipped for prompt, skipped in zip(prompts, read.skipped, strict=True)]
        starts, lengths = to_device(torch.tensor([begins, list(map(len, emissions))]), hidden.device)
        text_at = starts[:, None] + torch.arange(max(map(len, emissions)), device=hidden.device)
        text_mask = text_at < (starts + lengths)[:, None]
        text_at = text_at.clamp(max=hidden.shape[1] - 1)
        soft_at = (starts + lengths)[:, None] + torch.arange(self.n_tokens, device=hidden.device)
        h_soft = _take(hidden, soft_at)
        return CompilerScores(
            logits=self.backbone.logits(_take(hidden, text_at - 1)),
            text_mask=text_mask,
            targets=read.tokens.gather(1, text_at),
            h_text=_take(hidden, text_at),
            h_soft=h_soft,
            gaussian=self.projector(h_soft),
        )

    def allowed(self, logits: Tensor) -> Tensor:
        """Mask reserved tokens in logits (fp32), when sampling and when scoring again."""
        return logits.float().index_fill(-1, _on(logits.device, tuple(self.backbone.suppressed)), -torch.inf)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Compute log-probabilities (..., V) of the distribution that `decoding` samples from, in fp32."""
        return (self.allowed(logits) / (self.decoding.temperature or 1.0)).log_softmax(-1)

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride]  (torch.compile's: never called on a compiler)
        self,
        requests: Sequence[CompileRequest],
        seeds: Sequence[int] | None = None,
        wanted: StillWanted = never_cancelled,
    ) -> list[Compilation]:
        size, compilations = self.decoding.batch_size, []
        for at in range(0, len(requests), size):
            own = seeds and seeds[at : at + size]
            compilations += super().compile(requests[at : at + size], own, lambda i, at=at: wanted(at + i))
        return compilations

    def _draft(
        self, requests: Sequence[CompileRequest], prompts: Sequence[Prompt], by: Generators, wanted: StillWanted
    ) -> tuple[list[Draft], Gaussian]:
        was_training = self.training
        self.eval()  # without dropout, as when scoring again
        if not self.writes_text:
            gaussian = self.score(prompts, [()] * len(prompts)).gaussian
            self.train(was_training)
            return [no_text()] * len(prompts), gaussian
        memories = [tuple(entry.id for entry in request.memory) for request in requests]
        makes_soft = lambda i, ids, truncated: self.makes_soft(requests[i], ids, truncated)
        drafts, gaussian = Decoder(self, prompts, memories=memories, by=by, makes_soft=makes_soft).run(wanted)
        self.train(was_training)
        return drafts, gaussian


@functools.lru_cache(maxsize=8)
def _on(device: torch.device, ids: tuple[int, ...]) -> Tensor:
    """Copy ids to a device once: a copy at every token would synchronise it."""
    return torch.tensor(ids, dtype=torch.long, device=device)


def _take(hidden: Tensor, at: Tensor) -> Tensor:
    """Gather hidden (B, T, d) at positions (B, K): (B, K, d)."""
    return hidden.gather(1, at.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def _with_lora(backbone: Backbone, lora: Lora | LoraConfig) -> PeftModel:
    """Add a checkpoint's adapter, or a fresh one on the language model's projections (paper Table 7: q_proj, v_proj of
    all layers), without the vision tower's."""
    if isinstance(lora, LoraConfig):
        return get_peft_model(backbone.model, lora)
    seeing = {module for part in vision_modules(backbone.model).values() for module in part.modules()}
    names = [
        name
        for name, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear)
        and name.split(".")[-1] in lora.targets
        and module not in seeing
        and layer_of(name) >= lora.first_layer
    ]
    if not names:
        behind = f" from layer {lora.first_layer} on" if lora.first_layer else ""
        raise ValueError(f"no layers named {lora.targets} in {type(backbone.model).__name__}{behind}")
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names, bias="none"
    )
    return get_peft_model(backbone.model, config)


def layer_of(module: str) -> int:
    """Return the number of the layer that a module's name, or the end of one, contains: 0 without one."""
    found = re.search(r"(?:^|\.)(\d+)\.", module)
    return int(found[1]) if found else 0
