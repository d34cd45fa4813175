"""Encoding of chats into prompts: token ids with soft tokens and pictures.

A prompt is tokenised once, here. Texts from memory and environment are data: they are concatenated, never used as
templates, and special tokens that they spell are encoded as text (`lm.special_tokens`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lm.picture_cache import PictureCache
from lm.special_tokens import SpecialTokens, TextTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# Reserved tokens of memory positions, in order of preference: ordinary text never encodes to them.
MEMORY_TOKENS = ("<|mem|>", "<|quad_end|>", "<|fim_pad|>", "<|reserved_special_token_0|>", "<file_sep>", "<unused0>")
# A processor's outputs that are not of pictures.
TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of the user turn: text, an image, or `soft` positions of soft tokens."""

    text: str = ""
    image: Image | None = None
    soft: int = 0


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A turn of a chat."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[PromptPart, ...]

    @classmethod
    def of(cls, role: Literal["system", "user", "assistant"], text: str) -> ChatTurn:
        """Create a turn of text alone."""
        return cls(role, (PromptPart(text),))


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A preprocessed picture.

    Attributes:
        image: the original, for engines with their own preprocessing.
        tokens: number of its image tokens in a prompt; other tokens may separate them, such as those of crops.
        tensors: the processor's outputs by the model's argument names. Their first dimension counts pictures, crops or
            patches; several pictures are concatenated along it.
    """

    image: Image
    tokens: int
    tensors: Mapping[str, Tensor]

    @property
    def values(self) -> int:
        """Number of input values of the vision tower."""
        return sum(tensor.numel() for tensor in self.tensors.values() if tensor.is_floating_point())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def looks_like(self, other: Picture) -> bool:
        """Whether both pictures have equal tensors."""
        if self is other:
            return True
        mine, theirs = self.tensors, other.tensors
        return mine.keys() == theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in mine.items())


@dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """A picture that was processed alone, with the token ids that the processor writes for it."""

    ids: tuple[int, ...]
    picture: Picture

    @property
    def nbytes(self) -> int:
        return self.picture.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """An encoded prompt.

    Attributes:
        ids: (T,) token ids, with one image token per state of a picture.
        soft: (N, d) embeddings that replace the reserved token, or None.
        pictures: in the order of their tokens.
        turns_dropped: past turns that the prompt leaves out because of a bound on its tokens.
    """

    ids: tuple[int, ...]
    soft: Tensor | None = None
    pictures: tuple[Picture, ...] = ()
    turns_dropped: int = 0

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(picture.image for picture in self.pictures)

    def extended(self, ids: Sequence[int]) -> Prompt:
        return replace(self, ids=(*self.ids, *ids))


class ContextLengthError(ValueError):
    """A prompt leaves too little room in its model's context."""


def check_context(role: str, tokens: int, room: int, context: int | None) -> None:
    """Check that a prompt of `tokens` tokens and `room` more fit into a context.

    Args:
        role: compiler or executor, for the message.
        context: None if unknown.

    Raises:
        ContextLengthError: they do not fit.
    """
    if context is not None and tokens + room > context:
        raise ContextLengthError(
            f"the {role}'s prompt has {tokens} tokens and leaves no room for {room} more in a context of {context}: "
            f"give it less memory (memory.k), lower {role}.max_new_tokens, or choose a model with a longer context "
            "(vLLM with a lower limit: raise max_model_len, or serve it with a larger --max-model-len)"
        )


