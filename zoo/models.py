"""Tokenizer and architectures of the shipped small models, untrained.

A vision compiler base is a Qwen2.5-VL of about 1.3 M parameters, a text model a Qwen2 of about 1.1 M, saved as a Llama.
The tokenizer has one token for every entity that models look up ("cabinet 2", "home 17"), since a two-token name
doubles the length of every look-up circuit (18 % against 100 % guided success at equal steps). Other text becomes
bytes, so the tokenizer is lossless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
)

END_OF_TURN, MEMORY_TOKEN = "<|im_end|>", "<|mem|>"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    MEMORY_TOKEN,
)
IMAGE_SIZE, PATCH, MERGE = 64, 8, 2  # one patch is one cell of the rendered floor map; 16 image tokens a view


@dataclass(frozen=True)
class Lexicon:
    """Single tokens of a world's tokenizer, by role."""

    pieces: tuple[str, ...]  # entities and words, each with and without a leading space
    scenes: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    goals: tuple[str, ...]  # kinds of places for things
    phrases: tuple[str, ...] = ()  # several words or signs as one token; the longest match wins
    names: str = ""  # a regular expression for names that are neither words nor "word number"
    numbered: tuple[str, ...] = ()  # words that form one token with a number; (): all words
    treatments: Mapping[str, str] = field(default_factory=dict)  # kind of place by a goal's word for its treatment


def make_tokenizer(lexicon: Lexicon) -> PreTrainedTokenizerFast:
    """Create a tokenizer with words and entities as single tokens, other text as bytes, and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    for text in [variant for piece in dict.fromkeys(lexicon.pieces) for variant in (piece, " " + piece)]:
        vocab.setdefault("".join(part for part, _ in byte_level.pre_tokenize_str(text)), len(vocab))
    for text in (" ;", " |", " =", "\n\n", " [", *lexicon.phrases):
        vocab.setdefault("".join(part for part, _ in byte_level.pre_tokenize_str(text)), len(vocab))
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    longest = sorted((rf"{re.escape(phrase)}(?!\w)" for phrase in lexicon.phrases), key=len, reverse=True)
    own = "".join(f"{form}|" for form in (*longest, *filter(None, [lexicon.names])))
    numbered = f"(?:{'|'.join(lexicon.numbered)})" if lexicon.numbered else "[A-Za-z/]+"
    entity_or_word = Regex(rf"{own} ?{numbered} \d+(?!\d)| ?[A-Za-z/]+| [;|=\[>]|\n\n|\d|\s|[^\sA-Za-z\d]")
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(entity_or_word, "isolated"), byte_level])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END_OF_TURN, pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,  # pyright: ignore[reportAttributeAccessIssue]
    )

    area = IMAGE_SIZE * IMAGE_SIZE
    size = {"shortest_edge": area, "longest_edge": area}
    shape = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": size}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**shape),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**shape),
        chat_template=tokenizer.chat_template,
    )


def make_compiler(
    tokenizer: PreTrainedTokenizerFast, hidden: int = 128, layers: int = 4
) -> Qwen2_5_VLForConditionalGeneration:
    """Create an untrained Qwen2.5-VL with head_dim 32, the smallest that vLLM accepts."""
    ids = {name: tokenizer.get_vocab()[name] for name in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    config = Qwen2_5_VLConfig(
        text_config={**_decoder(tokenizer, hidden, layers), "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": IMAGE_SIZE,
            "fullatt_block_indexes": [0, 1],
            "initializer_range": 0.04,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_executor(tokenizer: PreTrainedTokenizerFast, hidden: int = 128, layers: int = 4) -> Qwen2ForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Qwen2ForCausalLM(Qwen2Config(**_decoder(tokenizer, hidden, layers), rope_parameters=rope))


def as_llama(model: Qwen2ForCausalLM) -> LlamaForCausalLM:
    """Convert a Qwen2 to an equivalent Llama with attention biases.

    In a `qwen2` folder, AutoTokenizer (transformers 5.17) would replace the tokenizer by Qwen's, which splits entities.
    """
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rms_norm_eps",
        "eos_token_id",
        "pad_token_id",
        "rope_parameters",
    )
    settings = {name: getattr(model.config, name) for name in shared}
    llama = LlamaForCausalLM(LlamaConfig(**settings, bos_token_id=None, attention_bias=True))
    weights = llama.state_dict()
    llama.load_state_dict(
        {k: torch.zeros_like(v) if k.endswith("o_proj.bias") else v for k, v in weights.items()} | model.state_dict()
    )
    return llama


def save(folder: Path, model, processor) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer and, if any, image processor."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _decoder(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
        "rms_norm_eps": 1e-6,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
