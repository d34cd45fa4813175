"""A training stage from its settings to a run folder: checkpoints, metrics.jsonl, and for GRPO rollouts.jsonl.

All processes of a torchrun call these functions; rank 0 has the run folder and the trackers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from torch.utils.data import ConcatDataset, Subset

from agent.deliveries import find as find_delivery
from agent.episode import EpisodeSpec, Limits
from compiler import checkpoint
from compiler.build import (
    load_compiler,
    load_served_compiler,
    measured_std,
    report_reading,
)
from compiler.gate import Need, keep_need, need_for
from compiler.hf import MemoryCompiler
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import MAY_CHANGE_ON_RESUME, GrpoConfig, SftConfig
from data_gen.experience import bank_facts, filled_bank
from data_gen.leakage import MANIFEST, guard_rows, record_rows, rows_environment
from data_gen.memories import open_memory
from data_gen.rows import SftRow, StoredRows, held_out, row_folders, without_brief_state
from data_gen.tasks import guarded_tasks, held_out_of_rows, rows_world, specs_for, without_held_out
from envs.manifest import Manifest
from envs.registry import Environments, compiler_told, executor_told
from envs.spec import EnvSpec
from executor.build import load_executor, load_frozen
from executor.hf import FrozenExecutor
from executor.records import Executor
from lm.backbone import Weights
from lm.device import placed
from runtime.progress import progress
from runtime.store import read_json
from training import distributed
from training.backend import BACKENDS
from training.engines import Engines, ray_compiler, ray_executor
from training.evaluation import HeldOutTasks, greedy
from training.gate import leave_need
from training.grpo import GrpoTrainer, ModelExecutor
from training.rollout import Group, RolloutEngine
from training.row_check import bad_rows, describe
from training.sft import SftTrainer
from training.trackers import open_trackers, require
from training.trainer import Trainer
from training.validation import METRICS

console = Console(width=120)
ROLLOUTS = "rollouts.jsonl"
HELD_OUT = "held_out.json"  # the tasks whose rows validate, and those that are played
SKIPPED = "skipped_rows.json"  # the rows that cannot be trained on, each with its task and what is wrong
APART_ALARM = (
    0.05  # mean |difference| of log p between rollout engine and trainer beyond which GRPO warns: ratios 5 % off
)

Made = TypeVar("Made")
Metrics = dict[str, float]


def train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Run stage 1, or go on with it. Raises: ConfigError, where no gradient could pass through the executor, or the
    rows do not hold what it reads."""
    if config.executor.engine != "hf":
        raise ConfigError("SFT's gradient passes through the executor: it needs executor.engine=hf")
    require(config.trackers)
    with distributed.group(), ExitStack() as opened:
        edit = None if config.brief_state else without_brief_state
        parts = {folder: StoredRows(folder, edit) for folder in row_folders(config.rows)}
        problems: list[str] = []
        for folder, part in parts.items():
            problems += guard_rows(folder, part.tasks, config.allow_leakage)
        every, tasks = ConcatDataset[SftRow](parts.values()), [task for part in parts.values() for task in part.tasks]
        training, validating = held_out(tasks, config.validation.share, config.seed)
        names = {tasks[i] for i in validating}
        make_env, specs = None, list[EpisodeSpec]()
        if n := config.evaluation.tasks:
            envs = opened.enter_context(Environments(rows_world(list(parts))))
            apart = {folder: names.intersection(part.tasks) for folder, part in parts.items()}
            make_env, specs = envs.lease, held_out_of_rows(apart, n, config.seed, envs)
        if (run := _run_folder(config, out, on_exists)) is not None:
            opened.enter_context(run)
            record_rows(run, list(parts), problems)
            if validating:
                run.write_json(HELD_OUT, {"rows": len(validating), "tasks": sorted(names), **_played(specs)})
        spec = rows_environment(list(parts))
        if config.executor.first_view and not any(part.has_first_views for part in parts.values()):
            raise ConfigError("the executor reads the first view, which rows of an older version lack: collect anew")
        compiler, executor = load_models(config, spec)
        facts = {"environment": spec.name, **_bank_facts(list(parts)), **_left_out(config)}
        if bad := bad_rows(every, tasks, compiler, executor, config):
            said = describe(bad, len(every))
            training, validating = ([i for i in part if i not in bad] for part in (training, validating))
            if config.on_bad_rows == "error" or not training:
                raise ConfigError(f"{said}. Mend or remove them, or leave them out by on_bad_rows=skip")
            facts["skipped_rows"] = len(bad)
            if run is not None:
                console.print(f"  skipped: {said}", markup=False, soft_wrap=True)
                run.write_json(SKIPPED, {"rows": len(every), "skipped": bad})
        rows, others = Subset(every, training), Subset(every, validating)
        played = None
        if make_env:
            engine = RolloutEngine(make_env, executor, Limits(config.evaluation.max_steps, config.seed))
            played = HeldOutTasks(config.evaluation, engine, specs, greedy(config.compiler))
        trainer = SftTrainer(config, compiler, executor, rows, out, facts, others, played)
        train(trainer, run, config, lambda metrics: (metrics, _sft_line(metrics)))
    if run is not None:
        leave_need(out, config.seed)
    return compiler


