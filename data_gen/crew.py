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
from data_gen.collect import Collection, arrange, expert_actor, taught, what_is_left
from data_gen.experience import explain
from data_gen.memories import open_memory
from data_gen.tasks import specs_for
from envs.base import Task
from envs.registry import Environments, reader_of
from runtime.crew import Crew, Line, Unit, units_of
from runtime.progress import progress
from runtime.ray_fleet import ray_crew
from runtime.store import JsonLines, to_json

UNIT = 8  # tasks of a unit, where settings do not say


def play_on_ray(config: CollectConfig, of: Collection) -> None:
    """Have workers play what the record does not hold yet. A kill of the driver costs what they have not sent. Raises:
    as `data_gen.collect.play`, and ClusterError."""
    if what_is_left(of):
        with ray_crew(config.ray, partial(CollectWorker, config, of.bank.path.resolve(), of.bank.snapshot())) as crew:
            play_by(crew, of, config.ray.unit or UNIT)
    arrange(of)


def play_by(crew: Crew, of: Collection, unit: int) -> None:
    """Have a crew play what the record does not hold yet, which is recorded as it comes."""
    left, store = what_is_left(of), JsonLines(of.record)

    def lost(what: None, id: str, task: Task, why: str) -> str:
        return line_of(lost_episode(task, "teacher", of.limits.seed, why, of.bank.snapshot()))

    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:

        def record(lines: Sequence[Line]) -> None:
            store.append_lines(*(line for _, line in lines))
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


def line_of(episode: Episode) -> str:
    """Write an episode as the record holds it."""
    return to_json(episode.to_json(images=True), ascii=True)
