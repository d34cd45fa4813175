"""From chat to ids: a prompt as one model reads it, with its soft tokens and pictures.

Token-in/token-out: a prompt becomes ids once, here, and is never tokenised again. Text from memory and environment is
data: it is concatenated, never used as a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# Stand for a memory position (Qwen has no real [UNK]). First match wins: in the vocabulary, but never produced by
# tokenising ordinary text.
MEMORY_TOKENS = ("<|mem|>", "<|quad_end|>", "<|fim_pad|>", "<|reserved_special_token_0|>", "<file_sep>", "<unused0>")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the user turn: text, or an image."""

    text: str = ""
    image: Image | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A sequence as a model reads it.

    Attributes:
        ids: (T,) token ids; an image takes as many as it has merged patches.
        soft: (N, d) embeddings that take the places of the reserved token, or None.
        pixels, grid: what a vision tower reads of its images: (patches, values), and (images, 3) patches as (t, h, w).
        images: the images themselves, for engines that make pixels of their own.
    """

    ids: tuple[int, ...]
    soft: Tensor | None = None
    pixels: Tensor | None = None
    grid: Tensor | None = None
    images: tuple[Image, ...] = ()

    def extended(self, ids: Sequence[int]) -> Prompt:
        return replace(self, ids=(*self.ids, *ids))

    def cut(self, tokens: int, pictures: int) -> tuple[Prompt, Prompt]:
        """Cut behind so many tokens, among which are those of so many pictures. (Soft tokens stay with neither.)"""
        head, tail = Prompt(self.ids[:tokens]), Prompt(self.ids[tokens:])
        if self.pixels is None or self.grid is None:
            return head, tail
        at = int(self.grid[:pictures].prod(-1).sum())
        if pictures:
            head = replace(head, pixels=self.pixels[:at], grid=self.grid[:pictures], images=self.images[:pictures])
        if pictures < len(self.grid):
            tail = replace(tail, pixels=self.pixels[at:], grid=self.grid[pictures:], images=self.images[pictures:])
        return head, tail


class ContextLengthError(ValueError):
    """A prompt that leaves no room in its model's context."""


def check_context(role: str, tokens: int, room: int, context: int | None) -> None:
    """Refuse a prompt of a compiler or executor (`role`), before its model works on it, where `room` more tokens do not
    fit behind it in the model's context (None where nobody knows). Raises: ContextLengthError."""
    if context is not None and tokens + room > context:
        raise ContextLengthError(
            f"the {role}'s prompt has {tokens} tokens and leaves no room for {room} more in a context of {context}: "
            f"give it less memory (memory.k), lower {role}.max_new_tokens, or take a model that reads more (where vLLM "
            "was given less than the model can: raise max_model_len, or serve it with a larger --max-model-len)"
        )


class PromptEncoder:
    """Turns chats into the prompts of one model.

    Args:
        processor: the tokenizer of a text model, or the processor of a vision-language model.
        memory_token: the reserved token that stands for memory positions; `auto` takes the first that is known.
        arguments: further ones of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not know an argument; no end token or no
            reserved token.
    """

    def __init__(
        self, processor: Any, memory_token: str = "auto", arguments: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        self.processor, self.arguments = processor, dict(arguments or {})
        self.is_vlm = hasattr(processor, "image_processor")
        self.tokenizer = processor.tokenizer if self.is_vlm else processor
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        if template is None:
            raise ValueError("the model's tokenizer has no chat template: use an instruction-tuned model")
        if unknown := [name for name in self.arguments if name not in str(template)]:
            raise ValueError(f"the model's chat template does not ask for {', '.join(unknown)}: see chat_template")
        self.memory_id = reserved_token_id(self.tokenizer, memory_token)
        self.end_id = self.tokenizer.eos_token_id
        if self.end_id is None:
            raise ValueError("the tokenizer has no end-of-turn (eos) token")
        pad = self.tokenizer.pad_token_id
        self.pad_id = self.end_id if pad is None else pad
        self.image_token = processor.image_token if self.is_vlm else None
        self.image_id: Any = self.tokenizer.convert_tokens_to_ids(self.image_token) if self.is_vlm else None
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        # Never sampled: an <|image_pad|> in an answer breaks scoring.
        self.suppressed = sorted(special - {self.end_id})

    def encode(self, parts: Sequence[Part], instructions: str = "") -> Prompt:
        """Make a prompt that ends where the model's answer begins. Raises: ValueError, for images and a text model, or
        a text that spells the image token."""
        text = self.processor.apply_chat_template(
            messages(parts, instructions), add_generation_prompt=True, tokenize=False, **self.arguments
        )
        images = tuple(part.image.convert("RGB") for part in parts if part.image is not None)
        if images and not self.is_vlm:
            raise ValueError("a text-only model cannot take pictures")
        if self.image_token is not None and text.count(self.image_token) != len(images):
            raise ValueError(f"the prompt contains {self.image_token} outside its pictures")
        if not images:
            return Prompt(self.ids(text))
        inputs = self.processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)
        ids = tuple(inputs["input_ids"][0].tolist())
        return Prompt(ids, pixels=inputs["pixel_values"], grid=inputs["image_grid_thw"], images=images)

    def pictures(self, images: Sequence[Image]) -> Prompt:
        """Make a prompt of nothing but pictures, one after another, for a model that sees."""
        inputs = self.processor.image_processor(images=list(images), return_tensors="pt")
        grid = inputs["image_grid_thw"]
        return Prompt(
            (self.image_id,) * sum(self.places(grid)), pixels=inputs["pixel_values"], grid=grid, images=tuple(images)
        )

    def places(self, grid: Tensor) -> list[int]:
        """Count the tokens that each picture takes: patches (images, 3), merged."""
        return (grid.prod(-1) // self.processor.image_processor.merge_size**2).tolist()

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def folded(self, ids: Sequence[int], soft: bool = False) -> list[int]:
        """Make each image's pads (with `soft`, also each run of memory tokens) one token: vLLM makes room itself."""
        wide = {self.image_id, *((self.memory_id,) if soft else ())}
        return [id for i, id in enumerate(ids) if id not in wide or i == 0 or ids[i - 1] != id]


def messages(parts: Sequence[Part], instructions: str = "") -> list[dict[str, Any]]:
    """Write messages for `apply_chat_template`: content parts if there is an image, plain text otherwise."""
    content: object = "".join(part.text for part in parts)
    if any(part.image is not None for part in parts):
        content = [{"type": "image"} if p.image is not None else {"type": "text", "text": p.text} for p in parts]
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, {"role": "user", "content": content}]


def merge(parts: Sequence[Part]) -> list[Part]:
    """Join neighbouring text parts."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.image is None and merged[-1].image is None:
            merged[-1] = Part(text=merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def reserved_token_id(tokenizer: Any, name: str = "auto") -> int:
    """Find the memory token's id. Raises: ValueError, where the tokenizer does not have it."""
    vocabulary = tokenizer.get_vocab()
    candidates = MEMORY_TOKENS if name == "auto" else (name,)
    for token in candidates:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"no reserved memory token among {list(candidates)} in this tokenizer: set memory_token to a special token of "
        "the model that ordinary text never produces"
    )
