"""Which tasks a run plays, what fills the memory bank that serves them, and what each of them retrieves from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.leakage import guard_training
from envs.base import Environment, Task
from envs.registry import Environments, experience_split, find, reader_of
from memory.bank import MemoryBank, open_bank
from memory.entry import Memory, MemoryEntry
from memory.trajectory import entry_from_trajectory
from runtime.errors import is_failure
from runtime.progress import progress

if TYPE_CHECKING:
    from PIL.Image import Image

console = Console(width=120)


def chosen_tasks(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, split: str
) -> tuple[list[Task], list[Task]]:
    """Choose the tasks that a command plays, and those whose episodes fill its bank (none where a bank is given).
    Raises: ValueError, where the split has no tasks."""
    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"there are no tasks in {split} of {config.env.name}: check split, limit and the data")
    if config.memory.bank is not None:
        return tasks, []
    source = config.memory.experience_split or experience_split(config.env, split)
    scenes = {task.scene for task in tasks}
    return tasks, [task for task in envs.tasks(source) if task.scene in scenes][: config.memory.experience_limit]


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
        left, teacher = not_experienced(experience, bank), ExpertTeacher(reader=reader_of(config.env))
        with progress("experience", len(experience), len(experience) - len(left)) as advance:
            collect_experience(envs.lease, left, bank, teacher, kept_views(config), on_episode=advance)
    return bank


def guarded_tasks(
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder, experienced: bool = True
) -> tuple[list[Task], list[Task]]:
    """Choose tasks as `chosen_tasks` does, checked to share nothing with evaluation (ConfigError). `experienced`: there
    is a bank to be filled."""
    tasks, experience = chosen_tasks(config, envs, config.split)
    tasks, experience, audit = guard_training(config, tasks, experience if experienced else [], envs, run)
    console.print(f"  {audit.summary}")
    return tasks, experience


ROUND = 64  # episodes that are played side by side where settings do not say, and that a kill may cost


Views = Callable[[Episode], "Sequence[Image]"]  # which views of its episode an entry keeps


def no_views(episode: Episode) -> Sequence[Image]:
    return ()


def kept_views(config: CollectConfig | EvalConfig | GrpoConfig) -> Views:
    """Make the rule for the views that entries keep: of those steps that the environment names as telling
    (`EnvSpec.views`), the first `memory.pictures` that have a view, in the order in which they were seen."""
    telling, most = find(config.env.name).views, config.memory.pictures

    def views(episode: Episode) -> Sequence[Image]:
        seen = {t: image for t, step in enumerate(episode.steps) if (image := step.image) is not None}
        steps = [t for t in telling([step.action for step in episode.steps]) if t in seen]
        return [seen[t] for t in sorted(steps[:most])]

    return views


class Explainer(Protocol):
    """Who says of finished episodes, one line each, why they went as they did."""

    def rationales(self, episodes: Sequence[Episode]) -> list[str]: ...


def collect_experience(
    make_env: Callable[[], Environment], tasks: Sequence[Task], bank: Memory, explainer: Explainer,
    views: Views = no_views, max_steps: int = 50, on_episode: Callable[[Episode], None] | None = None,
    round_size: int = ROUND,
) -> None:  # fmt: skip
    """Have the expert play `tasks`; every episode becomes an entry, with why it went so (`explainer`), written when the
    `round_size` episodes of its round are over."""
    delivery, limits = Delivery("expert", "none"), Limits(max_steps)
    for start in range(0, len(tasks), round_size):
        specs = [EpisodeSpec(task) for task in tasks[start : start + round_size]]
        episodes = run_episodes(make_env, specs, delivery, ExpertExecutor(), limits, round_size, on_episode)
        explain(episodes, explainer)
        bank.write(entries_of(episodes, views))


def not_experienced(tasks: Sequence[Task], bank: Memory) -> list[Task]:
    """Return those of `tasks` of which the bank holds no episode yet."""
    known = bank.origins()
    return [task for task in tasks if (task.id, task.split) not in known]


def explain(episodes: Sequence[Episode], explainer: Explainer) -> None:
    """Give each episode its rationale, but for those that broke: there is nothing to learn from them."""
    told = [episode for episode in episodes if not is_failure(episode.stop_reason)]
    for episode, why in zip(told, explainer.rationales(told), strict=True):
        episode.rationale = why


def entries_of(episodes: Iterable[Episode], views: Views = no_views) -> list[MemoryEntry]:
    """Return what episodes leave in memory, with their telling views: failures, too, but not those of endpoint or
    environment, which teach nothing."""
    return [
        entry_from_trajectory(
            Task(e.task_id, e.goal, e.scene, e.split, e.kind), [step.action for step in e.steps],
            [step.feedback for step in e.steps], e.success, e.rationale, views(e),
        )
        for e in episodes
        if not is_failure(e.stop_reason)
    ]  # fmt: skip
