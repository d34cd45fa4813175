"""Selection of the tasks that a run plays, and retrieval of each task's memory entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from agent.episode import EpisodeSpec
from configs.collect import CollectConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.experience import Config, experience_tasks, require_expert
from data_gen.leakage import isolate_training_tasks
from envs.base import Task
from envs.registry import Environments
from memory.protocol import Isolation, MemorySystem, Query

console = Console(width=120)


def select_tasks(
    config: Config, envs: Environments, split: str, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Select the tasks that a command plays, and the tasks whose episodes fill its bank.

    Args:
        experienced: the expert fills a bank, unless one is given or nothing is retrieved.

    Raises:
        ValueError: the split has no tasks.
        ConfigError: the environment has no expert (or explorer) or no tasks to fill the bank, or its tasks have no
            scenes to isolate.
    """
    experienced = experienced and config.memory.bank is None and config.memory.k > 0
    if experienced:
        require_expert(config)
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"split {split} of {config.env.name} has no tasks: check split, limit and the data")
    if config.memory.isolation == "scene" and not all(task.scene for task in tasks):
        raise ConfigError(
            f"memory.isolation=scene: tasks of {config.env.name} have no scene, so nothing would be left out; set "
            "memory.isolation=task"
        )
    return tasks, experience_tasks(config, envs, split, tasks) if experienced else []


def episode_specs(
    tasks: Sequence[Task], bank: MemorySystem, k: int, isolation: Isolation = "task"
) -> list[EpisodeSpec]:
    """Retrieve M = Retrieve(bank, goal) for every task, without entries of the task's own episodes.

    Args:
        isolation: "scene" leaves out everything that episodes of the task's scene left, at every step.

    Raises:
        ValueError: isolation by scene for a task without one.
    """
    version, queries = bank.snapshot(), [Query(task, k, isolation=isolation) for task in tasks]
    return [
        EpisodeSpec(
            query.task,
            memory=first.entries,
            bank_version=version,
            open_session=partial(bank.session, query, first),
            next_attempt=partial(bank.again, query, first),
        )
        for query, first in zip(queries, bank.recall(queries), strict=True)
    ]


def select_isolated_tasks(
    config: CollectConfig | GrpoConfig,
    envs: Environments,
    run: RunFolder,
    experienced: bool = True,
    environment: str = "",
) -> tuple[list[Task], list[Task]]:
    """Select tasks as `select_tasks` does and check them for leakage (`environment`: as `isolate_training_tasks`).
    Raises: ConfigError, if they leak."""
    tasks, experience = select_tasks(config, envs, config.split, experienced)
    tasks, experience, audit = isolate_training_tasks(
        config, tasks, experience, envs=envs, run=run, environment=environment
    )
    console.print(f"  {audit.summary}")
    return tasks, experience
