"""Evaluation: the same tasks, memory and executor under every delivery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.delivery import Delivery, ShuffledSoft
from agent.episode import Job, Limits, run_episodes
from agent.records import Episode
from compiler.records import Compiler
from data_gen.teacher import ExpertTeacher
from envs.base import Environment
from executor.frozen import Executor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that one comparison holds fixed."""

    make_env: Callable[[], Environment]
    jobs: Sequence[Job]
    executor: Executor
    compiler: Compiler | None
    limits: Limits
    concurrency: int = 64

    def run(self, name: str, on_episode: Callable[[Episode], None] | None = None) -> list[Episode]:
        """All jobs under delivery `name`.

        Raises:
            ValueError: no tasks, or a compiled delivery without a compiler.
        """
        if not self.jobs:
            raise ValueError("there are no tasks to evaluate: check split, limit and the environment's data")
        delivery = make_delivery(name, self.compiler, self.limits.seed)
        return run_episodes(
            self.make_env, self.jobs, delivery, self.executor, self.limits, self.concurrency, on_episode
        )


def make_delivery(name: str, compiler: Compiler | None, seed: int) -> Delivery:
    """A delivery or control by its name in result tables."""
    match name:
        case "none" | "static":
            return Delivery(name, name)
        case "expert_compiler":
            return Delivery(name, "compiled", ExpertTeacher(), soft=False)
        case "expert_random_entry":
            return Delivery(name, "compiled", ExpertTeacher("random", seed), soft=False)
    if compiler is None:
        raise ValueError(f"delivery {name} needs a trained compiler: set compiler.checkpoint")
    match name:
        case "compiled":
            return Delivery(name, "compiled", compiler)
        case "compiled_text":
            return Delivery(name, "compiled", compiler, soft=False)
        case "compiled_no_brief":
            return Delivery(name, "compiled", compiler, brief_state=False)
        case "compiled_shuffled_soft":
            return Delivery(name, "compiled", ShuffledSoft(compiler))
    raise ValueError(f"no delivery is named {name}")
