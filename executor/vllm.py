"""The frozen executor in vLLM: text and soft tokens in one prompt, with the same actions as `executor.hf`.

A prompt with soft tokens is token ids, with embeddings at the placeholders; the prefix cache is keyed by both. vLLM
silently misreads ids with such embeddings beside a picture. Beside a picture, soft tokens therefore enter in the form
that vLLM converts a chat message's parts (text, `prompt_embeds`, image) to, still with the prompt as ids. Every request
compares the ids that vLLM has read with ours.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from configs.models import ExecutorMode
from executor.base import Answer, TokenExecutor
from executor.decoding import CommandWalk, follow
from executor.prompt import Rules
from executor.records import PAPER_VIEW, ExecutorView
from lm.backbone import input_embeddings
from lm.engine_loop import EngineLoop
from lm.prompt import Prompt, PromptEncoder
from lm.vllm import SETTINGS, check_prompt_ids, sampling_arguments, token_logprobs, vllm_request

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

SOFT_PARTS = "_prompt_embeds"  # key of a chat message's `prompt_embeds` in vLLM 0.31
COMMANDS = "memcompiler_commands"  # key in `SamplingParams.extra_args`: token ids of the commands, with their ends
HELD = "executor.vllm_commands:HeldToCommands"
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


class _VllmRequest(NamedTuple):
    """A request for vLLM, and the ids that the model must read."""

    ids: tuple[int, ...]
    request: dict[str, Any]


class VllmExecutor(TokenExecutor):
    """A `TokenExecutor`, which documents `mode`. Mode `choice` scores each command by one short request behind the
    prompt, which the prefix cache holds. Thread-safe: calls of several threads share the engine's batches.

    Args:
        llm: an engine with the settings of `engine_settings`.
        weights: the model's folder, for `hash` and `embedding_table`.

    Raises:
        ValueError: pictures for a text model.
    """

    concurrent = True

    def __init__(
        self,
        llm: LLM,
        encoder: PromptEncoder,
        weights: Path,
        mode: ExecutorMode = "choice",
        instructions: Rules = "",
        max_new_tokens: int = 64,
        images: bool = True,
        temperature: float = 0.0,
        reads: ExecutorView = PAPER_VIEW,
    ) -> None:
        super().__init__(
            encoder,
            instructions=instructions,
            max_new_tokens=max_new_tokens,
            images=images,
            temperature=temperature,
            reads=reads,
        )
        if self.sees_images and not llm.model_config.is_multimodal_model:
            raise ValueError("the engine's model takes text only: give it a tokenizer, or images=False")
        self.llm, self.weights, self.mode, self.loop = llm, weights, mode, EngineLoop.of(llm)
        self.holds = bool(llm.model_config.logits_processors)  # it decodes commands itself
        self.context = llm.model_config.max_model_len

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """Read the table (V, d) from the model's files. Raises: ValueError, if no file holds it."""
        return input_embeddings(self.weights)

    def hash(self) -> str:
        """Return the SHA-256 of the model's files, since nothing here can write the engine's weights."""
        digest = hashlib.sha256()
        for path in sorted(self.weights.glob("*.safetensors")):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()

    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> list[Answer]:
        from vllm import SamplingParams

        walks = self._held(admissible, seeds)
        free = [prompt for i, prompt in enumerate(prompts) if i not in walks]
        params = SamplingParams(max_tokens=self.max_new_tokens, stop_token_ids=[self.end_id], **_GREEDY)
        outputs = self._run([self._request(prompt) for prompt in free], [params] * len(free)) if free else []
        decoded = iter([Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs])
        held = self._decode_held(prompts, walks) if self.holds else self._follow(prompts, walks)
        return [held[i] if i in walks else next(decoded) for i in range(len(prompts))]

    def _decode_held(self, prompts: Sequence[Prompt], walks: Mapping[int, CommandWalk]) -> dict[int, Answer]:
        """Decode commands in the engine, one request each. Raises: RuntimeError, if it writes another one."""
        from vllm import SamplingParams

        several = {i: walk for i, walk in walks.items() if not walk.done}
        params = [
            SamplingParams(
                max_tokens=max(map(len, walk.commands)),
                stop_token_ids=[self.end_id],
                extra_args={COMMANDS: walk.commands},
                **self._drawing(walk),
            )
            for walk in several.values()
        ]
        outputs = self._run([self._request(prompts[i]) for i in several], params)
        made = {i: Answer(list(walk.path), None, walk.logprob) for i, walk in walks.items() if walk.done}
        for (i, walk), output in zip(several.items(), outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            if tuple(ids) not in walk.commands:
                raise RuntimeError(f"tokens {ids} are no listed command: the engine ignores what is allowed")
            made[i] = Answer(ids, output.num_cached_tokens or 0, _drawn_logprob(output))
        return made

    def _drawing(self, walk: CommandWalk) -> dict[str, Any]:
        """Return vLLM's settings of drawing a walk's tokens, or of taking the likeliest."""
        if walk.generator is None:
            return _GREEDY
        seed = int(torch.randint(2**31, (1,), generator=walk.generator))
        return {**_GREEDY, "temperature": self.temperature, "seed": seed, "logprobs": 0}

    def _follow(self, prompts: Sequence[Prompt], walks: Mapping[int, CommandWalk]) -> dict[int, Answer]:
        """Ask for one token at each branch of the commands' trees, all prompts at a time; the prefix cache holds the
        rest. The tokens that it held of a prompt are those at the first branch."""
        from vllm import SamplingParams

        rows, cached = list(walks), dict[int, int]()

        def choose(unfinished: list[int]) -> list[int]:
            at = [rows[k] for k in unfinished]
            params = [
                SamplingParams(max_tokens=1, allowed_token_ids=list(walks[i].allowed), **self._drawing(walks[i]))
                for i in at
            ]
            outputs = self._run([self._request(prompts[i], walks[i].path) for i in at], params)
            for i, output in zip(at, outputs, strict=True):
                cached.setdefault(i, min(output.num_cached_tokens or 0, len(prompts[i].ids)))
                if (drawn := _drawn_logprob(output)) is not None:
                    walks[i].logprob = (walks[i].logprob or 0.0) + drawn
            return [output.outputs[0].token_ids[0] for output in outputs]

        follow([walks[i] for i in rows], choose)
        return {i: Answer(list(walk.path), cached.get(i), walk.logprob) for i, walk in walks.items()}

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        actions = [self.action_ids(name) for names in candidates for name in names]
        rows = [prompt for prompt, names in zip(prompts, candidates, strict=True) for _ in names]
        requests = [self._request(prompt, ids) for prompt, ids in zip(rows, actions, strict=True)]
        scores = self._scores(requests, actions, past_cache=False)
        # Nothing is computed for the part of a repeated command that the cache holds: score it again, past the cache.
        short = [i for i, score in enumerate(scores) if score is None]
        again = self._scores([requests[i] for i in short], [actions[i] for i in short], past_cache=True)
        for i, score in zip(short, again, strict=True):
            scores[i] = score
        flat = torch.tensor([score for score in scores if score is not None])
        return list(flat.split([len(names) for names in candidates]))

    def _scores(
        self, requests: Sequence[_VllmRequest], actions: Sequence[Sequence[int]], past_cache: bool
    ) -> list[float | None]:
        """Score each request's last tokens, `actions`; None where the prefix cache held some of them."""
        from vllm import SamplingParams

        if not requests:
            return []
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=past_cache, detokenize=False
        )
        outputs = self._run(requests, [params] * len(requests))
        return [_tail_score(output, ids) for output, ids in zip(outputs, actions, strict=True)]

    def _request(self, prompt: Prompt, then: Sequence[int] = ()) -> _VllmRequest:
        """Write prompt and continuation for vLLM."""
        ids, config = (*prompt.ids, *then), self.llm.model_config
        if prompt.soft is None:
            return _VllmRequest(ids, vllm_request(self.encoder, prompt, then))
        if prompt.soft.shape[1] != config.get_hidden_size():
            raise ValueError(f"soft tokens of {prompt.soft.shape[1]} dimensions, not {config.get_hidden_size()}")
        soft = prompt.soft.to("cpu", config.dtype)
        if prompt.images:  # vLLM expands the one place of each picture and of the soft tokens
            if sum(a == self.placeholder != b for a, b in itertools.pairwise(ids)) > 1:
                raise ValueError("vLLM takes soft tokens of one turn beside a picture: executor.past_soft=dropped")
            folded = [*self.encoder.collapse_placeholders(prompt.ids, soft=True), *then]
            pictures = {"multi_modal_data": {"image": list(prompt.images)}}
            return _VllmRequest(ids, {"prompt_token_ids": folded, **pictures, SOFT_PARTS: ([soft], self.placeholder)})
        is_soft = torch.tensor(ids) == self.placeholder
        is_soft[len(prompt.ids) :] = False
        embeddings = torch.zeros(len(ids), soft.shape[1], dtype=config.dtype)
        embeddings[is_soft] = soft
        mixed = {"prompt_embeds": embeddings, "prompt_is_token_ids": (~is_soft).tolist()}
        return _VllmRequest(ids, {"prompt_token_ids": list(ids), **mixed})

    def _run(self, requests: Sequence[_VllmRequest], params: Sequence[Any]) -> list[RequestOutput]:
        sent = [dict(r.request) for r in requests]  # copies, since vLLM changes them
        outputs = [output for output in self.loop.run(sent, params) if output is not None]
        if any(SOFT_PARTS in request for request in sent):
            raise RuntimeError("this version of vLLM does not take soft tokens beside pictures: use 0.31")
        check_prompt_ids(outputs, [r.ids for r in requests])
        return outputs


def engine_settings(draws: bool = False) -> dict[str, Any]:
    """Return this backend's settings of `vllm.LLM` beyond model and dtype, for an executor that draws or does not."""
    from vllm.platforms import current_platform

    held = {"logits_processors": [HELD]} if current_platform.is_cpu() else {}  # of the runner that is used on CPU
    return {**SETTINGS, "enable_prompt_embeds": True, **held, **(sampling_arguments() if draws else {})}


def _drawn_logprob(output: RequestOutput) -> float | None:
    """Return the log-probability of an answer's tokens, if it was asked for."""
    written = output.outputs[0]
    return None if written.logprobs is None else sum(token_logprobs(written.logprobs, written.token_ids))


def _tail_score(output: RequestOutput, ids: Sequence[int]) -> float | None:
    total = len(output.prompt_token_ids or ())
    if (output.num_cached_tokens or 0) > total - len(ids) - 1:  # the token before an id predicts it
        return None
    every: Any = output.prompt_logprobs
    return sum(token_logprobs(every[-len(ids) :], ids))
