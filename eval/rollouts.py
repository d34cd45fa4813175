"""Episodes of one cell: its tasks with their retrieved entries, played under each delivery, here or by Ray workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.command_teacher import NAMES_PLACES, Teaching
from agent.deliveries import Delivery, find
from agent.episode import EpisodeLimits, EpisodeSpec, lost_episode, run_episodes
from agent.records import Episode
from compiler.gate import CompileGate, gate_for
from compiler.records import Compiler
from configs.evaluation import EvalConfig
from data_gen.memory_factory import open_memory
from data_gen.tasks import episode_specs
from envs.base import Environment, Task
from envs.command_reader import CommandReader
from envs.registry import command_reader_for
from eval.model_cache import ModelCache
from eval.provenance import identity_of_models
from eval.runs import EpisodeRecord, to_line
from executor.records import Executor
from memory.protocol import MemorySystem
from runtime.progress import progress
from runtime.store import to_json
from runtime.worker_pool import ResultLine, WorkerPool, WorkUnit, split_into_units


def limits_of(config: EvalConfig) -> EpisodeLimits:
    return EpisodeLimits(config.max_steps, config.seed, config.min_confidence, config.batching)


def gate_of(config: EvalConfig) -> CompileGate | None:
    """Load the compile gate beside the checkpoint if a delivery uses it. Raises: CheckpointError, if there is none."""
    return gate_for(
        [name for name in config.deliveries if find(name).gated], config.compiler.checkpoint, config.gate_threshold
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tasks, models and environments that all deliveries of a comparison share.

    Attributes:
        specs: the tasks with their retrieved entries.
        top_specs: the same tasks with the best entry only (empty if no delivery uses it).
        title: label of the progress bar, before the delivery.
        reader: command reader of the environment, for teachers.
        gate: compile gate beside the checkpoint.
        teaching: settings of teachers without a model.
    """

    make_env: Callable[[], Environment]
    specs: Sequence[EpisodeSpec]
    executor: Executor
    compiler: Compiler | None
    limits: EpisodeLimits
    concurrency: int = 64
    top_specs: Sequence[EpisodeSpec] = ()
    title: str = ""
    reader: CommandReader | None = None
    gate: CompileGate | None = None
    teaching: Teaching = NAMES_PLACES

    @classmethod
    def of(
        cls,
        config: EvalConfig,
        models: ModelCache,
        specs: Sequence[EpisodeSpec],
        top_specs: Sequence[EpisodeSpec],
        title: str = "",
    ) -> Evaluation:
        """Load the models of a cell."""
        return cls(
            make_env=models.environments(config).lease,
            specs=specs,
            executor=models.executor(config),
            compiler=models.compiler(config),
            limits=limits_of(config),
            concurrency=config.concurrency,
            top_specs=top_specs,
            title=title,
            reader=command_reader_for(config.env),
            gate=gate_of(config),
            teaching=Teaching(config.teacher_level, config.teacher_silence),
        )

    def run(
        self, name: str, record: Callable[[Episode], None] = lambda _: None, played: Collection[str] = ()
    ) -> list[Episode]:
        """Play all tasks under a delivery, except those in `played`.

        Raises:
            ValueError: there are no tasks, no such delivery, or the delivery needs a compiler that is not loaded.
        """
        if not self.specs:
            raise ValueError("there are no tasks to evaluate: check split, limit and the environment's data")
        specs, delivery = self._specs_of(name), self.delivery(name)
        left = [spec for spec in specs if spec.task.id not in played]
        with progress(f"{self.title} {name}".strip(), len(specs), len(played)) as advance:

            def on_episode(episode: Episode) -> None:
                record(episode)
                advance(episode)

            return run_episodes(
                self.make_env,
                left,
                delivery=delivery,
                executor=self.executor,
                limits=self.limits,
                concurrency=self.concurrency,
                on_episode=on_episode,
            )

    def delivery(self, name: str) -> Delivery:
        """Create a delivery. Raises: ValueError, as `DeliverySpec.create`."""
        return find(name).create(self.compiler, self.limits.seed, self.reader, self.gate, self.teaching)

    def _specs_of(self, name: str) -> Sequence[EpisodeSpec]:
        """Return the tasks with the entries that a delivery starts from."""
        memory = find(name).memory
        if memory == "empty":
            return [spec.without_memory() for spec in self.specs]
        return self.top_specs if memory == "top" else self.specs


