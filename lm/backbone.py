"""One face for the two kinds of model that can be a compiler: vision-language (Qwen2.5-VL) and text-only LMs.

Token-in/token-out: a prompt becomes ids once, here, and is never re-tokenised. Positions are always computed here and
passed explicitly, so that prefill, decoding with a cache and re-scoring agree to the last bit of position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from compiler.prompt import Part, images_of, messages
from soft_mem.tokens import reserved_token_id


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence: ids (T,), and the pixels of its images (patches, values) with their (images, 3) grid."""

    ids: tuple[int, ...]
    pixels: Tensor | None = None
    grid: Tensor | None = None

    def extended(self, ids: Sequence[int]) -> Encoded:
        return replace(self, ids=(*self.ids, *ids))


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch. tokens, mask: (B, T); positions: (B, T), or (3, B, T) for multimodal rotary embeddings."""

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    pixels: Tensor | None
    grid: Tensor | None

    @property
    def next_positions(self) -> Tensor:
        """(B, 1) or (3, B, 1): the position after each row's last real token (in text all axes agree)."""
        last = self.positions.masked_fill(self.mask == 0, -1).amax(-1, keepdim=True)
        return (last if last.dim() == 2 else last.amax(0, keepdim=True).expand_as(last)) + 1


class Backbone:
    """A causal LM or VLM with its tokenizer.

    Raises:
        ValueError: the tokenizer has no chat template, no end token or no reserved token for the memory positions.
    """

    def __init__(self, model: Any, processor: Any, memory_token: str = "auto") -> None:
        self.model = model  # the HF model; PEFT wraps layers in place, so this stays the handle
        self.processor = processor
        self.is_vlm = hasattr(processor, "image_processor")
        self.tokenizer = processor.tokenizer if self.is_vlm else processor
        if self.tokenizer.chat_template is None and getattr(processor, "chat_template", None) is None:
            raise ValueError("the compiler's tokenizer has no chat template: use an instruction-tuned model")
        self.memory_id = reserved_token_id(self.tokenizer, memory_token)
        self.end_id = self.tokenizer.eos_token_id
        if self.end_id is None:
            raise ValueError("the tokenizer has no end-of-turn (eos) token")
        self.image_id = getattr(model.config, "image_token_id", None)
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        self.suppressed = sorted(
            special - {self.end_id}
        )  # never sampled: an <|image_pad|> in an emission breaks scoring

    @classmethod
    def load(cls, name: str | Path, dtype: torch.dtype, device: str, memory_token: str = "auto") -> Backbone:
        """Any Hugging Face name or folder; a vision-language model if its config has a vision part."""
        config = AutoConfig.from_pretrained(name)
        if hasattr(config, "vision_config"):
            model: Any = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype)
            processor: Any = AutoProcessor.from_pretrained(name)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
            processor = AutoTokenizer.from_pretrained(name)
        return cls(model.to(device), processor, memory_token)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def encode(self, parts: Sequence[Part], instructions: str = "") -> Encoded:
        """A prompt that ends where the model's answer begins."""
        chat = messages(parts, instructions)
        text = self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        pictures = images_of(parts)
        if pictures and not self.is_vlm:
            raise ValueError("a text-only model cannot take pictures")
        if not pictures:
            return Encoded(tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]))
        inputs = self.processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        return Encoded(tuple(inputs["input_ids"][0].tolist()), inputs["pixel_values"], inputs["image_grid_thw"])

    def pad(self, rows: Sequence[Encoded], side: str) -> Padded:
        """Left padding to generate, right padding to score."""
        width, device = max(len(row.ids) for row in rows), self.device
        tokens = torch.full((len(rows), width), self.tokenizer.pad_token_id or self.end_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            where = slice(width - len(row.ids), width) if side == "left" else slice(0, len(row.ids))
            tokens[i, where] = torch.tensor(row.ids)
            mask[i, where] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        pictures = [row.pixels for row in rows if row.pixels is not None]
        grids = [row.grid for row in rows if row.grid is not None]
        pixels = torch.cat(pictures).to(device) if pictures else None
        grid = torch.cat(grids).to(device) if grids else None
        return Padded(tokens, mask, self._positions(tokens, mask, grid), pixels, grid)

    def common(self, rows: Sequence[Encoded]) -> int:
        """How many tokens all of several rows begin with, up to their first picture; something is left of each row.
        0 for a single row."""
        if len(rows) < 2:
            return 0
        first, last = min(row.ids for row in rows), max(row.ids for row in rows)  # all others lie between these two
        n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        pictures = [row.ids.index(self.image_id) for row in rows if self.image_id in row.ids]
        return min(n, *pictures, *(len(row.ids) - 1 for row in rows))

    def hidden(self, batch: Padded, cache: Any = None) -> Tensor:
        """(B, T, d): final hidden states (after the final norm). With a cache, it is filled."""
        images = {} if batch.pixels is None else {"pixel_values": batch.pixels, "image_grid_thw": batch.grid}
        return self.body(
            input_ids=batch.tokens, attention_mask=batch.mask, position_ids=batch.positions, past_key_values=cache,
            use_cache=cache is not None, **images,
        ).last_hidden_state  # fmt: skip

    @property
    def body(self) -> Any:
        """The model without its output head."""
        return getattr(self.model, self.model.base_model_prefix)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def _positions(self, tokens: Tensor, mask: Tensor, grid: Tensor | None) -> Tensor:
        plain = (mask.cumsum(-1) - 1).clamp(min=0)
        if not self.is_vlm:
            return plain
        if grid is None:
            return plain.unsqueeze(0).expand(3, -1, -1)
        kinds = (tokens == self.image_id).int() * mask.int()
        positions, _ = self.body.get_rope_index(
            tokens, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=mask
        )
        return positions
