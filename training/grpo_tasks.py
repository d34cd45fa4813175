"""Tasks of GRPO, of every environment with their memories, and which are held out; instructions of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.episode import EpisodeSpec
from compiler.prompt import Instructions
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.experience import bank_facts, open_experience_bank
from data_gen.held_out import shares, split_held_out_specs
from data_gen.leakage import MANIFEST, file_of
from data_gen.memory_factory import open_memory
from data_gen.recall_mix import recall_mix
from data_gen.tasks import select_isolated_tasks
from envs.manifest import Manifest
from envs.registry import Environments, compiler_instructions_for, executor_instructions_for, of_environments
from executor.build import Told
from training import distributed


def training_specs(
    config: GrpoConfig, envs: Mapping[str, Environments], run: RunFolder | None, out: Path
) -> tuple[list[EpisodeSpec], dict[str, Any]]:
    """Choose the training tasks of every environment with their memories, and return facts of the banks for
    checkpoints."""
    if not config.also:
        return _specs_in(config, envs[config.env.name], run, out)
    specs, banks = list[EpisodeSpec](), dict[str, Any]()
    for part in config.parts:
        name = part.env.name
        found, banks[name] = _specs_in(part, envs[name], run, out, environment=name)
        specs += [replace(spec, environment=name) for spec in found]
    return specs, {"banks": banks}


def _specs_in(
    config: GrpoConfig, envs: Environments, run: RunFolder | None, out: Path, environment: str = ""
) -> tuple[list[EpisodeSpec], dict[str, Any]]:
    """Choose the tasks of one environment. Rank 0, which has the run folder, checks the tasks and fills the bank; the
    others read both. `environment`: its name in the run folder's files, if the run has several."""
    link = file_of("bank", environment)
    if run is not None:
        tasks, experience = select_isolated_tasks(config, envs, run, environment=environment)
        bank = open_experience_bank(config, envs, experience, out, link=link)
        distributed.barrier()
    else:
        distributed.barrier()
        ids = Manifest.read(out / file_of(MANIFEST, environment)).ids
        tasks = [task for task in envs.tasks(config.split)[: config.limit] if task.id in ids]
        bank = open_memory(config.memory, out / link, config.env.name)
    return recall_mix(config).specs(tasks, bank, config.memory), bank_facts(config, bank)


def hold_out_of_each(specs: Sequence[EpisodeSpec], n: int, seed: int) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Split specs into training ones and `n` held-out ones, as many of each environment. Raises: ConfigError, if no
    task is left to train on."""
    training, held = list[EpisodeSpec](), list[EpisodeSpec]()
    groups = by_environment(specs)
    for group, share in zip(groups, shares(n, len(groups)), strict=True):
        kept, played = split_held_out_specs(group, share, seed)
        training, held = [*training, *kept], [*held, *played]
    return training, held


def by_environment(specs: Sequence[EpisodeSpec]) -> list[list[EpisodeSpec]]:
    """Group specs by environment, in order."""
    groups = dict[str, list[EpisodeSpec]]()
    for spec in specs:
        groups.setdefault(spec.environment, []).append(spec)
    return list(groups.values())


def told_to_compiler(config: GrpoConfig) -> Instructions:
    """Return the compiler's instructions for the environments of a run."""
    return of_environments({part.env.name: compiler_instructions_for(part.env) for part in config.parts})


def told_to_executor(config: GrpoConfig) -> Told:
    """Return the executor's instructions for the environments of a run."""
    return of_environments({part.env.name: executor_instructions_for(part.env) for part in config.parts})
