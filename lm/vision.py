"""Support of Hugging Face's vision-language models by their structure, independent of their names.

A supported model replaces image tokens by states: a vision tower and a projector beside its language model compute as
many states of a picture as its processor put image tokens into the prompt. The processor's outputs are passed to the
model by argument name.
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

TOKEN_TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")  # 1 at a picture's tokens, 0 elsewhere


def parameter_names(function: Any) -> set[str]:
    """Return the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def check_vision_model(kind: Any) -> None:
    """Check that a vision-language model class replaces image tokens and has no unknown arguments about them.

    Raises: ValueError, with the class's name."""
    takes, lacks = parameter_names(kind.forward), []
    if not hasattr(kind, "get_image_features") or any(name.startswith("cross_attention") for name in takes):
        lacks.append("does not replace image tokens")
    if "position_ids" not in takes or "decoder_input_ids" in takes:
        lacks.append("is not a decoder that takes positions")
    if unknown := sorted(name for name in takes if name.endswith("type_ids") and name not in TOKEN_TYPE_INPUTS):
        lacks.append(f"needs {', '.join(unknown)}")
    if lacks:
        raise ValueError(f"{kind.__name__} cannot be a compiler or executor with pictures: it {' and '.join(lacks)}")


def vision_modules(model: Any) -> dict[str, nn.Module]:
    """Return a model's vision towers and projectors by name; {} for a text model.

    Raises: ValueError, if the language model is not a separate module."""
    if not hasattr(model.config, "vision_config"):
        return {}
    language, parts = model.get_decoder(), dict(getattr(model, model.base_model_prefix).named_children())
    if language not in parts.values():
        raise ValueError(f"{type(model).__name__} has no separate language model beside its vision modules")
    return {name: part for name, part in parts.items() if part is not language}


def concatenate_pictures(pictures: Sequence[Picture], device: torch.device) -> dict[str, Tensor]:
    """Concatenate pictures' tensors by name along the first dimension, zero-padded in all others.

    Raises: ValueError, if padding is needed but no tensor informs the model about it."""
    names = list(pictures[0].tensors) if pictures else []
    joint = {name: _concatenate_padded([picture.tensors[name] for picture in pictures]) for name in names}
    shapes = {tuple(picture.tensors[name].shape[1:] for name in names) for picture in pictures}
    if len(shapes) > 1 and len(names) == 1:
        raise ValueError(
            f"pictures of different sizes in one batch, but {names[0]} is the only input and lacks their sizes: "
            "let the model's image processor resize them"
        )
    return {name: to_device(tensor, device) for name, tensor in joint.items()}


def _concatenate_padded(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [max(dims) for dims in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padding = lambda t: [n for size, has in zip(sizes[::-1], t.shape[:0:-1], strict=True) for n in (0, size - has)]
    return torch.cat([pad(tensor, padding(tensor)) for tensor in tensors])
