"""A model's input embeddings, read from its files: an engine elsewhere has the model itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor


def input_embeddings(files: Iterable[Path], model: str | Path) -> Tensor:
    """(V, d), from the first of some safetensors files that holds them.

    Raises:
        ValueError: none does.
    """
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.endswith("embed_tokens.weight"):
                    return file.get_tensor(name)
    raise ValueError(f"no input embeddings (embed_tokens.weight) in the safetensors files of {model}")
