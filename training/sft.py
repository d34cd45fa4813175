"""Stage 1, supervised fine-tuning of compiler LoRA and projector against a frozen executor (paper C.3.1, Eq. 9).

    L = L_text + L_action + 0.1 L_entropy + 1.0 L_latent + 0.1 L_orth

    memcompiler train sft -c sft/quickstart rows=out/rows --out out/sft
    torchrun --nproc_per_node 8 -m memcompiler train sft -c sft/paper --out runs/sft backend=fsdp

`train_sft` is the stage: data, models, loop, checkpoints. `SftTrainer._optimizer_step` is one step: a global batch of
rows, split over ranks and micro-batches. Every loss is a sum over rows with weights from the global batch, so the
result does not depend on the split. All randomness of a step (order, dropout, noise of the soft tokens) is a function
of (seed, step): resuming needs no generator state.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from agent.episode import EpisodeLimits, EpisodeSpec
from compiler.build import load_compiler, measured_std
from compiler.checkpoint import environment_facts
from compiler.hf import MemoryCompiler
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import SftConfig
from data_gen.held_out import rows_environment_settings, select_held_out_specs, shares
from data_gen.leakage import copy_rows_manifest, rows_by_environment, rows_environments
from envs.registry import Environments, leases, of_environments
from envs.spec import EnvSpec
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from training import distributed
from training.backend import BACKENDS
from training.evaluation import HeldOutTasks, eval_decoding
from training.gate import fit_gate_after_sft
from training.rollout import RolloutEngine
from training.sft_data import (
    EncodedRows,
    Example,
    Rows,
    SftData,
    StepBatches,
    bad_rows,
    bucketed,
    describe,
    episodes_of,
    memory_systems,
    row_length,
)
from training.sft_losses import sft_losses
from training.trackers import require
from training.trainer import (
    HELD_OUT,
    Metrics,
    Trainer,
    console,
    create_run,
    permutation,
    training_log,
    weights_location,
)

SKIPPED = "skipped_rows.json"  # in the run folder: rows that cannot be trained on, with task and reason


def train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Train stage 1, or resume it; OUT gets checkpoints, metrics.jsonl, and the gate of `compiled_gated`.

    Raises:
        ConfigError: No gradient can pass through this executor, or rows leak, are broken, or lack what it reads.
    """
    if config.executor.engine != "hf":
        raise ConfigError("SFT's gradient passes through the executor: it needs executor.engine=hf")
    require(config.trackers)
    with distributed.group(), ExitStack() as stack:
        # Data
        data = SftData.load(config)
        envs, specs = held_out_episodes(data, config, stack)
        if (run := create_run(config, out, on_exists)) is not None:
            stack.enter_context(run)
            copy_rows_manifest(run, data.folders, data.leaks)
            if data.validation:
                played = {"played": sorted(spec.task.id for spec in specs)} if specs else {}
                tasks = sorted({data.tasks[i] for i in data.validation})
                run.write_json(HELD_OUT, {"rows": len(data.validation), "tasks": tasks, **played})

        # Models
        if config.executor.first_view and not any(part.has_first_observations for part in data.parts):
            raise ConfigError("the executor reads the first view, which rows of an older version lack: collect anew")
        if config.executor.context == "turns" and not all(part.has_past_views for part in data.parts):
            raise ConfigError(
                "the executor reads past views (executor.context=turns), which rows of an older version lack: collect "
                "anew, or use executor.context=rebuilt"
            )
        environments = rows_environments(data.folders)
        compiler, executor = load_models(config, environments)
        _check_continues(config, compiler)
        skipped = exclude_bad_rows(data, compiler, executor=executor, config=config, run=run)

        held_out_tasks = None
        if envs:
            engine = RolloutEngine(leases(envs), executor, EpisodeLimits(config.evaluation.max_steps, config.seed))
            held_out_tasks = HeldOutTasks(config.evaluation, engine, specs, eval_decoding(config.compiler))
        trainer = SftTrainer(
            config=config,
            compiler=compiler,
            executor=executor,
            rows=Subset(data.rows, data.training),
            out=out,
            facts=environment_facts(list(environments)) | _facts_of_rows(config, data) | _ablations(config) | skipped,
            validation_rows=Subset(data.rows, data.validation),
            held_out_tasks=held_out_tasks,
        )
        # Loop; `steps` saves checkpoints
        with training_log(trainer, run, config) as log:
            for metrics in trainer.steps():
                log(metrics, progress_line(metrics))
    if run is not None:
        fit_gate_after_sft(out, config.seed)
    return compiler