def specs_of(
    config: EvalConfig, tasks: Sequence[Task], memory: MemorySystem, deliveries: Sequence[str]
) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Retrieve the entries of each task; and the best entry only, if one of the deliveries uses it."""
    top = next((spec for spec in map(find, deliveries) if spec.memory == "top"), None)
    k, isolation = config.memory.k, config.memory.isolation
    top_specs = episode_specs(tasks, memory, top.entries(k), isolation) if top else []
    return episode_specs(tasks, memory, k, isolation), top_specs


# -- on Ray ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """Work of a Ray worker: a cell's tasks under a delivery; without a delivery, a description of its models."""

    config: EvalConfig
    cell: Mapping[str, str]
    bank: Path
    version: int
    delivery: str = ""

    def key(self, task: str) -> str:
        return f"{self.delivery} {task}"


class EvalWorker:
    """Ray worker that plays tasks with its own models, reused from one job to the next. The bank must have the same
    path on every node."""

    def __init__(self) -> None:
        self._models = ModelCache()
        self._memory: tuple[object, MemorySystem] | None = None

    def play(self, unit: WorkUnit, done: Callable[[str, str], None]) -> None:
        job: Job = unit.context
        config, models = job.config, self._models
        if not job.delivery:
            executor, compiler = models.executor(config), models.compiler(config)
            done("", to_json(identity_of_models(config, executor, compiler, gate_of(config))))
            return
        specs = specs_of(config, list(unit.items.values()), self._open_memory(job), [job.delivery])
        evaluation = Evaluation.of(config, models, *specs)
        evaluation.run(job.delivery, lambda e: done(job.key(e.task_id), to_line(e, job.cell)))

    def _open_memory(self, job: Job) -> MemorySystem:
        settings = job.config.memory.model_copy(update={"bank": str(job.bank), "version": job.version})
        if self._memory is None or self._memory[0] != settings:
            self._memory = settings, open_memory(settings, job.bank, job.config.env.name)
        return self._memory[1]


def models_on_ray(workers: WorkerPool, job: Job) -> dict[str, Any]:
    """Have a worker describe its weights and prompts (`identity_of_models`)."""
    return json.loads(workers.run_one(job))


def play_on_ray(workers: WorkerPool, job: Job, tasks: Sequence[Task], record: EpisodeRecord) -> None:
    """Play what the record does not hold, all deliveries at once; record each episode when it ends."""
    played, units = record.played(), list[WorkUnit]()
    for name in job.config.deliveries:
        of_delivery, done = replace(job, delivery=name), set(played.get(name, ()))
        left = {of_delivery.key(task.id): task for task in tasks if task.id not in done}
        # one worker plays all episodes of a delivery whose episodes depend on each other
        size = len(tasks) if find(name).interdependent else job.config.ray.batch_size or job.config.concurrency
        units += split_into_units(of_delivery, left, size)
    total, left = len(tasks) * len(job.config.deliveries), sum(len(unit.items) for unit in units)
    with progress(" ".join(job.cell.values()) or "episodes", total, total - left) as advance:

        def on_lines(lines: Sequence[ResultLine]) -> None:
            record.add((_split_key(key), line) for key, line in lines)
            for key, _ in lines:
                advance(key)

        workers.run(units, on_lines, _lost)


def _lost(job: Job, key: str, task: Task, why: str) -> str:
    return to_line(lost_episode(task, job.delivery, seed=job.config.seed, why=why, bank_version=job.version), job.cell)


def _split_key(key: str) -> tuple[str, str]:
    delivery, _, task = key.partition(" ")
    return delivery, task
