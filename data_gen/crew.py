"""A collection by workers on Ray: the expert teaches in each of them, and the driver alone writes the record.

Its episodes depend on nothing beside them (chance follows from seed, goal and history), so that the record is the one
that a single process leaves, whoever played which: it is put in the tasks' order when all are there.
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

UNIT = 8  # tasks of a unit, where settings do not say


def play_on_ray(config: CollectConfig, of: Collection) -> None:
    """Have workers play what the record does not hold yet. A kill of the driver costs what they have not sent. Raises:
    as `data_gen.collect.play`, and ClusterError."""
    record, left = todo = what_is_left(of)
    if left:
        with ray_crew(config.ray, partial(CollectWorker, config, of.bank.path.resolve(), of.bank.snapshot())) as crew:
            play_by(crew, of, todo, config.ray.unit or UNIT)
    arrange(record, of)


def play_by(crew: Crew, of: Collection, todo: tuple[Attempts[str], Sequence[Task]], unit: int) -> None:
    """Have a crew play what is left (`what_is_left`), which is recorded as it comes."""
    rows, left = todo

    def lost(what: None, id: str, task: Task, why: str) -> str:
        return line_of(lost_episode(task, "teacher", of.limits.seed, why, of.bank.snapshot()))

    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:

        def record(lines: Sequence[Line]) -> None:
            rows.add(lines)
            for key, _ in lines:
                advance(key)

        crew.play(list(units_of(None, {task.id: task for task in left}, unit)), record, lost)


class CollectWorker:
    """A worker of a collection: an expert that teaches, one that acts, environments, and the bank as it was when the
    collection began, which has to lie under the same path on every node."""

    def __init__(self, config: CollectConfig, bank: Path, version: int) -> None:
        known = {"bank": str(bank), "version": version}
        self._config, self._bank = config, open_memory(config.memory.model_copy(update=known), bank)
        self._envs, self._teacher = Environments(config.env), ExpertTeacher(reader=reader_of(config.env))

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        def tell(episode: Episode) -> None:
            explain([episode], self._teacher)
            done(episode.task_id, line_of(episode))

        config, specs = self._config, specs_for(list(unit.items.values()), self._bank, self._config.memory.k)
        delivery, actor = taught(self._teacher, config.brief_state, config.sparing), expert_actor(config)
        limits = Limits(config.max_steps, config.seed)
        run_episodes(self._envs.lease, specs, delivery, actor, limits, len(specs), tell)
