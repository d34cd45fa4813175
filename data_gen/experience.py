"""Experience: memory banks filled with the expert's episodes, and cached by everything that their entries depend on.

Matrix cells, ranks of a run and later runs share a bank with equal dependencies.

    experience/NAME-HASH/      beside the run folder, or in `memory.experience_folder`
      bank/                    an entry for each episode
      experience.json          the dependencies; written when the bank is complete
    OUT/bank                   a link to the bank
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.explorer import ExplorerExecutor
from agent.records import Episode
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.training import GrpoConfig
from data_gen.memory_factory import initialise_memory, open_memory
from envs.base import Environment, EnvironmentFailure, Task
from envs.manifest import Manifest
from envs.registry import Environments, command_reader_for, environment_version, find
from envs.spec import package_versions, source_sha256
from executor.records import Executor
from memory.protocol import MemorySystem, Trace
from memory.trajectory import png_bytes
from runtime.attempts import ATTEMPTS
from runtime.errors import is_failure
from runtime.lock import FolderLock
from runtime.progress import progress
from runtime.store import locked, to_json, write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

Config = CollectConfig | EvalConfig | GrpoConfig
console = Console(width=120)
EXPERIENCE = "experience.json"
HASHED_SOURCES = ("agent", "envs", "memory", __name__)  # code that determines the expert's actions and the entries
ROUND = 64  # default number of concurrent episodes, which a kill may cost
EXPERT_STEPS = 200  # longer than any plan; many environments end an episode earlier


# -- task selection ----------------------------------------------------------------------------------------------------


def require_expert(config: Config) -> None:
    """Raise ConfigError if the environment has no expert to fill a bank, or no explorer where settings ask for it."""
    if not find(config.env.name).expert:
        raise ConfigError(
            f"{config.env.name} has no expert that could fill a memory bank: collect one with an endpoint as teacher "
            "(memcompiler collect teacher=endpoint actor=teacher api.model=NAME, docs/guides/endpoints.md) and name it "
            "(memory.bank=RUN/bank), or play without memory (memory.k=0)"
        )
    if config.memory.experience_actor == "explorer" and not command_reader_for(config.env).lists_places:
        raise ConfigError(
            f"memory.experience_actor=explorer: the views of {config.env.name} do not list the places that an explorer "
            "would search; set memory.experience_actor=expert"
        )


def experience_actor(config: Config) -> Executor:
    """Return the executor that plays the episodes of a bank."""
    return ExplorerExecutor(config.env.seed) if config.memory.experience_actor == "explorer" else ExpertExecutor()


def experience_tasks(config: Config, envs: Environments, split: str, tasks: Sequence[Task]) -> list[Task]:
    """Select the tasks whose episodes fill the bank for `tasks` of `split`, by the environment's rule
    (`envs.spec.Splits`). Raises: ConfigError, if there are none."""
    splits, memory = envs.spec.splits(config.env), config.memory
    source = memory.experience_split or splits.experience(split)
    own = {task.id for task in tasks} if source != split else set[str]()
    try:
        found = [task for task in envs.tasks(source) if task.id not in own]
    except (EnvironmentFailure, OSError, ValueError) as error:
        raise _no_experience(config, split, source, str(error)) from error
    if splits.related is not None:
        wanted = {getattr(task, splits.related) for task in tasks}
        found = [task for task in found if getattr(task, splits.related) in wanted]
    if splits.per_kind is not None:
        found = _by_turns(found, splits.per_kind if memory.experience_limit is None else len(found))
    if not found:
        shared = f"of the same {splits.related}" if splits.related else "besides the played ones"
        raise _no_experience(config, split, source, f"it has no task {shared}")
    return found[: memory.experience_limit]


def _no_experience(config: Config, split: str, source: str, why: str) -> ConfigError:
    return ConfigError(
        f"no memory bank for {config.env.name} {split}: its tasks read episodes of {source}, and {why.rstrip('.')}. "
        "Name a bank (memory.bank=FOLDER) or another split to fill it from (memory.experience_split=NAME), or play "
        "without memory (memory.k=0)"
    )


def _by_turns(tasks: Sequence[Task], per_kind: int) -> list[Task]:
    """Select the first `per_kind` tasks of every kind, in turns: the first of each, then the second of each, ..."""
    turn, seen = dict[str, int](), Counter[str]()
    for task in tasks:
        turn[task.id] = seen[task.kind]
        seen[task.kind] += 1
    return sorted((task for task in tasks if turn[task.id] < per_kind), key=lambda task: turn[task.id])


# -- the bank ----------------------------------------------------------------------------------------------------------


def open_experience_bank(
    config: Config,
    envs: Environments,
    experience: Sequence[Task],
    out: Path,
    beside: Path | None = None,
    link: str = "bank",
) -> MemorySystem:
    """Open the bank that the settings name, or the cached bank of this experience; the expert fills it if needed.

    Concurrent processes wait for the one that fills it; a kill costs a round.

    Args:
        experience: tasks whose episodes fill the bank; none if a bank is given or nothing is retrieved.
        out: the run folder.
        link: name of the link to the bank in it.
        beside: folder beside which banks are cached (default: `out`; cells of a matrix share one).

    Raises:
        ConfigError: the expert fails on most of the tasks.
    """
    if not experience:
        bank = open_memory(config.memory, out / link, config.env.name)
        if config.memory.bank is None:
            initialise_memory(bank, config.env.name)
        return bank
    facts = _facts(config, experience)
    key = hashlib.sha256(to_json(facts, ascii=True).encode()).hexdigest()[:16]
    root = Path(config.memory.experience_folder or (beside or out).absolute().parent / "experience")
    folder = root / f"{config.env.name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", lambda: console.print(f"  experience: another process fills {folder}; waiting")):
        bank = open_memory(config.memory, folder / "bank", config.env.name)
        if (folder / EXPERIENCE).exists():
            missing = len(tasks_without_episode(experience, bank))
            console.print(
                f"  experience: {len(bank)} episodes are in {folder}"
                + (f"; {missing} tasks broke and have none: delete the folder to fill it again" if missing else "")
            )
        else:
            with FolderLock(folder / "bank", "memcompiler"):
                _fill(config, envs, experience, bank, facts=facts, path=folder / EXPERIENCE)
    _link(out / link, folder / "bank")
    return bank


def bank_facts(config: Config, bank: MemorySystem) -> dict[str, Any]:
    """Return name, version, size and system of a bank and how it was isolated, for the record; a cached bank is named
    by its folder."""
    name = config.memory.bank or bank.path.resolve().parent.name
    return {
        "bank": name,
        "bank_version": bank.snapshot(),
        "bank_entries": len(bank),
        "memory_system": config.memory.system,
        "memory_isolation": config.memory.isolation,
    }


def _facts(config: Config, experience: Sequence[Task]) -> dict[str, Any]:
    """Return everything that the entries depend on; the tasks' manifest covers game data, wherever it is stored."""
    env, spec, memory = config.env, find(config.env.name), config.memory
    api = {"model": memory.api.model} if memory.api else {}  # the language model that the memory system calls
    return {
        "environment": env.model_dump(mode="json", exclude=set(env.HOW)),
        **environment_version(env.name, package_versions(spec.packages)),
        "expert_sha256": source_sha256(HASHED_SOURCES),
        "actor": memory.experience_actor,
        "tasks_sha256": Manifest.of(env.name, experience).sha256,
        "pictures": memory.pictures,
        "embed": memory.embedding_model,
        "memory": {"system": memory.system, "settings": memory.settings, **api},
    }


