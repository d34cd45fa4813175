"""Experience: the tasks that fill a memory bank, the expert that plays them, and where the bank lies.

A bank's folder is named by all that its entries follow from, so that whoever asks for the same finds it: the cells of a
matrix, the ranks of a run, later runs.

    experience/NAME-HASH/      beside the run folder, or where `memory.experience_folder` says
      bank/                    an entry for each episode
      experience.json          what they follow from; written when the bank is whole
    OUT/bank                   leads there
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.training import GrpoConfig
from data_gen.memories import make_memory, open_memory
from envs.base import Environment, EnvironmentFailure, Task
from envs.manifest import Manifest
from envs.registry import Environments, environment_version, find, reader_of
from envs.spec import installed_versions, source_sha256
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
WHOLE = "experience.json"
WRITERS = ("agent", "envs", "memory", __name__)  # whose text decides what the expert does, and what of it an entry says
ROUND = 64  # episodes that are played side by side where settings do not say, and that a kill may cost
EXPERT_STEPS = 200  # more than any plan has; many environments end an episode sooner


# -- which tasks ------------------------------------------------------------------------------------------------------


def check_filled(config: Config) -> None:
    """Raise ConfigError where a bank would be filled, and the environment has no expert to do so."""
    if not find(config.env.name).expert:
        raise ConfigError(
            f"{config.env.name} has no expert that could fill a memory bank: collect one with an endpoint as teacher "
            "(memcompiler collect teacher=endpoint actor=teacher api.model=NAME, docs/data.md) and name it "
            "(memory.bank=RUN/bank), or play without memory (memory.k=0)"
        )


def experience_tasks(config: Config, envs: Environments, split: str, tasks: Sequence[Task]) -> list[Task]:
    """Choose the tasks whose episodes fill the bank of `tasks`, which are of `split`, by the environment's rule
    (`envs.spec.Splits`). Raises: ConfigError, where there are none."""
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
        shared = f"of the same {splits.related}" if splits.related else "but those that are played"
        raise _no_experience(config, split, source, f"it has no task {shared}")
    return found[: memory.experience_limit]


def _no_experience(config: Config, split: str, source: str, why: str) -> ConfigError:
    return ConfigError(
        f"no memory bank for {config.env.name} {split}: its tasks read episodes of {source}, and {why.rstrip('.')}. Or "
        "else name a bank (memory.bank=FOLDER), another split to fill it from (memory.experience_split=NAME), or play "
        "without memory (memory.k=0)"
    )


def _by_turns(tasks: Sequence[Task], per_kind: int) -> list[Task]:
    """Take the first `per_kind` tasks of every kind: the first of each, then the second of each, and so on."""
    turn, seen = dict[str, int](), Counter[str]()
    for task in tasks:
        turn[task.id] = seen[task.kind]
        seen[task.kind] += 1
    return sorted((task for task in tasks if turn[task.id] < per_kind), key=lambda task: turn[task.id])


# -- where the bank lies ----------------------------------------------------------------------------------------------


def filled_bank(
    config: Config, envs: Environments, experience: Sequence[Task], out: Path, beside: Path | None = None
) -> MemorySystem:
    """Open the bank that the settings name, or the one that holds this experience; the expert fills it, where nobody
    has yet. Several processes may ask at once, and a kill costs a round.

    Args:
        experience: the tasks whose episodes fill it; none where a bank is given, or nothing is retrieved from it.
        out: the run folder, whose `bank` leads to it.
        beside: the folder that banks lie beside, where it is not `out` (a matrix shares them).

    Raises:
        ConfigError: the expert fails on most of the tasks.
    """
    if not experience:
        bank = open_memory(config.memory, out / "bank")
        if config.memory.bank is None:
            make_memory(bank)
        return bank
    follows_from = _facts(config, experience)
    key = hashlib.sha256(to_json(follows_from, ascii=True).encode()).hexdigest()[:16]
    root = Path(config.memory.experience_folder or (beside or out).absolute().parent / "experience")
    folder = root / f"{config.env.name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", lambda: console.print(f"  experience: another process fills {folder}; waiting")):
        bank = open_memory(config.memory, folder / "bank")
        if (folder / WHOLE).exists():
            missing = len(not_experienced(experience, bank))
            console.print(
                f"  experience: {len(bank)} episodes are in {folder}"
                + (f"; {missing} tasks broke and have none: delete it to fill it again" if missing else "")
            )
        else:
            with FolderLock(folder / "bank", "memcompiler"):
                _fill(config, envs, experience, bank, follows_from, folder / WHOLE)
    _lead(out / "bank", folder / "bank")
    return bank


def bank_facts(config: Config, bank: MemorySystem) -> dict[str, Any]:
    """Say which bank that is: as settings name it, or by the folder of its experience."""
    name = config.memory.bank or bank.path.resolve().parent.name
    return {"bank": name, "bank_version": bank.snapshot(), "bank_entries": len(bank)}


def _facts(config: Config, experience: Sequence[Task]) -> dict[str, Any]:
    """State all that the entries follow from: game data goes in by the tasks' manifest, not by where it lies."""
    env, spec = config.env, find(config.env.name)
    return {
        "environment": env.model_dump(mode="json", exclude=set(env.HOW)),
        **environment_version(env.name, installed_versions(spec.packages)),
        "expert_sha256": source_sha256(WRITERS),
        "tasks_sha256": Manifest.of(env.name, experience).sha256,
        "pictures": config.memory.pictures,
        "embed": config.memory.embedding_model,
        "memory": {"system": config.memory.system, "settings": config.memory.settings, **_asked(config)},
    }


