"""Loading any Hugging Face language or vision-language model, by name or folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import file_exists, hf_hub_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from lm.backbone import Backbone
from lm.prompt import PromptEncoder


def model_path(name: str) -> str:
    """Find a shipped model's folder for `zoo/...` from anywhere; any other name or path stays as it is."""
    shipped = Path(__file__).resolve().parents[1] / name
    return str(shipped) if name.startswith("zoo/") and not Path(name).exists() else name


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def device_of(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def quiet() -> None:
    """Silence the libraries' progress bars: one is enough, ours."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def load_processor(name: str | Path) -> Any:
    """Load the processor of a vision-language model, the tokenizer of a text model."""
    kind: Any = AutoProcessor if _is_vlm(name) else AutoTokenizer
    return kind.from_pretrained(name)


def load_encoder(name: str | Path, memory_token: str = "auto") -> PromptEncoder:
    """Load what encodes prompts exactly as the model's backbone does, without weights."""
    return PromptEncoder(load_processor(name), memory_token)


def load_backbone(
    name: str | Path, dtype: torch.dtype, device: str, memory_token: str = "auto",
    device_map: str | Mapping[str, str] | None = None, **placing: Any,
) -> Backbone:  # fmt: skip
    """Load the model with its prompts; a vision-language model if its config has a vision part.

    Args:
        device: that holds all of it, unless there is a `device_map`.
        device_map: accelerate spreads a model that is too large for one device over all of them and the host's memory:
            `auto`, or the place of each part. For frozen models.
        placing: what accelerate takes besides: max_memory, offload_folder.
    """
    kind: Any = AutoModelForImageTextToText if _is_vlm(name) else AutoModelForCausalLM
    if device_map is None:
        model = kind.from_pretrained(name, dtype=dtype).to(device)
    else:
        model = kind.from_pretrained(name, dtype=dtype, device_map=device_map, **placing)
    return Backbone(model, load_processor(name), memory_token)


def input_embeddings(name: str | Path) -> Tensor:
    """Read (V, d) from the model's files, for an engine elsewhere has the model (only the file with them is fetched).

    Raises:
        ValueError: none of the files holds them.
    """
    for path in _weight_files(name):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key.endswith("embed_tokens.weight"):
                    return file.get_tensor(key)
    raise ValueError(f"no input embeddings (embed_tokens.weight) in the safetensors files of {name}")


def _weight_files(name: str | Path) -> list[Path]:
    """List the model's safetensors files here; of a hub model, the one with the input embeddings is fetched."""
    if Path(name).is_dir():
        return sorted(Path(name).glob("*.safetensors"))
    name, index = str(name), "model.safetensors.index.json"
    if not file_exists(name, index):
        return [Path(hf_hub_download(name, "model.safetensors"))]
    where = json.loads(Path(hf_hub_download(name, index)).read_text())["weight_map"]
    files = {file for weight, file in where.items() if weight.endswith("embed_tokens.weight")}
    return [Path(hf_hub_download(name, file)) for file in sorted(files)]


def _is_vlm(name: str | Path) -> bool:
    return hasattr(AutoConfig.from_pretrained(name), "vision_config")
