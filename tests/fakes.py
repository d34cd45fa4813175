"""Fake environments, compilers and executors, and small records, for several tests."""

from __future__ import annotations

from collections.abc import Sequence

from agent.episode import EpisodeSpec
from agent.records import Episode, StepRecord
from compiler.brief_state import Create, Fold
from compiler.language import Emission, render
from compiler.records import Compilation
from envs.base import EnvironmentFailure, Observation, Task, Transition
from executor.prompt import ExecutorRequest
from executor.records import FULL_VIEW, PAPER_VIEW, Action, Grounding
from runtime.errors import StopReason
from tests.tiny_models import entry

COMMANDS = ("north", "south")


class CountingEnv:
    """Succeeds after a number of steps, the task's id; fails for the kinds `broken` and `crash`."""

    name = "counting"

    def tasks(self, split):
        return []

    def reset(self, task):
        if task.kind == "broken":
            raise EnvironmentFailure("the simulator is gone")
        self.left, self.total, self.kind = int(task.id), int(task.id), task.kind
        return Observation("start", None, COMMANDS)

    def step(self, action):
        if self.kind == "crash" and self.left == 1:
            raise EnvironmentFailure("crashed")
        self.left -= 1
        done = self.left == 0
        return Transition(Observation(f"after {action}", None, COMMANDS), 1 - self.left / self.total, done, done)

    def expert(self):
        return ["north"] * self.left

    def close(self):
        pass


class Recorder:
    """A compiler and an executor that record their requests."""

    accepts_soft, sees_images, reads = True, False, FULL_VIEW

    def __init__(self):
        self.batches, self.seen = [], []

    def compile(self, requests):
        self.batches.append([r.goal for r in requests])
        emission = Emission("go north", "it is there", (Create("plan", "a; b"),))
        later = Emission(ops=(Fold("did a"), Create("x", "1"), Create("x", "2")))
        emissions = [emission if not r.history else later for r in requests]
        return [Compilation(render(e), e, tokens_in=3, tokens_out=2) for e in emissions]

    def act(self, requests):
        self.seen += requests
        return [Action("north", Grounding.CHOICE, "north", (1, 2), 2, 1) for _ in requests]


def spec(steps: int, kind: str = "") -> EpisodeSpec:
    return EpisodeSpec(Task(str(steps), f"goal {steps}", "home 1", "test", kind), (entry(1, "the memory"),), 7)


def one_step_episode(task: str, delivery: str = "none", text: str = "") -> Episode:
    step = StepRecord(0, "see", None, ("look",), "goal: x", executor_text=text)
    return Episode(task, "x", "", "test", "", "", delivery, 0, steps=[step], stop_reason=StopReason.DONE)


class Obedient:
    """An executor that does what guidance says where that is possible, and looks elsewhere."""

    batched, accepts_soft, sees_images, reads = False, False, False, PAPER_VIEW

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        told = [(request.delivered.guidance, request.admissible or ()) for request in requests]
        return [Action(a, Grounding.CHOICE, a) for a in (g if g in possible else "look" for g, possible in told)]