def train_grpo(
    config: GrpoConfig, out: Path, on_exists: str = "resume", engines: Engines | None = None
) -> MemoryCompiler:
    """Run stage 2, or go on with it. `engines`: that roll out and act beside the trainers (`training.on_ray`). Raises:
    ConfigError, where tasks share what they must not with evaluation's."""
    require(config.trackers)
    with distributed.group(), ExitStack() as opened:
        if (run := _run_folder(config, out, on_exists, lock=engines is None)) is not None:  # on Ray the driver holds it
            opened.enter_context(run)
            keep_need(config.compiler.checkpoint, out)
        need = needed_by(config)  # what lacks is said before anything is loaded
        if engines is not None:
            engines.tell({"role": "trainer", "number": distributed.rank(), "event": "began", "pid": os.getpid()})
        with Environments(config.env) as envs:
            specs, facts = training_specs(config, envs, run, out)
            held: list[EpisodeSpec] = []
            if config.evaluation.tasks:
                specs, held = without_held_out(specs, config.evaluation.tasks, config.seed)
                if run is not None:
                    run.write_json(HELD_OUT, _played(held))
            acts, executor = grpo_executors(config, engines)
            weights = _weights(config.backend) if _is_served(config, engines) else "device"
            compiler = load_compiler(config.compiler, executor, config.seed, compiler_told(config.env), weights)
            if config.compiler.checkpoint and run is not None:
                found = checkpoint.find(Path(config.compiler.checkpoint))
                report_reading(checkpoint.executor_reading(found), config.executor, str(found))
            engine = rollout_engine(config, envs, acts, engines, need)
            facts |= {"environment": config.env.name}
            played = None
            if held:
                player = replace(engine, limits=Limits(config.evaluation.max_steps, config.seed))
                played = HeldOutTasks(config.evaluation, player, held, greedy(config.compiler))
            trainer = GrpoTrainer(config, compiler, executor, engine, specs, out, facts, played)

            compared = False

            def record(update: tuple[Metrics, list[Group]]) -> tuple[Metrics, str]:
                nonlocal compared
                metrics, groups = update
                assert run is not None  # only rank 0 records
                run.lines(ROLLOUTS).append(*_rollout_rows(int(metrics["update"]), groups))
                for line in engine_lines(metrics, first=not compared):
                    console.print(line)
                compared = compared or "apart" in metrics
                return metrics, _grpo_line(metrics)

            train(trainer, run, config, record)
    return compiler


