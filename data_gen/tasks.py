"""Which tasks a run plays, and the memory bank that serves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.collect import collect_experience, experience_tasks, not_experienced
from envs.base import Task
from memcompiler import build
from memcompiler.environments import Environments, experience_split
from memory.bank import MemoryBank
from runtime.progress import progress

console = Console(width=120)


def chosen_tasks(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, split: str
) -> tuple[list[Task], list[Task]]:
    """The tasks that a command plays, and those whose episodes fill its bank (none where a bank is given)."""
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"there are no tasks in {split} of {config.env.name}: check split, limit and the data")
    if config.memory.bank is not None:
        return tasks, []
    source = experience_split(config.env, config.memory.experience_split, split)
    return tasks, experience_tasks(envs.tasks(source), tasks, config.memory.experience_limit)


def filled_bank(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, experience: Sequence[Task], out: Path
) -> MemoryBank:
    """The bank that the settings name, or OUT/bank with what the expert experiences now."""
    bank = build.open_bank(config.memory, out / "bank")
    if experience:
        bank.write([])  # there is one, if an empty one
        left = not_experienced(experience, bank)
        with progress("experience", len(experience), len(experience) - len(left)) as advance:
            collect_experience(envs.lease, left, bank, on_episode=advance)
    return bank


def training_tasks_and_bank(
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder
) -> tuple[MemoryBank, list[Task]]:
    """Tasks to learn from and the bank that serves them, after the check that they share nothing with evaluation.

    Raises:
        ConfigError: they do. Nothing has been played then.
    """
    from memcompiler.leakage import guard_training

    guarded = guard_training(config, *chosen_tasks(config, envs, config.split), envs, run)
    console.print(f"  {guarded.summary}")
    return filled_bank(config, envs, guarded.experience, run.path), guarded.tasks
