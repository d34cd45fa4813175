"""Tiny random vision-language models of several families, each with its own processor, from seed 0.

They differ in the number of crops and tokens of a picture, the names and padding of the processor's tensors, the place
of the vision tower, and whether the tokens of a picture attend to later ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.models import Lora
from lm.backbone import Backbone
from soft_mem.projector import Projector, ProjectorConfig
from tests import tiny_models

SEES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "initializer_range": 0.2,
}
# Like the templates of LLaVA, SmolVLM and Gemma, it ignores content that is plain text.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}IMAGE"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(image: str, *others: str, **named: str) -> Any:
    """Create the tests' tokenizer with a family's special tokens, some of which are its attributes."""
    known = tiny_models.tokenizer()
    made = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(known._tokenizer),
        eos_token=known.eos_token,
        pad_token=known.pad_token,
        model_max_length=4096,
        extra_special_tokens=named,
    )
    made.add_special_tokens({"additional_special_tokens": [*others]}, replace_extra_special_tokens=False)
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    return made


def _reads(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **more,
    }


def llava() -> tuple[Any, Any]:
    """One crop of 16 tokens without delimiters; tensors of pictures alone."""
    tokenizer = _tokenizer("<image>", "<image>")
    config = transformers.LlavaConfig(
        vision_config={**SEES, "model_type": "clip_vision_model", "image_size": 32, "projection_dim": 32},
        text_config={**_reads(tokenizer), "model_type": "llama"},
        image_token_index=_id(tokenizer, "<image>"),
    )
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def internvl() -> tuple[Any, Any]:
    """As many crops as the picture's shape needs, 4 tokens each, in one row."""
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = _tokenizer("<IMG_CONTEXT>", **names, video_token="<video>")
    config = transformers.InternVLConfig(
        vision_config={**SEES, "patch_size": [8, 8], "image_size": [32, 32]},
        text_config={**_reads(tokenizer), "model_type": "qwen2"},
        image_token_id=_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    processor = transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size={"height": 32, "width": 32}, max_patches=4),
        tokenizer,
        transformers.InternVLVideoProcessor(size={"height": 32, "width": 32}),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def idefics3() -> tuple[Any, Any]:
    """Crops in rows and columns, with other tokens between; padded in a batch, with a mask."""
    places = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tokenizer = _tokenizer(
        "<image>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places
    )
    processor = transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    config = transformers.Idefics3Config(
        vision_config={**SEES, "image_size": 32},
        text_config={**_reads(tokenizer), "model_type": "llama"},
        image_token_id=_id(tokenizer, "<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def gemma3(**reads: Any) -> tuple[Any, Any]:
    """4 tokens a picture, which attend to each other in both directions; sliding windows shorter than a prompt."""
    names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer = _tokenizer("<start_of_image>", **names)
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        vision_config={**SEES, "image_size": 32},
        text_config=_reads(tokenizer, **layers | reads),
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        image_token_index=_id(tokenizer, "<image_soft_token>"),
        boi_token_index=_id(tokenizer, "<start_of_image>"),
        eoi_token_index=_id(tokenizer, "<end_of_image>"),
    )
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)  # zeros by default
    return model, processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava,
    "internvl": internvl,
    "idefics3": idefics3,
    "gemma3": gemma3,
}


def backbone(family: str, **reads: Any) -> Backbone:
    torch.manual_seed(0)
    model, processor = FAMILIES[family](**reads)
    return Backbone(model.eval(), processor)


def memory_compiler(family: str, **reads: Any) -> MemoryCompiler:
    base = backbone(family, **reads)
    decoding = Decoding(max_new_tokens=8)
    return MemoryCompiler(base, Projector(ProjectorConfig(64, 64, 4)), decoding, lora=Lora(rank=4))


def _id(tokenizer: Any, token: str) -> int:
    return tokenizer.get_vocab()[token]
