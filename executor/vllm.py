"""The frozen executor served by vLLM: text and soft tokens in one prompt, actions as `executor.hf` decides on them.

A prompt with soft tokens is token ids with embeddings in the places of the placeholders; the prefix cache goes by both.
Ids, such embeddings and a picture together are misread by vLLM without an error. Beside a picture, soft tokens enter
another way: as what vLLM makes of the parts of a chat message (text, `prompt_embeds`, image) before it reads them, so
that this prompt, too, goes in as ids. What vLLM says it has read is compared with ours at every request.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest
from executor.records import Action
from lm.loading import input_embeddings, load_encoder
from lm.prompt import Prompt, PromptEncoder
from lm.vllm import SETTINGS, check_read, load_engine, request_of, run

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

SOFT_PARTS = "_prompt_embeds"  # where vLLM 0.31 keeps a chat message's `prompt_embeds` until the pictures are read


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as vLLM takes it, and the ids that the model must read."""

    ids: tuple[int, ...]
    request: dict[str, Any]


class VllmExecutor(TokenExecutor):
    """A backend of the protocol `executor.records.Executor`. Where commands are enumerated, `mode` says how it acts:

    choice    the most likely command, exactly as the Hugging Face backend chooses: every command is scored behind the
              prompt, which the prefix cache holds (one short request for each command)
    guided    greedy decoding that is held to the commands (one request): cheaper, but token by token, so that it may
              begin with a likely word whose commands are all less likely than another
    generate  free greedy text, grounded afterwards

    Args:
        llm: an engine made by `load`, or with the settings of `engine_settings`.
        weights: the model's folder, for `hash` and `embedding_table`.

    Raises:
        ValueError: pictures for a text model.
    """

    def __init__(
        self, llm: LLM, encoder: PromptEncoder, weights: Path, mode: Literal["choice", "guided", "generate"] = "choice",
        instructions: str = "", max_new_tokens: int = 64, images: bool = True, temperature: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(encoder, instructions, max_new_tokens, images, temperature)
        if self.sees_images and not llm.model_config.is_multimodal_model:
            raise ValueError("the engine's model takes text only: give it a tokenizer, or images=False")
        self.llm, self.weights, self.mode = llm, weights, mode
        self.context = llm.model_config.max_model_len

    @classmethod
    def load(
        cls, name: str | Path, dtype: Any = "bfloat16", memory_token: str = "auto",
        engine: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> VllmExecutor:  # fmt: skip
        """An engine of its own for any Hugging Face name or folder.

        Args:
            engine: further arguments of `vllm.LLM`, such as gpu_memory_utilization or max_model_len.
            kwargs: of the constructor.

        Raises:
            RuntimeError: vLLM is not installed.
        """
        from huggingface_hub import snapshot_download

        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(str(name)))
        llm = load_engine(folder, dtype, engine_settings(), engine)
        return cls(llm, load_encoder(folder, memory_token), folder, **kwargs)

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """(V, d), read from the model's files.

        Raises:
            ValueError: none of them holds it.
        """
        return input_embeddings(self.weights)

    def hash(self) -> str:
        """SHA-256 over the model's files: the engine's own copy is one that nothing here can write."""
        digest = hashlib.sha256()
        for path in sorted(self.weights.glob("*.safetensors")):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        """One action per request, in order.

        Raises:
            ValueError: a prompt leaves no room for an action, soft tokens were made for another executor, or vLLM reads
                a prompt (its picture) as other tokens than the Hugging Face backend does.
            RuntimeError: the engine failed, or is of a version that takes soft tokens beside pictures in another way.
        """
        if not requests:
            return []
        admissible = [request.admissible for request in requests]
        return self._decided(requests, lambda prompts: self._generate(prompts, admissible))

    def _generate(
        self, prompts: Sequence[Prompt], admissible: Sequence[Sequence[str] | None]
    ) -> list[tuple[list[int], int]]:
        """Greedy answers (ids without the end token), and how many of the prompt's tokens were in the prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = [
            SamplingParams(
                temperature=0.0, max_tokens=self.max_new_tokens, stop_token_ids=[self.end_id], ignore_eos=True,
                detokenize=False,
                structured_outputs=StructuredOutputsParams(choice=list(names))
                if self.mode == "guided" and names else None,
            )
            for names in admissible
        ]  # fmt: skip
        outputs = self._run([self._request(prompt) for prompt in prompts], params)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        cached = [output.num_cached_tokens or 0 for output in outputs]
        return [(ids[:-1] if ids[-1] == self.end_id else ids, n) for ids, n in zip(answers, cached, strict=True)]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt."""
        actions = [self.action_ids(name) for names in candidates for name in names]
        rows = [prompt for prompt, names in zip(prompts, candidates, strict=True) for _ in names]
        requests = [self._request(prompt, ids) for prompt, ids in zip(rows, actions, strict=True)]
        scores = self._scores(requests, actions, past_cache=False)
        # The cache may hold part of a command that was scored before, and nothing is computed for that part.
        short = [i for i, score in enumerate(scores) if score is None]
        again = self._scores([requests[i] for i in short], [actions[i] for i in short], past_cache=True)
        for i, score in zip(short, again, strict=True):
            scores[i] = score
        flat = torch.tensor([score for score in scores if score is not None])
        return list(flat.split([len(names) for names in candidates]))

    def _scores(
        self, requests: Sequence[_Asked], actions: Sequence[Sequence[int]], past_cache: bool
    ) -> list[float | None]:
        """Log-probability of the last tokens of each request, `actions`; None where the prefix cache held some."""
        from vllm import SamplingParams

        if not requests:
            return []
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=past_cache, detokenize=False
        )
        outputs = self._run(requests, [params] * len(requests))
        return [_tail_score(output, ids) for output, ids in zip(outputs, actions, strict=True)]

    def _request(self, prompt: Prompt, then: Sequence[int] = ()) -> _Asked:
        """Prompt and `then` for vLLM."""
        ids = (*prompt.ids, *then)
        config = self.llm.model_config
        if prompt.soft is not None and prompt.soft.shape[1] != config.get_hidden_size():
            raise ValueError(f"soft tokens of {prompt.soft.shape[1]} dimensions, not {config.get_hidden_size()}")
        soft = None if prompt.soft is None else prompt.soft.to("cpu", config.dtype)
        if soft is None:
            return _Asked(ids, request_of(self.encoder, prompt, then))
        if prompt.images:  # they and the soft tokens hold one place each: vLLM makes room for them itself
            folded = [*self.encoder.folded(prompt.ids, soft=True), *then]
            pictures = {"multi_modal_data": {"image": list(prompt.images)}}
            return _Asked(ids, {"prompt_token_ids": folded, **pictures, SOFT_PARTS: ([soft], self.placeholder)})
        is_soft = torch.tensor(ids) == self.placeholder
        is_soft[len(prompt.ids) :] = False
        embeddings = torch.zeros(len(ids), soft.shape[1], dtype=config.dtype)
        embeddings[is_soft] = soft
        mixed = {"prompt_embeds": embeddings, "prompt_is_token_ids": (~is_soft).tolist()}
        return _Asked(ids, {"prompt_token_ids": list(ids), **mixed})

    def _run(self, requests: Sequence[_Asked], params: Sequence[Any]) -> list[RequestOutput]:
        sent = [dict(asked.request) for asked in requests]  # copies: vLLM takes out and expands what it has read
        outputs = run(self.llm, sent, params)
        if any(SOFT_PARTS in request for request in sent):
            raise RuntimeError("this version of vLLM takes soft tokens beside pictures in another way: use 0.31")
        check_read(outputs, [asked.ids for asked in requests])
        return outputs


def engine_settings() -> dict[str, Any]:
    """What this backend asks of `vllm.LLM`, beyond model and dtype."""
    return {**SETTINGS, "enable_prompt_embeds": True}


def _tail_score(output: RequestOutput, ids: Sequence[int]) -> float | None:
    total = len(output.prompt_token_ids or ())
    if (output.num_cached_tokens or 0) > total - len(ids) - 1:  # the token before an id predicts it
        return None
    every: Any = output.prompt_logprobs
    rows = every[-len(ids) :]
    return sum(row[id].logprob for row, id in zip(rows, ids, strict=True))
