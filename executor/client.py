"""The frozen executor behind a vLLM OpenAI server: acts as `executor.hf` does.

How prompts travel (vLLM 0.31):
- of text alone, as token ids over /v1/completions;
- with soft tokens or a picture, as the parts of one chat message: text, `prompt_embeds`, text, and the picture as a PNG
  wherever it likes, for its place is the image token in the text. A server that `memcompiler serve executor` starts has
  a chat template that adds nothing, so that the texts are the prompt. The server tokenises them itself and says what it
  has read, a pad for each patch of the picture included: anything but our own ids is refused, never used.
  (/v1/completions takes embeddings, too, but of whole prompts only: 100 times the bytes at the paper's size.)

How commands are scored: neither way returns prompt log-probabilities from a prefix cache, and embeddings exclude them.
So each node of the commands' prefix tree is one request: prompt and the command's first tokens, one token to generate,
and the log-probabilities there of exactly those tokens that continue a command (`logprob_token_ids`). The prompt is in
the prefix cache. The sums are the commands' exact log-probabilities, as the Hugging Face backend computes them.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from configs.models import EXECUTOR_KEY
from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest
from executor.records import Action
from lm.endpoint import content_part
from lm.loading import input_embeddings, load_encoder
from lm.prompt import Prompt
from memory.trajectory import png_bytes
from runtime.http import RefusedError, RemoteError, RemoteServer

_MOST_SCORED = 128  # vLLM's limit of logprob_token_ids
# Whatever the server's defaults are: the likeliest token.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class _Node:
    """The commands of prompt `row` that begin with `path` go on with one of `tokens`."""

    row: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]


class RemoteExecutor(TokenExecutor):
    """A backend of the protocol `executor.records.Executor`. Where commands are enumerated, `mode` says how it acts:

    choice    the most likely command, exactly as the Hugging Face backend chooses (one short request for each node of
              the commands' prefix tree)
    guided    greedy decoding that is held to the commands (one request): not always the most likely command
    generate  free greedy text, grounded afterwards

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        name: the model's Hugging Face name or folder: its tokenizer or processor, and its embedding table if that is
            asked for.
        dtype: in which soft tokens travel: the server's.
        images: False keeps pictures from a model that could see them.
        timeout: seconds that a request may take from when it is sent, retries included.

    Raises:
        RemoteError: no such server.
        ValueError: it serves another model.
    """

    def __init__(
        self, url: str, name: str | Path, dtype: torch.dtype = torch.bfloat16,
        mode: Literal["choice", "guided", "generate"] = "choice", instructions: str = "", max_new_tokens: int = 64,
        memory_token: str = "auto", timeout: float = 120.0, parallel: int = 64, images: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(load_encoder(name, memory_token), instructions, max_new_tokens, images)
        self.name, self.dtype, self.mode = str(name), dtype, mode
        start = f"memcompiler serve executor --model {name}"
        self.server = RemoteServer(url, EXECUTOR_KEY, start, timeout, parallel)
        served = {model["id"]: model for model in self.server.get("/v1/models")["data"]}
        found = served.get(self.name) or next((m for m in served.values() if m.get("root") == self.name), None)
        if found is None:
            raise ValueError(f"{self.server.url} serves {sorted(served)}, not {self.name}: start it by `{start}`")
        self.served_name, self.context = found["id"], found.get("max_model_len")

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """(V, d), read from the model's files, here (only the file that holds it is fetched).

        Raises:
            ValueError: none of them holds it.
        """
        return input_embeddings(self.name)

    def hash(self) -> str:
        """What is known of the server's weights from here: the name that they are served by."""
        return f"remote:{self.served_name}"

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        """One action per request, in order.

        Raises:
            RemoteError: the server cannot be reached, refuses a prompt, or read it as other tokens than ours.
            ValueError: a prompt leaves no room for an action.
        """
        if not requests:
            return []
        admissible = [request.admissible for request in requests]
        return self._decided(requests, lambda prompts: [(ids, None) for ids in self._generate(prompts, admissible)])

    def _generate(self, prompts: Sequence[Prompt], admissible: Sequence[Sequence[str] | None]) -> list[list[int]]:
        """Greedy answers (ids without the end token)."""
        settings = [
            {
                **_GREEDY, "max_tokens": self.max_new_tokens, "stop_token_ids": [self.end_id], "ignore_eos": True,
                **({"structured_outputs": {"choice": list(names)}} if self.mode == "guided" and names else {}),
            }
            for names in admissible
        ]  # fmt: skip
        answers = [answer["token_ids"] for answer in self._ask(prompts, [()] * len(prompts), settings)]
        return [ids[:-1] if ids and ids[-1] == self.end_id else ids for ids in answers]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt."""
        actions = [[self.action_ids(name) for name in names] for names in candidates]
        nodes = [node for row, ids in enumerate(actions) for node in _nodes(row, ids)]
        settings = [
            {**_GREEDY, "max_tokens": 1, "logprob_token_ids": node.tokens, "return_tokens_as_token_ids": True}
            for node in nodes
        ]
        answers = self._ask([prompts[node.row] for node in nodes], [node.path for node in nodes], settings)
        score = {
            (node.row, node.path, token): found[token]
            for node, answer in zip(nodes, answers, strict=True)
            for found in [_logprobs(answer)]
            for token in node.tokens
        }
        return [
            torch.tensor([sum(score[row, ids[:i], ids[i]] for i in range(len(ids))) for ids in every])
            for row, every in enumerate(actions)
        ]

    # -- the server ---------------------------------------------------------------------------------------------------

    def _ask(
        self, prompts: Sequence[Prompt], paths: Sequence[tuple[int, ...]], settings: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The server's one choice for each prompt, followed by its path."""
        asked = list(zip(prompts, paths, settings, strict=True))
        made: list[dict[str, Any]] = [{}] * len(asked)
        for path, of_parts in (("/v1/completions", False), ("/v1/chat/completions", True)):
            mine = [i for i, (prompt, _, _) in enumerate(asked) if _has_parts(prompt) == of_parts]
            bodies = [(self._chat if of_parts else self._completion)(*asked[i]) for i in mine]
            for i, answer in zip(mine, self.server.post_all(path, bodies) if mine else (), strict=True):
                made[i] = self._choice(answer, (*asked[i][0].ids, *asked[i][1]))
        return made

    def _completion(self, prompt: Prompt, path: tuple[int, ...], settings: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": 1} if "logprob_token_ids" in settings else {}
        return {"model": self.served_name, "prompt": [*prompt.ids, *path], **logprobs, **settings}

    def _chat(self, prompt: Prompt, path: tuple[int, ...], settings: dict[str, Any]) -> dict[str, Any]:
        parts = list(self._parts(prompt, [*prompt.ids, *path]))
        logprobs = {"logprobs": True} if "logprob_token_ids" in settings else {}
        return {
            "model": self.served_name, "messages": [{"role": "user", "content": parts}],
            "add_generation_prompt": False, **logprobs, **settings,
        }  # fmt: skip

    def _parts(self, prompt: Prompt, ids: list[int]) -> Iterator[dict[str, Any]]:
        """Text, soft tokens, text; and the picture, whose pads are one image token in the text."""
        if prompt.images:
            ids = self.encoder.folded(ids)
            yield from (content_part(png_bytes(image)) for image in prompt.images)
        if prompt.soft is None:
            yield content_part(self._text(ids))
            return
        first, n = ids.index(self.placeholder), len(prompt.soft)
        yield content_part(self._text(ids[:first]))
        yield {"type": "prompt_embeds", "data": _packed(prompt.soft.to("cpu", self.dtype))}
        yield content_part(self._text(ids[first + n :]))

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _choice(self, answer: Any, ids: Sequence[int]) -> dict[str, Any]:
        """The one choice of an answer. Raises: RefusedError, where the server has not read `ids`."""
        try:
            (choice,) = answer["choices"]
            read = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RemoteError(f"{self.server.url} does not answer as vLLM 0.31 does: is it one?") from None
        # In the places of soft tokens the server has a mark of its own.
        if len(read) != len(ids) or any(b not in (a, self.placeholder) for a, b in zip(read, ids, strict=True)):
            raise RefusedError(
                f"{self.server.url} read a prompt as other tokens than ours: its chat template must add nothing, and "
                f"its tokenizer must be {self.name}'s. Start it by `{self.server.start}`"
            )
        return choice


def _has_parts(prompt: Prompt) -> bool:
    return prompt.soft is not None or bool(prompt.images)


def _nodes(row: int, actions: Sequence[Sequence[int]]) -> Iterator[_Node]:
    """The inner nodes of the commands' prefix tree; one with very many branches is asked in several requests."""
    branches: dict[tuple[int, ...], dict[int, None]] = {}
    for ids in actions:
        for i, token in enumerate(ids):
            branches.setdefault(tuple(ids[:i]), {})[token] = None
    for path, tokens in branches.items():
        every = tuple(tokens)
        for i in range(0, len(every), _MOST_SCORED):
            yield _Node(row, path, every[i : i + _MOST_SCORED])


def _logprobs(choice: dict[str, Any]) -> dict[int, float]:
    """Token id -> log-probability of the one token that was generated, and of those that were asked for."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:  # a chat's
        rows = logprobs["content"][0]["top_logprobs"]
        return {_token_id(row["token"]): row["logprob"] for row in rows}
    return {_token_id(token): value for token, value in logprobs["top_logprobs"][0].items()}


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _packed(tensor: Tensor) -> str:
    """torch.save is what vLLM reads embeddings from (weights only); nothing of the kind is ever loaded here."""
    buffer = io.BytesIO()
    torch.save(tensor.contiguous().clone(), buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
