"""The Memory Compiler pi_C (paper Eq. 3 and 5): LoRA-tuned (V)LM, N memory tokens, projector. Hugging Face backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache

from compiler.base import Draft, Generators, TokenCompiler
from compiler.records import Compilation, CompileRequest, Decoding, Wanted, always
from configs.models import Lora
from lm.backbone import Backbone, Batch
from lm.prompt import Prompt
from soft_mem.projector import Gaussian, Projector


@dataclass(frozen=True, slots=True)
class Scores:
    """One forward pass over [prompt | emission | memory tokens].

    logits (B, E, V) predict the emission's E tokens; text_mask (B, E) marks the real ones; h_text (B, E, d) and
    h_soft (B, N, d) are hidden states at the emission's and the memory tokens' positions.
    """

    logits: Tensor
    text_mask: Tensor
    targets: Tensor
    h_text: Tensor
    h_soft: Tensor
    gaussian: Gaussian


class MemoryCompiler(TokenCompiler, nn.Module):
    """Compiles requests in batches; the same module is what SFT and GRPO train."""

    def __init__(
        self, backbone: Backbone, projector: Projector, decoding: Decoding | None = None, instructions: str = "",
        lora: Lora | LoraConfig | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if projector.config.d_compiler != backbone.hidden_size:
            raise ValueError(
                f"projector reads {projector.config.d_compiler}-d states, the compiler has {backbone.hidden_size}"
            )
        self.backbone, self.encoder, self.context = backbone, backbone, backbone.context
        self.decoding, self.instructions = decoding or Decoding(), instructions
        self.projector = projector.to(backbone.device)
        backbone.model.requires_grad_(False)
        self.policy: Any = _with_lora(backbone, lora) if lora else backbone.model
        self.generator = torch.Generator(device=backbone.device).manual_seed(seed)
        self.weight_version = 0

    def emission_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise an emission with its end-of-turn token: what SFT trains and what decoding produces."""
        return (*self.backbone.ids(text), self.backbone.end_id)

    def score(self, prompts: Sequence[Prompt], emissions: Sequence[Sequence[int]]) -> Scores:
        """Compute the emissions' logits and the soft tokens' Gaussian. Memory tokens follow the end-of-turn token."""
        memory = (self.backbone.memory_id,) * self.n_tokens
        rows = [prompt.extended((*emission, *memory)) for prompt, emission in zip(prompts, emissions, strict=True)]
        batch = self.backbone.pad(rows, side="right")
        hidden = self.backbone.hidden(batch)
        starts = torch.tensor([len(prompt.ids) for prompt in prompts], device=hidden.device)
        lengths = torch.tensor([len(emission) for emission in emissions], device=hidden.device)
        text_at = starts[:, None] + torch.arange(int(lengths.max()), device=hidden.device)
        text_mask = text_at < (starts + lengths)[:, None]
        text_at = text_at.clamp(max=hidden.shape[1] - 1)
        soft_at = (starts + lengths)[:, None] + torch.arange(self.n_tokens, device=hidden.device)
        h_soft = _take(hidden, soft_at)
        return Scores(
            logits=self.backbone.logits(_take(hidden, text_at - 1)),
            text_mask=text_mask,
            targets=batch.tokens.gather(1, text_at),
            h_text=_take(hidden, text_at),
            h_soft=h_soft,
            gaussian=self.projector(h_soft),
        )

    def allowed(self, logits: Tensor) -> Tensor:
        """Rule reserved tokens out of logits (fp32): the policy's distribution, when sampling and when re-scoring."""
        banned = torch.tensor(self.backbone.suppressed, dtype=torch.long, device=logits.device)
        return logits.float().index_fill(-1, banned, -torch.inf)

    def logprobs(self, logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute log-probabilities (..., V) of the distribution that `decoding` samples from, in fp32.

        `tokens` (...) were sampled earlier: they count as possible even if truncation would leave them out now.
        """
        logits = self.allowed(logits) / (self.decoding.temperature or 1.0)
        if self.decoding.top_k or self.decoding.top_p < 1:
            logits = _truncated(logits, self.decoding.top_k, self.decoding.top_p, tokens)
        return logits.log_softmax(-1)

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride]  (torch.compile's: never called on a compiler)
        self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None, wanted: Wanted = always
    ) -> list[Compilation]:
        size, made = self.decoding.batch_size, []
        for at in range(0, len(requests), size):
            own = seeds and seeds[at : at + size]
            made += super().compile(requests[at : at + size], own, lambda i, at=at: wanted(at + i))
        return made

    def _draft(
        self, requests: Sequence[CompileRequest], prompts: Sequence[Prompt], by: Generators, wanted: Wanted
    ) -> tuple[list[Draft], Gaussian]:
        was_training = self.training
        self.eval()  # dropout off: the sampled distribution is the one that is re-scored
        memories = [tuple(entry.id for entry in request.memory) for request in requests]
        drafts, gaussian = _Decoder(self, prompts, memories, by).run(wanted)
        self.train(was_training)
        return drafts, gaussian


class _Decoder:
    """Batched sampling with a cache, then the memory tokens over the same cache: the prompt is read once, and what rows
    of the same task memory have in common (the episodes of a group) once for all of them.

    A row that has ended goes on as padding that nothing attends to (`real` is 0) and that takes up no position.
    `memories` says which task memory each prompt begins with.
    """

    def __init__(
        self, compiler: MemoryCompiler, prompts: Sequence[Prompt], memories: Sequence[object], by: Generators
    ) -> None:
        self.compiler, self.backbone, self.prompts, self.by = compiler, compiler.backbone, prompts, by
        self.cache = DynamicCache(config=self.backbone.model.config.get_text_config())
        whole = self.backbone.pad(prompts, "left")
        self.position = whole.next_positions  # ([3,] B, 1)
        begun, tails = self._read_common(prompts, memories)  # (B, P), 1 where the cache holds a row's token
        # What is left of every row: its last columns. Where another row has more left, some of them are read already.
        left = self.backbone.pad(tails, "left")
        self.mask = torch.cat([begun, left.mask], 1)
        positions = whole.positions[..., -left.tokens.shape[1] :]
        self.rest = replace(left, mask=self.mask, positions=positions)

    def _read_common(self, prompts: Sequence[Prompt], memories: Sequence[object]) -> tuple[Tensor, list[Prompt]]:
        """Fill the cache with what prompts of the same memory begin with; return its mask (B, P), and what is left."""
        groups = [[i for i, m in enumerate(memories) if m == memory] for memory in dict.fromkeys(memories)]
        common = [self.backbone.common([prompts[i] for i in rows]) for rows in groups]
        group_of = {i: g for g, rows in enumerate(groups) for i in rows}
        tails = [prompt.cut(*common[group_of[i]])[1] for i, prompt in enumerate(prompts)]
        if not any(n for n, _ in common):
            return torch.zeros((len(prompts), 0), dtype=torch.long, device=self.backbone.device), tails
        # A row that shares nothing gets some token that its mask hides.
        heads = [prompts[rows[0]].cut(n or 1, pictures)[0] for rows, (n, pictures) in zip(groups, common, strict=True)]
        beginnings = self.backbone.pad(heads, "left")
        self.backbone.hidden(beginnings, self.cache)
        order = torch.tensor([group_of[i] for i in range(len(prompts))], device=self.backbone.device)
        self.cache.batch_select_indices(order)
        shares = torch.tensor([n > 0 for n, _ in common], device=order.device)
        return (beginnings.mask * shares[:, None])[order], tails

    def run(self, wanted: Wanted) -> tuple[list[Draft], Gaussian]:
        """Decode until every row has ended, or nobody waits for those that have not: they count as truncated."""
        end, n = self.backbone.end_id, self.compiler.n_tokens
        hidden = self.backbone.hidden(self.rest, self.cache)[:, -1]
        alive = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        tokens, logprobs, real = [], [], []
        for _ in range(self.compiler.decoding.max_new_tokens):
            if tokens:
                hidden = self._feed(tokens[-1], real[-1])[:, -1]
            token, logprob = self._sample(self.backbone.logits(hidden), alive)
            tokens.append(torch.where(alive, token, end)[:, None])
            logprobs.append(logprob[:, None])
            real.append(alive[:, None])
            alive = alive & (token != end)
            if not any(going and wanted(i) for i, going in enumerate(alive.tolist())):
                break
        rows = _rows(torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.cat(real, 1), alive, end)
        if not self.backbone.attends_fully:  # rows that ended went on in its states: all is read once more
            return rows, self.compiler.score(self.prompts, [row.ids for row in rows]).gaussian
        # The last token is not in the cache yet; a row that ran out of budget gets its end-of-turn token now.
        tail = torch.full((len(alive), 1 + n), self.backbone.memory_id, device=hidden.device)
        tail[:, 0] = end
        follows = torch.cat([real[-1], alive[:, None], torch.ones_like(tail[:, 1:], dtype=torch.bool)], 1)
        h_soft = self._feed(torch.cat([tokens[-1], tail], 1), follows)[:, -n:]
        return rows, self.compiler.projector(h_soft)

    def _feed(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Read K more columns: their hidden states (B, K, d)."""
        counts = real.long()
        self.mask = torch.cat([self.mask, counts], 1)
        positions = self.position + counts.cumsum(1) - counts
        self.position = self.position + counts.sum(1, keepdim=True)
        return self.backbone.hidden(Batch(tokens, self.mask, positions), self.cache)

    def _sample(self, logits: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens, with their log-probabilities at the sampling temperature, (B,) each; never a reserved one.

        A row's own generator draws nothing for a row that has ended, so that others do not change what it draws next.
        """
        logprobs = self.compiler.logprobs(logits)
        if self.compiler.decoding.temperature == 0:
            token = logprobs.argmax(-1)
        elif isinstance(self.by, torch.Generator):
            token = torch.multinomial(logprobs.exp(), 1, generator=self.by).squeeze(1)
        else:
            token = torch.full_like(alive, self.backbone.end_id, dtype=torch.long)
            for i in alive.nonzero().flatten().tolist():
                token[i] = torch.multinomial(logprobs[i : i + 1].exp(), 1, generator=self.by[i])
        return token, logprobs.gather(1, token[:, None]).squeeze(1)


def _rows(tokens: Tensor, logprobs: Tensor, real: Tensor, truncated: Tensor, end: int) -> list[Draft]:
    lengths = real.sum(1).tolist()
    return [
        Draft((*ids[:n], *((end,) if cut else ())), values[:n].cpu(), cut)
        for ids, values, n, cut in zip(tokens.tolist(), logprobs, lengths, truncated.tolist(), strict=True)
    ]


def _truncated(logits: Tensor, top_k: int, top_p: float, keep: Tensor | None) -> Tensor:
    """Keep the `top_k` likeliest tokens, and of those the fewest that hold a share of `top_p`; the rest at -inf."""
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    out = torch.zeros_like(ordered, dtype=torch.bool) if not top_k else (rank >= top_k).expand_as(ordered)
    if top_p < 1:
        held = ordered.masked_fill(out, -torch.inf).softmax(-1)
        out = out | (held.cumsum(-1) - held >= top_p)
    out = torch.zeros_like(out).scatter(-1, order, out)
    if keep is not None:
        out = out.scatter(-1, keep.unsqueeze(-1), False)
    return logits.masked_fill(out, -torch.inf)


def _take(hidden: Tensor, at: Tensor) -> Tensor:
    """Take hidden (B, T, d) at positions (B, K): (B, K, d)."""
    return hidden.gather(1, at.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def _with_lora(backbone: Backbone, lora: Lora | LoraConfig) -> PeftModel:
    """Add an adapter as a checkpoint says, or a fresh one on the language model's projections (paper Table 7: q_proj,
    v_proj), never on the vision tower's."""
    if isinstance(lora, LoraConfig):
        return get_peft_model(backbone.model, lora)
    names = [
        name
        for name, module in backbone.model.named_modules()
        if isinstance(module, nn.Linear) and name.split(".")[-1] in lora.targets and "visual" not in name
    ]
    if not names:
        raise ValueError(f"no layers named {lora.targets} in {type(backbone.model).__name__}")
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names, bias="none"
    )
    return get_peft_model(backbone.model, config)
