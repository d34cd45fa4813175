"""Which tasks a run plays, what fills the memory bank that serves them, and what each of them retrieves from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agent.episode import EpisodeSpec
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.experience import collect_experience, not_experienced
from data_gen.guard import guard_training
from envs.base import Task
from envs.environments import Environments
from envs.registry import experience_split
from memory.bank import MemoryBank, open_bank
from memory.protocol import Memory
from runtime.progress import progress

console = Console(width=120)


def chosen_tasks(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, split: str
) -> tuple[list[Task], list[Task]]:
    """Choose the tasks that a command plays, and those whose episodes fill its bank (none where a bank is given).

    Raises:
        ValueError: the split has no tasks.
    """
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"there are no tasks in {split} of {config.env.name}: check split, limit and the data")
    if config.memory.bank is not None:
        return tasks, []
    source = config.memory.experience_split or experience_split(config.env, split)
    return tasks, experience_tasks(envs.tasks(source), tasks, config.memory.experience_limit)


def experience_tasks(candidates: Sequence[Task], tasks: Sequence[Task], limit: int | None = None) -> list[Task]:
    """Choose what fills a bank for `tasks`: of `candidates`, those in the same scenes, `limit` of them at most."""
    scenes = {task.scene for task in tasks}
    return [task for task in candidates if task.scene in scenes][:limit]


def specs_for(tasks: Sequence[Task], bank: Memory, k: int) -> list[EpisodeSpec]:
    """Retrieve M = Retrieve(bank, goal) for every task, without entries of the task itself; the bank's version goes
    along.

    Entries stand in the order of their ids (hashes), not of their rank: the right one usually ranks first, and a place
    in the prompt that gives it away would make reading the entries unnecessary, for every delivery alike.
    """
    version = bank.snapshot()
    found = bank.retrieve(tasks, k) if k else [[] for _ in tasks]
    ordered = [tuple(sorted(entries, key=lambda entry: entry.id)) for entries in found]
    return [EpisodeSpec(task, entries, version) for task, entries in zip(tasks, ordered, strict=True)]


# -- banks ------------------------------------------------------------------------------------------------------------


def filled_bank(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, experience: Sequence[Task], out: Path
) -> MemoryBank:
    """Open the bank that the settings name, or OUT/bank with what the expert experiences now."""
    bank = open_bank(config.memory, out / "bank")
    if experience:
        bank.write([])  # there is one, if an empty one
        left = not_experienced(experience, bank)
        with progress("experience", len(experience), len(experience) - len(left)) as advance:
            collect_experience(envs.lease, left, bank, on_episode=advance)
    return bank


def training_tasks_and_bank(config: GrpoConfig, envs: Environments, run: RunFolder) -> tuple[MemoryBank, list[Task]]:
    """Choose tasks to learn from and the bank that serves them, after the check that they share nothing with
    evaluation.

    Raises:
        ConfigError: they do. Nothing has been played then.
    """
    tasks, experience = guarded_tasks(config, envs, run)
    return filled_bank(config, envs, experience, run.path), tasks


def guarded_tasks(
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Choose tasks as `chosen_tasks` does, after the check that they share nothing with evaluation. `experienced`:
    experience fills a bank.

    Raises:
        ConfigError: they do.
    """
    tasks, experience = chosen_tasks(config, envs, config.split)
    guarded = guard_training(config, tasks, experience if experienced else [], envs, run)
    console.print(f"  {guarded.summary}")
    return guarded.tasks, guarded.experience
