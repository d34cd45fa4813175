"""Which tasks a run plays, and what each of them retrieves from the memory bank (`data_gen.experience` fills it)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from agent.episode import EpisodeSpec
from configs.collect import CollectConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.experience import Config, check_filled, experience_tasks
from data_gen.leakage import guard_training
from envs.base import Task
from envs.registry import Environments
from memory.protocol import MemorySystem, Query

console = Console(width=120)


def chosen_tasks(
    config: Config, envs: Environments, split: str, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Choose the tasks that a command plays, and those whose episodes fill its bank. `experienced`: a bank is filled,
    unless one is given or nothing is retrieved.

    Raises:
        ValueError: the split has no tasks.
        ConfigError: nothing could fill the bank.
    """
    experienced = experienced and config.memory.bank is None and config.memory.k > 0
    if experienced:
        check_filled(config)
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"there are no tasks in {split} of {config.env.name}: check split, limit and the data")
    return tasks, experience_tasks(config, envs, split, tasks) if experienced else []


def specs_for(tasks: Sequence[Task], bank: MemorySystem, k: int) -> list[EpisodeSpec]:
    """Recall M = Retrieve(bank, goal) for every task, without what the task itself left; the bank's version goes along,
    and what recalls from the first view on."""
    version, queries = bank.snapshot(), [Query(task, k) for task in tasks]
    return [
        EpisodeSpec(
            query.task, first.entries, version, partial(bank.session, query, first), partial(bank.again, query, first)
        )
        for query, first in zip(queries, bank.recall(queries), strict=True)
    ]


def guarded_tasks(
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Choose tasks as `chosen_tasks` does, checked to share nothing with evaluation (ConfigError). `experienced`: there
    is a bank to be filled."""
    tasks, experience = chosen_tasks(config, envs, config.split, experienced)
    tasks, experience, audit = guard_training(config, tasks, experience, envs, run)
    console.print(f"  {audit.summary}")
    return tasks, experience
