"""The frozen executor in transformers: acts on text and soft tokens; its parameters never get a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from torch import Tensor

from configs.models import ExecutorMode
from executor.base import Answer, TokenExecutor
from executor.decoding import CommandWalk, FreeWalk, Walk, branches, follow
from executor.prompt import ExecutorRequest, Rules
from executor.records import PAPER_VIEW, Action, ExecutorView
from lm.backbone import Backbone, Batch
from lm.device import to_device
from lm.prefixes import PrefixCache, PromptReading, read_overlapping, read_prompts
from lm.prompt import Prompt
from lm.vision import parameter_names
from soft_mem.projector import check_places, inject


class FrozenExecutor(TokenExecutor):
    """Any causal LM or vision-language model (`lm.vision`).

    Args:
        batch_size: requests, or candidates of models without full attention, in a forward pass.
        prefix_mib: MiB of cached keys and values of earlier prompts (`lm.prefixes`), in models with full attention.

    Raises:
        ValueError: in mode `generate`, if the model cannot generate from embeddings.
    """

    def __init__(
        self,
        backbone: Backbone,
        mode: ExecutorMode = "choice",
        instructions: Rules = "",
        max_new_tokens: int = 64,
        batch_size: int = 64,
        images: bool = True,
        temperature: float = 0.0,
        reads: ExecutorView = PAPER_VIEW,
        prefix_mib: float = 0.0,
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
        self.prefixes = PrefixCache(prefix_mib if backbone.attends_fully else 0)

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
    def act(self, requests: Sequence[ExecutorRequest], seeds: Sequence[int] | None = None) -> list[Action]:
        actions: list[Action] = []
        for i in range(0, len(requests), self.batch_size):
            actions += super().act(requests[i : i + self.batch_size], seeds and seeds[i : i + self.batch_size])
        return actions

    def generate(
        self,
        prompts: Sequence[Prompt],
        admissible: Sequence[Sequence[str] | None],
        seeds: Sequence[int] | None = None,
    ) -> list[Answer]:
        if self.mode != "constrained" and not self.prefixes.budget:
            return list(map(Answer, self._generate(prompts)))
        held = self._held(admissible, seeds)
        walks = [held.get(i) or FreeWalk(self.end_id, self.max_new_tokens) for i in range(len(prompts))]
        if self.backbone.attends_fully and not all(walk.done for walk in walks):
            return self._follow(prompts, walks)
        follow(walks, lambda rows: self._choose(self._reread(prompts, walks, rows), [walks[i] for i in rows]))
        return [Answer(list(walk.path), None, walk.logprob) for walk in walks]

    def _generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Decode freely, as transformers does."""
        batch = self.backbone.pad(prompts, "left")
        with self.backbone.reading(batch):
            out = self.model.generate(
                inputs_embeds=self.embed(batch.tokens, prompts),
                attention_mask=batch.mask,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                repetition_penalty=1.0,  # whatever the model's folder says, as in the other engines
                eos_token_id=self.end_id,
                pad_token_id=self.end_id,
                **({"position_ids": batch.positions} if batch.positions.dim() == 3 else {}),  # else computed there
                **batch.vision,
            )
        return out.tolist()

    def _follow(self, prompts: Sequence[Prompt], walks: Sequence[Walk]) -> list[Answer]:
        """Decode with a KV cache, to which each pass adds the tokens since the last one."""
        reading = self.read(prompts)
        last, read = reading.hidden[:, -1], [0] * len(walks)

        def choose(rows: list[int]) -> list[int]:
            nonlocal last
            lines = [walk.path[k:] if not walk.done else () for walk, k in zip(walks, read, strict=True)]
            fed = [i for i, line in enumerate(lines) if line]
            if fed:
                hidden = reading.feed_lines(lines)
                at = to_device(torch.tensor([[i, len(lines[i]) - 1] for i in fed]), hidden.device)
                last = last.index_copy(0, at[:, 0], hidden[at[:, 0], at[:, 1]])
            read[:] = [k + len(line) for k, line in zip(read, lines, strict=True)]
            return self._choose(last[to_device(torch.tensor(rows), last.device)], [walks[i] for i in rows])

        follow(walks, choose)
        cached = reading.cached if self.prefixes.budget else [None] * len(walks)
        return [Answer(list(walk.path), held, walk.logprob) for walk, held in zip(walks, cached, strict=True)]

    def read(self, prompts: Sequence[Prompt], overlapping: bool = False) -> PromptReading:
        """Read what the prefix cache does not hold of the prompts, of which some may begin others (overlapping)."""
        read = read_overlapping if overlapping else read_prompts
        return read(self.backbone, prompts, self.prefixes.of_weights("frozen"), embed=self.embed)

    def _reread(self, prompts: Sequence[Prompt], walks: Sequence[Walk], rows: Sequence[int]) -> Tensor:
        """Read prompts and paths as a whole: states (b, d) at their ends. Recurrent states allow no padding between."""
        whole = [prompts[i].extended(walks[i].path) for i in rows]
        batch = self.backbone.pad(whole, "right")
        hidden = self.backbone.hidden(batch, embeddings=self.embed(batch.tokens, whole))
        at = to_device(torch.tensor([[k, len(row.ids) - 1] for k, row in enumerate(whole)]), hidden.device)
        return hidden[at[:, 0], at[:, 1]]

    def _choose(self, hidden: Tensor, walks: Sequence[Walk]) -> list[int]:
        """Choose the likeliest allowed token behind each state (b, d), or draw one."""
        logits = self.backbone.logits(hidden)
        best = logits.argmax(-1)
        if held := {k: walk for k, walk in enumerate(walks) if isinstance(walk, CommandWalk)}:
            rows, ids, own = _allowed_logits(logits, [(k, walk.allowed) for k, walk in held.items()])
            if self.temperature:
                taken = to_device(self._draw(own, list(held.values())), logits.device)
            else:
                taken = own.argmax(1)  # the first of equal ones
            best = best.index_copy(0, rows, ids.gather(1, taken[:, None]).squeeze(1))
        return best.tolist()

    def _draw(self, logits: Tensor, walks: Sequence[CommandWalk]) -> Tensor:
        """Draw an index of each row's logits (b, A), and add its log-probability to the walk's."""
        logprobs = self.choice_logprobs(logits).cpu()
        drawn = []
        for walk, row in zip(walks, logprobs, strict=True):
            drawn.append(int(torch.multinomial(row.exp(), 1, generator=walk.generator)))
            walk.logprob = (walk.logprob or 0.0) + float(row[drawn[-1]])
        return torch.tensor(drawn)

    def cached_tokens(self, prompts: Sequence[Prompt]) -> list[int | None]:
        if not self.prefixes.budget:
            return [None] * len(prompts)
        return [self.prefixes.find(self.backbone, prompt).tokens for prompt in prompts]

    def candidate_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """Score all candidates in one forward pass, exactly, and differentiably in the prompts' soft tokens.

        With a prefix cache there is a pass for prompts and one for candidates, except where gradients are recorded.
        The candidates of a prompt share prefixes ("go to ..."). They form a tree behind the prompt, and a tree
        attention mask lets each node attend to the prompt and its ancestors only. A candidate's last token is
        predicted, not read. In models without full attention (`Backbone.attends_fully`), each candidate is a row.
        """
        if not self.backbone.attends_fully:
            return self._row_logprobs(prompts, candidates)
        trees = [_Tree.of([self.action_ids(c) for c in names]) for names in candidates]
        cached = self.prefixes.budget and not torch.is_grad_enabled()
        states = self._cached_tree_states(prompts, trees) if cached else self._tree_states(prompts, trees)
        paths = [list(chain(*tree.paths)) for tree in trees]
        places = to_device(torch.tensor(list(chain(*paths))), states[0].device).split([len(path) for path in paths])
        results = []
        for hidden, tree, at in zip(states, trees, places, strict=True):
            logprobs = self.backbone.logits(hidden).float().log_softmax(-1)
            before, tokens = at.unbind(1)
            steps = logprobs[before + 1, tokens].split([len(path) for path in tree.paths])
            results.append(torch.stack([of_one.sum() for of_one in steps]))
        return results

    def _tree_states(self, prompts: Sequence[Prompt], trees: Sequence[_Tree]) -> list[Tensor]:
        """Read prompts with their trees in one pass: states (1 + nodes, d) at each prompt's end and its nodes."""
        rows = [p.extended(t.tokens) for p, t in zip(prompts, trees, strict=True)]
        batch = self.backbone.pad(rows, "right")
        mask, offsets = _tree_attention([len(p.ids) for p in prompts], trees, batch.tokens.shape[1])
        hidden = self.backbone.hidden(
            replace(batch, positions=batch.positions + to_device(offsets, batch.tokens.device)),
            embeddings=self.embed(batch.tokens, rows),
            mask=self._bias(to_device(mask, batch.tokens.device)),
        )
        rows = zip(hidden, prompts, trees, strict=True)
        return [row[len(prompt.ids) - 1 : len(prompt.ids) + len(tree.tokens)] for row, prompt, tree in rows]

    def _cached_tree_states(self, prompts: Sequence[Prompt], trees: Sequence[_Tree]) -> list[Tensor]:
        """Read what is new of the prompts, then their trees: states as in `_tree_states`."""
        reading = self.read(prompts)
        width = max(len(tree.tokens) for tree in trees)
        if not width:
            return list(reading.hidden)
        tokens = torch.tensor([[*t.tokens, *[self.backbone.pad_id] * (width - len(t.tokens))] for t in trees])
        mask, offsets = _tree_attention([0] * len(trees), trees, width)
        device = reading.mask.device
        tokens, shift = to_device(torch.stack([tokens, offsets + torch.arange(width)]), device)
        seen = reading.mask.bool()[:, None].expand(-1, width, -1)
        batch = Batch(tokens, reading.mask, reading.position + shift)
        bias = self._bias(torch.cat([seen, to_device(mask, device)], 2))
        hidden = torch.cat([reading.hidden, self.backbone.hidden(batch, reading.cache, mask=bias)], 1)
        return [hidden[i, : 1 + len(tree.tokens)] for i, tree in enumerate(trees)]

    def _bias(self, mask: Tensor) -> Tensor:
        """Turn a mask (B, Q, K), True where a position attends, into what is added to attention logits (B, 1, Q, K)."""
        none = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return none.masked_fill(~mask, torch.finfo(none.dtype).min).unsqueeze(1)

    def _row_logprobs(self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]]) -> list[Tensor]:
        """Score `batch_size` candidates per forward pass."""
        pairs = zip(prompts, candidates, strict=True)
        rows = [(prompt, self.action_ids(name)) for prompt, names in pairs for name in names]
        scores = []
        for i in range(0, len(rows), self.batch_size):
            part, actions = zip(*rows[i : i + self.batch_size], strict=True)
            scores.append(-self.action_nll(part, None, actions)[0])
        return list(torch.cat(scores).split([len(names) for names in candidates]))

    def chosen_logprobs(
        self, prompts: Sequence[Prompt], candidates: Sequence[Sequence[str]], chosen: Sequence[int]
    ) -> Tensor:
        """Return the log-probability (B,) with which the executor draws the chosen one of each prompt's candidates, at
        its temperature and in its mode; differentiable in the prompts' soft tokens."""
        if self.mode == "choice":
            scores = self.candidate_logprobs(prompts, candidates)
            return torch.stack([self.choice_logprobs(s)[at] for s, at in zip(scores, chosen, strict=True)])
        commands = [[self.action_ids(name) for name in names] for names in candidates]
        actions = [of_one[at] for of_one, at in zip(commands, chosen, strict=True)]
        hidden, before = self._read_actions(prompts, _stacked_soft(prompts), actions)
        read, allowed = list[tuple[int, int, int]](), list[tuple[int, ...]]()
        for i, action in enumerate(actions):
            for at, ids in branches(commands[i], action):
                read.append((i, before[i] + at, ids.index(action[at])))
                allowed.append(ids)
        sums = torch.zeros(len(prompts), device=hidden.device)
        if not read:  # each prompt has one candidate
            return sums
        row, at, target = to_device(torch.tensor(read), hidden.device).unbind(1)
        _, _, logits = _allowed_logits(self.backbone.logits(hidden[row, at]), list(enumerate(allowed)))
        return sums.index_add(0, row, self.choice_logprobs(logits).gather(1, target[:, None]).squeeze(1))

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
        hidden, before = self._read_actions(prompts, soft_BNd, actions)
        read = [(i, before[i] + k, token) for i, action in enumerate(actions) for k, token in enumerate(action)]
        row, at, target = to_device(torch.tensor(read), hidden.device).unbind(1)
        logits = self.backbone.logits(hidden[row, at]).float()
        nll = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
        zeros = torch.zeros(len(prompts), device=hidden.device)
        return zeros.index_add(0, row, nll), zeros.index_add(0, row, torch.ones_like(nll))

    def _read_actions(
        self, prompts: Sequence[Prompt], soft_BNd: Tensor | None, actions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """Read prompts and their actions: states (B, T, d), and of each row the state before the action's first token.

        `soft_BNd` as in `action_nll`."""
        rows = [p.extended(a) for p, a in zip(prompts, actions, strict=True)]
        ends = [len(prompt.ids) - 1 for prompt in prompts]
        if soft_BNd is None:
            batch = self.backbone.pad(rows, "right")
            return self.backbone.hidden(batch, embeddings=self.embed(batch.tokens, rows)), ends
        check_places([row.ids for row in rows], self.placeholder, [soft_BNd.shape[1]] * len(rows))
        starts = [0] * len(rows)
        if self.prefixes.budget and not any(row.pictures for row in rows):
            starts = [row.ids.index(self.placeholder) for row in rows]
        starts = starts if all(starts) else [0] * len(rows)
        hidden = self._read_with_soft(rows, starts, soft_BNd)
        return hidden, [end - start for end, start in zip(ends, starts, strict=True)]

    def _read_with_soft(self, rows: Sequence[Prompt], starts: Sequence[int], soft_BNd: Tensor) -> Tensor:
        """Read rows with soft tokens: states (B, T, d) of what follows each row's start.

        What precedes the soft tokens gets no gradient from them. With a prefix cache it is read without one, and only
        where neither an earlier row nor a longer one of the batch begins with it.
        """
        if not any(starts):
            batch = self.backbone.pad(rows, "right")
            embeddings = inject(self.backbone.embeddings(batch.tokens), batch.tokens, self.placeholder, soft_BNd)
            return self.backbone.hidden(batch, embeddings=embeddings)
        parts = [self.backbone.cut(row, start, 0) for row, start in zip(rows, starts, strict=True)]
        with torch.no_grad():
            reading = self.read([head for head, _ in parts], overlapping=True)
        tails = self.backbone.pad([tail for _, tail in parts], "right")
        batch = replace(
            tails,
            mask=torch.cat([reading.mask, tails.mask], 1),
            positions=reading.position + tails.positions,
            padded=reading.padded or tails.padded,
        )
        embeddings = inject(self.backbone.embeddings(tails.tokens), tails.tokens, self.placeholder, soft_BNd)
        return self.backbone.hidden(batch, reading.cache, embeddings)

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


def _stacked_soft(prompts: Sequence[Prompt]) -> Tensor | None:
    """Return the soft tokens (B, N, d) of prompts that all have N; else None."""
    own = [prompt.soft for prompt in prompts if prompt.soft is not None]
    if len(own) < len(prompts) or len({len(soft) for soft in own}) > 1:
        return None
    return torch.stack(own)


def _allowed_logits(logits: Tensor, allowed: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Select the logits of a row's allowed tokens.

    Args:
        logits: (B, V).
        allowed: R pairs of a row and its tokens.

    Returns:
        The rows (R,), their tokens' ids (R, A) and logits (R, A), which are -inf where a row has fewer than A.
    """
    width = max(len(ids) for _, ids in allowed)
    table = [[row, len(ids), *ids, *[ids[0]] * (width - len(ids))] for row, ids in allowed]
    rows, counts, *ids = to_device(torch.tensor(table), logits.device).unbind(1)
    ids = torch.stack(ids, 1)
    missing = torch.arange(width, device=logits.device) >= counts[:, None]
    return rows, ids, logits[rows].gather(1, ids).masked_fill(missing, -torch.inf)


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
