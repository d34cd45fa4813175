"""Stage 1, supervised fine-tuning of compiler LoRA and projector against a frozen executor (paper C.3.1, Eq. 9).

    L = L_text + L_action + 0.1 L_entropy + 1.0 L_latent + 0.1 L_orth

    memcompiler train sft -c sft/quickstart rows=out/rows --out out/sft
    torchrun --nproc_per_node 8 -m memcompiler train sft -c sft/paper --out runs/sft backend=fsdp

One optimiser step: a global batch of rows, split over ranks and micro-batches; every loss is a sum over rows with
weights that are computed from the global batch, so the result does not depend on the split. All randomness of a step
(order, dropout, noise of the soft tokens) is a function of (seed, step): resuming needs no generator state.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from agent.records import compile_request, executor_request
from compiler.hf import MemoryCompiler
from compiler.prompt import pictures_of
from configs.training import SftConfig
from data_gen.rows import SftRow
from executor.hf import FrozenExecutor
from lm.device import to_device
from lm.prompt import Prompt
from soft_mem.losses import gauss_nll, memory_targets, negative_entropy, orthogonality, soft_mse
from soft_mem.projector import Gaussian
from training import distributed
from training.backend import BACKENDS
from training.batches import bucketed, length
from training.evaluation import HeldOutTasks
from training.losses import token_nll
from training.trainer import Trainer, permuted

MOST_KEPT = 2**28  # values of encoded rows that a trainer keeps (1 GiB in fp32); others are encoded when needed
PATIENCE = 600  # seconds for workers to encode a batch


@dataclass(frozen=True, slots=True)
class Example:
    """A row as token ids: compiler prompt -> emission, executor prompt (with N placeholders) -> action."""

    prompt: Prompt
    emission: tuple[int, ...]
    executor_prompt: Prompt
    action: tuple[int, ...]
    memory_ids: tuple[int, ...]  # the memory's text, in the executor's tokens
    soft_read: bool  # whether the executor reads this step's soft tokens: without, no loss is theirs
    memory_seen: Prompt | None = None  # the memory's pictures, as an executor that sees reads them

    @property
    def size(self) -> int:
        """Count its values: pixels that vision towers read, and tokens, of which Python takes eight times as much."""
        read = [prompt for prompt in (self.prompt, self.executor_prompt, self.memory_seen) if prompt is not None]
        tokens = sum(len(ids) for ids in (self.emission, self.action, self.memory_ids, *(p.ids for p in read)))
        return 8 * tokens + sum(picture.values for prompt in read for picture in prompt.pictures)


class Rows(Protocol):
    """Rows by number, such as a list or what stays on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> SftRow: ...


class Steps(Dataset[list[Example]]):
    """By step, what this rank learns from there."""

    def __init__(self, total: int, examples: Callable[[int], list[Example]]) -> None:
        self._total, self._examples = total, examples

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, step: int) -> list[Example]:
        return self._examples(step)


