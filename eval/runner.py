"""Evaluation: the same tasks, memory and executor under every delivery."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from agent.deliveries import find
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.records import Episode
from compiler.records import Compiler
from envs.base import Environment
from executor.records import Executor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that one comparison holds fixed.

    Attributes:
        specs: the tasks with what was retrieved for each.
        top_specs: the same tasks with the best entry alone (empty where no delivery asks for it).
    """

    make_env: Callable[[], Environment]
    specs: Sequence[EpisodeSpec]
    executor: Executor
    compiler: Compiler | None
    limits: Limits
    concurrency: int = 64
    top_specs: Sequence[EpisodeSpec] = ()

    def run(
        self, name: str, on_episode: Callable[[Episode], None] | None = None, played: Container[str] = ()
    ) -> list[Episode]:
        """Play all specs under delivery `name`, but for the tasks that were played already.

        Raises:
            ValueError: no tasks, no such delivery, or one without the compiler that it needs.
        """
        if not self.specs:
            raise ValueError("there are no tasks to evaluate: check split, limit and the environment's data")
        wanted = find(name)
        specs = [spec for spec in (self.top_specs if wanted.top_entry else self.specs) if spec.task.id not in played]
        delivery = wanted.make(self.compiler, self.limits.seed)
        return run_episodes(self.make_env, specs, delivery, self.executor, self.limits, self.concurrency, on_episode)