class PromptEncoder:
    """Encodes chats into the prompts of one model.

    Args:
        processor: the tokenizer of a text model, or the processor of a vision-language model.
        memory_token: the reserved token of memory positions; `auto` takes the first known one.
        arguments: extra arguments of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: no chat template, or one without an argument's name; no end token or reserved token; a processor
            without an image token.
    """

    def __init__(self, processor: Any, memory_token: str = "auto", arguments: Mapping[str, Any] | None = None) -> None:
        self.processor, self.arguments = processor, dict(arguments or {})
        self.is_vlm = hasattr(processor, "image_processor")
        self.tokenizer = processor.tokenizer if self.is_vlm else processor
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        if template is None:
            raise ValueError("the model's tokenizer has no chat template: use an instruction-tuned model")
        if unknown := [name for name in self.arguments if name not in str(template)]:
            raise ValueError(f"the model's chat template does not use {', '.join(unknown)}: check chat_template")
        self.memory_id = reserved_token_id(self.tokenizer, memory_token)
        self.marks = SpecialTokens(self.tokenizer)
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        self.end_id = self._end_of_turn(special)
        pad = self.tokenizer.pad_token_id
        self.pad_id = self.end_id if pad is None else pad
        # A picture is one `image_token` in a chat and several `image_id` in a prompt.
        self.image_token: str | None = getattr(processor, "image_token", None) if self.is_vlm else None
        self.image_id: int | None = getattr(processor, "image_token_ids", [None])[0] if self.is_vlm else None
        self._picture_tokens: set[Any] = set()
        if self.is_vlm:
            if self.image_token is None or self.image_id is None:
                raise ValueError(f"{type(processor).__name__} has no image token")
            self._picture_tokens = {self.image_token, self.tokenizer.convert_ids_to_tokens(self.image_id)}
        self._alone = PictureCache[_Alone]()
        self._ids_of_sizes: dict[tuple[tuple[int, int], ...], bool] = {}  # of pictures: whether `_replaced` is right
        # Never sampled: an <|image_pad|> in an answer would break scoring.
        self.suppressed = sorted(special - {self.end_id})

    def _end_of_turn(self, special: Collection[int]) -> int:
        """Return the special token that the chat template writes after an answer, or else the tokenizer's eos token,
        which is another one in some models' folders.

        Raises: ValueError, if there is neither."""
        answer = "The answer."
        chat = [ChatTurn.of("user", "A question?"), ChatTurn.of("assistant", answer)]
        text = self.processor.apply_chat_template(chat_messages(chat, self.is_vlm), tokenize=False, **self.arguments)
        behind = self.chat_ids(text.rpartition(answer)[2].lstrip())
        if behind and behind[0] in special:
            return behind[0]
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-turn (eos) token")
        return self.tokenizer.eos_token_id

    def encode(self, parts: Sequence[PromptPart], instructions: str = "") -> Prompt:
        """Encode a prompt of one user turn. Raises: as `encode_chat`."""
        return self.encode_chat(chat_of(parts, instructions))

    def encode_chat(self, chat: Sequence[ChatTurn]) -> Prompt:
        """Encode a chat up to the start of the model's answer, with special tokens in texts as text.

        Raises: ValueError, for images and a text model, or a chat template that drops content."""
        placeholder = self.tokenizer.convert_ids_to_tokens(self.memory_id)
        chat = [replace(turn, parts=tuple(self._written(turn.parts, placeholder))) for turn in chat]
        text = self.processor.apply_chat_template(
            chat_messages(chat, self.is_vlm), add_generation_prompt=True, tokenize=False, **self.arguments
        )
        parts = [part for turn in chat for part in turn.parts]
        images = tuple(part.image.convert("RGB") for part in parts if part.image is not None)
        if images and not self.is_vlm:
            raise ValueError("a text-only model cannot take pictures")
        pictured = {token: text.count(token) for token in self._picture_tokens}
        if any(n != (len(images) if token == self.image_token else 0) for token, n in pictured.items()):
            raise ValueError(f"the model's chat template writes {pictured} for {len(images)} pictures")
        if any(part.text.strip() not in text for part in parts):
            raise ValueError("the model's chat template drops part of its input: choose another model")
        ids, pictures = self._read(text, images) if images else (self.chat_ids(text), ())
        if ids.count(self.image_id) != sum(picture.tokens for picture in pictures):
            raise ValueError("the model's processor creates other image tokens for several pictures than for each one")
        return Prompt(ids, pictures=pictures)

    def _written(self, parts: Sequence[PromptPart], placeholder: str) -> list[PromptPart]:
        """Hide special tokens in the parts' texts, and write placeholders for soft tokens."""
        return merge_text_parts(
            [
                replace(part, text=self.marks.hide(part.text) + placeholder * part.soft, soft=0)
                for part in merge_text_parts(parts)
            ]
        )

    def pictures(self, images: Sequence[Image]) -> Prompt:
        """Create a prompt of pictures alone, for a vision-language model."""
        assert self.image_id is not None
        pictures = tuple(self._processed(image).picture for image in images)
        return Prompt((self.image_id,) * sum(picture.tokens for picture in pictures), pictures=pictures)

    def _read(self, text: str, images: Sequence[Image]) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Encode a rendered chat with pictures.

        Each is processed alone, to separate its tensors and tokens, and once while it is in the cache. The processor
        reads text and pictures together where it writes more than special tokens for a picture, and the first time
        for pictures of these sizes."""
        alone, sizes = [self._processed(image) for image in images], tuple(image.size for image in images)
        pictures = tuple(one.picture for one in alone)
        if not self._ids_of_sizes.get(sizes, True):
            return self._processor_ids(text, images), pictures
        ids = self._replaced(text, alone)
        if sizes not in self._ids_of_sizes:
            together = self._processor_ids(text, images)
            self._ids_of_sizes[sizes], ids = ids == together, together
        assert ids is not None
        return ids, pictures

    def _replaced(self, text: str, alone: Sequence[_Alone]) -> tuple[int, ...] | None:
        """Encode a rendered chat with the ids of each picture at its token; None if they may change the encoding of the
        text around them."""
        if not all(id in self.marks.inert for one in alone for id in one.ids):
            return None
        at, rest = self.tokenizer.convert_tokens_to_ids(self.image_token), iter(alone)
        return tuple(new for id in self.chat_ids(text) for new in (next(rest).ids if id == at else (id,)))

    def _processed(self, image: Image) -> _Alone:
        return self._alone.get(image, self._process)

    def _process(self, image: Image) -> _Alone:
        """Let the processor read a picture alone."""
        inputs = self._processor_outputs(self.image_token or "", [image])
        ids = tuple(inputs["input_ids"][0].tolist())
        tensors = {name: inputs[name] for name in inputs if name not in TEXT_OUTPUTS}
        return _Alone(ids, Picture(image, ids.count(self.image_id), tensors))

    def _processor_ids(self, text: str, images: Sequence[Image]) -> tuple[int, ...]:
        return tuple(self._processor_outputs(text, images)["input_ids"][0].tolist())

    def _processor_outputs(self, text: str, images: Sequence[Image]) -> Mapping[str, Any]:
        """Return what the processor makes of a rendered chat with pictures."""
        processor = self.processor
        if self.marks.has_hidden(text):
            processor = copy.copy(processor)
            processor.tokenizer = TextTokenizer(self.marks)
        return processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)

    def ids(self, text: str) -> tuple[int, ...]:
        """Encode a text, with special tokens in it as text."""
        return self.chat_ids(self.marks.hide(text))

    def chat_ids(self, text: str) -> tuple[int, ...]:
        """Encode a part of a rendered chat, with its special tokens."""
        return tuple(self.marks.encode(text))

    def cut(self, prompt: Prompt, tokens: int, pictures: int) -> tuple[Prompt, Prompt]:
        """Split a prompt after `tokens` ids, which contain `pictures` pictures."""
        soft = None, None
        if prompt.soft is not None:
            places = prompt.ids[:tokens].count(self.memory_id)
            soft = prompt.soft[:places], prompt.soft[places:]
        head = Prompt(prompt.ids[:tokens], soft[0], prompt.pictures[:pictures])
        return head, Prompt(prompt.ids[tokens:], soft[1], prompt.pictures[pictures:])

    def collapse_placeholders(self, ids: Sequence[int], soft: bool = False) -> list[int]:
        """Collapse each run of image tokens (with `soft`, also of memory tokens) to one: vLLM expands it itself."""
        wide = {self.image_id, *((self.memory_id,) if soft else ())}
        return [id for i, id in enumerate(ids) if id not in wide or i == 0 or ids[i - 1] != id]


def chat_of(parts: Sequence[PromptPart], instructions: str = "") -> list[ChatTurn]:
    """Create a chat of one user turn, after a system turn if there are instructions."""
    system = [ChatTurn.of("system", instructions)] if instructions else []
    return [*system, ChatTurn("user", tuple(parts))]


def chat_messages(chat: Sequence[ChatTurn], typed: bool = False) -> list[dict[str, Any]]:
    """Create messages for `apply_chat_template`, with plain text or, for images, a list of content parts.

    Args:
        typed: always use content parts, because some vision-language templates ignore plain text.
    """
    return [{"role": turn.role, "content": _content(turn.parts, typed)} for turn in chat]


def _content(parts: Sequence[PromptPart], typed: bool) -> object:
    if typed or any(part.image is not None for part in parts):
        return [{"type": "image"} if p.image is not None else {"type": "text", "text": p.text} for p in parts]
    return "".join(part.text for part in parts)


def merge_text_parts(parts: Sequence[PromptPart]) -> list[PromptPart]:
    """Join neighbouring text parts."""
    merged: list[PromptPart] = []
    for part in parts:
        if merged and not any(p.image is not None or p.soft for p in (part, merged[-1])):
            merged[-1] = PromptPart(text=merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def reserved_token_id(tokenizer: Any, name: str = "auto") -> int:
    """Return the memory token's id. Raises: ValueError, if the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    candidates = MEMORY_TOKENS if name == "auto" else (name,)
    for token in candidates:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"no reserved memory token among {list(candidates)} in this tokenizer: set memory_token to a special token of "
        "the model that ordinary text never encodes to"
    )