def train(
    trainer: Trainer[Made],
    run: RunFolder | None,
    config: SftConfig | GrpoConfig,
    record: Callable[[Made], tuple[Metrics, str]],
) -> None:
    """Take all steps that remain, and tell run folder (rank 0 has it), trackers and terminal of each: `record` makes
    metrics and a line for the terminal of what a step gives."""
    if trainer.resume():
        console.print(f"  resumed at {trainer.unit} {trainer.step} of {trainer.total}")
    if run is not None:
        run.record(devices=placed(compiler=trainer.compiler, executor=trainer.executor))
        # Also where it starts over, having been killed before its first checkpoint.
        for rows in (run.metrics, run.lines(ROLLOUTS)):
            rows.keep(lambda row: row[trainer.unit] <= trainer.step)
    trackers = config.trackers if run is not None else ()
    with (
        progress(trainer.stage, trainer.total, trainer.step) as advance,
        open_trackers(trackers, trainer.folder.parent, config, trainer.step) as track,
    ):

        def on_step(made: Made) -> None:
            assert run is not None  # only rank 0 hears of steps
            metrics, line = record(made)
            run.metrics.append(metrics)
            track(metrics, trainer.step)
            advance(line)

        trainer.run(on_step)
    if trainer.step < trainer.total:
        console.print(
            f"  stopped after {trainer.step} of {trainer.total} {trainer.unit}s: {METRICS[trainer.best.by]} was best, "
            f"{trainer.best.value}, after {trainer.best.step}"
        )


def load_models(config: SftConfig, spec: EnvSpec) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Load both models. Where a backend is going to cut them into slices, rank 0 reads them into the host's memory and
    the others hold none of their weights, which the backend gives out."""
    weights = _weights(config.backend)
    executor = load_frozen(config.executor, spec.told, weights if config.soft else "device")  # else it is not cut
    settings = config.compiler
    if weights != "device" and settings.soft.emb_std == "auto" and settings.checkpoint is None:
        emb_std = distributed.from_first(lambda: measured_std(executor.embedding_table))
        settings = settings.model_copy(update={"soft": settings.soft.model_copy(update={"emb_std": emb_std})})
    return load_compiler(settings, executor, config.seed, spec.compiling, weights), executor


def _weights(backend: str) -> Weights:
    """Say where this process is to have the weights that it reads: rank 0 alone where they are going to be cut."""
    if not BACKENDS[backend].is_sharded or distributed.world_size() == 1:
        return "device"
    return "host" if distributed.rank() == 0 else "nowhere"


def _run_folder(config: SftConfig | GrpoConfig, out: Path, on_exists: str, lock: bool = True) -> RunFolder | None:
    """Make the run's folder, on rank 0; the others wait for it."""
    run = None
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME, lock=lock)
    distributed.barrier()
    return run


# -- SFT --------------------------------------------------------------------------------------------------------------


def _bank_facts(rows: Sequence[Path]) -> dict[str, Any]:
    """Name the bank version that the rows were made from; for several folders a list, in their order."""
    records = [folder.parent / "collect.json" for folder in rows]
    versions = [read_json(path)["bank_version"] if path.exists() else None for path in records]
    if len(versions) > 1:
        return {"bank_versions": versions}
    return {"bank_version": versions[0]} if versions[0] is not None else {}


def _left_out(config: SftConfig) -> dict[str, Any]:
    """Say what a compiler was trained without, for a checkpoint's state; nothing where it was trained with all."""
    return {name: False for name in ("soft", "brief_state") if not getattr(config, name)}


def _played(specs: Sequence[EpisodeSpec]) -> dict[str, list[str]]:
    """Name the tasks that are played now and then; nothing where none are."""
    return {"played": sorted(spec.task.id for spec in specs)} if specs else {}


def _sft_line(metrics: Metrics) -> str:
    terms = " ".join(f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("loss_"))
    held_out = f"  held out {metrics['val_loss']:.3f}" if "val_loss" in metrics else ""
    return f"loss {metrics['loss']:.2f}  {terms}{held_out}{_success(metrics)}"


def _success(metrics: Metrics) -> str:
    return f"  held-out success {metrics['eval_success']:.2f}" if "eval_success" in metrics else ""


# -- GRPO -------------------------------------------------------------------------------------------------------------


def training_specs(
    config: GrpoConfig, envs: Environments, run: RunFolder | None, out: Path
) -> tuple[list[EpisodeSpec], dict[str, Any]]:
    """Choose the training tasks with their memory, and what checkpoints say of it. Rank 0 (which has the run folder)
    checks the tasks and fills the bank; the others take what it has made."""
    if run is not None:
        tasks, experience = guarded_tasks(config, envs, run)
        bank = filled_bank(config, envs, experience, out)
        distributed.barrier()
    else:
        distributed.barrier()
        kept = Manifest.read(out / MANIFEST).ids
        tasks = [task for task in envs.tasks(config.split)[: config.limit] if task.id in kept]
        bank = open_memory(config.memory, out / "bank")
    return specs_for(tasks, bank, config.memory.k), bank_facts(config, bank)