def _asked(config: Config) -> dict[str, str]:
    """Name the language model that the memory system asks, if any."""
    return {"model": config.memory.api.model} if config.memory.api else {}


def _fill(
    config: Config,
    envs: Environments,
    experience: Sequence[Task],
    bank: MemorySystem,
    facts: dict[str, Any],
    whole: Path,
) -> None:
    """Play what the bank does not hold yet, what breaks up to `ATTEMPTS` times, and write down that it is whole:
    runs that share the bank would not compare if it changed later."""
    make_memory(bank)
    left, started = not_experienced(experience, bank), time.monotonic()
    teacher, views = ExpertTeacher(reader=reader_of(config.env)), kept_views(config)
    with progress("experience", len(experience), len(experience) - len(left)) as advance:
        lost = collect_experience(envs.lease, left, bank, teacher, views, on_episode=advance)
    for _ in range(ATTEMPTS - 1):
        if left := not_experienced(experience, bank):
            lost = collect_experience(envs.lease, left, bank, teacher, views)
    if lost:
        console.print(f"  experience: {len(lost)} of {len(experience)} tasks left no episode, first {_told(lost[0])}")
    made = {
        "tasks": len(experience),
        "entries": len(bank),
        "version": bank.snapshot(),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_atomically(whole, to_json({**facts, **made, "lost": [_told(episode) for episode in lost]}, indent=2))


def _told(episode: Episode) -> str:
    return f"{episode.task_id}: {episode.stop_reason} {episode.error}".strip()


def _lead(link: Path, bank: Path) -> None:
    """Have `link` lead to the bank, by a path that stays right when both are moved together."""
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(bank.resolve(), link.parent.resolve())
    if not link.is_symlink() or os.readlink(link) != target:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target)


# -- what the expert leaves -------------------------------------------------------------------------------------------


Views = Callable[[Episode], "Sequence[Image]"]  # which views of its episode an entry keeps


def no_views(episode: Episode) -> Sequence[Image]:
    return ()


def kept_views(config: Config) -> Views:
    """Make the rule for the views that entries keep, as environment and settings have it."""
    return first_views(find(config.env.name).views, config.memory.pictures)


def first_views(telling: Callable[[Sequence[str]], Sequence[int]], most: int) -> Views:
    """Make the rule for the views that entries keep: of those steps that the environment names as telling
    (`EnvSpec.views`), the first `most` that have a view, in the order in which they were seen."""

    def views(episode: Episode) -> Sequence[Image]:
        seen = {t: image for t, step in enumerate(episode.steps) if (image := step.image) is not None}
        steps = [t for t in telling([step.action for step in episode.steps]) if t in seen]
        return [seen[t] for t in sorted(steps[:most])]

    return views


class Explainer(Protocol):
    """Who says of finished episodes, one line each, why they went as they did."""

    def rationales(self, episodes: Sequence[Episode]) -> list[str]: ...


def collect_experience(
    make_env: Callable[[], Environment],
    tasks: Sequence[Task],
    bank: MemorySystem,
    explainer: Explainer,
    views: Views = no_views,
    max_steps: int = EXPERT_STEPS,
    on_episode: Callable[[Episode], None] | None = None,
    round_size: int = ROUND,
) -> list[Episode]:
    """Have the expert play `tasks`; every episode becomes a trace, with why it went so (`explainer`), committed when
    the `round_size` episodes of its round are over. Returns those that broke, which leave none. Raises: ConfigError,
    where they outnumber the others."""
    delivery, limits, lost = Delivery("expert", "none"), Limits(max_steps), list[Episode]()
    for start in range(0, len(tasks), round_size):
        specs = [EpisodeSpec(task) for task in tasks[start : start + round_size]]
        episodes = run_episodes(make_env, specs, delivery, ExpertExecutor(), limits, round_size, on_episode)
        explain(episodes, explainer)
        bank.commit(traces_of(episodes, views))
        lost += [episode for episode in episodes if is_failure(episode.stop_reason)]
        if lost and len(lost) > bank.origins().total():
            raise ConfigError(
                f"{len(lost)} of {start + len(specs)} tasks of {tasks[0].split} whose episodes are to fill a memory "
                f"bank broke, the first {_told(lost[0])}. Mend the environment or its data and run this again (what "
                "was played is kept), name another bank (memory.bank=FOLDER), or play without memory (memory.k=0)"
            )
    return lost


def not_experienced(tasks: Sequence[Task], bank: MemorySystem) -> list[Task]:
    """Return those of `tasks` of which the bank holds no episode yet."""
    known = bank.origins()
    return [task for task in tasks if (task.id, task.split) not in known]


def explain(episodes: Sequence[Episode], explainer: Explainer) -> None:
    """Give each episode its rationale, but for those that broke: there is nothing to learn from them."""
    told = [episode for episode in episodes if not is_failure(episode.stop_reason)]
    for episode, why in zip(told, explainer.rationales(told), strict=True):
        episode.rationale = why


def traces_of(episodes: Iterable[Episode], views: Views = no_views) -> list[list[Trace]]:
    """Return what episodes tell a memory system, with their telling views, and further attempts at their tasks behind
    them: failures, too, but not those of endpoint or environment, which teach nothing."""
    told = ([each for each in (e, *e.retries) if not is_failure(each.stop_reason)] for e in episodes)
    return [[_trace(e, number, views) for number, e in enumerate(attempts)] for attempts in told if attempts]


def _trace(e: Episode, attempt: int, views: Views) -> Trace:
    return Trace(
        Task(e.task_id, e.goal, e.scene, e.split, e.kind),
        tuple(step.told() for step in e.steps),
        e.success,
        attempt,
        e.rationale,
        tuple(map(png_bytes, views(e))),
        e.memory_ids,
    )
