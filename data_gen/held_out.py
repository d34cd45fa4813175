"""Held-out tasks, for evaluation during training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from agent.episode import EpisodeSpec
from configs.collect import CollectConfig
from configs.load import ConfigError, load_config
from configs.run_folder import CONFIG
from data_gen.memory_factory import open_memory
from data_gen.recall_mix import recall_mix
from data_gen.rows import seeded_order
from envs.registry import AnyEnvSettings, Environments
from runtime.store import read_json


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
    """Return the environment settings of the collections that rows of one environment come from.

    Raises:
        ConfigError: a collection's settings are missing, or they differ.
    """
    found = [_collection(folder).env for folder in folders]
    if any(env != found[0] for env in found[1:]):
        raise ConfigError(
            f"evaluation plays in the environment of the rows, but those of {found[0].name} have several settings of "
            "it: set evaluation.tasks=0"
        )
    return found[0]


def shares(n: int, parts: int) -> list[int]:
    """Split `n` tasks over several environments as equally as possible, the first ones getting the rest.

    Raises:
        ConfigError: some would get none.
    """
    if n < parts:
        raise ConfigError(f"evaluation.tasks={n} of {parts} environments: set it to at least {parts}")
    return [n // parts + (i < n % parts) for i in range(parts)]


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
        memory = collection.memory
        bank = open_memory(memory.model_copy(update=at_end), folder, collection.env.name)
        specs += recall_mix(collection).specs(tasks, bank, memory)
    return specs


def _collection(folder: Path) -> CollectConfig:
    """Read the settings of the collection that wrote a folder of rows."""
    if not (path := folder.parent / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG} beside it names the environment of its tasks: set evaluation.tasks=0")
    return load_config(CollectConfig, path)
