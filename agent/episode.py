"""The agent loop (paper Eq. 3 to 5): observe, compile, act, apply, step. data_gen, training and eval share it.

Many episodes run side by side; `agent.batching` or `agent.continuous` brings their requests to each backend.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from agent.batching import Backend, StepBatcher
from agent.continuous import ContinuousBatcher, batcher_for
from agent.deliveries import Delivery, pasted_memory
from agent.records import (
    ALL_KINDS,
    NOTHING,
    Episode,
    EpisodeContext,
    StepInput,
    StepRecord,
    compile_request,
    delivered,
    executor_request,
    soft_read_on,
)
from agent.seeds import episode_seeds
from compiler.brief_state import BriefState, apply_ops, render_brief_state
from configs.models import Batching
from envs.base import Environment, Observation, Task, Transition, is_persistent
from executor.prompt import Turn
from executor.records import Action, Executor
from lm.answer_cache import EndpointStop
from memory.entry import MemoryEntry
from memory.protocol import BankError, FixedSession, Recall, Session, Trace
from memory.trajectory import goal_with_scene
from runtime.errors import (
    CompilerFailure,
    EnvironmentFailure,
    EpisodeFailure,
    ExecutorFailure,
    MemoryFailure,
    StopReason,
)

_SEQUENCE_BROKE = "the world of the sequence broke"
T = TypeVar("T")
Batcher: TypeAlias = StepBatcher | ContinuousBatcher
# Creates the environment of an episode; in a run of several environments, by `EpisodeSpec.environment`.
MakeEnvironment: TypeAlias = Callable[[], Environment] | Mapping[str, Callable[[], Environment]]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Settings of a run of episodes."""

    max_steps: int = 15
    seed: int = 0
    # Under `Delivery.low_confidence_only`, an executor at least this confident acts without a compilation.
    min_confidence: float = 0.9
    batching: Batching = "auto"
    # Seed of the draws of requests that have seeds of their own; None: `seed`.
    draw_seed: int | None = None

    @property
    def drawn_by(self) -> int:
        """Return the seed from which the seeds of episodes are made (`agent.seeds`)."""
        return self.seed if self.draw_seed is None else self.draw_seed


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run.

    Args:
        memory: entries recalled for the task before the first observation.
        open_session: opens the memory session that recalls at every step; without it, `memory` is M throughout.
        next_attempt: opens the session of a further attempt after the given failed ones, or returns None.
        recall: what memory the episode is given, for its record.
        environment: name of the task's environment in a run that has several.
    """

    task: Task
    memory: tuple[MemoryEntry, ...] = ()
    bank_version: int | None = None
    open_session: Callable[[], Session] | None = None
    next_attempt: Callable[[Sequence[Trace]], Session | None] = lambda _: None
    recall: str = ALL_KINDS
    environment: str = ""

    def without_memory(self) -> EpisodeSpec:
        """Return the same episode with nothing to recall, for deliveries with `memory="empty"`."""
        return EpisodeSpec(self.task, bank_version=self.bank_version, recall=NOTHING, environment=self.environment)

    @property
    def goal(self) -> str:
        """Return the goal as memory, compiler and executor state it."""
        return goal_with_scene(self.task.goal, self.task.scene)


# -- one episode ------------------------------------------------------------------------------------------------------


async def run_episode(spec: EpisodeSpec, roles: Roles, continues: bool = False) -> Episode:
    """Play one episode. A failure of environment, memory, compiler or executor ends it with a named reason.

    Args:
        continues: keep the world that the previous episode left, instead of resetting the environment.

    Raises:
        EndpointStop: no endpoint can be called any more.
        BankError: the memory is not what it was when the run began.
    """
    env = roles.env
    runner = EpisodeRunner(spec, roles)
    episode = runner.episode
    try:
        runner.begin()
        with _failures_as(EnvironmentFailure):
            observed = await _call(env, is_persistent(env).proceed if continues else env.reset, spec.task)
        for _ in range(roles.limits.max_steps):
            action = await runner.act(observed)
            started = time.perf_counter()
            with _failures_as(EnvironmentFailure):
                transition = await _call(env, env.step, action)
            if runner.record(transition, time.perf_counter() - started):
                break
            observed = transition.observation
    except EpisodeFailure as error:
        episode.stop_reason, episode.error = error.stop_reason, str(error)
    return episode


class EpisodeRunner:
    """One episode of the agent loop, which `run_episode` and `memcompiler.Agent` share; the caller steps the
    environment."""

    def __init__(self, spec: EpisodeSpec, roles: Roles) -> None:
        self.episode = _new_episode(spec, roles.delivery, roles.limits)
        self.brief_state = BriefState(spec.goal)  # b_t
        self._spec, self._roles = spec, roles
        self._past: tuple[Turn, ...] = ()
        self._session: Session = FixedSession(Recall(spec.memory))

    def begin(self) -> None:
        """Open the memory session. Raises: MemoryFailure."""
        if self._spec.open_session is not None and self._roles.delivery.kind != "none":
            with _failures_as(MemoryFailure):
                self._session = self._spec.open_session()

    async def act(self, observed: Observation) -> str:
        """Recall, compile and act on an observation (Eq. 3 to 5), and return the action. Raises: EpisodeFailure."""
        episode, delivery = self.episode, self._roles.delivery
        state = self.brief_state = self.brief_state.noting(observed.beliefs)
        record = StepRecord(
            t=len(episode.steps),
            observation=observed.text,
            image=observed.image,
            admissible=observed.admissible,
            brief_before=render_brief_state(state),
        )
        episode.steps.append(record)
        with _failures_as(MemoryFailure):
            recalled = self._session.recall(observed.text)
        episode.note_recall(recalled, record)
        step = StepInput(
            goal=self._spec.goal,
            observation=observed.text,
            image=observed.image,
            admissible=observed.admissible,
            past=self._past,
            memory=recalled.entries,
            state=state if delivery.brief_state else None,
            pasted_memory=pasted_memory(delivery.kind, episode.memory_text, recalled.entries),
            first=episode.steps[0].observation,
            environment=self._spec.environment,
        )
        action = await self._roles.decide(step, record)
        if record.compilation is not None and record.compilation.applies_ops:
            self.brief_state, record.op_errors = apply_ops(record.compilation.emission.ops, state)  # Eq. 4
        record.brief_after = render_brief_state(self.brief_state)
        read = record.compilation.soft if record.compilation is not None and record.soft_read else None
        self._past = (*self._past, record.to_turn(read))
        return action

    def record(self, transition: Transition, seconds: float) -> bool:
        """Record the environment's answer to the last action; return whether the episode is over. Raises:
        MemoryFailure."""
        episode, record = self.episode, self.episode.steps[-1]
        record.seconds["environment"] = seconds
        record.note_transition(transition)
        with _failures_as(MemoryFailure):
            self._session.observe(record.to_memory_record())
        episode.progress = transition.progress
        if transition.success or transition.done:
            episode.success = transition.success
            ended = StopReason.STEP_LIMIT if transition.truncated else StopReason.DONE
            episode.stop_reason = StopReason.SUCCESS if transition.success else ended
        return transition.success or transition.done


def _new_episode(spec: EpisodeSpec, delivery: Delivery, limits: EpisodeLimits) -> Episode:
    """Create the record of an episode before its first step."""
    task = spec.task
    return Episode(
        task_id=task.id,
        goal=task.goal,
        scene=task.scene,
        split=task.split,
        kind=task.kind,
        family=task.family,
        delivery=delivery.name,
        seed=limits.seed,
        bank_version=spec.bank_version,
        recall=spec.recall,
        environment=spec.environment,
    )


def lost_episode(task: Task, delivery: str, seed: int, why: str, bank_version: int | None = None) -> Episode:
    """Create the record of an episode whose worker was lost before it ended."""
    spec = EpisodeSpec(task, bank_version=bank_version)
    episode = _new_episode(spec, Delivery(delivery, "none"), EpisodeLimits(seed=seed))
    episode.stop_reason, episode.error = StopReason.WORKER_FAILURE, why
    return episode


@contextmanager
def _failures_as(kind: type[EpisodeFailure]) -> Iterator[None]:
    """Convert exceptions to `kind`; re-raise episode failures and errors that end the run."""
    try:
        yield
    except (EpisodeFailure, EndpointStop, BankError):
        raise
    except Exception as error:
        raise kind(f"{type(error).__name__}: {error}") from error


async def _call(env: Environment, method: Callable[..., T], *arguments: object) -> T:
    """Call `method`, in a thread if the environment waits for another process (`in_process = False`).

    The shield protects a queued call from cancellation: asyncio cancels a task twice after Ctrl-C, and without its
    `close` the worker would first finish a long step.
    """
    if getattr(env, "in_process", True):
        return method(*arguments)
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, method, *arguments))


@dataclass(frozen=True, slots=True)
class Roles:
    """Compiler and executor of one episode.

    Args:
        index: of the episode in its batcher.
        seed: of the draws of its requests (`agent.seeds.episode_seeds`).
    """

    env: Environment
    task: Task
    delivery: Delivery
    executor: Executor
    limits: EpisodeLimits
    batcher: Batcher
    index: int
    seed: int = 0
    draws: Iterator[int] = field(default_factory=itertools.count)  # numbers of the requests with seeds

    async def decide(self, step: StepInput, record: StepRecord) -> str:
        """Compile and act (Eq. 3 to 5), or act without compiling where the delivery skips it. Return the action."""
        gate = self.delivery.gate
        if gate is not None and record.t:  # the first step is always compiled: it makes the plan
            record.gate_probability = gate(compile_request(step))
            if record.gate_probability < gate.threshold:
                return (await self._act(step, record)).action
        if not self.delivery.low_confidence_only:
            return (await self._act(await self._compile(step, record), record)).action
        alone = await self._act(step, record)
        record.confidence = alone.confidence
        if record.confidence is None:
            raise ExecutorFailure("it reports no confidence: only for listed commands, with executor.mode=choice")
        if record.confidence >= self.limits.min_confidence:
            return alone.action
        compiled = await self._compile(step, record)
        if delivered(compiled, self.executor) == delivered(step, self.executor):
            return alone.action  # its prompt would be the same
        return (await self._act(compiled, record)).action

    async def _compile(self, step: StepInput, record: StepRecord) -> StepInput:
        """Compile (M, b_t, o_t) and add emission and soft tokens to the step; without a compiler, do nothing."""
        compiler = self.delivery.compiler
        if compiler is None:
            return step
        soft_on = soft_read_on(self.executor) if self.delivery.soft else "never"
        request = replace(compile_request(step), soft_on=soft_on)
        with _failures_as(CompilerFailure):
            compilation, record.seconds["compiler"] = await self._answer(compiler, compiler.compile, request)
        record.note_compilation(compilation)
        return replace(step, emission=compilation.emission, soft=compilation.soft if self.delivery.soft else None)

    async def _act(self, step: StepInput, record: StepRecord) -> Action:
        """Have the executor choose one action."""
        request = executor_request(step, self.executor)
        with _failures_as(ExecutorFailure):
            action, seconds = await self._answer(self.executor, self.executor.act, request)
        record.note_action(request, action, seconds)
        return action

    async def _answer(self, owner: object, backend: Backend, request: object) -> tuple[Any, float]:
        """Return the backend's result, and its seconds (of a batch, its share).

        A teacher, which declares `needs_expert`, gets an `EpisodeContext` beside the request; others may get the
        request's seed, so that what they draw does not depend on the requests beside it. A backend with
        `batched = False` is called at once: a slow planner would delay all other episodes.
        """
        batched, arguments = getattr(owner, "batched", True), (request,)
        if not batched:
            await asyncio.sleep(0)  # lets the event loop handle Ctrl-C between two steps
        started = time.perf_counter()
        needs_expert = getattr(owner, "needs_expert", None)
        if needs_expert is not None:
            with _failures_as(EnvironmentFailure):
                plan = await _call(self.env, self.env.expert) if needs_expert else None
            arguments = request, EpisodeContext(plan, self.task.id, self.limits.seed)
        elif batched and self.batcher.seeds_requests_of(owner):
            arguments = request, self.seed + next(self.draws)
        planned = time.perf_counter() - started
        if batched:
            result, seconds = await self.batcher.call(self.index, backend, *arguments)
            return result, planned + seconds
        [result] = await _call(self.env, backend, *([argument] for argument in arguments))
        return result, time.perf_counter() - started


# -- many episodes ----------------------------------------------------------------------------------------------------


def run_episodes(
    make_env: MakeEnvironment,
    specs: Sequence[EpisodeSpec],
    delivery: Delivery,
    executor: Executor,
    limits: EpisodeLimits,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play all specs, at most `concurrency` at a time, each with its own environment. Results are in order."""
    alone = [[spec] for spec in specs]
    played = run_sequences(
        make_env,
        alone,
        delivery=delivery,
        executor=executor,
        limits=limits,
        concurrency=concurrency,
        on_episode=on_episode,
    )
    return [episode for [episode] in played]


