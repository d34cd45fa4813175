"""Readers: models that answer a question from packed evidence in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from configs.models import EndpointConfig, VllmEngine, model_path
from lm.answer_cache import Answer, EndpointStop
from lm.endpoint import Endpoint, user_message
from lm.reply_cleaning import clean_reply
from lm.responses import estimate_tokens
from lm.special_tokens import special_tokens_of

Prompt = tuple[str | bytes, ...]
"""Texts and pictures (PNG) in reading order."""
MAX_TOKENS = 48  # of an answer
ROLE = "reader"  # in the endpoint's account
ABSTAIN = "Not mentioned"
INSTRUCTION = (
    "Answer the question from the memory below, in a few words, with the memory's own words where possible. Times are "
    "when something was said; give dates rather than words such as yesterday. If the memory does not say, answer: "
    f"{ABSTAIN}."
)


class Reader(Protocol):
    """A model that answers prompts."""

    name: str

    def answer(self, prompts: Sequence[Prompt]) -> Sequence[Answer | Exception | None]:
        """Answer prompts in order: the failure if a request failed, None for an unusable answer."""
        ...

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        """Return the mean token log-probability of the given answer after each prompt; None if the engine has none."""
        ...

    def count(self, shown: Prompt) -> int:
        """Count the reader's own tokens of texts and pictures."""
        ...


# prompts --------------------------------------------------------------------------------------------------------------


def build_prompt(
    texts: Sequence[str], question: str, options: Sequence[str] = (), pictures: Sequence[Sequence[bytes]] = ()
) -> Prompt:
    """Render packed texts, the pictures of each text, and the question. Gold answers never enter a prompt."""
    choices = f"\nChoose one of: {'; '.join(options)}" if options else ""
    memory = render_pack(texts, pictures) or ("(nothing)",)
    ending = f"\n\nQuestion: {question}{choices}\nShort answer:"
    return _join_texts((f"{INSTRUCTION}\n\nMemory:\n", *memory, ending))


def render_pack(texts: Sequence[str], pictures: Sequence[Sequence[bytes]] = ()) -> Prompt:
    """Render packed texts, one a line, each followed by its pictures."""
    by_text = pictures or [()] * len(texts)
    lines = [part for text, own in zip(texts, by_text, strict=True) for part in ("\n", text, *own)]
    return _join_texts(lines[1:])


def _join_texts(parts: Iterable[str | bytes]) -> Prompt:
    """Join neighbouring texts; pictures separate them."""
    runs = groupby(parts, key=lambda part: isinstance(part, str))
    return tuple(part for text, run in runs for part in (["".join(map(str, run))] if text else run))


def text_of(prompt: Prompt) -> str:
    """Return the text of a prompt for a text-only reader. Raises: ValueError for a prompt with pictures."""
    if not all(isinstance(part, str) for part in prompt):
        raise ValueError("this reader sees no pictures: choose a vision-language reader, or drop --picture-tokens")
    return "".join(map(str, prompt))


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Tokenise a prompt as a user turn if the model has a chat template (which adds the first token itself)."""
    marks = special_tokens_of(tokenizer)
    prompt = marks.hide(prompt)
    if not getattr(tokenizer, "chat_template", None):
        return [*tokenizer("")["input_ids"], *marks.encode(prompt)]
    turn = [{"role": "user", "content": prompt}]
    return list(marks.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)))


def parse_answer(generated: str, tokens_in: int, tokens_out: int) -> Answer | None:
    """Return the first line after any reasoning; None if a model generated reasoning only."""
    text = next((line.strip() for line in clean_reply(generated).splitlines() if line.strip()), "")
    return Answer(text, tokens_in, tokens_out) if text or not generated.strip() else None


# readers --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class VllmReader:
    """A text reader on a vLLM engine, which answers all prompts at once."""

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
            [{"prompt_token_ids": chat_ids(tokenizer, text_of(prompt))} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        )
        return [
            parse_answer(o.outputs[0].text, len(o.prompt_token_ids or ()), len(o.outputs[0].token_ids)) for o in outputs
        ]

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, shown: Prompt) -> int:
        return len(self.engine.get_tokenizer()(text_of(shown), add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class EndpointReader:
    """A reader behind an endpoint, with or without pictures; its token counts are estimates (`lm.responses`)."""

    name: str
    endpoint: Endpoint

    @classmethod
    def load(cls, config: EndpointConfig, cache: Path) -> EndpointReader:
        return cls(config.model, Endpoint(config, cache))

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer | Exception]:
        """Answer prompts in order. Raises: EndpointStop, if the endpoint is gone or its budget is spent."""
        requests = [self.endpoint.ask([user_message(*prompt)], ROLE, MAX_TOKENS) for prompt in prompts]
        answers = self.endpoint.run(requests)
        for answer in answers:
            if isinstance(answer, EndpointStop):
                raise answer
        return answers

    def log_probs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float | None]:
        return [None] * len(prompts)

    def count(self, shown: Prompt) -> int:
        return estimate_tokens([user_message(*shown)])
