"""The frozen executor, Hugging Face backend: acts on text and soft tokens; its parameters never get a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from executor.grounding import Grounding, ground
from executor.prompt import ExecutorRequest, executor_parts
from lm.vision import Picture, encode_image_prompt, is_vlm, load_model, load_reader, vision_inputs
from soft_mem.inject import inject
from soft_mem.tokens import reserved_token_id


@dataclass(frozen=True, slots=True)
class Action:
    action: str
    how: Grounding
    text: str  # what the executor produced
    prompt_ids: tuple[int, ...]
    tokens_in: int
    tokens_out: int
    # Of tokens_in, out of a prefix cache; None where the backend does not say.
    tokens_cached: int | None = field(default=None, compare=False)
    # Of an action that was drawn among the admissible ones: what it was drawn from, and how likely it was.
    prompt: ExecutorPrompt | None = field(default=None, compare=False, repr=False)
    logprob: float | None = field(default=None, compare=False)


class Executor(Protocol):
    """A backend. `accepts_soft` is False where only text can be delivered (closed models); `sees_images` says whether
    it is to be shown the current view."""

    accepts_soft: bool
    sees_images: bool

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]: ...


@dataclass(frozen=True, slots=True)
class ExecutorPrompt:
    ids: tuple[int, ...]
    soft: Tensor | None  # (N, d)
    picture: Picture | None = None


# Greedy answers to prompts (ids without the end token), and how much of each prompt a cache held, where that is known.
Generate = Callable[[Sequence[ExecutorPrompt]], Sequence[tuple[list[int], int | None]]]


class TokenExecutor:
    """What executors of our own share, whatever runs the model: prompts as token ids, and actions from answers.

    Args:
        reader: the tokenizer of a text model, or the processor of a vision-language model.
        images: False keeps pictures from a model that could see them.
        temperature: of the choice among admissible actions; 0 takes the likeliest.
    """

    accepts_soft = True
    mode: Literal["choice", "guided", "generate"] = "choice"

    def __init__(
        self, reader: Any, instructions: str = "", memory_token: str = "auto", images: bool = True,
        temperature: float = 0.0,
    ) -> None:  # fmt: skip
        is_processor = hasattr(reader, "image_processor")
        self.reader, self.tokenizer = reader, reader.tokenizer if is_processor else reader
        self.sees_images, self.instructions = is_processor and images, instructions
        self.image_token = reader.image_token if is_processor else None
        self.placeholder = reserved_token_id(self.tokenizer, memory_token)
        self.placeholder_text = self.tokenizer.convert_ids_to_tokens(self.placeholder)
        self.end_id = self.tokenizer.eos_token_id
        self.temperature, self.generator = temperature, torch.Generator().manual_seed(0)

    def encode(self, request: ExecutorRequest) -> ExecutorPrompt:
        """The prompt that both backends read. A picture is left out by an executor that does not see.

        Raises:
            ValueError: memory or observation spell the reserved memory token or the image token.
        """
        image = request.image if self.sees_images else None
        text = self._prompt_text(replace(request, image=image))
        if self.image_token and text.count(self.image_token) != (image is not None):
            raise ValueError(f"the executor's prompt contains {self.image_token} outside its picture")
        if image is None:
            ids, picture = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]), None
        else:
            ids, picture = encode_image_prompt(self.reader, text, image)
        soft = request.delivered.soft
        if ids.count(self.placeholder) != request.delivered.n_soft:
            raise ValueError("the executor's prompt contains the reserved memory token outside the soft block")
        return ExecutorPrompt(ids, soft if isinstance(soft, Tensor) else None, picture)

    def _prompt_text(self, request: ExecutorRequest) -> str:
        before, *after = executor_parts(request, self.placeholder_text)
        parts = [{"type": "text", "text": before}, {"type": "image"}, *({"type": "text", "text": t} for t in after)]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat = [*system, {"role": "user", "content": parts if after else before}]
        return self.reader.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def action_ids(self, action: str) -> tuple[int, ...]:
        return (*self.tokenizer(action, add_special_tokens=False)["input_ids"], self.end_id)

    def _grounded(
        self, request: ExecutorRequest, prompt: ExecutorPrompt, ids: list[int], cached: int | None = None
    ) -> Action:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        grounded = ground(text, request.admissible)
        return Action(grounded.action, grounded.how, text, prompt.ids, len(prompt.ids), len(ids), cached)

    def _decided(self, requests: Sequence[ExecutorRequest], generate: Generate) -> list[Action]:
        """By likelihood where `mode` is choice and every request enumerates its commands; else what `generate` says."""
        prompts = [self.encode(request) for request in requests]
        if self.mode == "choice" and all(request.admissible for request in requests):
            scores = self.candidate_logprobs(prompts, [request.admissible or () for request in requests])
            return [self._chosen(*row) for row in zip(requests, prompts, scores, strict=True)]
        rows = zip(requests, prompts, generate(prompts), strict=True)
        return [self._grounded(request, prompt, *answer) for request, prompt, answer in rows]

    def candidate_logprobs(
        self, prompts: Sequence[ExecutorPrompt], candidates: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt."""
        raise NotImplementedError

    def policy(self, candidate_logprobs: Tensor) -> Tensor:
        """Log-probabilities (C,) of C admissible actions at this executor's temperature."""
        return (candidate_logprobs / (self.temperature or 1.0)).log_softmax(0)

    def _chosen(self, request: ExecutorRequest, prompt: ExecutorPrompt, candidate_logprobs: Tensor) -> Action:
        drawn: dict[str, Any] = {}  # a greedy action keeps neither pixels nor soft tokens in its episode's record
        if self.temperature:
            policy = self.policy(candidate_logprobs.float().cpu())
            at = int(torch.multinomial(policy.exp(), 1, generator=self.generator))
            drawn = {"prompt": prompt, "logprob": float(policy[at])}
        else:
            at = int(candidate_logprobs.argmax())
        action = (request.admissible or ())[at]
        return Action(
            action, Grounding.CHOICE, action, prompt.ids, len(prompt.ids), len(self.action_ids(action)), **drawn
        )


