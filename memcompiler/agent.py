"""An agent for environments that the caller steps: the evaluation's loop, one observation at a time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agent.batching import Unbatched
from agent.deliveries import find
from agent.episode import EpisodeLimits, EpisodeRunner, EpisodeSpec, Roles
from agent.records import Episode
from compiler.brief_state import render_brief_state
from compiler.records import Compiler, Gate
from data_gen.experience import episode_traces
from data_gen.tasks import episode_specs
from envs.base import Observation, Task, Transition
from executor.records import Executor
from memory.protocol import Isolation, MemorySystem
from runtime.errors import EpisodeFailure

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")
SPLIT = "agent"  # of the tasks that an agent begins


@dataclass(frozen=True, slots=True)
class AgentStep:
    """One decision of an agent.

    Attributes:
        action: the command to execute.
        guidance: the compiler's advice to the executor; "" where it gave none.
        reason: why the compiler gave it.
        state: the Brief State after the step, as text.
        soft: the soft tokens that the executor read, (N, d) at its scale; None where it read none.
    """

    action: str
    guidance: str
    reason: str
    state: str
    soft: Tensor | None


class Agent:
    """Acts in an environment that the caller steps, and commits finished episodes to memory.

        agent.begin(goal="put a hot mug in cabinet", scene="FloorPlan19")
        while not done:
            step = agent.act(observation, admissible)
            observation, done = env.step(step.action)
        agent.end(success=True)

    Args:
        compiler: the memory compiler; None for deliveries without one.
        executor: the frozen executor.
        memory: recalled from at every step, and written to by `end`; None for an agent without memory.
        delivery: how memory reaches the executor: `compiled`, `compiled_text`, `static`, `none`, ...
        k: entries to recall for a task.
        isolation: "scene" recalls nothing that episodes of the task's scene left; the tasks then need scenes.
        seed: seed of the records; models with temperature 0 ignore it.
        gate: the compile gate (`mc.load_gate`), for the delivery `compiled_gated`.
        min_confidence: under `compiled_low_confidence`, the executor acts alone at or above this probability.

    Raises:
        ValueError: the delivery does not exist, needs the environment's expert, or lacks compiler or gate.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        executor: Executor,
        memory: MemorySystem | None = None,
        *,
        delivery: str = "compiled",
        k: int = 4,
        isolation: Isolation = "task",
        seed: int = 0,
        gate: Gate | None = None,
        min_confidence: float = 0.9,
    ) -> None:
        spec = find(delivery)
        if spec.needs_expert or spec.interdependent:
            raise ValueError(f"delivery {delivery} is a control for evaluations: use `memcompiler eval`")
        self.memory = memory
        self._recalled_from = memory if spec.memory != "empty" else None
        self._k = spec.entries(k)
        self._isolation: Isolation = isolation
        self._limits = EpisodeLimits(seed=seed, min_confidence=min_confidence)
        self._delivery, self._executor = spec.create(compiler, seed, gate=gate), executor
        self._runner: EpisodeRunner | None = None
        self._acted = 0.0

    def begin(self, goal: str, scene: str = "", *, task_id: str | None = None) -> None:
        """Begin an episode; one that is not ended is dropped.

        Args:
            scene: name of the place whose layout persists over episodes; "" if none.
            task_id: memory never recalls what an earlier episode of the same id left. Default: a new id.
        """
        task = Task(task_id or f"{SPLIT}/{uuid.uuid4().hex}", goal, scene, SPLIT, kind="")
        memory = self._recalled_from
        [spec] = [EpisodeSpec(task)] if memory is None else episode_specs([task], memory, self._k, self._isolation)
        roles = Roles(
            env=_Outside(),
            task=task,
            delivery=self._delivery,
            executor=self._executor,
            limits=self._limits,
            batcher=Unbatched(),
            index=0,
        )
        self._runner = EpisodeRunner(spec, roles)
        self._runner.begin()

    def act(
        self,
        observation: str | Observation,
        admissible: Sequence[str] | None = None,
        image: Image | None = None,
        *,
        progress: float = 0.0,
    ) -> AgentStep:
        """Compile and act on the current observation.

        Args:
            observation: text in view, or an `mc.Observation` that holds all three.
            admissible: the commands that are possible now; None where the environment does not list them.
            image: the current view.
            progress: share of goal conditions met so far, in [0, 1]; it is recorded, and no model reads it.

        Raises:
            RuntimeError: no episode has begun, or memory, compiler or executor failed.
        """
        runner = self._running()
        if isinstance(observation, str):
            commands = None if admissible is None else tuple(admissible)
            observation = Observation(observation, image, commands)
        if runner.episode.steps:
            runner.record(Transition(observation, progress, False, False), time.perf_counter() - self._acted)
        try:
            action = _completed(runner.act(observation))
        except EpisodeFailure as failure:
            runner.episode.stop_reason, runner.episode.error = failure.stop_reason, str(failure)
            raise
        self._acted = time.perf_counter()
        record = runner.episode.steps[-1]
        soft = record.compilation.soft if record.compilation is not None and record.soft_read else None
        state = render_brief_state(runner.brief_state)
        return AgentStep(action, record.guidance, reason=record.reason, state=state, soft=soft)

    def end(self, success: bool, observation: str = "", *, rationale: str = "", commit: bool = True) -> Episode:
        """End the episode, commit it to memory, and return its record.

        Args:
            success: whether the goal was reached. Failures are committed, too: memory systems learn from them.
            observation: what the environment answered to the last action.
            rationale: why it succeeded or failed; stored in its memory entry.
            commit: False leaves memory unchanged.
        """
        runner = self._running()
        self._runner, episode = None, runner.episode
        if episode.steps and not episode.error:
            answer = Observation(observation)
            progress = 1.0 if success else episode.progress
            runner.record(Transition(answer, progress, success, done=True), time.perf_counter() - self._acted)
        episode.rationale = rationale or ("" if success else str(episode.stop_reason))
        if commit and self.memory is not None and episode.steps:
            self.memory.commit(episode_traces([episode]))
        return episode

    def _running(self) -> EpisodeRunner:
        if self._runner is None:
            raise RuntimeError("no episode has begun: call agent.begin(goal=...) first")
        return self._runner


class _Outside:
    """Placeholder for the caller's environment, which the loop cannot call."""

    name = "outside"

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> Observation:
        raise NotImplementedError

    def step(self, action: str) -> Transition:
        raise NotImplementedError

    def expert(self) -> list[str] | None:
        return None

    def close(self) -> None:
        pass


def _completed(step: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends; unlike `asyncio.run`, this works inside a running event loop."""
    while True:
        try:
            step.send(None)
        except StopIteration as end:
            return end.value