def run_sequences(
    make_env: MakeEnvironment,
    sequences: Sequence[Sequence[EpisodeSpec]],
    delivery: Delivery,
    executor: Executor,
    limits: EpisodeLimits,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[list[Episode]]:
    """Play sequences of tasks side by side, each in its own world, which is never reset: a task starts from the
    state that the previous one left, solved or not. After an environment failure, the rest of its sequence fails too.

    Where `make_env` is a pool's `lease` (or a method of an object with a `capacity`), no more episodes than that run at
    a time: an episode that waits for a worker would deadlock with the episodes that wait for it in the batch.
    """
    makes = make_env if isinstance(make_env, Mapping) else {"": make_env}
    capacities = (getattr(getattr(make, "__self__", make), "capacity", concurrency) for make in makes.values())
    concurrency = min(concurrency, *capacities)
    batcher = batcher_for(limits.batching, (delivery.compiler, executor))
    player = _Player(makes, delivery, executor, limits, batcher, on_episode or (lambda _: None))
    tasks = [[(spec.environment, spec.task.id) for spec in specs] for specs in sequences]
    seeds = episode_seeds(limits.drawn_by, tasks)
    plays = [partial(player.play, *both) for both in zip(sequences, seeds, strict=True) if both[0]]
    results: list[list[Episode]] = []

    async def run_all() -> None:
        # Two threads per episode: after an interrupt, each call in flight is ended by a `close` beside it.
        threads = ThreadPoolExecutor(2 * max(1, concurrency), thread_name_prefix="environment")
        asyncio.get_running_loop().set_default_executor(threads)
        awake = asyncio.create_task(_stay_awake())
        try:
            results.extend(await batcher.run(plays, concurrency))
        finally:
            awake.cancel()

    asyncio.run(run_all())  # returns nothing, because asyncio would format the repr of a returned result
    return results


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays sequences of tasks."""

    makes: Mapping[str, Callable[[], Environment]]
    delivery: Delivery
    executor: Executor
    limits: EpisodeLimits
    batcher: Batcher
    report: Callable[[Episode], None]

    async def play(self, specs: Sequence[EpisodeSpec], seeds: Sequence[int], index: int) -> list[Episode]:
        """Play one sequence, with the seed of each episode."""
        env, played = self.makes[specs[0].environment](), list[Episode]()
        try:
            for spec, seed in zip(specs, seeds, strict=True):
                if played:
                    self.report(played[-1])
                if broken := _sequence_failure(played):
                    episode = _new_episode(spec, self.delivery, self.limits)
                    episode.stop_reason, episode.error = StopReason.ENVIRONMENT_FAILURE, broken
                else:
                    roles = self._roles(env, spec.task, index=index, seed=seed)
                    episode = await run_episode(spec, roles, continues=bool(played))
                played.append(episode)
        finally:
            close_error = await _close(env)
        played[-1].error = played[-1].error or close_error
        self.report(played[-1])
        return played

    def _roles(self, env: Environment, task: Task, index: int, seed: int) -> Roles:
        return Roles(
            env=env,
            task=task,
            delivery=self.delivery,
            executor=self.executor,
            limits=self.limits,
            batcher=self.batcher,
            index=index,
            seed=seed,
        )


def _sequence_failure(played: Sequence[Episode]) -> str:
    """Return the environment failure that ended a sequence; "" if none did."""
    if not played or played[-1].stop_reason != StopReason.ENVIRONMENT_FAILURE:
        return ""
    error = played[-1].error
    return error if error.startswith(_SEQUENCE_BROKE) else f"{_SEQUENCE_BROKE} in {played[-1].task_id}: {error}"


async def _stay_awake() -> None:
    """Wake the event loop twice a second: a sleeping loop would handle Ctrl-C only after the next step."""
    while True:
        await asyncio.sleep(0.5)


async def _close(env: Environment) -> str:
    """Close the environment. Return the error message, or "" on success."""
    try:
        await _call(env, env.close)
    except Exception as error:
        return f"closing the environment failed: {type(error).__name__}: {error}"
    return ""
