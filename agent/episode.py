"""THE loop (paper Eq. 3 to 5): observe, compile, act, apply, step. data_gen, training and eval share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from agent.batching import StepBatcher
from agent.deliveries import Delivery
from agent.records import Episode, StepRecord
from compiler.brief_state import BriefState, apply_ops, render_brief_state
from compiler.records import Compilation, CompileRequest
from envs.base import Environment, Observation, Task
from executor.prompt import ExecutorRequest, executor_text
from executor.records import Executor
from lm.ledger import EndpointStop
from memory.entry import MemoryEntry
from memory.trajectory import stated_goal
from runtime.errors import CompilerFailure, EnvironmentFailure, EpisodeFailure, ExecutorFailure, StopReason

T = TypeVar("T")
SOFT_MARK = "▪"  # how records show a soft token's place


@dataclass(frozen=True, slots=True)
class Limits:
    max_steps: int = 15
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run: the task and what was retrieved for it, M = Retrieve(bank, goal), fixed all episode long."""

    task: Task
    memory: tuple[MemoryEntry, ...] = ()
    bank_version: int | None = None


def goal_text(task: Task) -> str:
    """The goal as the agent states it, in the words of its memory."""
    return stated_goal(task.goal, task.scene)


async def ask(env: Environment, call: Callable[..., T], *arguments: object) -> T:
    """A call of the environment. One that waits for another process (`in_process = False`) leaves the event loop to the
    other episodes; for the others a change of thread would cost more than the call."""
    if getattr(env, "in_process", True):
        return call(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


class EpisodeExpert:
    """The environment's expert, for teachers. They ask in the middle of a batch: a failure is kept for the episode that
    it belongs to, instead of failing the whole batch."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._failure: EnvironmentFailure | None = None

    def __call__(self) -> list[str] | None:
        try:
            return self._env.expert()
        except EnvironmentFailure as failure:
            self._failure = failure
            return None

    def check(self) -> None:
        """Raise what the environment raised when it was asked."""
        if self._failure is not None:
            raise self._failure


async def run_episode(
    env: Environment,
    spec: EpisodeSpec,
    delivery: Delivery,
    executor: Executor,
    limits: Limits,
    batcher: StepBatcher,
    index: int,
) -> Episode:
    """One episode. A failure of environment, compiler or executor ends it with a named reason; it never raises them.

    Raises:
        EndpointStop: no endpoint may be asked any more, for any episode.
    """
    task = spec.task
    episode = Episode(
        task.id, task.goal, task.scene, task.split, task.kind, task.family, delivery.name, limits.seed,
        memory_ids=tuple(entry.id for entry in spec.memory), bank_version=spec.bank_version,
        memory_text="\n\n".join(entry.text for entry in spec.memory),
    )  # fmt: skip
    try:
        expert, state, history = EpisodeExpert(env), BriefState(goal_text(task)), []
        observation = await ask(env, env.reset, task)
        for t in range(limits.max_steps):
            step = StepRecord(t, observation.text, observation.image, observation.admissible, render_brief_state(state))
            episode.steps.append(step)
            compiled = await _compile(expert, spec, delivery, state, observation, history, batcher, index, step)
            await _act(expert, spec, delivery, executor, state, compiled, observation, history, batcher, index, step)
            if compiled is not None:
                state, step.op_errors = apply_ops(compiled.emission.ops, state)
            step.brief_after = render_brief_state(state)
            started = time.perf_counter()
            transition = await ask(env, env.step, step.action)
            step.seconds["environment"] = time.perf_counter() - started
            step.feedback, step.progress = transition.observation.text, transition.progress
            episode.progress = transition.progress
            history.append(step.action)
            observation = transition.observation
            if transition.success or transition.done:
                episode.success = transition.success
                episode.stop_reason = StopReason.SUCCESS if transition.success else StopReason.DONE
                break
    except EpisodeFailure as error:
        episode.stop_reason, episode.error = error.stop_reason, str(error)
    return episode


async def _compile(
    expert: EpisodeExpert, spec: EpisodeSpec, delivery: Delivery, state: BriefState, observation: Observation,
    history: Sequence[str], batcher: StepBatcher, index: int, step: StepRecord,
) -> Compilation | None:  # fmt: skip
    """(M, b_t, o_t) -> emission and soft tokens."""
    if delivery.compiler is None:
        return None
    request = CompileRequest(
        goal_text(spec.task), spec.memory, state if delivery.brief_state else None, observation.text, observation.image,
        tuple(history), expert,
    )  # fmt: skip
    try:
        compiled: Compilation
        compiled, step.seconds["compiler"] = await batcher.call(index, delivery.compiler.compile, request)
    except EndpointStop:  # a spent budget, a wrong key: the run's end, not this episode's
        raise
    except Exception as error:
        raise CompilerFailure(f"{type(error).__name__}: {error}") from error
    expert.check()
    step.emission_text, step.emission_kind = compiled.text, str(compiled.emission.kind)
    step.parse_error = str(compiled.parse_error) if compiled.parse_error else None
    step.guidance, step.reason = compiled.emission.guidance, compiled.emission.reason
    step.tokens |= {"compiler_in": compiled.tokens_in, "compiler_out": compiled.tokens_out}
    if compiled.tokens_cached is not None:
        step.tokens["compiler_cached"] = compiled.tokens_cached
    step.compilation = compiled
    if compiled.mu is not None and compiled.log_sigma is not None and compiled.z is not None:
        step.soft = {
            "n": float(len(compiled.mu)), "mu_norm": compiled.mu.norm(dim=-1).mean().item(),
            "sigma_mean": compiled.log_sigma.exp().mean().item(), "z_norm": compiled.z.norm(dim=-1).mean().item(),
        }  # fmt: skip
    return compiled


async def _act(
    expert: EpisodeExpert, spec: EpisodeSpec, delivery: Delivery, executor: Executor, state: BriefState,
    compiled: Compilation | None, observation: Observation, history: Sequence[str], batcher: StepBatcher, index: int,
    step: StepRecord,
) -> None:  # fmt: skip
    """The executor reads goal, delivery, history and o_t, and decides on one action."""
    delivered = delivery.deliver(spec.memory, state, compiled)
    if not executor.accepts_soft:  # a closed model reads text only, and the record must show what it read
        delivered = replace(delivered, soft=None)
    image = observation.image if executor.sees_images else None
    request = ExecutorRequest(
        goal_text(spec.task), delivered, tuple(history), observation.text, observation.admissible, expert, image
    )
    try:
        action, step.seconds["executor"] = await batcher.call(index, executor.act, request)
    except EndpointStop:
        raise
    except Exception as error:
        raise ExecutorFailure(f"{type(error).__name__}: {error}") from error
    expert.check()
    step.action, step.grounding, step.executor_text, step.decision = action.action, str(action.how), action.text, action
    step.executor_prompt, step.executor_prompt_ids = executor_text(request, SOFT_MARK), action.prompt_ids
    step.tokens |= {"executor_in": action.tokens_in, "executor_out": action.tokens_out}
    if action.tokens_cached is not None:
        step.tokens["executor_cached"] = action.tokens_cached


def run_episodes(
    make_env: Callable[[], Environment], specs: Sequence[EpisodeSpec], delivery: Delivery, executor: Executor,
    limits: Limits, concurrency: int = 64, on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:  # fmt: skip
    """All specs, at most `concurrency` at a time, each with an environment of its own; results in the order of specs.

    Where `make_env` is a pool's `lease` (or anything whose owner has a `capacity`), no more than that run at a time: an
    episode that waits for a worker would wait for those that wait for it in the cohort.
    """
    concurrency = min(concurrency, getattr(getattr(make_env, "__self__", make_env), "capacity", concurrency))
    batcher = StepBatcher()

    def episode_of(spec: EpisodeSpec) -> Callable[[int], Awaitable[Episode]]:
        async def run(index: int) -> Episode:
            env = make_env()
            try:
                episode = await run_episode(env, spec, delivery, executor, limits, batcher, index)
            finally:
                trouble = await _close(env)
            episode.error = episode.error or trouble
            if on_episode:
                on_episode(episode)
            return episode

        return run

    episodes: list[Episode] = []

    async def run_all() -> None:
        # Twice: where the run is interrupted, each call in flight is cut short by a `close` beside it.
        threads = ThreadPoolExecutor(2 * max(1, concurrency), thread_name_prefix="environment")
        asyncio.get_running_loop().set_default_executor(threads)
        awake = asyncio.create_task(_stay_awake())
        try:
            episodes.extend(await batcher.run([episode_of(spec) for spec in specs], concurrency))
        finally:
            awake.cancel()

    asyncio.run(run_all())  # returns nothing: asyncio writes out the repr of what a main task returns
    return episodes


async def _stay_awake() -> None:
    """Ctrl-C is heard only by a loop that turns: one that has just gone to sleep would hear it after the next step."""
    while True:
        await asyncio.sleep(0.5)


async def _close(env: Environment) -> str:
    """What went wrong, if anything: the episode is over and stays as it is."""
    try:
        await ask(env, env.close)
    except Exception as error:
        return f"closing the environment failed: {type(error).__name__}: {error}"
    return ""
