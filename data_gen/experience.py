"""Experience: the environment's expert plays, and every episode becomes a memory entry (raw trajectory and why it
succeeded or failed, paper 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from envs.base import Environment, Task
from memory.entry import MemoryEntry
from memory.protocol import Memory
from memory.trajectory import entry_from_trajectory
from runtime.errors import is_failure

ROUND = 64  # episodes that are played side by side where settings do not say, and that a kill may cost


class Explainer(Protocol):
    """Says of finished episodes, one line each, why they went as they did."""

    def rationales(self, episodes: Sequence[Episode]) -> list[str]: ...


def collect_experience(
    make_env: Callable[[], Environment], tasks: Sequence[Task], bank: Memory, max_steps: int = 50,
    on_episode: Callable[[Episode], None] | None = None, round_size: int = ROUND,
) -> None:  # fmt: skip
    """Have the expert play `tasks`; every episode becomes an entry, written when the `round_size` episodes of its round
    are over."""
    delivery, limits = Delivery("expert", "none"), Limits(max_steps)
    for start in range(0, len(tasks), round_size):
        specs = [EpisodeSpec(task) for task in tasks[start : start + round_size]]
        episodes = run_episodes(make_env, specs, delivery, ExpertExecutor(), limits, round_size, on_episode)
        explain(episodes, ExpertTeacher())
        bank.write(entries_of(episodes))


def not_experienced(tasks: Sequence[Task], bank: Memory) -> list[Task]:
    """Return those of `tasks` of which the bank holds no episode yet."""
    known = bank.origins()
    return [task for task in tasks if (task.id, task.split) not in known]


def explain(episodes: Sequence[Episode], explainer: Explainer) -> None:
    """Give each episode its rationale, but for those that broke: there is nothing to learn from them."""
    told = [episode for episode in episodes if not is_failure(episode.stop_reason)]
    for episode, why in zip(told, explainer.rationales(told), strict=True):
        episode.rationale = why


def entries_of(episodes: Iterable[Episode]) -> list[MemoryEntry]:
    """Return what episodes leave in memory: failures, too, but not those of endpoint or environment, which teach
    nothing."""
    return [
        entry_from_trajectory(
            Task(e.task_id, e.goal, e.scene, e.split, e.kind), [step.action for step in e.steps],
            [step.feedback for step in e.steps], e.success, e.rationale,
        )
        for e in episodes
        if not is_failure(e.stop_reason)
    ]  # fmt: skip
