"""What vision-language models of Hugging Face have in common, found by their structure and never by their names.

A model reads pictures in the places of tokens: a tower and a projector beside its language model make as many states of
a picture as its processor has put image tokens into the prompt. What the processor returns goes to the model by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lm.device import to_device
from lm.prompt import Picture

TYPES = ("token_type_ids", "mm_token_type_ids")  # 1 at a picture's tokens, 0 elsewhere


def asked(function: Any) -> set[str]:
    """List what a function calls its arguments."""
    return set(inspect.signature(function).parameters)


def check_sees(kind: Any) -> None:
    """Refuse a class of vision-language models that does not read pictures in the places of tokens, or that asks for
    more about them than is known here. Raises: ValueError, by the class's name."""
    takes, lacks = asked(kind.forward), []
    if not hasattr(kind, "get_image_features") or any(name.startswith("cross_attention") for name in takes):
        lacks.append("does not read pictures in the places of tokens")
    if "position_ids" not in takes or "decoder_input_ids" in takes:
        lacks.append("is not a decoder that takes positions")
    if unknown := sorted(name for name in takes if name.endswith("type_ids") and name not in TYPES):
        lacks.append(f"asks for {', '.join(unknown)}")
    if lacks:
        raise ValueError(f"{kind.__name__} cannot be a compiler or executor that sees: it {' and '.join(lacks)}")


def vision_parts(model: Any) -> dict[str, nn.Module]:
    """Find what reads pictures, towers and projectors: the parts of a vision-language model (without its head) beside
    the language model, by name. A text model has none. Raises: ValueError, where the language model is no part of its
    own."""
    if not hasattr(model.config, "vision_config"):
        return {}
    language, parts = model.get_decoder(), dict(getattr(model, model.base_model_prefix).named_children())
    if language not in parts.values():
        raise ValueError(f"{type(model).__name__} has no language model apart from what sees")
    return {name: part for name, part in parts.items() if part is not language}


def joined(pictures: Sequence[Picture], device: torch.device) -> dict[str, Tensor]:
    """Join what a model reads of pictures, by name, along the first dimension. Where they differ in another one, as in
    size or in the number of crops, zeros follow. Raises: ValueError, where nothing tells the model of these."""
    names = list(pictures[0].tensors) if pictures else []
    together = {name: _joined([picture.tensors[name] for picture in pictures]) for name in names}
    alike = {tuple(picture.tensors[name].shape[1:] for name in names) for picture in pictures}
    if len(alike) > 1 and len(names) == 1:
        raise ValueError(
            f"pictures of different sizes in one batch, and nothing beside {names[0]} that says so: have the model's "
            "image processor resize them"
        )
    return {name: to_device(tensor, device) for name, tensor in together.items()}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [max(dims) for dims in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    short = lambda t: [n for size, has in zip(sizes[::-1], t.shape[:0:-1], strict=True) for n in (0, size - has)]
    return torch.cat([pad(tensor, short(tensor)) for tensor in tensors])