def _fill(
    config: Config,
    envs: Environments,
    experience: Sequence[Task],
    bank: MemorySystem,
    *,
    facts: dict[str, Any],
    path: Path,
) -> None:
    """Play the tasks that the bank lacks, broken ones up to `ATTEMPTS` times; then mark the bank complete.

    A complete bank never changes, so runs that share it stay comparable.
    """
    initialise_memory(bank, config.env.name)
    left, started = tasks_without_episode(experience, bank), time.monotonic()
    teacher = ExpertTeacher(reader=command_reader_for(config.env))
    collect = partial(collect_experience, envs.lease, bank=bank, explainer=teacher, views=view_selection(config))
    with progress("experience", len(experience), len(experience) - len(left)) as advance:
        lost = collect(left, actor=experience_actor(config), on_episode=advance)
    for _ in range(ATTEMPTS - 1):
        if left := tasks_without_episode(experience, bank):
            lost = collect(left, actor=experience_actor(config))
    if lost:
        console.print(
            f"  experience: {len(lost)} of {len(experience)} tasks left no episode, first {_failure(lost[0])}"
        )
    counts = {
        "tasks": len(experience),
        "entries": len(bank),
        "version": bank.snapshot(),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_atomically(path, to_json({**facts, **counts, "lost": [_failure(episode) for episode in lost]}, indent=2))


def _failure(episode: Episode) -> str:
    return f"{episode.task_id}: {episode.stop_reason} {episode.error}".strip()


def _link(link: Path, bank: Path) -> None:
    """Create a relative symbolic link to the bank, which stays valid when both are moved together."""
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(bank.resolve(), link.parent.resolve())
    if not link.is_symlink() or os.readlink(link) != target:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target)