class FrozenExecutor(TokenExecutor):
    """Any causal LM, or a Qwen2.5-VL-like model with its processor for `reader`.

    `mode` is how it acts where commands are enumerated: `choice` by likelihood, or `generate`.
    """

    def __init__(
        self, model: Any, reader: Any, mode: Literal["choice", "generate"] = "choice", instructions: str = "",
        max_new_tokens: int = 64, batch_size: int = 64, memory_token: str = "auto", images: bool = True,
        temperature: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(reader, instructions, memory_token, images, temperature)
        self.model, self.mode = model.eval().requires_grad_(False), mode
        self.is_vlm = is_vlm(model.config)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size

    @classmethod
    def load(cls, name: str | Path, dtype: torch.dtype, device: str, **kwargs: Any) -> FrozenExecutor:
        """Any Hugging Face name or folder; a vision-language model if its config has a vision part."""
        return cls(load_model(name, dtype).to(device), load_reader(name), **kwargs)

    @property
    def embedding_table(self) -> Tensor:
        """(V, d)."""
        return self.model.get_input_embeddings().weight

    def hash(self) -> str:
        """SHA-256 over names and bytes of all parameters: frozen means that training leaves it as it was."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        """One action per request, in order."""
        actions: list[Action] = []
        for i in range(0, len(requests), self.batch_size):
            actions += self._act(requests[i : i + self.batch_size])
        return actions

    def _act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        return self._decided(requests, lambda prompts: [(ids, None) for ids in self._generate(prompts)])

    def _generate(self, prompts: Sequence[ExecutorPrompt]) -> list[list[int]]:
        """Greedy answers (ids without the end token)."""
        tokens, mask = self._pad([p.ids for p in prompts], left=True)
        out = self.model.generate(
            inputs_embeds=self._embed(tokens, prompts),
            attention_mask=mask,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            eos_token_id=self.end_id,
            pad_token_id=self.end_id,
            **self._vision_inputs(tokens, mask, prompts),
        )
        return [row[: row.index(self.end_id)] if self.end_id in row else row for row in out.tolist()]

    # -- likelihoods --------------------------------------------------------------------------------------------------

    def candidate_logprobs(
        self, prompts: Sequence[ExecutorPrompt], candidates: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """log p(candidate, end of turn | prompt) for every candidate of every prompt, in ONE forward pass.

        The candidates of a prompt share prefixes ("go to ..."): they are laid out as a tree behind the prompt, and a
        tree attention mask lets each node see the prompt and its own ancestors only. Exact, not an approximation, and
        differentiable in the prompts' soft tokens.
        """
        trees = [_Tree.of([self.action_ids(c) for c in names]) for names in candidates]
        rows = [p.ids + tuple(tree.tokens) for p, tree in zip(prompts, trees, strict=True)]
        tokens, real = self._pad(rows, left=False)
        mask, positions = _tree_attention([len(p.ids) for p in prompts], trees, tokens.shape[1])
        positions = positions.to(tokens.device)
        dtype = self.embedding_table.dtype
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min).to(tokens.device)
        offsets = positions - torch.arange(tokens.shape[1], device=tokens.device)
        where = self._vision_inputs(tokens, real, prompts, offsets) if self.is_vlm else {"position_ids": positions}
        hidden = getattr(self.model, self.model.base_model_prefix)(
            inputs_embeds=self._embed(tokens, prompts), attention_mask=bias.unsqueeze(1), use_cache=False, **where
        ).last_hidden_state
        results = []
        for i, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
            start = len(prompt.ids) - 1
            at = torch.tensor([start + parent + 1 for parent in tree.parents], device=hidden.device)
            logprobs = self._head(hidden[i, at]).float().log_softmax(-1)
            node = logprobs.gather(1, torch.tensor(tree.tokens, device=hidden.device)[:, None]).squeeze(1)
            results.append(torch.stack([node[path].sum() for path in tree.paths]))
        return results

    def action_nll(
        self, prompts: Sequence[ExecutorPrompt], soft_BNd: Tensor | None, actions: Sequence[Sequence[int]],
        smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """L_action (paper C.3.1): per-row summed NLL (B,) of the action's tokens, and their counts (B,).

        Gradient flows through the frozen model into `soft_BNd`; only the action positions get logits.
        """
        rows = [p.ids + tuple(a) for p, a in zip(prompts, actions, strict=True)]
        tokens, mask = self._pad(rows, left=False)
        embeddings = self.model.get_input_embeddings()(tokens)
        if soft_BNd is not None:
            embeddings = inject(embeddings, tokens, self.placeholder, soft_BNd)
        hidden = getattr(self.model, self.model.base_model_prefix)(
            inputs_embeds=embeddings, attention_mask=mask, use_cache=False, **self._vision_inputs(tokens, mask, prompts)
        ).last_hidden_state
        row = torch.cat([torch.full((len(a),), i) for i, a in enumerate(actions)]).to(hidden.device)
        at = torch.cat([torch.arange(len(a)) + len(p.ids) - 1 for p, a in zip(prompts, actions, strict=True)])
        target = torch.tensor([t for a in actions for t in a], device=hidden.device)
        logits = self._head(hidden[row, at.to(hidden.device)]).float()
        nll = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
        zeros = torch.zeros(len(rows), device=hidden.device)
        return zeros.index_add(0, row, nll), zeros.index_add(0, row, torch.ones_like(nll))

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def _vision_inputs(
        self, tokens: Tensor, mask: Tensor, prompts: Sequence[ExecutorPrompt], offsets: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What a vision-language model is given beside embeddings and mask; nothing for a text model."""
        return vision_inputs(self.model, tokens, mask, [p.picture for p in prompts], offsets) if self.is_vlm else {}

    def _embed(self, tokens: Tensor, prompts: Sequence[ExecutorPrompt]) -> Tensor:
        """Input embeddings with each row's own soft tokens (rows may have none)."""
        embeddings = self.model.get_input_embeddings()(tokens)
        for i, prompt in enumerate(prompts):
            if prompt.soft is not None:
                soft = prompt.soft.to(embeddings.device)[None]
                embeddings[i : i + 1] = inject(embeddings[i : i + 1], tokens[i : i + 1], self.placeholder, soft)
        return embeddings

    def _pad(self, rows: Sequence[tuple[int, ...]], left: bool) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), self.end_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, ids in enumerate(rows):
            where = slice(width - len(ids), width) if left else slice(0, len(ids))
            tokens[i, where], mask[i, where] = torch.tensor(ids), 1
        return tokens.to(self.model.device), mask.to(self.model.device)


