"""What executors with a model of their own share, whatever runs it: prompts as token ids, and actions from answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from executor.grounding import Grounding, ground
from executor.prompt import ExecutorRequest, executor_parts
from executor.records import Action
from lm.prompt import Part, Prompt, PromptEncoder, check_context

# Greedy answers to prompts (ids without the end token), and how much of each prompt a cache held, where that is known.
Generate = Callable[[Sequence[Prompt]], Sequence[tuple[list[int], int | None]]]


class TokenExecutor:
    """Encodes requests and decides on actions; its backends score candidates and generate.

    Args:
        images: False keeps pictures from a model that could see them.
        temperature: of the choice among admissible actions; 0 takes the likeliest.
    """

    accepts_soft = True
    context: int | None = None  # tokens that its model reads and writes; None where nobody knows
    mode: Literal["choice", "guided", "generate"] = "choice"

    def __init__(
        self, encoder: PromptEncoder, instructions: str = "", max_new_tokens: int = 64, images: bool = True,
        temperature: float = 0.0,
    ) -> None:  # fmt: skip
        self.encoder, self.tokenizer, self.instructions = encoder, encoder.tokenizer, instructions
        self.placeholder, self.end_id = encoder.memory_id, encoder.end_id
        self.placeholder_text = self.tokenizer.convert_ids_to_tokens(self.placeholder)
        self.sees_images, self.max_new_tokens = encoder.is_vlm and images, max_new_tokens
        self.temperature, self.generator = temperature, torch.Generator().manual_seed(0)

    def encode(self, request: ExecutorRequest) -> Prompt:
        """The prompt that all backends read. A picture is left out by an executor that does not see.

        Raises:
            ValueError: memory or observation spell the reserved memory token or the image token.
        """
        image = request.image if self.sees_images else None
        before, *after = executor_parts(replace(request, image=image), self.placeholder_text)
        parts = [Part(before), *([] if image is None else [Part(image=image)]), *(Part(text) for text in after)]
        prompt = self.encoder.encode(parts, self.instructions)
        soft = request.delivered.soft
        if prompt.ids.count(self.placeholder) != request.delivered.n_soft:
            raise ValueError("the executor's prompt contains the reserved memory token outside the soft block")
        return replace(prompt, soft=soft if isinstance(soft, Tensor) else None)

    def action_ids(self, action: str) -> tuple[int, ...]:
        return (*self.encoder.ids(action), self.end_id)

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt."""
        raise NotImplementedError

    def action_logprobs(self, candidate_logprobs: Tensor) -> Tensor:
        """Give log-probabilities (C,) of C admissible actions at this executor's temperature."""
        return (candidate_logprobs / (self.temperature or 1.0)).log_softmax(0)

    def _decided(self, requests: Sequence[ExecutorRequest], generate: Generate) -> list[Action]:
        """By likelihood where `mode` is choice and every request enumerates its commands; else what `generate` says."""
        prompts = [self.encode(request) for request in requests]
        by_choice = self.mode == "choice" and all(request.admissible for request in requests)
        for request, prompt in zip(requests, prompts, strict=True):
            self._check_context(prompt, request.admissible or () if by_choice else ())
        if by_choice:
            scores = self.candidate_logprobs(prompts, [request.admissible or () for request in requests])
            return [self._chosen(*row) for row in zip(requests, prompts, scores, strict=True)]
        rows = zip(requests, prompts, generate(prompts), strict=True)
        return [self._grounded(request, prompt, *answer) for request, prompt, answer in rows]

    def _check_context(self, prompt: Prompt, candidates: Sequence[str]) -> None:
        """Raises: ContextLengthError, where an answer or a candidate does not fit behind the prompt."""
        room = max((len(name.encode()) + 3 for name in candidates), default=self.max_new_tokens)
        if candidates and self.context is not None and len(prompt.ids) + room > self.context:
            # Bytes were a bound that is cheap. Behind a candidate vLLM has to be asked for one more token.
            room = 1 + max(len(self.action_ids(name)) for name in candidates)
        check_context("executor", len(prompt.ids), room, self.context)

    def _chosen(self, request: ExecutorRequest, prompt: Prompt, candidate_logprobs: Tensor) -> Action:
        drawn: dict[str, Any] = {}
        if self.temperature:
            logprobs = self.action_logprobs(candidate_logprobs.float().cpu())
            at = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
            drawn = {"prompt": prompt, "logprob": float(logprobs[at])}
        else:
            at = int(candidate_logprobs.argmax())
        action = (request.admissible or ())[at]
        return Action(
            action, Grounding.CHOICE, action, prompt.ids, len(prompt.ids), len(self.action_ids(action)), chosen=at,
            **drawn,
        )  # fmt: skip

    def _grounded(self, request: ExecutorRequest, prompt: Prompt, ids: list[int], cached: int | None = None) -> Action:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        grounded = ground(text, request.admissible)
        return Action(grounded.action, grounded.how, text, prompt.ids, len(prompt.ids), len(ids), cached)