# -- models and rows ---------------------------------------------------------------------------------------------------


def held_out_episodes(
    data: SftData, config: SftConfig, stack: ExitStack
) -> tuple[dict[str, Environments], list[EpisodeSpec]]:
    """Open the environments of the rows by name, and choose the held-out tasks to play, as many of each; none without
    evaluation."""
    if not (n := config.evaluation.tasks):
        return {}, []
    held, by_name = data.validation_tasks(), rows_by_environment(data.folders)
    envs, specs = dict[str, Environments](), list[EpisodeSpec]()
    for (name, folders), share in zip(by_name.items(), shares(n, len(by_name)), strict=True):
        envs[name] = stack.enter_context(Environments(rows_environment_settings(folders)))
        found = select_held_out_specs({folder: held[folder] for folder in folders}, share, config.seed, envs[name])
        specs += [replace(spec, environment=name if len(by_name) > 1 else "") for spec in found]
    return envs, specs


def load_models(config: SftConfig, environments: Mapping[str, EnvSpec]) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Load both models with the instructions of the rows' environments.

    If the backend slices them, rank 0 loads weights into host memory, and the others have none until the backend
    distributes them."""
    location = weights_location(config.backend)
    # Without the soft channel the executor is not part of the step, and is not sliced.
    executor = load_frozen(
        config.executor,
        of_environments({name: spec.executor_instructions for name, spec in environments.items()}),
        location if config.soft else "device",
    )
    settings = config.compiler
    if location != "device" and settings.soft.emb_std == "auto" and settings.checkpoint is None:
        emb_std = distributed.from_first(lambda: measured_std(executor.embedding_table))
        settings = settings.model_copy(update={"soft": settings.soft.model_copy(update={"emb_std": emb_std})})
    told = of_environments({name: spec.compiler_instructions for name, spec in environments.items()})
    return load_compiler(settings, executor, seed=config.seed, instructions=told, weights=location), executor


def exclude_bad_rows(
    data: SftData, compiler: MemoryCompiler, executor: FrozenExecutor, config: SftConfig, run: RunFolder | None
) -> dict[str, int]:
    """Remove rows that cannot be trained on from `data`, and record them. Raises: ConfigError, if there are some and
    `on_bad_rows` is "error", or none is left."""
    bad = bad_rows(data.rows, data.tasks, compiler=compiler, executor=executor, config=config)
    if not bad:
        return {}
    problem = describe(bad, len(data.rows))
    data.training, data.validation = ([i for i in rows if i not in bad] for rows in (data.training, data.validation))
    if config.on_bad_rows == "error" or not data.training:
        raise ConfigError(f"{problem}. Repair or remove them, or skip them with on_bad_rows=skip")
    if run is not None:
        console.print(f"  skipped: {problem}", markup=False, soft_wrap=True)
        run.write_json(SKIPPED, {"rows": len(data.rows), "skipped": bad})
    return {"skipped_rows": len(bad)}


def _check_continues(config: SftConfig, compiler: MemoryCompiler) -> None:
    """Set whether a new compiler writes text. Raises: ConfigError, for a checkpoint of the other kind."""
    if config.compiler.checkpoint is None:
        compiler.writes_text = config.text
    elif compiler.writes_text != config.text:
        raise ConfigError(
            f"{config.compiler.checkpoint} was trained with text={str(compiler.writes_text).lower()}: set text so, or "
            "start from another checkpoint"
        )


def _facts_of_rows(config: SftConfig, data: SftData) -> dict[str, Any]:
    """Return the banks of the rows, and the memory systems whose entries the compiler reads."""
    return data.bank_versions() | (memory_systems(data.folders) if config.text else {})


def _ablations(config: SftConfig) -> dict[str, bool]:
    """Return the settings `soft`, `brief_state` and `text` if they are off, for a checkpoint's state."""
    return {name: False for name in ("soft", "brief_state", "text") if not getattr(config, name)}


def progress_line(metrics: Metrics) -> str:
    """Format a step's losses for the terminal."""
    terms = " ".join(f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("loss_"))
    validation = f"  held out {metrics['val_loss']:.3f}" if "val_loss" in metrics else ""
    success = f"  held-out success {metrics['eval_success']:.2f}" if "eval_success" in metrics else ""
    return f"loss {metrics['loss']:.2f}  {terms}{validation}{success}"


# -- the loop ----------------------------------------------------------------------------------------------------------


