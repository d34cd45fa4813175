"""Collection by workers on Ray: the expert teaches in each worker, and only the driver writes the record.

Every episode depends on its seed, goal and history alone, so the record equals that of a single process once it is
sorted by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agent.episode import Limits, lost_episode, run_episodes
from agent.expert import ExpertTeacher
from agent.records import Episode
from configs.collect import CollectConfig
from data_gen.collect import Collection, arrange, expert_actor, line_of, taught, what_is_left
from data_gen.experience import explain
from data_gen.memories import open_memory
from data_gen.tasks import specs_for
from envs.base import Task
from envs.registry import Environments, reader_of
from runtime.attempts import Attempts
from runtime.progress import progress
from runtime.worker_pool import Crew, Line, Unit, ray_crew, units_of

UNIT = 8  # default number of tasks that a worker receives at a time


def play_on_ray(config: CollectConfig, of: Collection) -> None:
    """Play the remaining tasks on Ray workers; a killed driver loses the episodes that it has not received.

    Raises:
        ClusterError: the cluster fails.
        RecordError, BankError: record or bank are of another collection.
    """
    record, left = todo = what_is_left(of)
    if left:
        with ray_crew(config.ray, partial(CollectWorker, config, of.bank.path.resolve(), of.bank.snapshot())) as crew:
            play_by(crew, of, todo, config.ray.unit or UNIT)
    arrange(record, of)


def play_by(crew: Crew, of: Collection, todo: tuple[Attempts[str], Sequence[Task]], unit: int) -> None:
    """Play the remaining tasks (`what_is_left`) with a worker pool; record episodes as they arrive."""
    rows, left = todo

    def lost(what: None, id: str, task: Task, why: str) -> str:
        return line_of(lost_episode(task, "teacher", of.limits.seed, why, bank_version=of.bank.snapshot()))

    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:

        def record(lines: Sequence[Line]) -> None:
            rows.add(lines)
            for key, _ in lines:
                advance(key)

        crew.play(list(units_of(None, {task.id: task for task in left}, unit)), record, lost)


class CollectWorker:
    """A collection worker: expert teacher, acting expert, environments, and the bank at the collection's first version.

    The bank needs the same path on every node.
    """

    def __init__(self, config: CollectConfig, bank: Path, version: int) -> None:
        at_start = {"bank": str(bank), "version": version}
        self._config, self._bank = config, open_memory(config.memory.model_copy(update=at_start), bank)
        self._envs, self._teacher = Environments(config.env), ExpertTeacher(reader=reader_of(config.env))

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        def on_episode(episode: Episode) -> None:
            explain([episode], self._teacher)
            done(episode.task_id, line_of(episode))

        config, specs = self._config, specs_for(list(unit.items.values()), self._bank, self._config.memory.k)
        delivery, actor = taught(self._teacher, config.brief_state, config.sparing), expert_actor(config)
        run_episodes(
            self._envs.lease,
            specs,
            delivery=delivery,
            executor=actor,
            limits=Limits(config.max_steps, config.seed),
            concurrency=len(specs),
            on_episode=on_episode,
        )