@dataclass(frozen=True, slots=True)
class _Tree:
    """Candidates as a prefix tree: node i holds `tokens[i]` and follows node `parents[i]` (-1: the prompt's end)."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    paths: list[list[int]]  # node indices of each candidate

    @classmethod
    def of(cls, candidates: Sequence[Sequence[int]]) -> _Tree:
        tree, children = cls([], [], [], []), {}
        for ids in candidates:
            path, parent = [], -1
            for token in ids:
                node = children.setdefault((parent, token), len(tree.tokens))
                if node == len(tree.tokens):
                    tree.tokens.append(token)
                    tree.parents.append(parent)
                    tree.depths.append(len(path))
                path.append(node)
                parent = node
            tree.paths.append(path)
        return tree


def _tree_attention(lengths: Sequence[int], trees: Sequence[_Tree], width: int) -> tuple[Tensor, Tensor]:
    """Attention mask (B, T, T), True where a position may look, and position ids (B, T)."""
    mask = torch.tril(torch.ones(width, width, dtype=torch.bool)).repeat(len(trees), 1, 1)
    positions = torch.arange(width).repeat(len(trees), 1)
    for i, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            row = mask[i, length + parent].clone() if parent >= 0 else torch.arange(width) < length
            row[length + node] = True
            mask[i, length + node] = row
            positions[i, length + node] = length + depth
    return mask, positions
