"""Evaluation: the same tasks, memory and executor under every delivery."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from agent.deliveries import Delivery, ShuffledSoft
from agent.disclosure import RuleDisclosure
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertTeacher
from agent.records import Episode
from compiler.records import Compiler
from envs.base import Environment
from executor.records import Executor

# Deliveries whose episodes depend on those that run beside them: a run that was killed plays them again as a whole.
INTERDEPENDENT = frozenset({"compiled_shuffled_soft"})
NEEDS_CHECKPOINT = frozenset({"compiled", "compiled_text", "compiled_no_brief", "compiled_shuffled_soft"})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that one comparison holds fixed.

    Attributes:
        specs: the tasks with what was retrieved for each.
        top_jobs: the same tasks with the best entry alone, for `static_top1` (empty where nobody asks for it).
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
        """All specs under delivery `name`, but for the tasks that were played already.

        Raises:
            ValueError: no tasks, or a compiled delivery without a compiler.
        """
        if not self.specs:
            raise ValueError("there are no tasks to evaluate: check split, limit and the environment's data")
        specs = [
            spec for spec in (self.top_specs if name == "static_top1" else self.specs) if spec.task.id not in played
        ]
        delivery = make_delivery(name, self.compiler, self.limits.seed)
        return run_episodes(self.make_env, specs, delivery, self.executor, self.limits, self.concurrency, on_episode)


def make_delivery(name: str, compiler: Compiler | None, seed: int) -> Delivery:
    """A delivery or control by its name in result tables."""
    match name:
        case "none" | "static":
            return Delivery(name, name)
        case "static_top1":
            return Delivery(name, "static")
        case "disclosure":
            return Delivery(name, "compiled", RuleDisclosure(), soft=False)
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
