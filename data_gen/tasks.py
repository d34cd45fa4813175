"""Which tasks a run plays, and what each of them retrieves from the memory bank (`data_gen.experience` fills it)."""

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
from data_gen.experience import Config, check_filled, experience_tasks
from data_gen.leakage import guard_training
from data_gen.memories import open_memory
from data_gen.rows import shuffled
from envs.base import Task
from envs.registry import AnyEnvSettings, Environments
from memory.protocol import MemorySystem, Query
from runtime.store import read_json

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


# -- tasks that training goes without, to be played by what it makes --------------------------------------------------


def without_held_out(specs: Sequence[EpisodeSpec], n: int, seed: int) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Split tasks into those that train and `n` others; which ones follows from seed and names alone. Raises:
    ConfigError, where none would be left to train on."""
    names = shuffled((spec.task.id for spec in specs), seed)
    if n >= len(names):
        raise ConfigError(f"evaluation.tasks={n} of {len(names)} tasks leave none to train on: set it lower")
    held = set(names[:n])
    return [s for s in specs if s.task.id not in held], [s for s in specs if s.task.id in held]


def rows_world(folders: Sequence[Path]) -> AnyEnvSettings:
    """Return the environment that rows were collected in, as their collections' settings have it. Raises: ConfigError,
    where one does not say, or they differ."""
    found = [_collection(folder).env for folder in folders]
    if any(env != found[0] for env in found[1:]):
        raise ConfigError(
            "evaluation plays in the environment of the rows, and these are of several: evaluation.tasks=0"
        )
    return found[0]


def held_out_of_rows(names: Mapping[Path, Collection[str]], n: int, seed: int, envs: Environments) -> list[EpisodeSpec]:
    """Choose `n` of the tasks whose rows are held out, with what the bank of their collection recalls for them.

    Args:
        names: of these tasks, by the folder with their rows.

    Raises:
        ConfigError: there are fewer, or the environment has them no more.
    """
    folder_of = {name: folder for folder, held in names.items() for name in held}
    if n > len(folder_of):
        raise ConfigError(
            f"evaluation.tasks={n}, and rows of {len(folder_of)} tasks are held out: set it lower, or validation.share "
            "higher"
        )
    chosen = set(shuffled(folder_of, seed)[:n])
    specs: list[EpisodeSpec] = []
    for folder in names:
        mine, collection = {name for name in chosen if folder_of[name] == folder}, _collection(folder)
        tasks = [task for task in envs.tasks(collection.split) if task.id in mine]
        if missing := mine - {task.id for task in tasks}:
            raise ConfigError(
                f"{collection.env.name} {collection.split} has no tasks {sorted(missing)[:3]} of {folder}"
            )
        version = read_json(folder.parent / "collect.json")["bank_version"]
        known = {"bank": collection.memory.bank or str(folder.parent / "bank"), "version": version}
        specs += specs_for(tasks, open_memory(collection.memory.model_copy(update=known), folder), collection.memory.k)
    return specs


def _collection(folder: Path) -> CollectConfig:
    """Read the settings of the collection that left rows in a folder."""
    if not (path := folder.parent / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG} beside it says where its tasks are played: evaluation.tasks=0")
    return load_config(CollectConfig, path)