class SftTrainer(Trainer[Metrics]):
    """Trains on rows. A step returns its metrics, with validation and evaluation metrics when those are due."""

    stage, unit, counts = "sft", "step", "rows"

    def __init__(
        self,
        config: SftConfig,
        compiler: MemoryCompiler,
        executor: FrozenExecutor,
        rows: Rows,
        out: Path,
        facts: dict[str, Any] | None = None,
        validation_rows: Rows = (),
        held_out_tasks: HeldOutTasks | None = None,
    ) -> None:
        if not len(rows):
            raise ValueError("no SFT rows: run `memcompiler collect` first")
        self.config, self.executor, self.rows, self.validation_rows = config, executor, rows, validation_rows
        self.per_epoch = math.ceil(len(rows) / config.batch_size)
        total = config.max_steps or math.ceil(config.epochs * self.per_epoch)
        # Hash before the backend slices the models; until then only rank 0 may have the weights.
        sharded = BACKENDS[config.backend].is_sharded
        hash = distributed.from_first(executor.hash) if sharded else distributed.once_per_node(executor.hash)
        super().__init__(
            config,
            compiler,
            executor_hash=hash,
            items=len(rows),
            total=total,
            out=out,
            facts=facts,
            held_out_tasks=held_out_tasks,
        )
        self.backend = BACKENDS[config.backend](
            compiler, executor.model if config.soft else None, config.optimizer, config.soft
        )
        self.frozen = self.executor_fingerprint() if sharded else hash
        if self.best.by == "loss":
            self.patience = config.validation.patience or math.inf
        if config.gradient_checkpointing:
            compiler.backbone.enable_gradient_checkpointing()
            executor.backbone.enable_gradient_checkpointing()
        every_row: Any = ConcatDataset([rows, validation_rows])  # pyright: ignore[reportArgumentType]
        self.examples = EncodedRows(every_row, compiler, executor, config.soft)  # validation rows follow the others
        self._buckets: tuple[int, list[list[int]]] = (-1, [])  # an epoch and its batches of similar length
        self._loader: tuple[int, Iterator[list[Example]]] = (-1, iter(()))  # and the step of its next batch

    def executor_fingerprint(self) -> str:
        if self.backend.is_sharded:
            return self.backend.fingerprint(self.executor.model)
        return distributed.once_per_node(self.executor.hash)

    def steps(self) -> Iterator[Metrics]:
        self.compiler.train()
        return super().steps()

    def take_step(self) -> Metrics:
        started = time.perf_counter()
        metrics = self._optimizer_step(self.step)
        self.step += 1
        metrics |= {"step": self.step, "seconds": time.perf_counter() - started}
        if len(self.validation_rows) and (self.step % self.config.validation.every == 0 or self.step == self.total):
            metrics |= {f"val_{name}": value for name, value in self.validate().items()}
        if self.held_out_tasks is not None and self.plays_after(self.step):
            metrics |= self.held_out_tasks.play(self.compiler)
        self.save_if_due(metrics)
        return metrics

    def _optimizer_step(self, step: int) -> Metrics:
        """Compute the losses of a global batch, their gradients, and AdamW's update."""
        config, mine = self.config, self._next_examples()
        counts = distributed.total({**loss_counts(mine), "read": self._tokens(mine)})
        rate = self.set_learning_rate(config.optimizer, step)
        totals: dict[str, Tensor] = {}
        torch.manual_seed((config.seed * 1_000_003 + step) * 64 + distributed.rank())
        for micro in self.backend.micro_batches(mine, config.micro_batch_size):
            # A rank without rows takes part with a row of weight 0.
            examples = micro or [self.examples[self.batch_indices(step)[0]]]
            terms, loss = self.backend.forward(
                functools.partial(self._weighted_losses, examples, counts, 1.0 if micro else 0.0)
            )
            self.backend.backward(loss)
            for name, value in terms.items():
                totals[name] = totals.get(name, torch.zeros(())) + value.detach()
        norm = self.backend.step()
        losses = distributed.total(_to_host(totals))
        return {**self._loss_metrics(losses), "lr": rate, "grad_norm": norm, "tokens": int(counts["read"])}

    def _weighted_losses(
        self, examples: Sequence[Example], counts: Mapping[str, float], weight: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute a micro-batch's part of every term, averaged over the global batch, and of the loss (Eq. 9)."""
        losses = sft_losses(self.compiler, self.executor, examples, self.config, sharing=self.sharing)
        terms = {n: weight * value.sum() / max(1, counts.get(n, counts["rows"])) for n, value in losses.items()}
        return terms, sum((getattr(self.config.weights, n) * v for n, v in terms.items()), torch.tensor(0.0))

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Compute the loss on all validation rows, without dropout and with the soft tokens' means: a deterministic
        function of the weights."""
        self.compiler.eval()
        totals, counts, first = dict[str, Tensor](), Counter[str](), len(self.rows)
        mine = range(first + distributed.rank(), first + len(self.validation_rows), distributed.world_size())
        for micro in self.backend.micro_batches(mine, self.config.micro_batch_size):
            examples = [self.examples[i] for i in micro or (first,)]
            losses = self.backend.forward(
                functools.partial(
                    sft_losses,
                    self.compiler,
                    self.executor,
                    examples,
                    self.config,
                    temperature=0.0,
                    sharing=self.sharing,
                )
            )
            if micro:
                counts.update(loss_counts(examples))
                for name, value in losses.items():
                    totals[name] = totals.get(name, 0.0) + value.sum().double()
        self.compiler.train()
        sums, over = distributed.total(_to_host(totals)), distributed.total(counts)
        return self._loss_metrics({name: value / max(1, over.get(name, over["rows"])) for name, value in sums.items()})

    def _loss_metrics(self, losses: Mapping[str, float]) -> Metrics:
        """Return the loss (Eq. 9) and its terms under their names in metrics.jsonl."""
        terms = {f"loss_{name}": value for name, value in losses.items()}
        return {"loss": sum(getattr(self.config.weights, name) * value for name, value in losses.items()), **terms}

    # -- batches -------------------------------------------------------------------------------------------------------

    def batch_indices(self, step: int) -> list[int]:
        """Return the rows of a step's global batch, from the epoch's order or batches of similar length."""
        epoch, i = divmod(step, self.per_epoch)
        order = self._order(epoch)
        size, window = self.config.batch_size, self.config.length_buckets
        if not window:
            return order[i * size : (i + 1) * size]
        if self._buckets[0] != epoch:
            batches = bucketed(order, self._lengths, size, window, seed=f"{self.config.seed}:{epoch}")
            self._buckets = epoch, batches
        return self._buckets[1][i]

    def _order(self, epoch: int) -> list[int]:
        """Shuffle the rows for an epoch, or with `share_prefix` the episodes, whose rows lie together."""
        if not self.config.share_prefix:
            return permutation(len(self.rows), self.config.seed, epoch)
        episodes = permutation(len(self._episodes), self.config.seed, epoch)
        return [i for episode in episodes for i in self._episodes[episode]]

    @functools.cached_property
    def _episodes(self) -> list[list[int]]:
        return episodes_of(self.rows)

    @functools.cached_property
    def _lengths(self) -> list[int]:
        lengths = [row_length(row) for row in self.rows]
        for episode in self._episodes if self.config.share_prefix else ():
            longest = max(lengths[i] for i in episode)  # so that its rows stay together
            for i in episode:
                lengths[i] = longest
        return lengths

    def _next_examples(self) -> list[Example]:
        """Return this rank's examples of the current step from the loader, which is ahead with later steps."""
        step, batches = self._loader
        if step != self.step:  # the first step, also after resuming
            self.batch_indices(self.step)  # computes episodes and row lengths once, before workers fork
            batches = StepBatches(self.total, self._rank_examples).load(self.step, self.config.loader_workers)
        self._loader = self.step + 1, batches
        return next(batches)

    def _rank_examples(self, step: int) -> list[Example]:
        batch = self.batch_indices(step)
        if self.config.share_prefix:  # neighbours share a prefix
            return [self.examples[batch[i]] for i in distributed.share(len(batch))]
        return [self.examples[i] for i in batch[distributed.rank() :: distributed.world_size()]]

    def _tokens(self, examples: Sequence[Example]) -> int:
        """Count the tokens that the compiler and, with soft tokens, the executor read."""
        compiler = sum(len(e.prompt.ids) + len(e.emission) + self.compiler.n_tokens for e in examples)
        return compiler + sum(len(e.executor_prompt.ids) + len(e.action) for e in examples if e.soft_read)


def loss_counts(examples: Sequence[Example]) -> dict[str, int]:
    """Count what losses are averaged over: tokens of emissions and actions, and rows whose soft tokens are read."""
    read = [e for e in examples if e.soft_read]
    tokens = {"text": sum(len(e.emission) for e in examples), "action": sum(len(e.action) for e in read)}
    return {"rows": len(read), **tokens}


def _to_host(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Read all scalars with one copy from the device."""
    values = torch.stack([value.double() for value in totals.values()]).tolist() if totals else []
    return dict(zip(totals, values, strict=True))
