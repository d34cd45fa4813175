"""Readers: whatever answers a question from a pack of evidence, in a few words."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from configs.models import EndpointConfig, VllmEngine, model_path
from lm.ledger import Answer, EndpointStop
from lm.marks import marks_of
from lm.replies import answer_text

Prompt = tuple[str | bytes, ...]
"""Texts and pictures (PNG) in the order in which they are read."""
MAX_TOKENS = 48  # of an answer
ROLE = "reader"
ABSTAIN = "Not mentioned"
INSTRUCTION = (
    "Answer the question from the memory below, in a few words, with the memory's own words where possible. Times are "
    "when something was said; give dates rather than words such as yesterday. If the memory does not say, answer: "
    f"{ABSTAIN}."
)


class Reader(Protocol):
    """Answers prompts, in their order; None where there is no usable answer, or the failure that cost it. `liked`: the
    mean log-probability of the tokens of an answer that is given after each prompt, None where an engine does not tell;
    it is asked after the answers are there, which cannot depend on it. `count`: tokens of what is shown, as it reads.
    """

    name: str

    def answer(self, prompts: Sequence[Prompt]) -> Sequence[Answer | Exception | None]: ...

    def liked(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]: ...

    def count(self, shown: Prompt) -> int: ...


def prompt_of(
    texts: Sequence[str], question: str, options: Sequence[str] = (), pictures: Sequence[Sequence[bytes]] = ()
) -> Prompt:
    """Render a pack, with the pictures of each text if there are any, and its question. Nothing else is read: no second
    retrieval, no gold."""
    choices = f"\nChoose one of: {'; '.join(options)}" if options else ""
    memory = shown_of(texts, pictures) or ("(nothing)",)
    asked = f"\n\nQuestion: {question}{choices}\nShort answer:"
    return _joined((f"{INSTRUCTION}\n\nMemory:\n", *memory, asked))


def shown_of(texts: Sequence[str], pictures: Sequence[Sequence[bytes]] = ()) -> Prompt:
    """Render a pack: a line a text, behind it its pictures."""
    by_text = pictures or [()] * len(texts)
    lines = [part for text, own in zip(texts, by_text, strict=True) for part in ("\n", text, *own)]
    return _joined(lines[1:])


def _joined(parts: Iterable[str | bytes]) -> Prompt:
    """Join neighbouring texts."""
    runs = groupby(parts, key=lambda part: isinstance(part, str))
    return tuple(part for text, run in runs for part in (["".join(map(str, run))] if text else run))


def text_of(prompt: Prompt) -> str:
    """Return a prompt for who reads text alone. Raises: ValueError, where there are pictures in it."""
    if not all(isinstance(part, str) for part in prompt):
        raise ValueError("this reader sees no pictures: take one that does, or no --picture-tokens")
    return "".join(map(str, prompt))


@dataclass(slots=True)
class HfReader:
    """A Hugging Face model on this machine that reads text, one prompt at a time, greedily; on a GPU where there is
    one, in the type of its weights. What it has read of a prompt is kept until the next ones are answered."""

    name: str
    model: Any
    tokenizer: Any
    _read: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # ids, and the cache of all but the last

    @classmethod
    def load(cls, name: str) -> HfReader:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from lm.attention import share_heads
        from lm.device import device_of

        path, device = model_path(name), device_of("auto")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        model = model.eval().to(device)
        if device == "cpu":
            share_heads(model)
        return cls(Path(name).name, model, AutoTokenizer.from_pretrained(path))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        self._read.clear()
        return [self._one(text_of(prompt)) for prompt in prompts]

    def liked(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [self._mean_logprob(text_of(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _prefill(self, prompt: str) -> tuple[Any, Any]:
        """Read a prompt once; a copy of the cache is for whoever goes on from it."""
        import torch

        if prompt not in self._read:
            ids = self._tensor(_chat(self.tokenizer, prompt))
            with torch.no_grad():
                self._read[prompt] = ids, self.model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        ids, cache = self._read[prompt]
        return ids, copy.deepcopy(cache)

    def _one(self, prompt: str) -> Answer | None:
        import torch

        ids, cache = self._prefill(prompt)
        given = ids.shape[1]

        def ended(written: Any, scores: Any) -> Any:
            over = [_ended(self._told(each[given:])) for each in written]
            return torch.tensor(over, device=written.device)

        with torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                stopping_criteria=[ended],
            )
        return _answer(self._told(out[0, given:]), given, out.shape[1] - given)

    def _tensor(self, ids: Sequence[int]) -> Any:
        import torch

        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    def _told(self, ids: Any) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _mean_logprob(self, prompt: str, answer: str) -> float | None:
        import torch

        ids, cache = self._prefill(prompt)
        wanted = self._tensor(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        if not wanted.shape[1]:
            return None
        with torch.no_grad():
            logits = self.model(torch.cat([ids[:, -1:], wanted[:, :-1]], 1), past_key_values=cache).logits
        found = logits.float().log_softmax(-1).gather(-1, wanted[..., None])
        return float(found.mean())

    def count(self, shown: Prompt) -> int:
        return len(self.tokenizer(text_of(shown), add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class SeeingReader:
    """A vision-language model of Hugging Face on this machine, one prompt at a time, greedily. A prompt that it cannot
    read (its chat template leaves something out) has no answer."""

    name: str
    backbone: Any  # lm.backbone.Backbone

    @classmethod
    def load(cls, name: str) -> SeeingReader:
        """Load it. Raises: ValueError, for a model that sees nothing."""
        from lm.backbone import load_backbone
        from lm.device import device_of, dtype_of

        device = device_of("auto")
        backbone = load_backbone(model_path(name), dtype_of("auto", device), device)
        if not backbone.is_vlm:
            raise ValueError(f"{name} sees no pictures: take a model that does, or no --picture-tokens")
        backbone.model.eval()
        return cls(Path(name).name, backbone)

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        return [self._one(prompt) for prompt in prompts]

    def liked(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [self._mean_logprob(*each) for each in zip(prompts, answers, strict=True)]

    def count(self, shown: Prompt) -> int:
        """Count the tokens of texts and pictures, as the model's processor makes them."""
        images = [_opened(part) for part in shown if isinstance(part, bytes)]
        seen = len(self.backbone.pictures(images).ids) if images else 0
        return seen + sum(len(self.backbone.ids(part)) for part in shown if isinstance(part, str))

    def _encoded(self, prompt: Prompt) -> Any:
        """Return it as the model reads it; None where it cannot."""
        from lm.prompt import Part

        parts = [Part(text=part) if isinstance(part, str) else Part(image=_opened(part)) for part in prompt]
        try:
            return self.backbone.encode(parts)
        except ValueError:
            return None

    def _one(self, prompt: Prompt) -> Answer | None:
        import torch

        if (read := self._encoded(prompt)) is None:
            return None
        batch, given = self.backbone.pad([read], "left"), len(read.ids)
        positions = {"position_ids": batch.positions} if batch.positions.dim() == 3 else {}
        with torch.no_grad():
            out = self.backbone.model.generate(
                batch.tokens,
                attention_mask=batch.mask,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=self.backbone.pad_id,
                **positions,
                **batch.vision,
            )
        told = self.backbone.tokenizer.decode(out[0, given:], skip_special_tokens=True)
        return _answer(told, given, out.shape[1] - given)

    def _mean_logprob(self, prompt: Prompt, answer: str) -> float | None:
        import torch

        read, wanted = self._encoded(prompt), self.backbone.ids(answer)
        if read is None or not wanted:
            return None
        with torch.no_grad():
            hidden = self.backbone.hidden(self.backbone.pad([read.extended(wanted)], "right"))
            scores = self.backbone.logits(hidden[0, len(read.ids) - 1 : -1]).float().log_softmax(-1)
        return float(scores.gather(-1, torch.tensor(wanted, device=scores.device)[:, None]).mean())


