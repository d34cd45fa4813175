"""Base class of executors with a local or served model: prompts as token ids, and actions from scores or answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.models import ExecutorMode
from envs.spec import ExecutorInstructions
from executor.decoding import CommandWalk
from executor.prompt import ExecutorRequest, Rules, executor_chat, rules_of
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding, ground
from lm.prompt import Prompt, PromptEncoder, check_context
from lm.reply_cleaning import clean_reply

DROPPED = 4  # past turns that a prompt leaves out at a time


class Answer(NamedTuple):
    """What a model wrote.

    Attributes:
        cached: tokens of the prompt that a cache held; None: unknown.
        logprob: log-probability of an answer that was drawn; None: the likeliest tokens were taken.
    """

    ids: list[int]
    cached: int | None = None
    logprob: float | None = None


class TokenExecutor:
    """Encodes requests and chooses actions. Subclasses score candidates and generate.

    `mode` selects how it acts on admissible commands:

    choice       choose by likelihood, exact on every backend
    constrained  decode token by token, held to the tokens of a command (`executor.decoding`), the same on every
                 backend. Cheaper, but a likely first word may lead to commands that are all less likely than another
                 one
    generate     decode greedily without constraint, and ground the text

    Args:
        images: False hides pictures from a model that could see them.
        temperature: of the choice among admissible commands, or of each token that continues one in mode constrained;
            0 takes the likeliest.
        reads: inputs that `agent.records.executor_request` puts into its requests.
    """

    accepts_soft, takes_seeds = True, True
    context: int | None = None  # context length of the model in tokens; None if unknown
    mode: ExecutorMode = "choice"

    def __init__(
        self,
        encoder: PromptEncoder,
        instructions: Rules = "",
        max_new_tokens: int = 64,
        images: bool = True,
        temperature: float = 0.0,
        reads: ExecutorView = PAPER_VIEW,
    ) -> None:
        self.encoder, self.tokenizer, self.instructions = encoder, encoder.tokenizer, instructions
        self.placeholder, self.end_id = encoder.memory_id, encoder.end_id
        self.placeholder_text = self.tokenizer.convert_ids_to_tokens(self.placeholder)
        self.sees_images, self.max_new_tokens = encoder.is_vlm and images, max_new_tokens
        self.temperature, self.generator = temperature, torch.Generator().manual_seed(0)
        self.reads = reads

    def rules(self, request: ExecutorRequest) -> ExecutorInstructions:
        """Return the instructions of the request's environment, and whether its commands are listed below them."""
        return rules_of(self.instructions, request.environment, self.reads.commands)

    def encode(self, request: ExecutorRequest) -> Prompt:
        """Encode a request, without its picture if the executor does not see.

        In context `turns`, a prompt beyond `reads.context_tokens` or the model's context leaves out the oldest turns,
        whole, `DROPPED` at a time, so that the rest stays a prefix of later prompts for some steps. Instructions,
        pasted memory, goal with the first view, and the newest turn always stay."""
        shown = request if self.sees_images else replace(request, image=None)
        bounds = [self.reads.context_tokens, self.context and self.context - self.max_new_tokens]
        most, last = min((bound for bound in bounds if bound), default=None), len(request.past) - 1
        prompt = self._encode(shown)
        while most is not None and len(prompt.ids) > most and shown.dropped < last:
            shown = replace(shown, dropped=min(shown.dropped + DROPPED, last))
            prompt = self._encode(shown)
        return replace(prompt, turns_dropped=shown.dropped)

    def _encode(self, request: ExecutorRequest) -> Prompt:
        prompt = self.encoder.encode_chat(executor_chat(request, *self.rules(request)))
        if prompt.ids.count(self.placeholder) != request.n_soft:  # ordinary text produces the token
            raise ValueError(f"ordinary text contains the memory token {self.placeholder_text}: set memory_token")
        soft = [block.soft for block in request.blocks if isinstance(block.soft, Tensor)]
        return replace(prompt, soft=torch.cat(soft) if soft else None)

    def action_ids(self, action: str) -> tuple[int, ...]:
        """Tokenise an action with its end of turn."""
        return (*self.encoder.ids(action), self.end_id)

    def act(self, requests: Sequence[ExecutorRequest], seeds: Sequence[int] | None = None) -> list[Action]:
        """Return one action per request, in order: chosen by likelihood if `mode` is choice and every request lists its
        commands, else decoded.

        Args:
            seeds: draw each action by a generator with its seed, instead of by the one of all requests.

        Raises:
            ValueError: a prompt leaves no room for an action, or the backend cannot read it.
            RuntimeError: the backend's engine or server failed.
        """
        prompts, admissible = [self.encode(request) for request in requests], [r.admissible for r in requests]
        by_choice = self.mode == "choice" and all(admissible)
        for prompt, names in zip(prompts, admissible, strict=True):
            self._check_context(prompt, names or () if by_choice or self.mode == "constrained" else ())
        if not requests:
            return []
        if by_choice:
            cached = self.cached_tokens(prompts)
            # One copy from the device: each copy synchronises it.
            found = torch.cat(self.candidate_logprobs(prompts, [names or () for names in admissible])).float().cpu()
            scores = found.split([len(names or ()) for names in admissible])
            own = [torch.Generator().manual_seed(seed) for seed in seeds or ()] or [self.generator] * len(requests)
            return [self._chosen(*row) for row in zip(admissible, prompts, scores, cached, own, strict=True)]
        if self.temperature and seeds is None:
            seeds = torch.randint(2**62, (len(requests),), generator=self.generator).tolist()
        answers = self.generate(prompts, admissible, seeds if self.temperature else None)
        return [self._grounded(*row) for row in zip(admissible, prompts, answers, strict=True)]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return log p(candidate, end of turn | prompt) of every candidate of every prompt."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> Sequence[Answer]:
        """Decode greedily, held to the commands if `mode` is constrained; with seeds, draw these commands."""
        raise NotImplementedError

    def cached_tokens(self, prompts: Sequence[Prompt]) -> Sequence[int | None]:
        """Return how many tokens of each prompt a cache holds before it is scored; None if unknown."""
        return [None] * len(prompts)

    def _held(self, admissible: Sequence[Sequence[str] | None], seeds: Sequence[int] | None) -> dict[int, CommandWalk]:
        """Return the walks of the requests, by index, whose answers are held to their commands."""
        if self.mode != "constrained":
            return {}
        return {
            i: CommandWalk(
                [self.action_ids(name) for name in names],
                None if seeds is None else torch.Generator().manual_seed(seeds[i]),
            )
            for i, names in enumerate(admissible)
            if names
        }

    def choice_logprobs(self, scores: Tensor) -> Tensor:
        """Return log-probabilities (..., C) of C choices with these logits, at this executor's temperature."""
        return (scores.float() / (self.temperature or 1.0)).log_softmax(-1)

    def _check_context(self, prompt: Prompt, candidates: Sequence[str]) -> None:
        """Raise ContextLengthError if an answer or a candidate does not fit behind the prompt."""
        room = max((len(name.encode()) + 3 for name in candidates), default=self.max_new_tokens)
        if candidates and self.context is not None and len(prompt.ids) + room > self.context:
            # The bound by bytes is exceeded: count tokens, and one that vLLM generates behind a candidate.
            room = 1 + max(len(self.action_ids(name)) for name in candidates)
        check_context("executor", len(prompt.ids), room, self.context)

    def _chosen(
        self,
        candidates: Sequence[str] | None,
        prompt: Prompt,
        candidate_logprobs: Tensor,
        cached: int | None,
        generator: torch.Generator,
    ) -> Action:
        drawn: dict[str, Any] = {}
        if self.temperature:
            logprobs = self.choice_logprobs(candidate_logprobs)
            at = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            drawn = {"prompt": prompt, "logprob": float(logprobs[at])}
        else:
            at = int(candidate_logprobs.argmax())
        action, ids = (candidates or ())[at], prompt.ids
        written, sure = len(self.action_ids(action)), float(candidate_logprobs.softmax(0).max())
        return Action(
            action,
            Grounding.CHOICE,
            text=action,
            prompt_ids=ids,
            tokens_in=len(ids),
            tokens_out=written,
            tokens_cached=cached,
            chosen=at,
            confidence=sure,
            turns_dropped=prompt.turns_dropped,
            **drawn,
        )

    def _grounded(self, candidates: Sequence[str] | None, prompt: Prompt, answer: Answer) -> Action:
        written, cached, logprob = answer
        drawn: dict[str, Any] = {} if logprob is None else {"prompt": prompt, "logprob": logprob}
        if self.mode == "constrained" and candidates:
            at = [self.action_ids(name) for name in candidates].index(tuple(written))
            return Action(
                candidates[at],
                Grounding.CHOICE,
                text=candidates[at],
                prompt_ids=prompt.ids,
                tokens_in=len(prompt.ids),
                tokens_out=len(written),
                tokens_cached=cached,
                chosen=at,
                turns_dropped=prompt.turns_dropped,
                **drawn,
            )
        ids = written[: written.index(self.end_id)] if self.end_id in written else written
        text = clean_reply(self.tokenizer.decode(ids, skip_special_tokens=True))
        return Action(
            *ground(text, candidates),
            text=text,
            prompt_ids=prompt.ids,
            tokens_in=len(prompt.ids),
            tokens_out=len(ids),
            tokens_cached=cached,
            turns_dropped=prompt.turns_dropped,
        )
