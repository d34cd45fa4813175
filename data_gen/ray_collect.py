"""Collection by workers on Ray: the expert teaches in each worker, and only the driver writes the record.

Every episode depends on its seed, goal and history alone, so the record equals that of a single process once it is
sorted by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agent.episode import EpisodeLimits, lost_episode, run_episodes
from agent.records import Episode
from configs.collect import CollectConfig
from data_gen.collect import (
    CollectionPlan,
    expert_actor,
    load_collection_teacher,
    remaining_tasks,
    serialise_episode,
    sort_record,
    teacher_delivery,
)
from data_gen.experience import add_rationales
from data_gen.memory_factory import open_memory
from data_gen.recall_mix import recall_mix
from envs.base import Task
from envs.registry import Environments
from runtime.attempts import RetriedResults
from runtime.progress import progress
from runtime.worker_pool import ResultLine, WorkerPool, WorkUnit, ray_worker_pool, split_into_units

UNIT = 8  # default number of tasks that a worker receives at a time


def play_on_ray(config: CollectConfig, of: CollectionPlan) -> None:
    """Play the remaining tasks on Ray workers; a killed driver loses the episodes that it has not received.

    Raises:
        ClusterError: the cluster fails.
        RecordError, BankError: record or bank are of another collection.
    """
    record, left = todo = remaining_tasks(of)
    if left:
        with ray_worker_pool(
            config.ray, partial(CollectWorker, config, of.bank.path.resolve(), of.bank.snapshot())
        ) as pool:
            play_with_pool(pool, of, todo, config.ray.batch_size or UNIT)
    sort_record(record, of)


def play_with_pool(
    pool: WorkerPool, of: CollectionPlan, todo: tuple[RetriedResults[str], Sequence[Task]], unit: int
) -> None:
    """Play the remaining tasks (`remaining_tasks`) with a worker pool; record episodes as they arrive."""
    rows, left = todo

    def lost(what: None, id: str, task: Task, why: str) -> str:
        return serialise_episode(lost_episode(task, "teacher", of.limits.seed, why, bank_version=of.bank.snapshot()))

    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:

        def record(lines: Sequence[ResultLine]) -> None:
            rows.add(lines)
            for key, _ in lines:
                advance(key)

        pool.run(list(split_into_units(None, {task.id: task for task in left}, unit)), record, lost)


class CollectWorker:
    """A collection worker: expert teacher, acting expert, environments, and the bank at the collection's first version.

    The bank needs the same path on every node.
    """

    def __init__(self, config: CollectConfig, bank: Path, version: int) -> None:
        at_start = {"bank": str(bank), "version": version}
        memory = config.memory.model_copy(update=at_start)
        self._config, self._bank = config, open_memory(memory, bank, config.env.name)
        self._envs, self._teacher = Environments(config.env), load_collection_teacher(config)

    def play(self, unit: WorkUnit, done: Callable[[str, str], None]) -> None:
        def on_episode(episode: Episode) -> None:
            add_rationales([episode], self._teacher)
            done(episode.task_id, serialise_episode(episode))

        config = self._config
        specs = recall_mix(config).specs(list(unit.items.values()), self._bank, config.memory)
        delivery, actor = (
            teacher_delivery(self._teacher, config.brief_state, config.gated_teacher),
            expert_actor(config),
        )
        run_episodes(
            self._envs.lease,
            specs,
            delivery=delivery,
            executor=actor,
            limits=EpisodeLimits(config.max_steps, config.seed),
            concurrency=len(specs),
            on_episode=on_episode,
        )
