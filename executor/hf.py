"""The frozen executor in transformers: acts on text and soft tokens; its parameters never get a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from torch import Tensor

from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, ExecutorView
from lm.backbone import Backbone
from lm.device import to_device
from lm.prompt import Prompt
from lm.vision import parameter_names
from soft_mem.projector import check_places, inject


class FrozenExecutor(TokenExecutor):
    """Any causal LM or vision-language model (`lm.vision`). Raises: ValueError, in mode `generate` if the model cannot
    generate from embeddings."""

    def __init__(
        self,
        backbone: Backbone,
        mode: Literal["choice", "generate"] = "choice",
        instructions: str = "",
        max_new_tokens: int = 64,
        batch_size: int = 64,
        images: bool = True,
        temperature: float = 0.0,
        reads: ExecutorView = PAPER_VIEW,
    ) -> None:
        if mode == "generate" and "inputs_embeds" not in parameter_names(backbone.model.prepare_inputs_for_generation):
            raise ValueError(f"{type(backbone.model).__name__} cannot generate from soft tokens: executor.mode=choice")
        super().__init__(
            backbone,
            instructions=instructions,
            max_new_tokens=max_new_tokens,
            images=images,
            temperature=temperature,
            reads=reads,
        )
        self.backbone, self.mode, self.context = backbone, mode, backbone.context
        self.model = backbone.model.eval().requires_grad_(False)
        self.batch_size = batch_size

    @property
    def embedding_table(self) -> Tensor:
        """Return the input embeddings (V, d)."""
        return self.backbone.embedding_table

    def hash(self) -> str:
        """Return the SHA-256 of all parameters, which training must not change."""
        digest = hashlib.sha256()
        spread = any(parameter.is_meta for parameter in self.model.parameters())  # some weights are offloaded
        weights = get_state_dict_offloaded_model(self.model) if spread else self.model.state_dict()
        for name, parameter in sorted(weights.items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        actions: list[Action] = []
        for i in range(0, len(requests), self.batch_size):
            actions += super().act(requests[i : i + self.batch_size])
        return actions

    def generate(
        self, prompts: Sequence[Prompt], admissible: Sequence[Sequence[str] | None]
    ) -> list[tuple[list[int], int | None]]:
        batch = self.backbone.pad(prompts, "left")
        with self.backbone.reading(batch):
            out = self.model.generate(
                inputs_embeds=self.embed(batch.tokens, prompts),
                attention_mask=batch.mask,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                eos_token_id=self.end_id,
                pad_token_id=self.end_id,
                **({"position_ids": batch.positions} if batch.positions.dim() == 3 else {}),  # else computed there
                **batch.vision,
            )
        return [(ids, None) for ids in out.tolist()]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """Score all candidates in one forward pass, exactly, and differentiably in the prompts' soft tokens.

        The candidates of a prompt share prefixes ("go to ..."). They form a tree behind the prompt, and a tree
        attention mask lets each node attend to the prompt and its ancestors only. A candidate's last token is
        predicted, not read. In models without full attention (`Backbone.attends_fully`), each candidate is a row.
        """
        if not self.backbone.attends_fully:
            return self._row_logprobs(prompts, candidates)
        trees = [_Tree.of([self.action_ids(c) for c in names]) for names in candidates]
        rows = [p.extended(t.tokens) for p, t in zip(prompts, trees, strict=True)]
        batch = self.backbone.pad(rows, "right")
        mask, offsets = _tree_attention([len(p.ids) for p in prompts], trees, batch.tokens.shape[1])
        dtype, device = self.model.dtype, batch.tokens.device
        hides = to_device(~mask, device)
        bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(hides, torch.finfo(dtype).min)
        hidden = self.backbone.hidden(
            replace(batch, positions=batch.positions + to_device(offsets, device)),
            embeddings=self.embed(batch.tokens, rows),
            mask=bias.unsqueeze(1),
        )
        paths = [list(chain(*tree.paths)) for tree in trees]
        places = to_device(torch.tensor(list(chain(*paths))), hidden.device).split([len(path) for path in paths])
        results = []
        for i, (prompt, tree, at) in enumerate(zip(prompts, trees, places, strict=True)):
            end = len(prompt.ids)
            logprobs = self.backbone.logits(hidden[i, end - 1 : end + len(tree.tokens)]).float().log_softmax(-1)
            before, tokens = at.unbind(1)
            steps = logprobs[before + 1, tokens].split([len(path) for path in tree.paths])
            results.append(torch.stack([of_one.sum() for of_one in steps]))
        return results

    def _row_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """Score `batch_size` candidates per forward pass."""
        pairs = zip(prompts, candidates, strict=True)
        rows = [(prompt, self.action_ids(name)) for prompt, names in pairs for name in names]
        scores = []
        for i in range(0, len(rows), self.batch_size):
            part, actions = zip(*rows[i : i + self.batch_size], strict=True)
            scores.append(-self.action_nll(part, None, actions)[0])
        return list(torch.cat(scores).split([len(names) for names in candidates]))

    def action_nll(
        self,
        prompts: Sequence[Prompt],
        soft_BNd: Tensor | None,
        actions: Sequence[Sequence[int]],
        smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute L_action (paper C.3.1): per-row summed NLL (B,) of the action's tokens, and their counts (B,).

        The gradient flows through the frozen model into `soft_BNd`. Only action positions get logits.

        Args:
            soft_BNd: soft tokens of all rows; None reads each prompt with its own, if it has any.
        """
        rows = [p.extended(a) for p, a in zip(prompts, actions, strict=True)]
        batch = self.backbone.pad(rows, "right")
        if soft_BNd is None:
            embeddings = self.embed(batch.tokens, rows)
        else:
            check_places([row.ids for row in rows], self.placeholder, [soft_BNd.shape[1]] * len(rows))
            embeddings = inject(self.backbone.embeddings(batch.tokens), batch.tokens, self.placeholder, soft_BNd)
        hidden = self.backbone.hidden(batch, embeddings=embeddings)
        pairs = enumerate(zip(prompts, actions, strict=True))
        read = [(i, len(p.ids) - 1 + k, token) for i, (p, action) in pairs for k, token in enumerate(action)]
        row, at, target = to_device(torch.tensor(read), hidden.device).unbind(1)
        logits = self.backbone.logits(hidden[row, at]).float()
        nll = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
        zeros = torch.zeros(len(batch.tokens), device=hidden.device)
        return zeros.index_add(0, row, nll), zeros.index_add(0, row, torch.ones_like(nll))

    def embed(self, tokens: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Embed tokens (B, T) with each row's own soft tokens, if it has any: (B, T, d)."""
        embeddings = self.backbone.embeddings(tokens)
        rows = [i for i, prompt in enumerate(prompts) if prompt.soft is not None]
        if not rows:
            return embeddings
        own = [soft for prompt in prompts if (soft := prompt.soft) is not None]
        check_places([prompts[i].ids for i in rows], self.placeholder, [len(soft) for soft in own])
        soft = to_device(torch.cat(own), embeddings.device)
        if len(rows) == len(prompts):
            return inject(embeddings, tokens, self.placeholder, soft)
        at = to_device(torch.tensor(rows), embeddings.device)
        return embeddings.index_copy(0, at, inject(embeddings[at], tokens[at], self.placeholder, soft))


@dataclass(frozen=True, slots=True)
class _Tree:
    """Prefix tree of the candidates: node i holds `tokens[i]` and follows node `parents[i]` (-1: the prompt)."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    paths: list[list[tuple[int, int]]]  # of each candidate: (node before a token, token)

    @classmethod
    def of(cls, candidates: Sequence[Sequence[int]]) -> _Tree:
        tree, children = cls([], [], [], []), {}
        for ids in candidates:
            nodes = [-1]
            for depth, token in enumerate(ids[:-1]):
                node = children.setdefault((nodes[-1], token), len(tree.tokens))
                if node == len(tree.tokens):
                    tree.tokens.append(token)
                    tree.parents.append(nodes[-1])
                    tree.depths.append(depth)
                nodes.append(node)
            tree.paths.append(list(zip(nodes, ids, strict=True)))
        return tree


def _tree_attention(lengths: Sequence[int], trees: Sequence[_Tree], width: int) -> tuple[Tensor, Tensor]:
    """Return the attention mask (B, T, T), True where a position attends, and the shift of each position (B, T)."""
    mask = torch.tril(torch.ones(width, width, dtype=torch.bool)).repeat(len(trees), 1, 1)
    offsets = torch.zeros(len(trees), width, dtype=torch.long)
    for i, (length, tree) in enumerate(zip(lengths, trees, strict=True)):
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            row = mask[i, length + parent].clone() if parent >= 0 else torch.arange(width) < length
            row[length + node] = True
            mask[i, length + node] = row
            offsets[i, length + node] = depth - node
    return mask, offsets