class SftTrainer(Trainer[dict[str, float]]):
    """Trains on rows; a step gives its metrics, with those of the rows that are held out where it validates."""

    stage, unit, counts = "sft", "step", "rows"

    def __init__(
        self,
        config: SftConfig,
        compiler: MemoryCompiler,
        executor: FrozenExecutor,
        rows: Rows,
        out: Path,
        facts: dict[str, Any] | None = None,
        held_out: Rows = (),
        played: HeldOutTasks | None = None,
    ) -> None:
        if not len(rows):
            raise ValueError("no SFT rows: run `memcompiler collect` first")
        self.config, self.executor, self.rows, self.held_out = config, executor, rows, held_out
        self.per_epoch = math.ceil(len(rows) / config.batch_size)
        total = config.max_steps or math.ceil(config.epochs * self.per_epoch)
        # Where models are about to be cut into slices, rank 0 alone may have them.
        sharded = BACKENDS[config.backend].is_sharded
        hash = distributed.from_first(executor.hash) if sharded else distributed.once_per_node(executor.hash)
        super().__init__(config, compiler, hash, len(rows), total, out, facts, played)
        model = executor.model if config.soft else None  # cut into slices, as the compiler is, where the backend does
        self.backend = BACKENDS[config.backend](compiler, model, config.optimizer, config.soft)
        self.frozen = self.executor_fingerprint() if sharded else hash
        if self.best.by == "loss":
            self.patience = config.validation.patience or math.inf
        if config.gradient_checkpointing:
            compiler.backbone.recompute_layers()
            executor.backbone.recompute_layers()
        self._bucketed: tuple[int, list[list[int]]] = (-1, [])  # an epoch's batches of like length
        self._examples: dict[int, Example] = {}
        self._kept = 0  # values in them
        self._ahead: tuple[int, Iterator[list[Example]]] = (-1, iter(()))  # what comes next, and of which step

    def executor_fingerprint(self) -> str:
        if self.backend.is_sharded:
            return self.backend.fingerprint(self.executor.model)
        return distributed.once_per_node(self.executor.hash)

    def steps(self) -> Iterator[dict[str, float]]:
        self.compiler.train()
        return super().steps()

    def take_step(self) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self._learn(self.step)
        self.step += 1
        metrics |= {"step": self.step, "seconds": time.perf_counter() - started}
        if len(self.held_out) and (self.step % self.config.validation.every == 0 or self.step == self.total):
            metrics |= {f"val_{name}": value for name, value in self.validate().items()}
        if self.played is not None and self.is_evaluated(self.step):
            metrics |= self.played.play(self.compiler)
        if self.best.hear(metrics, self.step) or self.is_over or self.is_due(self.step):
            self.save()
        return metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Compute the loss on all rows that are held out, without dropout and with the soft tokens' means: nothing is
        drawn, so that it is a function of the weights."""
        self.compiler.eval()
        totals, counts, first = dict[str, Tensor](), Counter[str](), len(self.rows)
        mine = range(first + distributed.rank(), first + len(self.held_out), distributed.world_size())
        for micro in self.backend.micro_batches(mine, self.config.micro_batch_size):
            examples = [self.example(i) for i in micro or (first,)]
            losses = self.backend.forward(
                functools.partial(sft_losses, self.compiler, self.executor, examples, self.config, 0.0)
            )
            if micro:
                counts.update(_counts(examples))
                for name, value in losses.items():
                    share = value.sum().double()
                    totals[name] = totals[name] + share if name in totals else share
        self.compiler.train()
        sums, over = distributed.total(_read_once(totals)), distributed.total(counts)
        return self._weighted({name: value / max(1, over.get(name, over["rows"])) for name, value in sums.items()})

    def batch_indices(self, step: int) -> list[int]:
        """Choose the rows of a global batch: each epoch is a fresh permutation, or of one batches of like length."""
        epoch, i = divmod(step, self.per_epoch)
        order = permuted(len(self.rows), self.config.seed, epoch)
        size, window = self.config.batch_size, self.config.length_buckets
        if not window:
            return order[i * size : (i + 1) * size]
        if self._bucketed[0] != epoch:  # they are sorted once
            self._bucketed = epoch, bucketed(order, self._lengths, size, window, f"{self.config.seed}:{epoch}")
        return self._bucketed[1][i]

    @functools.cached_property
    def _lengths(self) -> list[int]:
        return [length(row) for row in self.rows]

    def _learn(self, step: int) -> dict[str, float]:
        config, mine = self.config, self._next_examples()
        counts = distributed.total({**_counts(mine), "read": self._size(mine)})
        rate = self.schedule(config.optimizer, step)
        totals: dict[str, Tensor] = {}
        torch.manual_seed((config.seed * 1_000_003 + step) * 64 + distributed.rank())
        for micro in self.backend.micro_batches(mine, config.micro_batch_size):
            weight = 1.0 if micro else 0.0  # a rank that has run out of rows keeps step with one that counts nothing
            shares = self._backward(micro or [self.example(self.batch_indices(step)[0])], counts, weight)
            for name, value in shares.items():
                totals[name] = totals.get(name, torch.zeros(())) + value.detach()
        norm = self.backend.step()
        losses = distributed.total(_read_once(totals))
        return {**self._weighted(losses), "lr": rate, "grad_norm": norm, "tokens": int(counts["read"])}

    def _next_examples(self) -> list[Example]:
        """Return this rank's rows of the coming step; workers, where there are any, are ahead with further steps."""
        step, batches = self._ahead
        if step != self.step:  # the first one, or a run that was resumed
            workers = self.config.loader_workers
            self.batch_indices(self.step)  # what rows' lengths are, workers need not find out each for itself
            loader = DataLoader(
                Steps(self.total, self._mine),
                batch_size=None,
                sampler=range(self.step, self.total),
                collate_fn=list,
                num_workers=workers,
                timeout=PATIENCE if workers else 0,
                generator=torch.Generator(),
                multiprocessing_context="fork" if workers else None,  # they take tokenizers and rows over as they are
            )
            batches = iter(loader)
        self._ahead = self.step + 1, batches
        return next(batches)

    def _mine(self, step: int) -> list[Example]:
        return [self.example(i) for i in self.batch_indices(step)[distributed.rank() :: distributed.world_size()]]

    def _weighted(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Give the loss (Eq. 9) and its terms as metrics name them."""
        terms = {f"loss_{name}": value for name, value in losses.items()}
        return {"loss": sum(getattr(self.config.weights, name) * value for name, value in losses.items()), **terms}

    def _backward(self, micro: Sequence[Example], counts: Mapping[str, float], weight: float) -> dict[str, Tensor]:
        """Add the gradients of a micro-batch; returns its share of each loss."""

        def shares_and_loss() -> tuple[dict[str, Tensor], Tensor]:
            losses = sft_losses(self.compiler, self.executor, micro, self.config)
            shares = {n: weight * value.sum() / max(1, counts.get(n, counts["rows"])) for n, value in losses.items()}
            return shares, sum((getattr(self.config.weights, n) * v for n, v in shares.items()), torch.tensor(0.0))

        shares, loss = self.backend.forward(shares_and_loss)
        self.backend.backward(loss)
        return shares

    def example(self, index: int) -> Example:
        """Encode row `index`, behind the last of which come those that are held out: once, unless it is more than there
        is room for."""
        if index in self._examples:
            return self._examples[index]
        row = self.rows[index] if index < len(self.rows) else self.held_out[index - len(self.rows)]
        try:
            example = encode_row(row, self.compiler, self.executor, self.config.soft)
        except ValueError as error:
            raise ValueError(f"row {index} (task {row.task_id}, step {row.t}) cannot be encoded: {error}") from error
        if self._kept + example.size <= MOST_KEPT:
            self._examples[index], self._kept = example, self._kept + example.size
        return example

    def _size(self, examples: Sequence[Example]) -> int:
        """Count the tokens that compiler and (with the soft channel) executor read in this step."""
        compiler = sum(len(e.prompt.ids) + len(e.emission) + self.compiler.n_tokens for e in examples)
        return compiler + sum(len(e.executor_prompt.ids) + len(e.action) for e in examples if e.soft_read)


def encode_row(row: SftRow, compiler: MemoryCompiler, executor: FrozenExecutor, soft: bool) -> Example:
    """Encode a row for both models; with `soft`, the executor's prompt has the placeholders of the soft tokens."""
    step = row.step_input(compiler.n_tokens if soft else 0)
    request = executor_request(step, executor)
    pictures = pictures_of(step.memory) if executor.sees_images else []
    return Example(
        compiler.encode(compile_request(step)),
        compiler.emission_ids(row.emission),
        replace(executor.encode(request), soft=None),
        executor.action_ids(row.action),
        executor.encoder.ids(row.memory_text),
        request.delivered.n_soft > 0,
        executor.encoder.pictures(pictures) if pictures else None,
    )


def _counts(examples: Sequence[Example]) -> dict[str, int]:
    """Count what losses are averaged over: tokens of emissions and actions, and the rows whose soft tokens are read."""
    read = [e for e in examples if e.soft_read]
    tokens = {"text": sum(len(e.emission) for e in examples), "action": sum(len(e.action) for e in read)}
    return {"rows": len(read), **tokens}


def _read_once(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Read scalars of a device by one copy."""
    values = torch.stack([value.double() for value in totals.values()]).tolist() if totals else []
    return dict(zip(totals, values, strict=True))


def sft_losses(
    compiler: MemoryCompiler,
    executor: FrozenExecutor,
    examples: Sequence[Example],
    config: SftConfig,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Compute the terms of Eq. 9: `text` (B,), and of the rows whose soft tokens are read the others. `text` and
    `action` sum over a row's tokens, the others are its means. Soft tokens are drawn at `temperature`."""
    scored = compiler.score([e.prompt for e in examples], [e.emission for e in examples])
    text, _ = token_nll(scored.logits, scored.targets, scored.text_mask, config.label_smoothing)
    if not config.soft:
        return {"text": text}
    z = compiler.projector.draw(scored.gaussian, temperature)
    rows, read, weight = _read(examples, executor, z.shape[1])
    if len(rows) == len(examples):
        of_read = lambda tensor: tensor
    else:
        at = to_device(torch.tensor(rows), z.device)
        of_read = lambda tensor: tensor[at]
    gaussian, z = Gaussian(of_read(scored.gaussian.mu), of_read(scored.gaussian.log_sigma)), of_read(z)
    soft = compiler.projector.to_embeddings(z)
    prompts, actions = [e.executor_prompt for e in read], [e.action for e in read]
    action, _ = executor.action_nll(prompts, soft, actions, config.label_smoothing)
    losses = {
        "action": action.to(z.device),  # each model may have a device of its own
        "entropy": negative_entropy(gaussian),
        "orth": orthogonality(of_read(scored.h_soft), of_read(scored.h_text), of_read(scored.text_mask)),
    }
    if compiler.projector.config.kind == "linear":
        del losses["entropy"]  # there is no sigma to keep open
    if config.latent != "none":
        losses["latent"] = _latent(compiler, executor, read, gaussian, z, soft, config)
    return {"text": text, **{name: weight * value for name, value in losses.items()}}


def _read(examples: Sequence[Example], executor: FrozenExecutor, n: int) -> tuple[list[int], list[Example], float]:
    """Choose the rows whose soft tokens are read, and the weight of their losses. Where there are none, one row that
    weighs nothing stands in: ranks that share a model's slices keep step by it."""
    rows = [i for i, example in enumerate(examples) if example.soft_read]
    if rows:
        return rows, [examples[i] for i in rows], 1.0
    nothing = Prompt((executor.placeholder,) * n, None)
    return [0], [replace(examples[0], executor_prompt=nothing)], 0.0


def _latent(
    compiler: MemoryCompiler,
    executor: FrozenExecutor,
    examples: Sequence[Example],
    gaussian: Any,
    z: Tensor,
    soft: Tensor,
    config: SftConfig,
) -> Tensor:
    """Compute L_latent, the semantic alignment of Eq. 6: the soft tokens should hold the memory's content."""
    settings = compiler.projector.config
    if config.latent == "lm_head":  # the executor reads the memory back out of the soft tokens
        prompts = [Prompt((executor.placeholder,) * settings.n_tokens, None)] * len(examples)
        nll, count = executor.action_nll(prompts, soft, [e.memory_ids for e in examples])
        return (nll / count.clamp(min=1)).to(z.device)
    memories = embedded_memories(executor, examples)
    target = torch.stack([memory_targets(m, settings.n_tokens, settings.emb_std) for m in memories]).to(z.device)
    if config.latent == "soft_mse" or settings.kind == "linear":
        return soft_mse(z, target)
    return gauss_nll(gaussian, target)


def embedded_memories(executor: FrozenExecutor, examples: Sequence[Example]) -> list[Tensor]:
    """Embed each row's M (T, d) as the executor does: its pictures, where it sees and M has some, else its text."""
    # The embedding layer is called, for its table may be in slices, and once: ranks hold unequal numbers of rows.
    ids = to_device(torch.tensor([i for e in examples for i in e.memory_ids]), executor.backbone.device)
    read = list(executor.backbone.embeddings(ids).split([len(e.memory_ids) for e in examples]))
    shown = {i: e.memory_seen for i, e in enumerate(examples) if e.memory_seen is not None}
    if shown:
        for i, seen in zip(shown, executor.backbone.picture_embeddings(list(shown.values())), strict=True):
            read[i] = seen
    return read
