"""What an executor that sees has beyond one that reads: a picture in its prompt, and positions on three axes (M-RoPE).

Any Qwen2.5-VL-like model of transformers: pictures enter its forward pass as `pixel_values` and `image_grid_thw`, and
its body knows the positions of a prompt (`get_rope_index`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The view in a prompt, and how the model reads it: pixels (patches, values), grid (1, 3) of patches (t, h, w)."""

    image: Image
    pixels: Tensor
    grid: Tensor


def is_vlm(config: Any) -> bool:
    """Is this the config of a vision-language model?"""
    return hasattr(config, "vision_config")


def load_reader(name: str | Path) -> Any:
    """The processor of a vision-language model, the tokenizer of a text model."""
    reader: Any = AutoProcessor if is_vlm(AutoConfig.from_pretrained(name)) else AutoTokenizer
    return reader.from_pretrained(name)


def load_model(name: str | Path, dtype: torch.dtype) -> Any:
    """The model, with its vision tower if its config has one."""
    kind: Any = AutoModelForImageTextToText if is_vlm(AutoConfig.from_pretrained(name)) else AutoModelForCausalLM
    return kind.from_pretrained(name, dtype=dtype)


def encode_image_prompt(processor: Any, text: str, image: Image) -> tuple[tuple[int, ...], Picture]:
    """A prompt with one picture as the model reads it: the picture's place becomes one pad per image token."""
    image = image.convert("RGB")
    inputs = processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)
    return tuple(inputs["input_ids"][0].tolist()), Picture(image, inputs["pixel_values"], inputs["image_grid_thw"])


def folded(ids: Sequence[int], wide: Collection[int]) -> list[int]:
    """Ids with each run of one of the tokens `wide` as a single token: what a server makes room for by itself."""
    return [id for i, id in enumerate(ids) if id not in wide or i == 0 or ids[i - 1] != id]


def vision_inputs(
    model: Any, tokens: Tensor, mask: Tensor, pictures: Sequence[Picture | None], offsets: Tensor | None = None
) -> dict[str, Tensor]:
    """What the forward pass of a vision-language model gets beside embeddings and mask: pictures and positions.

    Args:
        tokens, mask: (B, T), padded on either side; what follows a prompt counts as text.
        pictures: one or none per row.
        offsets: (B, T), by how much a position is moved against its place in the row (candidates laid out as a tree).

    Raises:
        ValueError: a row has places for a picture but no picture: it would be read as noise.
    """
    pads = tokens == model.config.image_token_id
    if bool((pads & mask.bool()).any(1).ne(torch.tensor([p is not None for p in pictures], device=pads.device)).any()):
        raise ValueError("a prompt's places for a picture and its picture do not go together: encode the request again")
    seen = [picture for picture in pictures if picture is not None]
    pixels = torch.cat([p.pixels for p in seen]).to(tokens.device) if seen else None
    grid = torch.cat([p.grid for p in seen]).to(tokens.device) if seen else None
    if grid is None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0).unsqueeze(0).expand(3, -1, -1)
    else:
        body = getattr(model, model.base_model_prefix)
        kinds = pads.int() * mask.int()
        positions, _ = body.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=mask)
    moved = positions if offsets is None else positions + offsets
    return {"position_ids": moved} | ({} if pixels is None else {"pixel_values": pixels, "image_grid_thw": grid})
