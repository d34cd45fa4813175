"""Create pairs of models with the paper's proportions and random weights, as folders that every engine loads.

`paper` has the shapes of a 7B compiler and a 14B executor (45 GB of disk in bfloat16). `small` is an eighth as wide and
a quarter as deep: 26 and 52 M parameters in their layers, for a CPU. Both use the shipped models' tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lm.architecture import model_config
from lm.device import device_of, dtype_of
from zoo.household.words import LEXICON
from zoo.models import make_tokenizer, save

Shapes = Literal["small", "paper"]
MODELS = {"compiler": "Qwen/Qwen2.5-7B-Instruct", "executor": "Qwen/Qwen2.5-14B-Instruct"}


def create_pair(shapes: Shapes, folder: Path, dtype: str) -> tuple[str, str]:
    """Write both models under `folder` and return the folders of compiler and executor."""
    tokenizer = make_tokenizer(LEXICON)
    for seed, (role, name) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        with torch.device(device_of("auto")):
            model: Any = LlamaForCausalLM._from_config(llama_config(name, shapes, tokenizer), dtype=dtype_of(dtype))
        save(folder / role, model, tokenizer)
        del model
    return str(folder / "compiler"), str(folder / "executor")


def llama_config(name: str, shapes: Shapes, tokenizer: Any) -> LlamaConfig:
    """Copy an architecture's shape to a Llama config; a config of Qwen's own type would load Qwen's tokenizer."""
    width, depth = (8, 4) if shapes == "small" else (1, 1)
    whole = model_config(name)
    return LlamaConfig(
        hidden_size=whole.hidden_size // width,
        intermediate_size=whole.intermediate_size // width,
        num_hidden_layers=whole.num_hidden_layers // depth,
        num_attention_heads=whole.num_attention_heads // depth,
        num_key_value_heads=whole.num_key_value_heads // depth,
        vocab_size=whole.vocab_size // width,
        max_position_embeddings=whole.max_position_embeddings,
        rms_norm_eps=whole.rms_norm_eps,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