# -- episodes as experience --------------------------------------------------------------------------------------------


ViewSelection = Callable[[Episode], "Sequence[Image]"]  # selects the pictures of an episode that its entry stores


def select_no_views(episode: Episode) -> Sequence[Image]:
    return ()


def view_selection(config: Config) -> ViewSelection:
    """Return the selection of views that environment and settings define."""
    return select_first_views(find(config.env.name).views, config.memory.pictures)


def select_first_views(select: Callable[[Sequence[str]], Sequence[int]], most: int) -> ViewSelection:
    """Return a selection of the first `most` views among the steps that `select` picks from an episode's actions
    (`EnvSpec.views`), in step order."""

    def views(episode: Episode) -> Sequence[Image]:
        seen = {t: image for t, step in enumerate(episode.steps) if (image := step.image) is not None}
        steps = [t for t in select([step.action for step in episode.steps]) if t in seen]
        return [seen[t] for t in sorted(steps[:most])]

    return views


class RationaleWriter(Protocol):
    """Explains in one line each why finished episodes succeeded or failed."""

    def rationales(self, episodes: Sequence[Episode]) -> list[str]: ...


def collect_experience(
    make_env: Callable[[], Environment],
    tasks: Sequence[Task],
    bank: MemorySystem,
    explainer: RationaleWriter,
    views: ViewSelection = select_no_views,
    max_steps: int = EXPERT_STEPS,
    on_episode: Callable[[Episode], None] | None = None,
    round_size: int = ROUND,
    actor: Executor | None = None,
) -> list[Episode]:
    """Play tasks with the expert (or another `actor`) in rounds; commit each round's episodes to the bank with their
    rationales.

    Returns:
        The broken episodes, which are not committed.

    Raises:
        ConfigError: more episodes broke than were committed.
    """
    delivery, limits, lost = Delivery("expert", "none"), EpisodeLimits(max_steps), list[Episode]()
    for start in range(0, len(tasks), round_size):
        specs = [EpisodeSpec(task) for task in tasks[start : start + round_size]]
        episodes = run_episodes(
            make_env,
            specs,
            delivery=delivery,
            executor=actor or ExpertExecutor(),
            limits=limits,
            concurrency=round_size,
            on_episode=on_episode,
        )
        add_rationales(episodes, explainer)
        bank.commit(episode_traces(episodes, views))
        lost += [episode for episode in episodes if is_failure(episode.stop_reason)]
        if lost and len(lost) > bank.origins().total():
            raise ConfigError(
                f"{len(lost)} of {start + len(specs)} tasks of {tasks[0].split} whose episodes are to fill a memory "
                f"bank broke, the first {_failure(lost[0])}. Repair the environment or its data and run this again "
                "(finished episodes are stored), name another bank (memory.bank=FOLDER), or play without memory "
                "(memory.k=0)"
            )
    return lost


def tasks_without_episode(tasks: Sequence[Task], bank: MemorySystem) -> list[Task]:
    """Return the tasks without an episode in the bank."""
    known = bank.origins()
    return [task for task in tasks if (task.id, task.split) not in known]


def add_rationales(episodes: Sequence[Episode], explainer: RationaleWriter) -> None:
    """Set the rationale of each episode that did not break."""
    finished = [episode for episode in episodes if not is_failure(episode.stop_reason)]
    for episode, why in zip(finished, explainer.rationales(finished), strict=True):
        episode.rationale = why


def episode_traces(episodes: Iterable[Episode], views: ViewSelection = select_no_views) -> list[list[Trace]]:
    """Convert episodes into memory traces with the selected views, each followed by its retries.

    Unsuccessful episodes count, broken ones do not.
    """
    finished = ([each for each in (e, *e.retries) if not is_failure(each.stop_reason)] for e in episodes)
    return [[_trace(e, number, views) for number, e in enumerate(attempts)] for attempts in finished if attempts]


def _trace(e: Episode, attempt: int, views: ViewSelection) -> Trace:
    return Trace(
        Task(e.task_id, goal=e.goal, scene=e.scene, split=e.split, kind=e.kind),
        records=tuple(step.to_memory_record() for step in e.steps),
        success=e.success,
        attempt=attempt,
        rationale=e.rationale,
        views=tuple(map(png_bytes, views(e))),
        shown=e.memory_ids,
    )
