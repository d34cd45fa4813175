"""The frozen executor served by vLLM: text and soft tokens in one prompt, actions as `executor.frozen` decides on them.

A prompt with soft tokens is token ids with embeddings in the places of the placeholders; the prefix cache goes by both.
Text models only: with an image, vLLM takes soft tokens by other means (as parts of chat messages), and ids with
embeddings and pictures together are misread without an error.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from compiler.vllm_extension import llm_class, run
from executor.frozen import Action, ExecutorPrompt, TokenExecutor
from executor.prompt import ExecutorRequest

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


class VllmExecutor(TokenExecutor):
    """A backend of the protocol `executor.frozen.Executor`. Where commands are enumerated, `mode` says how it acts:

    choice    the most likely command, exactly as the Hugging Face backend chooses: every command is scored behind the
              prompt, which the prefix cache holds (one short request for each command)
    guided    greedy decoding that is held to the commands (one request): cheaper, but token by token, so that it may
              begin with a likely word whose commands are all less likely than another
    generate  free greedy text, grounded afterwards

    Args:
        llm: an engine made by `load`, or with the settings of `engine_settings`.
        weights: the model's folder, for `hash` and `embedding_table`.

    Raises:
        ValueError: a vision-language model.
    """

    def __init__(
        self, llm: LLM, tokenizer: Any, weights: Path, mode: Literal["choice", "guided", "generate"] = "choice",
        instructions: str = "", max_new_tokens: int = 64, memory_token: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, instructions, memory_token)
        if llm.model_config.is_multimodal_model:
            raise ValueError("this backend takes text models: vLLM reads soft tokens beside images by other means")
        self.llm, self.weights, self.mode, self.max_new_tokens = llm, weights, mode, max_new_tokens

    @classmethod
    def load(
        cls, name: str | Path, dtype: Any = "bfloat16", engine: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> VllmExecutor:
        """An engine of its own for any Hugging Face name or folder.

        Args:
            engine: further arguments of `vllm.LLM`, such as gpu_memory_utilization or max_model_len.
            kwargs: of the constructor.

        Raises:
            RuntimeError: vLLM is not installed.
        """
        from huggingface_hub import snapshot_download
        from transformers import AutoTokenizer

        LLM = llm_class()
        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(str(name)))
        llm = LLM(model=str(folder), dtype=dtype, **{**engine_settings(), **(engine or {})})
        return cls(llm, AutoTokenizer.from_pretrained(folder), folder, **kwargs)

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """(V, d), read from the model's files.

        Raises:
            ValueError: none of them holds it.
        """
        from safetensors import safe_open

        for path in self._files():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name.endswith("embed_tokens.weight"):
                        return file.get_tensor(name)
        raise ValueError(f"no input embeddings (embed_tokens.weight) in the safetensors files of {self.weights}")

    def hash(self) -> str:
        """SHA-256 over the model's files: the engine's own copy is one that nothing here can write."""
        digest = hashlib.sha256()
        for path in self._files():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        return sorted(self.weights.glob("*.safetensors"))

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        """One action per request, in order.

        Raises:
            ValueError: a prompt leaves no room for an action, or soft tokens were made for another executor.
        """
        if not requests:
            return []
        prompts = [self.encode(request) for request in requests]
        if self.mode == "choice" and all(request.admissible for request in requests):
            scores = self.likelihoods(prompts, [request.admissible or () for request in requests])
            return [self._chosen(*row) for row in zip(requests, prompts, scores, strict=True)]
        answers = self._generate(prompts, [request.admissible for request in requests])
        return [self._grounded(*row) for row in zip(requests, prompts, answers, strict=True)]

    def _generate(
        self, prompts: Sequence[ExecutorPrompt], admissible: Sequence[Sequence[str] | None]
    ) -> list[list[int]]:
        """Greedy answers (ids without the end token)."""
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
        outputs = self._run([self._request(prompt, room=self.max_new_tokens) for prompt in prompts], params)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return [ids[:-1] if ids[-1] == self.end_id else ids for ids in answers]

    def likelihoods(self, prompts: Sequence[ExecutorPrompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt."""
        actions = [self.action_ids(name) for names in candidates for name in names]
        rows = [prompt for prompt, names in zip(prompts, candidates, strict=True) for _ in names]
        requests = [self._request(prompt, ids, room=1) for prompt, ids in zip(rows, actions, strict=True)]
        scores = self._scores(requests, actions, past_cache=False)
        # The cache may hold part of a command that was scored before, and nothing is computed for that part.
        short = [i for i, score in enumerate(scores) if score is None]
        again = self._scores([requests[i] for i in short], [actions[i] for i in short], past_cache=True)
        for i, score in zip(short, again, strict=True):
            scores[i] = score
        flat = torch.tensor([score for score in scores if score is not None])
        return list(flat.split([len(names) for names in candidates]))

    def _scores(
        self, requests: Sequence[dict[str, Any]], actions: Sequence[Sequence[int]], past_cache: bool
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

    def _request(self, prompt: ExecutorPrompt, then: Sequence[int] = (), room: int = 0) -> dict[str, Any]:
        """Prompt and `then` for vLLM; `room` is how many tokens it may add."""
        ids = [*prompt.ids, *then]
        if len(ids) + room > self.llm.model_config.max_model_len:
            raise ValueError(
                f"the executor's prompt has {len(prompt.ids)} tokens and leaves no room for {len(then) + room} more: "
                "raise max_model_len, or give it less memory"
            )
        if prompt.soft is None:
            return {"prompt_token_ids": ids}
        config = self.llm.model_config
        if prompt.soft.shape[1] != config.get_hidden_size():
            raise ValueError(f"soft tokens of {prompt.soft.shape[1]} dimensions, not {config.get_hidden_size()}")
        is_soft = torch.zeros(len(ids), dtype=torch.bool)
        is_soft[: len(prompt.ids)] = torch.tensor(prompt.ids) == self.placeholder
        embeddings = torch.zeros(len(ids), prompt.soft.shape[1], dtype=config.dtype)
        embeddings[is_soft] = prompt.soft.to("cpu", config.dtype)
        return {
            "prompt_token_ids": ids, "prompt_embeds": embeddings, "prompt_is_token_ids": (~is_soft).tolist(),
        }  # fmt: skip

    def _run(self, requests: Sequence[dict[str, Any]], params: Sequence[Any]) -> list[RequestOutput]:
        return run(self.llm, requests, params)


def engine_settings() -> dict[str, Any]:
    """What this backend asks of `vllm.LLM`, beyond model and dtype."""
    return {"enable_prompt_embeds": True, "enable_prefix_caching": True, "generation_config": "vllm"}


def _tail_score(output: RequestOutput, ids: Sequence[int]) -> float | None:
    total = len(output.prompt_token_ids or ())
    if (output.num_cached_tokens or 0) > total - len(ids) - 1:  # the token before an id predicts it
        return None
    every: Any = output.prompt_logprobs
    rows = every[-len(ids) :]
    return sum(row[id].logprob for row, id in zip(rows, ids, strict=True))