def grpo_executors(config: GrpoConfig, engines: Engines | None = None) -> tuple[Executor, ModelExecutor]:
    """Make what acts, and the executor that the trainer holds: the same one, unless engines act beside it and a
    gradient is to pass through one here."""
    told = executor_told(config.env)
    if engines is None or not engines.executors:
        executor = load_executor(config.executor, told)
        return executor, executor
    acts = ray_executor(config.executor, told, engines, distributed.rank())
    return acts, load_executor(config.executor, told) if config.loss.latent_gradient == "pathwise" else acts


def _is_served(config: GrpoConfig, engines: Engines | None) -> bool:
    """Say whether something else than the trainer's own compiler rolls out."""
    return config.compiler.engine == "vllm" or (engines is not None and bool(engines.compilers))


def rollout_engine(
    config: GrpoConfig,
    envs: Environments,
    executor: Executor,
    engines: Engines | None = None,
    need: Need | None = None,
) -> RolloutEngine:
    """Make what plays episodes: the compiler in training compiles, or a vLLM engine, or engines beside it."""
    served: Any = None
    if engines is not None and engines.compilers:
        served = ray_compiler(engines, distributed.rank())
    elif config.compiler.engine == "vllm":
        served = load_served_compiler(config.compiler, config.seed, compiler_told(config.env))
    limits = Limits(config.max_steps, config.seed)
    return RolloutEngine(envs.lease, executor, limits, config.concurrency, served, need)


def needed_by(config: GrpoConfig) -> Need | None:
    """Read what guesses which steps need compiling, where they are played so. Raises: CheckpointError, where it does
    not stand beside the checkpoint, or cannot be read."""
    asked = [name for name in (config.delivery, config.evaluation.delivery) if find_delivery(name).where_needed]
    return need_for(asked, config.compiler.checkpoint)


def _rollout_rows(update: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Say of every episode what it was and how it ended, failures with their reason."""
    return [
        {
            "update": update,
            "task": episode.task_id,
            "family": episode.family,
            "success": episode.success,
            "steps": len(episode.steps),
            "stop_reason": str(episode.stop_reason),
            "error": episode.error,
        }
        for group in groups
        for episode in group.episodes
    ]


def engine_lines(metrics: Metrics, first: bool) -> list[str]:
    """Say how far apart rollout engine and trainer put log p of what was sampled, before the update's first step: in
    the `first` update that learns, and whenever it is too much."""
    if "apart" not in metrics:  # nothing was learnt, nothing scored
        return []
    tokens = {name: metrics[f"apart_{name}"] for name in ("text", "latent")}
    apart = ", ".join(f"{n} {v:.2g} (at most {metrics[f'apart_{n}_max']:.2g})" for n, v in tokens.items())
    lines = [f"  engine and trainer: log p of a sampled token differs by {apart} on average"] if first else []
    limit = math.inf if metrics["staleness"] else APART_ALARM  # other weights are another policy
    if not all(value <= limit for value in tokens.values()):  # what is not a number is too much, too
        lines.append(
            f"  warning: update {metrics['update']:.0f}: rollout engine and trainer are {apart} nats of log p apart, "
            f"more than {APART_ALARM}: are precision, truncation and weights of the two the same?"
        )
    return lines


def _grpo_line(metrics: Metrics) -> str:
    clipped = metrics.get("clip_low", 0.0) + metrics.get("clip_high", 0.0)
    return (
        f"reward {metrics['reward']:.2f}  flat groups {metrics['zero_variance_fraction']:.2f}  clipped {clipped:.3f}  "
        f"entropy {metrics.get('entropy_text', 0.0):.2f}  sigma {metrics.get('sigma', 0.0):.3f}  "
        f"{metrics['seconds_rollout']:.1f} + {metrics['seconds_update']:.1f} s{_success(metrics)}"
    )