def _opened(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


@dataclass(slots=True)
class VllmReader:
    """A model on a vLLM engine that reads text, all prompts at once."""

    name: str
    engine: Any

    @classmethod
    def load(cls, name: str) -> VllmReader:
        from lm.vllm import load_engine

        return cls(Path(name).name, load_engine(model_path(name), "auto", {}, VllmEngine()))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | None]:
        from vllm import SamplingParams

        tokenizer = self.engine.get_tokenizer()
        outputs = self.engine.generate(
            [{"prompt_token_ids": _chat(tokenizer, text_of(prompt))} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        )
        return [_answer(o.outputs[0].text, len(o.prompt_token_ids or ()), len(o.outputs[0].token_ids)) for o in outputs]

    def liked(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, shown: Prompt) -> int:
        return len(self.engine.get_tokenizer()(text_of(shown), add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class EndpointReader:
    """A model behind an endpoint, which is shown pictures where there are any; tokens are estimated (`lm.answers`)."""

    name: str
    endpoint: Any

    @classmethod
    def load(cls, config: EndpointConfig, cache: Path) -> EndpointReader:
        from lm.endpoint import Endpoint

        return cls(config.model, Endpoint(config, cache))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | Exception]:
        """Ask for all of them. Raises: EndpointStop, where nothing more is asked."""
        from lm.endpoint import user_message

        asked = [self.endpoint.ask([user_message(*prompt)], ROLE, MAX_TOKENS) for prompt in prompts]
        answers = self.endpoint.run(asked)
        for answer in answers:
            if isinstance(answer, EndpointStop):
                raise answer
        return answers

    def liked(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, shown: Prompt) -> int:
        from lm.answers import estimate
        from lm.endpoint import user_message

        return estimate([user_message(*shown)])


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    """Tokenise a prompt as the model's chat, where it has a template, which writes the first token of a text itself."""
    marks = marks_of(tokenizer)
    prompt = marks.hide(prompt)
    if not getattr(tokenizer, "chat_template", None):
        return [*tokenizer("")["input_ids"], *marks.encode(prompt)]
    turn = [{"role": "user", "content": prompt}]
    return list(marks.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)))


def _ended(written: str) -> bool:
    """Tell whether the first line of an answer is complete."""
    answer = answer_text(written)
    return bool(answer) and ("\n" in answer or "\n" in written[len(written.rstrip()) :])


def _answer(written: str, tokens_in: int, tokens_out: int) -> Answer | None:
    """Return the first line of the answer in what a model wrote; None where that is reasoning alone."""
    text = next((line.strip() for line in answer_text(written).splitlines() if line.strip()), "")
    return Answer(text, tokens_in, tokens_out) if text or not written.strip() else None
