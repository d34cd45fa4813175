"""Readers on Hugging Face models: text only, and vision-language."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.models import model_path
from eval.qa.readers import MAX_TOKENS, Prompt, chat_ids, parse_answer, text_of
from lm.answer_cache import Answer
from lm.attention import share_heads
from lm.backbone import Backbone, load_backbone
from lm.device import device_of, dtype_of
from lm.prompt import PromptPart
from lm.reply_cleaning import clean_reply


@dataclass(slots=True)
class HfReader:
    """A greedy text reader, one prompt at a time, on a GPU if there is one and in the dtype of its weights.

    The KV cache of each prompt is reused by `log_probs` until the next `answer`.
    """

    name: str
    model: Any
    tokenizer: Any
    _prefills: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # ids_1T, cache of all but the last token

    @classmethod
    def load(cls, name: str) -> HfReader:
        path, device = model_path(name), device_of("auto")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        model = model.eval().to(device)
        if device == "cpu":
            share_heads(model)
        return cls(Path(name).name, model, AutoTokenizer.from_pretrained(path))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        self._prefills.clear()
        return [self._generate(text_of(prompt)) for prompt in prompts]

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [self._log_prob(text_of(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def count(self, shown: Prompt) -> int:
        return len(self.tokenizer(text_of(shown), add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _prefill(self, prompt: str) -> tuple[Any, Any]:
        """Return a prompt's ids and a copy of its KV cache; compute them once."""
        if prompt not in self._prefills:
            ids = self._tensor(chat_ids(self.tokenizer, prompt))
            self._prefills[prompt] = ids, self.model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        ids, cache = self._prefills[prompt]
        return ids, copy.deepcopy(cache)

    @torch.no_grad()
    def _generate(self, prompt: str) -> Answer | None:
        ids, cache = self._prefill(prompt)
        given = ids.shape[1]

        def ended(tokens: Any, scores: Any) -> Any:
            return torch.tensor([is_complete(self._decode(row[given:])) for row in tokens], device=tokens.device)

        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            stopping_criteria=[ended],
        )
        return parse_answer(self._decode(out[0, given:]), given, out.shape[1] - given)

    def _tensor(self, ids: Sequence[int]) -> Any:
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    def _decode(self, ids: Any) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @torch.no_grad()
    def _log_prob(self, prompt: str, answer: str) -> float | None:
        ids, cache = self._prefill(prompt)
        wanted = self._tensor(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        if not wanted.shape[1]:
            return None
        logits = self.model(torch.cat([ids[:, -1:], wanted[:, :-1]], 1), past_key_values=cache).logits
        found = logits.float().log_softmax(-1).gather(-1, wanted[..., None])
        return float(found.mean())


@dataclass(slots=True)
class HfVisionReader:
    """A greedy vision-language reader, one prompt at a time. A prompt that the chat template cannot render has no
    answer."""

    name: str
    backbone: Backbone

    @classmethod
    def load(cls, name: str) -> HfVisionReader:
        """Load the model. Raises: ValueError for a text-only model."""
        device = device_of("auto")
        backbone = load_backbone(model_path(name), dtype_of("auto", device), device)
        if not backbone.is_vlm:
            raise ValueError(f"{name} sees no pictures: choose a vision-language model, or drop --picture-tokens")
        backbone.model.eval()
        return cls(Path(name).name, backbone)

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        return [self._generate(prompt) for prompt in prompts]

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [self._log_prob(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def count(self, shown: Prompt) -> int:
        """Count the tokens of texts and of pictures as the model's processor encodes them."""
        images = [_decode_png(part) for part in shown if isinstance(part, bytes)]
        seen = len(self.backbone.pictures(images).ids) if images else 0
        return seen + sum(len(self.backbone.ids(part)) for part in shown if isinstance(part, str))

    def _encode(self, prompt: Prompt) -> Any:
        """Encode a prompt; return None if the chat template drops a part of it."""
        parts = [
            PromptPart(text=part) if isinstance(part, str) else PromptPart(image=_decode_png(part)) for part in prompt
        ]
        try:
            return self.backbone.encode(parts)
        except ValueError:
            return None

    @torch.no_grad()
    def _generate(self, prompt: Prompt) -> Answer | None:
        if (encoded := self._encode(prompt)) is None:
            return None
        batch, given = self.backbone.pad([encoded], "left"), len(encoded.ids)
        positions = {"position_ids": batch.positions} if batch.positions.dim() == 3 else {}
        model: Any = self.backbone.model
        out = model.generate(
            batch.tokens,
            attention_mask=batch.mask,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=self.backbone.pad_id,
            **positions,
            **batch.vision,
        )
        generated = self.backbone.tokenizer.decode(out[0, given:], skip_special_tokens=True)
        return parse_answer(generated, given, out.shape[1] - given)

    @torch.no_grad()
    def _log_prob(self, prompt: Prompt, answer: str) -> float | None:
        encoded, wanted = self._encode(prompt), self.backbone.ids(answer)
        if encoded is None or not wanted:
            return None
        hidden = self.backbone.hidden(self.backbone.pad([encoded.extended(wanted)], "right"))
        scores = self.backbone.logits(hidden[0, len(encoded.ids) - 1 : -1]).float().log_softmax(-1)
        return float(scores.gather(-1, torch.tensor(wanted, device=scores.device)[:, None]).mean())


def _decode_png(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def is_complete(generated: str) -> bool:
    """Return whether the first line after any reasoning is complete."""
    answer = clean_reply(generated)
    return bool(answer) and ("\n" in answer or "\n" in generated[len(generated.rstrip()) :])
