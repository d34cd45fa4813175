"""Model architectures without weights: Hugging Face configs from disk, the cache, `lm/known/` or the hub, and models
on torch's default device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from configs.load import ConfigError
from configs.models import model_path
from lm.device import dtype_of

KNOWN = Path(__file__).parent / "known"


def model_config(name: str) -> Any:
    """Find a model's Hugging Face config: in a folder, the cache, `lm/known/` (by name or last path part), or on the
    hub. Raises: ConfigError, if there is none."""
    path = model_path(name)
    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(path)
    known = _known_architecture(name)
    attempts: list[tuple[Any, dict[str, Any]]] = [(path, {"local_files_only": True})]
    attempts += [(known, {})] if known else []
    attempts += [] if Path(name).is_absolute() else [(path, {})]
    for source, options in attempts:
        try:
            return AutoConfig.from_pretrained(source, **options)
        except (OSError, ValueError):
            continue
    names = ", ".join(sorted(folder.parent.name + "/" + folder.name for folder in KNOWN.glob("*/*")))
    raise ConfigError(f"no model {name!r}: name a folder, a model of the hub, or a shipped architecture ({names})")


def _known_architecture(name: str) -> Path | None:
    """Find a shipped architecture by the last two parts of a name, or by the last one if it has a hyphen."""
    folders, parts = sorted(KNOWN.glob("*/*")), Path(name).parts
    found = [folder for folder in folders if folder.parts[-2:] == parts[-2:]]
    found += [folder for folder in folders if folder.name == parts[-1] and "-" in folder.name]
    return found[0] if found else None


def untrained(name: str, dtype: torch.dtype) -> Any:
    """Create a model with random weights in evaluation mode, on torch's default device ("meta": shapes only). Raises:
    ConfigError, if the name is unknown."""
    config = model_config(name)
    auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype).eval()


def weight_bytes(name: str, dtype: str) -> int:
    """Count the bytes of a model's parameters."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in untrained(name, dtype_of(dtype)).parameters())


def cache_bytes_per_token(text: Any, dtype: str) -> int:
    """Count the bytes of one token's keys and values over all full-attention layers of a text config."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    heads = text.num_key_value_heads or text.num_attention_heads
    return 2 * sum(kind != "linear_attention" for kind in kinds) * heads * head_dim(text) * dtype_of(dtype).itemsize


def head_dim(text: Any) -> int:
    """Return the width of an attention head of a text config."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
