"""Collection (paper C.2): the expert fills the bank, then the teacher plays the training tasks and leaves SFT rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.delivery import Delivery
from agent.episode import Job, Limits, run_episodes
from agent.records import Episode
from data_gen.rows import SftRow, balance, rows_of
from data_gen.teacher import ExpertExecutor, ExpertTeacher, rationale
from envs.base import Environment, Task
from memory.bank import MemoryBank
from memory.trajectory import entry_from_trajectory


def experience_tasks(candidates: Sequence[Task], tasks: Sequence[Task], limit: int | None = None) -> list[Task]:
    """What fills a bank for `tasks`: of `candidates`, those in the same scenes, `limit` of them at most."""
    scenes = {task.scene for task in tasks}
    return [task for task in candidates if task.scene in scenes][:limit]


def collect_experience(
    make_env: Callable[[], Environment], tasks: Sequence[Task], bank: MemoryBank, max_steps: int = 50,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:  # fmt: skip
    """The expert plays `tasks`; every episode becomes an entry (raw trajectory and why it succeeded, paper 4.1)."""
    jobs = [Job(task) for task in tasks]
    limits = Limits(max_steps)
    episodes = run_episodes(make_env, jobs, Delivery("expert", "none"), ExpertExecutor(), limits, 256, on_episode)
    entries = []
    for task, episode in zip(tasks, episodes, strict=True):
        actions = [step.action for step in episode.steps]
        feedback = [step.feedback for step in episode.steps]
        why = rationale(task.scene, actions) if episode.success else str(episode.stop_reason)
        entries.append(entry_from_trajectory(task, actions, feedback, episode.success, why))
    bank.write(entries)
    return episodes


def jobs_for(tasks: Sequence[Task], bank: MemoryBank, k: int) -> list[Job]:
    """M = Retrieve(bank, goal) for every task, without entries of the task itself; the bank's version goes along.

    Entries stand in the order of their ids (hashes), not of their rank: the right one usually ranks first, and a place
    in the prompt that gives it away would make reading the entries unnecessary, for every delivery alike.
    """
    version = bank.snapshot()
    found = bank.retrieve_many(tasks, k) if k else [[] for _ in tasks]
    ordered = [tuple(sorted(entries, key=lambda entry: entry.id)) for entries in found]
    return [Job(task, entries, version) for task, entries in zip(tasks, ordered, strict=True)]


def collect_rows(
    make_env: Callable[[], Environment], jobs: Sequence[Job], noise: float, max_steps: int, seed: int,
    keep_noaction: float = 1.0, on_episode: Callable[[Episode], None] | None = None,
) -> tuple[list[SftRow], list[Episode]]:  # fmt: skip
    """The teacher compiles, the expert acts (and strays with probability `noise`); successful episodes become rows."""
    delivery = Delivery("teacher", "compiled", ExpertTeacher(), soft=False)
    executor = ExpertExecutor(noise, seed)
    episodes = run_episodes(make_env, jobs, delivery, executor, Limits(max_steps, seed), 256, on_episode)
    rows = [row for episode in episodes if episode.success for row in rows_of(episode)]
    return balance(rows, keep_noaction, seed), episodes
