"""Pairs of models of the paper's proportions with random weights, as ordinary folders that every engine loads.

The paper's compiler has 7 and its executor 14 billion parameters. `paper` is these two (45 GB in bfloat16 on disk);
`small` has both an eighth as wide and a quarter as deep: 26 and 52 million parameters in their layers, for a CPU. Both
read by the shipped models' tokenizer, and have the whole vocabulary of their architecture, or an eighth of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lm.architecture import model_config
from lm.device import dtype_of
from zoo.household.words import LEXICON
from zoo.models import make_tokenizer, save

Shapes = Literal["small", "paper"]
ROLES = {"compiler": "Qwen/Qwen2.5-7B-Instruct", "executor": "Qwen/Qwen2.5-14B-Instruct"}


def made_pair(shapes: Shapes, folder: Path, dtype: str) -> tuple[str, str]:
    """Write both models under `folder`; the folders of compiler and executor."""
    tokenizer = make_tokenizer(LEXICON)
    for seed, (role, name) in enumerate(ROLES.items()):
        torch.manual_seed(seed)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model: Any = LlamaForCausalLM._from_config(shape_of(name, shapes, tokenizer), dtype=dtype_of(dtype))
        save(folder / role, model, tokenizer)
        del model
    return str(folder / "compiler"), str(folder / "executor")


def shape_of(name: str, shapes: Shapes, tokenizer: Any) -> LlamaConfig:
    """Give an architecture's shape, or the small one of it, to a Llama: a folder of Qwen's kind would be read by Qwen's
    own tokenizer."""
    wide, many = (8, 4) if shapes == "small" else (1, 1)  # fewer heads, and each half as wide
    whole = model_config(name)
    return LlamaConfig(
        hidden_size=whole.hidden_size // wide,
        intermediate_size=whole.intermediate_size // wide,
        num_hidden_layers=whole.num_hidden_layers // many,
        num_attention_heads=whole.num_attention_heads // many,
        num_key_value_heads=whole.num_key_value_heads // many,
        vocab_size=whole.vocab_size // wide,
        max_position_embeddings=whole.max_position_embeddings,
        rms_norm_eps=whole.rms_norm_eps,
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
