"""Stage 2, GRPO (paper C.3.2, Eq. 8): compiler LoRA and projector from binary success, with the executor frozen.

    memcompiler train grpo -c grpo/quickstart --out out/grpo
    memcompiler train grpo -c grpo/paper cluster=ray --out runs/grpo                     (engines beside the trainers)
    torchrun --nproc_per_node 8 -m memcompiler train grpo -c grpo/paper compiler.engine=hf --out runs/grpo    (without)

`train_grpo` is the stage: tasks, models, loop, checkpoints. `GrpoTrainer.take_step` is one update: `tasks` tasks, a
group of `group_size` sampled episodes of each, advantages within the groups, and clipped policy-gradient steps
(`_optimizer_step`) on all samples. Ranks share the episodes; a group may be split over ranks.

The policy is the emission's text and the N Gaussian soft tokens, at the steps at which the executor reads them
(`executor.soft_on`). With `latent_gradient: density_root` they count as N more tokens in Eq. 8, whose ratio is the d-th
root of the density ratio (d dimensions), and the executor has no part in the gradient. `pathwise` is another unbiased
estimate of the same gradient, up to a factor: the soft tokens are mu + sigma noise with the noise given, and the action
that the executor samples after them is the policy's last token. Reward reaches mu and sigma through the frozen
executor, in the one direction that matters; the score function must find it among N d ones.

With `max_staleness: S` a thread plays the episodes of up to S coming updates meanwhile (`training.rollouts_ahead`).

Token weights are computed from global counts, so the split over ranks and micro-batches changes nothing. All randomness
is a function of (seed, update): resuming needs no generator state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agent.deliveries import find as find_delivery
from agent.episode import EpisodeLimits, EpisodeSpec
from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler, warn_about_compiler_inputs, warn_about_executor_inputs
from compiler.checkpoint import environment_facts
from compiler.gate import CompileGate, copy_gate, gate_for
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.load import ConfigError
from configs.training import GrpoConfig
from envs.registry import Environments, leases
from executor.base import TokenExecutor
from executor.build import load_executor, load_frozen
from executor.hf import FrozenExecutor
from executor.records import Executor
from training import distributed
from training.backend import BACKENDS
from training.evaluation import HeldOutTasks, eval_decoding
from training.grpo_tasks import by_environment, hold_out_of_each, told_to_compiler, told_to_executor, training_specs
from training.metrics import Totals, mismatch_lines, progress_line, rollout_means, rollout_rows, token_means
from training.policy import Policy, WeightedSample, token_weights
from training.ray_engines import RayEngines, ray_compiler, ray_executor
from training.ray_trainer import train_on_ray
from training.rollout import Group, RolloutEngine, Sample, gather_groups, samples_of
from training.rollouts_ahead import (
    Rollout,
    RolloutsAhead,
    Snapshot,
    check_staleness,
    check_weight_versions,
    copy_for_rollouts,
)
from training.trackers import require
from training.trainer import (
    HELD_OUT,
    ROLLOUTS,
    Metrics,
    Trainer,
    console,
    create_run,
    permutation,
    training_log,
    weights_location,
)


class HashedExecutor(Executor, Protocol):
    """An executor whose parameters can be hashed, to check that they stay the same."""

    def hash(self) -> str: ...


def train_grpo(config: GrpoConfig, out: Path, on_exists: str = "resume") -> None:
    """Train stage 2, or resume it, in this process, under torchrun, or on Ray (`cluster`); OUT gets checkpoints,
    metrics.jsonl and rollouts.jsonl.

    Raises:
        ConfigError: Training tasks overlap with evaluation's.
        ClusterError: Ray cannot be used, or trainers were lost too often.
    """
    if config.cluster == "ray":
        train_on_ray(config, out, on_exists, run_trainer)
    else:
        run_trainer(config, out, on_exists)


def run_trainer(
    config: GrpoConfig, out: Path, on_exists: str = "resume", engines: RayEngines | None = None
) -> MemoryCompiler:
    """Run one trainer process. `engines`: roll out and act beside the trainers, on Ray."""
    require(config.trackers)
    with distributed.group(), ExitStack() as stack:
        run = create_run(config, out, on_exists, lock=engines is None)  # on Ray, the driver holds the lock
        if run is not None:
            stack.enter_context(run)
            copy_gate(config.compiler.checkpoint, out)
        gate = delivery_gate(config)
        if engines is not None:
            engines.report({"role": "trainer", "number": distributed.rank(), "event": "began", "pid": os.getpid()})

        # Data
        envs = {part.env.name: stack.enter_context(Environments(part.env)) for part in config.parts}
        specs, facts = training_specs(config, envs, run, out)
        held: list[EpisodeSpec] = []
        if config.evaluation.tasks:
            specs, held = hold_out_of_each(specs, config.evaluation.tasks, config.seed)
            if run is not None:
                run.write_json(HELD_OUT, {"played": sorted(spec.task.id for spec in held)})

        # Models
        actor, executor = load_executors(config, engines)
        served = config.compiler.engine == "vllm" or (engines is not None and bool(engines.compilers))
        location = weights_location(config.backend) if served else "device"
        compiler = load_compiler(
            config.compiler,
            executor,
            seed=config.seed,
            instructions=told_to_compiler(config),
            weights=location,
        )
        check_deliveries(config, compiler)
        if config.compiler.checkpoint and run is not None:
            found = checkpoint.find(Path(config.compiler.checkpoint))
            warn_about_executor_inputs(checkpoint.executor_inputs(found), config.executor, str(found))
            warn_about_compiler_inputs(checkpoint.compiler_inputs(found), config.compiler, str(found))

        engine = rollout_engine(config, envs, executor=actor, engines=engines, gate=gate)
        held_out_tasks = None
        if held:
            player = replace(engine, limits=EpisodeLimits(config.evaluation.max_steps, config.seed))
            held_out_tasks = HeldOutTasks(config.evaluation, player, held, eval_decoding(config.compiler))
        played = find_delivery(config.delivery)
        without = {name: False for name in ("soft", "brief_state", "text") if not getattr(played, name)}
        facts |= environment_facts(list(envs)) | without
        trainer = GrpoTrainer(
            config=config,
            compiler=compiler,
            executor=executor,
            engine=engine,
            specs=specs,
            out=out,
            facts=facts,
            held_out_tasks=held_out_tasks,
        )
        # Loop; `steps` plays, learns, and saves checkpoints
        is_first = True
        with training_log(trainer, run, config) as log:
            for metrics, groups in trainer.steps():
                if run is not None:
                    run.lines(ROLLOUTS).append(*rollout_rows(int(metrics["update"]), groups))
                    for line in mismatch_lines(metrics, is_first):
                        console.print(line)
                    is_first = is_first and "apart" not in metrics
                log(metrics, progress_line(metrics))
    return compiler


# -- tasks, models and engines -----------------------------------------------------------------------------------------


def load_executors(config: GrpoConfig, engines: RayEngines | None = None) -> tuple[Executor, HashedExecutor]:
    """Load the executor that acts and the one that the trainer holds: two only if an engine acts, and the trainer needs
    the gradient of its own."""
    environment = told_to_executor(config)
    if engines is None or not engines.executors:
        actor = load_executor(config.executor, environment)
    else:
        actor = ray_executor(config.executor, environment, engines, distributed.rank())
    if config.loss.latent_gradient != "pathwise" or isinstance(actor, FrozenExecutor):
        return actor, actor
    return actor, load_frozen(config.executor, environment)


def rollout_engine(
    config: GrpoConfig,
    envs: Mapping[str, Environments],
    executor: Executor,
    engines: RayEngines | None = None,
    gate: CompileGate | None = None,
) -> RolloutEngine:
    """Create what plays episodes; the compiler in training, a vLLM engine or Ray engines compile."""
    served: Any = None
    if engines is not None and engines.compilers:
        served = ray_compiler(engines, distributed.rank(), concurrent=config.compiler.engine == "vllm")
    elif config.compiler.engine == "vllm":
        served = load_served_compiler(config.compiler, config.seed, told_to_compiler(config))
    limits = EpisodeLimits(config.max_steps, config.seed, batching=config.batching)
    return RolloutEngine(
        make_env=leases(envs),
        executor=executor,
        limits=limits,
        concurrency=config.concurrency,
        served=served,
        gate=gate,
    )


def check_deliveries(config: GrpoConfig, compiler: MemoryCompiler) -> None:
    """Set whether a new compiler writes text. Raises: ConfigError, if a delivery needs a compiler of the other kind."""
    played = find_delivery(config.delivery)
    if config.compiler.checkpoint is None:
        compiler.writes_text = played.text
    names = (config.delivery, config.evaluation.delivery) if config.evaluation.tasks else (config.delivery,)
    for name in names:
        try:
            find_delivery(name).check_text(compiler.writes_text, str(config.compiler.checkpoint))
        except ValueError as error:
            raise ConfigError(str(error)) from None


def delivery_gate(config: GrpoConfig) -> CompileGate | None:
    """Load the compile gate beside the checkpoint, if a delivery uses it. Raises: CheckpointError, if it cannot be
    read."""
    gated = [name for name in (config.delivery, config.evaluation.delivery) if find_delivery(name).gated]
    return gate_for(gated, config.compiler.checkpoint)


def sampling(config: GrpoConfig) -> Decoding:
    """Return the decoding of rollouts, which also scores them."""
    settings, compiler = config.sampling, config.compiler
    return Decoding(
        temperature=settings.temperature,
        max_new_tokens=compiler.max_new_tokens,
        batch_size=compiler.batch_size,
        latent_temperature=settings.latent_temperature,
    )


# -- the loop ----------------------------------------------------------------------------------------------------------


class GrpoTrainer(Trainer[tuple[Metrics, list[Group]]]):
    """Trains on episodes that it plays. A step is one update; it returns metrics and the episodes' groups."""

    stage, unit, counts = "grpo", "update", "tasks"

    def __init__(
        self,
        config: GrpoConfig,
        compiler: MemoryCompiler,
        executor: HashedExecutor,
        engine: RolloutEngine,
        specs: Sequence[EpisodeSpec],
        out: Path,
        facts: dict[str, Any] | None = None,
        held_out_tasks: HeldOutTasks | None = None,
    ) -> None:
        if not specs:
            raise ValueError("there are no tasks to train on: check split, limit and the environment's data")
        if (episodes := config.tasks * config.group_size) < distributed.world_size():
            raise ValueError(
                f"{config.tasks} tasks x {config.group_size} episodes an update leave {distributed.world_size()} ranks "
                f"only {episodes} episodes, some none: set tasks or group_size higher, or start fewer processes"
            )
        self.config, self.executor, self.engine, self.specs = config, executor, engine, list(specs)
        self.environments = [group[0].environment for group in by_environment(specs) if group[0].environment]
        hash = distributed.once_per_node(executor.hash)
        super().__init__(
            config,
            compiler,
            executor_hash=hash,
            items=len(specs),
            total=config.updates,
            out=out,
            facts=facts,
            held_out_tasks=held_out_tasks,
        )
        self.frozen = self.executor_hash
        compiler.decoding = sampling(config)
        self.policy = Policy(compiler, executor, config.loss, self.sharing)
        backend = BACKENDS[config.backend]
        # Rollouts need a copy if the policy is about to be sliced, or to change meanwhile.
        copied = backend.is_sharded or config.max_staleness > 0
        self.sampler = copy_for_rollouts(compiler, with_base=engine.served is None) if copied else compiler
        self.backend = backend(compiler, None, config.optimizer, config.loss.latent_weight > 0)
        if config.gradient_checkpointing:
            compiler.backbone.enable_gradient_checkpointing()
            if self.policy.pathwise and isinstance(executor, FrozenExecutor):
                executor.backbone.enable_gradient_checkpointing()
        # No rollout runs across held-out tasks, which may cause a checkpoint.
        pauses_after = lambda step: self.saves_after(step) or self.plays_after(step)
        self._ahead = RolloutsAhead(self._play, config.max_staleness, pauses_after)

    def executor_fingerprint(self) -> str:
        return distributed.once_per_node(self.executor.hash)

    def steps(self) -> Iterator[tuple[Metrics, list[Group]]]:
        try:
            yield from super().steps()
        finally:
            self._ahead.close()

    def take_step(self) -> tuple[Metrics, list[Group]]:
        started, update = time.perf_counter(), self.step
        rollout = self._ahead.take(update, self._snapshot)
        rolled = time.perf_counter()
        groups = gather_groups(rollout.group_indices, rollout.episodes, self.config.token_cost)
        samples = samples_of(groups, self.compiler, self.policy.pathwise)
        check_staleness(samples, update, self.config.max_staleness)
        learned = self.learn(samples, update)
        seconds = {
            "seconds_rollout": rollout.seconds,
            "seconds_waited": rolled - started,
            "seconds_update": time.perf_counter() - rolled,
        }
        self.step += 1
        metrics = {"update": float(self.step), **rollout_means(groups, self.environments), **learned, **seconds}
        metrics["staleness"] = float(update - rollout.weight_version)
        if self.held_out_tasks is not None and self.plays_after(self.step):
            self._set_sampler(self._snapshot(), self.step)
            metrics |= self.held_out_tasks.play(self.sampler)
        self.save_if_due(metrics)
        return metrics | {"seconds": time.perf_counter() - started}, groups

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def specs_of(self, update: int) -> list[EpisodeSpec]:
        """Return the tasks of an update: environments take turns, and every pass over the tasks of one is a new
        permutation."""
        groups, chosen = by_environment(self.specs), list[EpisodeSpec]()
        for position in range(update * self.config.tasks, (update + 1) * self.config.tasks):
            turn, at = divmod(position, len(groups))
            epoch, i = divmod(turn, len(groups[at]))
            chosen.append(groups[at][permutation(len(groups[at]), self.config.seed, epoch)[i]])
        return chosen

    def _play(self, update: int, weights: Snapshot, version: int) -> Rollout:
        """Play this rank's episodes of an update, in this thread, with the weights after `version` updates."""
        started, k, chosen = time.perf_counter(), self.config.group_size, self.specs_of(update)
        indices = [episode // k for episode in distributed.share(len(chosen) * k)]
        self._set_sampler(weights, version)
        seed = (self.config.seed * 1_000_003 + update) * 1024 + distributed.rank()
        self.sampler.generator.manual_seed(seed)
        if isinstance(self.engine.executor, TokenExecutor):
            self.engine.executor.generator.manual_seed(seed)
        episodes = self.engine.run(self.sampler, [chosen[i] for i in indices], self.config.delivery)
        check_weight_versions(episodes, version)
        return Rollout(indices, episodes, version, time.perf_counter() - started)

    def _snapshot(self) -> Snapshot:
        """Copy the current weights for the compiler that rolls out."""
        return None if self.sampler is self.compiler else self.backend.weights()

    def _set_sampler(self, weights: Snapshot, version: int) -> None:
        """Set the weights of the compiler that rolls out."""
        if weights is not None:
            checkpoint.copy_weights(self.sampler, weights)
        self.sampler.weight_version = version

    # -- the update ----------------------------------------------------------------------------------------------------

    def learn(self, samples: Sequence[Sample], update: int = 0) -> Metrics:
        """Take `iterations` x `minibatches` optimiser steps on all ranks' samples; returns global means. Every rank
        must call it, with samples or without."""
        config = self.config
        self.compiler.eval()  # LoRA dropout would change the ratio
        weights, first, total = token_weights(samples, config.loss)
        if total == 0:  # no group of any rank has variance
            return {"samples": 0.0, "skipped": 1.0}
        rate = self.set_learning_rate(config.optimizer, update)
        old = self._score_all(samples) if self._needs_old else [None] * len(samples)
        rows = list(zip(samples, weights, old, strict=True))
        totals = Totals()
        norms = []
        for iteration in range(config.iterations):
            for chosen in _minibatches(total, config.minibatches, config.seed, update * config.iterations + iteration):
                mine = [rows[i - first] for i in chosen if first <= i < first + len(rows)]
                norms.append(self._optimizer_step(mine, totals))
        counts = {"samples": float(total), "skipped": 0.0, "grad_norm": max(norms), "lr": rate}
        return token_means(totals) | counts

    @property
    def _needs_old(self) -> bool:
        """Return whether weights change before the last gradient of an update: old log-probabilities are needed."""
        return self.config.minibatches * self.config.iterations > 1

    def _optimizer_step(self, rows: Sequence[WeightedSample], totals: Totals) -> float:
        """Take one optimiser step on this rank's rows; returns the gradient norm before clipping."""
        for micro in self.backend.micro_batches(rows, self.config.micro_batch_size):
            batch = micro or [self.policy.dummy_row(self.step, self._needs_old)]
            loss, stats = self.backend.forward(partial(self.policy.loss, batch))
            self.backend.backward(loss * self.config.minibatches)
            if micro:
                totals.add(stats)
        return self.backend.step()

    @torch.no_grad()
    def _score_all(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Compute every sample's log-probabilities (T + L,) under the current weights."""
        rows: list[Tensor] = []
        for micro in self.backend.micro_batches(samples, self.config.micro_batch_size):
            batch = micro or [self.policy.dummy_row(self.step, with_old=False)[0]]
            scores = self.backend.forward(lambda batch=batch: self.policy.score(batch).logprobs)[: len(micro)].cpu()
            n = self.policy.n_latent
            text, latent = scores.split([scores.shape[1] - n, n], 1)
            rows += [torch.cat([text[i, : s.sampled], latent[i, : n * s.soft_read]]) for i, s in enumerate(micro)]
        return rows


def _minibatches(total: int, number: int, seed: int, iteration: int) -> list[list[int]]:
    """Shuffle and split global sample indices 0..total-1 into `number` parts, identically on every rank. Samples of an
    episode lie together in a part, so that they can share their prefix."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + iteration)
    order = torch.randperm(total, generator=generator).tolist() if number > 1 else list(range(total))
    return [sorted(order[i::number]) for i in range(number)]
