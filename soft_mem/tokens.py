"""The reserved token that stands for a memory position, in compiler and executor alike (Qwen has no real [UNK])."""

from __future__ import annotations

from typing import Any

# First match wins: in the vocabulary, but never produced by tokenising ordinary text.
MEMORY_TOKENS = ("<|mem|>", "<|quad_end|>", "<|fim_pad|>", "<|reserved_special_token_0|>", "<file_sep>", "<unused0>")


def reserved_token_id(tokenizer: Any, name: str = "auto") -> int:
    """Id of the memory token.

    Raises:
        ValueError: the tokenizer has none of the known reserved tokens, or not the one that was named.
    """
    vocabulary = tokenizer.get_vocab()
    candidates = MEMORY_TOKENS if name == "auto" else (name,)
    for token in candidates:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"no reserved memory token among {list(candidates)} in this tokenizer: set memory_token to a special token of "
        "the model that ordinary text never produces"
    )
