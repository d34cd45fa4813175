"""Readers: whatever answers a question from a pack of evidence, in a few words."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from configs.models import EndpointConfig, VllmEngine
from lm.ledger import Answer, EndpointStop

MAX_TOKENS = 48  # of an answer
ROLE = "reader"
ABSTAIN = "Not mentioned"
INSTRUCTION = (
    "Answer the question from the memory below, in a few words, with the memory's own words where possible. Times are "
    "when something was said; give dates rather than words such as yesterday. If the memory does not say, answer: "
    f"{ABSTAIN}."
)


class Reader(Protocol):
    """Answers prompts, in their order; None where there is no usable answer. `liked`: the mean log-probability of the
    tokens of an answer that is given after each prompt, None where an engine does not tell; it is asked after the
    answers are there, which cannot depend on it. `count`: tokens of a text as it reads."""

    name: str

    def answer(self, prompts: Sequence[str]) -> list[Answer | None]: ...

    def liked(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float | None]: ...

    def count(self, text: str) -> int: ...


def prompt_of(texts: Sequence[str], question: str, options: Sequence[str] = ()) -> str:
    """Render a pack and its question. Nothing else is read: no second retrieval, no gold."""
    choices = f"\nChoose one of: {'; '.join(options)}" if options else ""
    memory = "\n".join(texts) or "(nothing)"
    return f"{INSTRUCTION}\n\nMemory:\n{memory}\n\nQuestion: {question}{choices}\nShort answer:"


@dataclass(slots=True)
class HfReader:
    """A Hugging Face model on this machine, one prompt at a time, greedily. What it has read of a prompt is kept until
    the next ones are answered."""

    name: str
    model: Any
    tokenizer: Any
    _read: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # ids, and the cache of all but the last

    @classmethod
    def load(cls, name: str) -> HfReader:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from lm.backbone import model_path

        path = model_path(name)
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        return cls(Path(name).name, model, AutoTokenizer.from_pretrained(path))

    def answer(self, prompts: Sequence[str]) -> list[Answer | None]:
        self._read.clear()
        return [self._one(prompt) for prompt in prompts]

    def liked(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        return [self._mean_logprob(*each) for each in zip(prompts, answers, strict=True)]

    def _prefill(self, prompt: str) -> tuple[Any, Any]:
        """Read a prompt once; a copy of the cache is for whoever goes on from it."""
        import torch

        if prompt not in self._read:
            ids = self.tokenizer(_chat(self.tokenizer, prompt), return_tensors="pt")["input_ids"]
            with torch.no_grad():
                self._read[prompt] = ids, self.model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        ids, cache = self._read[prompt]
        return ids, copy.deepcopy(cache)

    def _one(self, prompt: str) -> Answer:
        import torch

        ids, cache = self._prefill(prompt)
        given = ids.shape[1]
        ended = lambda told, scores: torch.tensor(["\n" in self._told(each[given:]).lstrip() for each in told])
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=MAX_TOKENS,
                do_sample=False, stopping_criteria=[ended],
            )  # fmt: skip
        return Answer(_first_line(self._told(out[0, given:])), given, out.shape[1] - given)

    def _told(self, ids: Any) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _mean_logprob(self, prompt: str, answer: str) -> float | None:
        import torch

        ids, cache = self._prefill(prompt)
        wanted = self.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        if not wanted.shape[1]:
            return None
        with torch.no_grad():
            logits = self.model(torch.cat([ids[:, -1:], wanted[:, :-1]], 1), past_key_values=cache).logits
        found = logits.float().log_softmax(-1).gather(-1, wanted[..., None])
        return float(found.mean())

    def count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class VllmReader:
    """The same on a vLLM engine, all prompts at once."""

    name: str
    engine: Any

    @classmethod
    def load(cls, name: str) -> VllmReader:
        from lm.backbone import model_path
        from lm.vllm import load_engine

        return cls(Path(name).name, load_engine(model_path(name), "auto", {}, VllmEngine()))

    def answer(self, prompts: Sequence[str]) -> list[Answer | None]:
        from vllm import SamplingParams

        tokenizer = self.engine.get_tokenizer()
        outputs = self.engine.generate(
            [_chat(tokenizer, prompt) for prompt in prompts], SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        )
        return [
            Answer(_first_line(o.outputs[0].text), len(o.prompt_token_ids or ()), len(o.outputs[0].token_ids))
            for o in outputs
        ]

    def liked(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, text: str) -> int:
        return len(self.engine.get_tokenizer()(text, add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class EndpointReader:
    """A model behind an endpoint; tokens are estimated, four characters each."""

    name: str
    endpoint: Any

    @classmethod
    def load(cls, config: EndpointConfig, cache: Path) -> EndpointReader:
        from lm.endpoint import Endpoint

        return cls(config.model, Endpoint(config, cache))

    def answer(self, prompts: Sequence[str]) -> list[Answer | None]:
        """Ask for all of them. Raises: EndpointStop, where nothing more is asked."""
        asked = [self.endpoint.ask([{"role": "user", "content": prompt}], ROLE, MAX_TOKENS) for prompt in prompts]
        answers = self.endpoint.run(asked)
        for answer in answers:
            if isinstance(answer, EndpointStop):
                raise answer
        return [answer if isinstance(answer, Answer) else None for answer in answers]

    def liked(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, text: str) -> int:
        return len(text) // 4 + 1


def _chat(tokenizer: Any, prompt: str) -> str:
    """Write a prompt as the model's chat, where it has a template."""
    if not getattr(tokenizer, "chat_template", None):
        return prompt
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
