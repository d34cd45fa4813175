"""Selection of the tasks that a run plays, and retrieval of each task's memory entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from agent.episode import EpisodeSpec
from configs.collect import CollectConfig
from configs.load import ConfigError, load_config
from configs.run_folder import CONFIG, RunFolder
from configs.training import GrpoConfig
from data_gen.experience import Config, experience_tasks, require_expert
from data_gen.leakage import isolate_training_tasks
from data_gen.memory_factory import open_memory
from data_gen.rows import seeded_order
from envs.base import Task
from envs.registry import AnyEnvSettings, Environments
from memory.protocol import MemorySystem, Query
from runtime.store import read_json

console = Console(width=120)


def select_tasks(
    config: Config, envs: Environments, split: str, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Select the tasks that a command plays, and the tasks whose episodes fill its bank.

    Args:
        experienced: the expert fills a bank, unless one is given or nothing is retrieved.

    Raises:
        ValueError: the split has no tasks.
        ConfigError: the environment has no expert or no tasks to fill the bank.
    """
    experienced = experienced and config.memory.bank is None and config.memory.k > 0
    if experienced:
        require_expert(config)
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"split {split} of {config.env.name} has no tasks: check split, limit and the data")
    return tasks, experience_tasks(config, envs, split, tasks) if experienced else []


def episode_specs(tasks: Sequence[Task], bank: MemorySystem, k: int) -> list[EpisodeSpec]:
    """Retrieve M = Retrieve(bank, goal) for every task, without entries of the task's own episodes."""
    version, queries = bank.snapshot(), [Query(task, k) for task in tasks]
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
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Select tasks as `select_tasks` does and check them for leakage. Raises: ConfigError, if they leak."""
    tasks, experience = select_tasks(config, envs, config.split, experienced)
    tasks, experience, audit = isolate_training_tasks(config, tasks, experience, envs=envs, run=run)
    console.print(f"  {audit.summary}")
    return tasks, experience


# -- held-out tasks, for evaluation during training --------------------------------------------------------------------


def split_held_out_specs(
    specs: Sequence[EpisodeSpec], n: int, seed: int
) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Split specs into training ones and `n` held-out ones, by seed and task id alone.

    Raises:
        ConfigError: no task is left to train on.
    """
    names = seeded_order((spec.task.id for spec in specs), seed)
    if n >= len(names):
        raise ConfigError(f"evaluation.tasks={n} of {len(names)} tasks leave none to train on: set it lower")
    held = set(names[:n])
    return [s for s in specs if s.task.id not in held], [s for s in specs if s.task.id in held]


def rows_environment_settings(folders: Sequence[Path]) -> AnyEnvSettings:
    """Return the environment settings of the collections that rows come from.

    Raises:
        ConfigError: a collection's settings are missing, or they differ.
    """
    found = [_collection(folder).env for folder in folders]
    if any(env != found[0] for env in found[1:]):
        raise ConfigError(
            "evaluation plays in the environment of the rows, but they come from several: set evaluation.tasks=0"
        )
    return found[0]


def select_held_out_specs(
    names: Mapping[Path, Collection[str]], n: int, seed: int, envs: Environments
) -> list[EpisodeSpec]:
    """Select `n` of the tasks whose rows are held out, with entries from the bank of their collection.

    Args:
        names: task ids, by the folder of their rows.

    Raises:
        ConfigError: there are fewer tasks, or the environment no longer has them.
    """
    folder_of = {name: folder for folder, held in names.items() for name in held}
    if n > len(folder_of):
        raise ConfigError(
            f"evaluation.tasks={n}, but only rows of {len(folder_of)} tasks are held out: set it lower, or raise "
            "validation.share"
        )
    chosen = set(seeded_order(folder_of, seed)[:n])
    specs: list[EpisodeSpec] = []
    for folder in names:
        mine, collection = {name for name in chosen if folder_of[name] == folder}, _collection(folder)
        tasks = [task for task in envs.tasks(collection.split) if task.id in mine]
        if missing := mine - {task.id for task in tasks}:
            raise ConfigError(
                f"{collection.env.name} {collection.split} has no tasks {sorted(missing)[:3]} of {folder}"
            )
        version = read_json(folder.parent / "collect.json")["bank_version"]
        at_end = {"bank": collection.memory.bank or str(folder.parent / "bank"), "version": version}
        memory = collection.memory.model_copy(update=at_end)
        specs += episode_specs(tasks, open_memory(memory, folder, collection.env.name), memory.k)
    return specs


def _collection(folder: Path) -> CollectConfig:
    """Read the settings of the collection that wrote a folder of rows."""
    if not (path := folder.parent / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG} beside it names the environment of its tasks: set evaluation.tasks=0")
    return load_config(CollectConfig, path)
