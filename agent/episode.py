"""THE loop (paper Eq. 3 to 5): observe, compile, act, apply, step. data_gen, training and eval share it.

Many episodes run at once, and what they wait for goes to each backend in batches, reproducibly (`StepBatcher`)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agent.deliveries import Delivery, pasted
from agent.records import Episode, StepInput, StepRecord, compile_request, delivered, executor_request, soft_read_on
from compiler.brief_state import BriefState, apply_ops, render_brief_state
from envs.base import Environment, Observation, Task, Transition, living
from executor.records import Action, Executor
from lm.ledger import EndpointStop
from memory.entry import MemoryEntry
from memory.protocol import BankError, Fixed, Recall, Session, Trace
from memory.trajectory import stated_goal
from runtime.errors import (
    CompilerFailure,
    EnvironmentFailure,
    EpisodeFailure,
    ExecutorFailure,
    MemoryFailure,
    StopReason,
)

_BROKE = "the world of the sequence broke"
T = TypeVar("T")
Batch = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How episodes are played: `pipelined` has half of them in the compiler while the other half is in the executor.
    An executor is `sure` that gives its likeliest action at least so much probability (`Delivery.where_unsure`)."""

    max_steps: int = 15
    seed: int = 0
    pipelined: bool = False
    sure: float = 0.9


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to run: the task, what is recalled for it before anything is in view, and the session that recalls
    from then on (without one, M = Retrieve(bank, goal) is fixed all episode long). `again` begins another attempt, if
    memory wants one, where all of the given ones failed."""

    task: Task
    memory: tuple[MemoryEntry, ...] = ()
    bank_version: int | None = None
    session: Callable[[], Session] | None = None
    again: Callable[[Sequence[Trace]], Session | None] = lambda _: None

    @property
    def goal(self) -> str:
        """Return the goal as memory, compiler and executor state it."""
        return stated_goal(self.task.goal, self.task.scene)

    def begin(self) -> Session:
        return self.session() if self.session is not None else Fixed(Recall(self.memory))


async def ask(env: Environment, call: Callable[..., T], *arguments: object) -> T:
    """Call the environment, in a thread if it waits for another process (`in_process = False`): the event loop is left
    to the other episodes. A call given to a thread is made, whatever becomes of the episode: asyncio cancels a task a
    second time after Ctrl-C, and a `close` still in the queue would leave its worker to end a long step."""
    if getattr(env, "in_process", True):
        return call(*arguments)
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, call, *arguments))


class EpisodeExpert:
    """The environment's expert, for teachers. Some ask in the middle of a batch: a failure is kept for the episode that
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
    goes_on: bool = False,
) -> Episode:
    """Play one episode, in a world of its own or, where it `goes_on`, in the one that an earlier one left. A failure of
    environment, memory, compiler or executor ends it with a named reason. Raises: EndpointStop, where no endpoint may
    be asked any more, for any episode; BankError, where memory is not what it was for any of them."""
    expert = EpisodeExpert(env)
    runner = EpisodeRunner(spec, limits, Roles(delivery, executor, env, expert, batcher, index, limits.sure), expert)
    episode = runner.episode
    try:
        runner.begin()
        with _failures_as(EnvironmentFailure):
            observed = await ask(env, living(env).proceed if goes_on else env.reset, spec.task)
        for _ in range(limits.max_steps):
            action = await runner.act(observed)
            started = time.perf_counter()
            with _failures_as(EnvironmentFailure):
                transition = await ask(env, env.step, action)
            if runner.record(transition, time.perf_counter() - started):
                break
            observed = transition.observation
    except EpisodeFailure as error:
        episode.stop_reason, episode.error = error.stop_reason, str(error)
    return episode


class EpisodeRunner:
    """One episode without its environment: `act` recalls, compiles and acts (Eq. 3 and 4), `record` takes in what the
    environment answered (Eq. 5). `run_episode` and `memcompiler.Agent` share it."""

    def __init__(self, spec: EpisodeSpec, limits: Limits, roles: Roles, expert: EpisodeExpert | None = None) -> None:
        self.episode = _begin(spec, roles.delivery, limits)
        self.brief_state = BriefState(spec.goal)
        self._spec, self._roles, self._expert = spec, roles, expert
        share = roles.delivery.sparing
        self._spares = random.Random(f"{limits.seed} {spec.task.id}").random() < share
        self._history: tuple[str, ...] = ()
        self._session: Session = Fixed(Recall(spec.memory))

    def begin(self) -> None:
        """Open the memory session. Raises: MemoryFailure."""
        with _failures_as(MemoryFailure):
            if self._roles.delivery.kind != "none":
                self._session = self._spec.begin()

    async def act(self, observed: Observation) -> str:
        """Record a step and return its action. Raises: the failure of memory, compiler or executor."""
        episode, delivery, state = self.episode, self._roles.delivery, self.brief_state
        brief = render_brief_state(state)
        record = StepRecord(len(episode.steps), observed.text, observed.image, observed.admissible, brief)
        episode.steps.append(record)
        with _failures_as(MemoryFailure):
            recalled = self._session.recall(observed.text)
        episode.note_recall(recalled, record)
        step = StepInput(
            goal=self._spec.goal,
            observation=observed.text,
            image=observed.image,
            admissible=observed.admissible,
            history=self._history,
            memory=recalled.entries,
            state=state if delivery.brief_state else None,
            pasted=pasted(delivery.kind, episode.memory_text, recalled.entries),
            expert=self._expert,
            first=episode.steps[0].observation,
        )
        step, action = await self._roles.decide(step, record)
        if step.emission is not None and (not self._spares or step.emission.guidance or not record.t):
            self.brief_state, record.op_errors = apply_ops(step.emission.ops, state)  # the change of b_t, Eq. 4
        record.brief_after = render_brief_state(self.brief_state)
        self._history = (*self._history, action)
        return action

    def record(self, transition: Transition, seconds: float) -> bool:
        """Record what the environment answered to the last action, and return whether the episode is over. Raises:
        MemoryFailure."""
        episode, record = self.episode, self.episode.steps[-1]
        record.seconds["environment"] = seconds
        record.note_transition(transition)
        with _failures_as(MemoryFailure):
            self._session.observe(record.told())
        episode.progress = transition.progress
        if transition.success or transition.done:
            episode.success = transition.success
            ended = StopReason.STEP_LIMIT if transition.truncated else StopReason.DONE
            episode.stop_reason = StopReason.SUCCESS if transition.success else ended
        return transition.success or transition.done


@contextmanager
def _failures_as(kind: type[EpisodeFailure]) -> Iterator[None]:
    """Convert exceptions to `kind`; re-raise those that name who failed, and errors that end the run."""
    try:
        yield
    except (EpisodeFailure, EndpointStop, BankError):
        raise
    except Exception as error:
        raise kind(f"{type(error).__name__}: {error}") from error


def _begin(spec: EpisodeSpec, delivery: Delivery, limits: Limits) -> Episode:
    """Say what is known of an episode before its first step."""
    task = spec.task
    return Episode(
        task.id,
        task.goal,
        task.scene,
        task.split,
        task.kind,
        task.family,
        delivery.name,
        limits.seed,
        bank_version=spec.bank_version,
    )


def lost_episode(task: Task, delivery: str, seed: int, why: str, bank_version: int | None = None) -> Episode:
    """Make the record of an episode that nobody could play to its end, since who played it was lost."""
    episode = _begin(EpisodeSpec(task, bank_version=bank_version), Delivery(delivery, "none"), Limits(seed=seed))
    episode.stop_reason, episode.error = StopReason.WORKER_FAILURE, why
    return episode


@dataclass(frozen=True, slots=True)
class Roles:
    """Compiler and executor as one episode asks them: in a batch with those of the others, or at once where the backend
    wants no batch (`batched = False`). Those that ask the expert want none: it may plan for seconds in another process,
    beside the experts of other episodes, and nobody has to wait until all have planned."""

    delivery: Delivery
    executor: Executor
    env: Environment
    expert: EpisodeExpert
    batcher: StepBatcher
    index: int
    sure: float

    async def decide(self, step: StepInput, record: StepRecord) -> tuple[StepInput, str]:
        """Compile and act (Eq. 3 to 5); or act at once, where that is the delivery and the step is not likely to need
        more, or the executor is sure."""
        need = self.delivery.need
        if need is not None and record.t:  # nobody has a plan before the first one
            record.needed = need(compile_request(step))
            if record.needed < need.threshold:
                return step, (await self.act(step, record)).action
        if not self.delivery.where_unsure:
            step = await self.compile(step, record)
            return step, (await self.act(step, record)).action
        untold = await self.act(step, record)
        record.sure = untold.sure
        if record.sure is None:
            raise ExecutorFailure("it does not say how sure it is: only of listed commands, with executor.mode=choice")
        if record.sure >= self.sure:
            return step, untold.action
        told = await self.compile(step, record)
        if delivered(told, self.executor) == delivered(step, self.executor):
            return told, untold.action  # it would read the same once more
        return told, (await self.act(told, record)).action

    async def compile(self, step: StepInput, record: StepRecord) -> StepInput:
        """Compile (M, b_t, o_t) into emission and soft tokens of the step; nothing where nobody compiles."""
        if self.delivery.compiler is None:
            return step
        soft_on = soft_read_on(self.executor) if self.delivery.soft else "never"
        request = replace(compile_request(step), soft_on=soft_on)
        answer = self._answer(self.delivery.compiler, self.delivery.compiler.compile, request)
        made, record.seconds["compiler"] = await self._guarded(answer, CompilerFailure)
        record.note_compilation(made)
        return replace(step, emission=made.emission, soft=made.soft if self.delivery.soft else None)

    async def act(self, step: StepInput, record: StepRecord) -> Action:
        """Have the executor read goal, delivery, history and o_t, and decide on one action."""
        request = executor_request(step, self.executor)
        answer = self._answer(self.executor, self.executor.act, request)
        made, seconds = await self._guarded(answer, ExecutorFailure)
        record.note_action(request, made, seconds)
        return made

    async def _answer(self, owner: object, backend: Batch, request: object) -> tuple[Any, float]:
        """Return what the backend answers, and the seconds that this took (of a batch, its share)."""
        if getattr(owner, "batched", True):
            return await self.batcher.call(self.index, backend, request)
        await asyncio.sleep(0)  # the loop turns between any two steps, so that Ctrl-C is heard
        started = time.perf_counter()
        [made] = await ask(self.env, backend, [request])
        return made, time.perf_counter() - started

    async def _guarded(self, answer: Awaitable[T], failure: type[RuntimeError]) -> T:
        """Wait for an answer. Whatever goes wrong is the backend's failure, unless the expert's environment failed."""
        try:
            made = await answer
        except EndpointStop:  # a spent budget, a wrong key: the run's end, not this episode's
            raise
        except Exception as error:
            self.expert.check()
            raise failure(f"{type(error).__name__}: {error}") from error
        self.expert.check()
        return made


def run_episodes(
    make_env: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    delivery: Delivery,
    executor: Executor,
    limits: Limits,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play all specs, at most `concurrency` at a time, each with an environment of its own; results in their order."""
    alone = [[spec] for spec in specs]
    played = run_sequences(make_env, alone, delivery, executor, limits, concurrency, on_episode)
    return [episode for [episode] in played]


def run_sequences(
    make_env: Callable[[], Environment],
    sequences: Sequence[Sequence[EpisodeSpec]],
    delivery: Delivery,
    executor: Executor,
    limits: Limits,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[list[Episode]]:
    """Play sequences of tasks side by side, each in a world of its own that is never reset: what a task leaves, solved
    or not, the next one finds. A world that breaks ends its sequence: the tasks that are left fail with it.

    Where `make_env` is a pool's `lease` (or anything whose owner has a `capacity`), no more than that run at a time: an
    episode that waits for a worker would wait for those that wait for it in the batch.
    """
    concurrency = min(concurrency, getattr(getattr(make_env, "__self__", make_env), "capacity", concurrency))
    batched = delivery.compiler is not None and getattr(delivery.compiler, "batched", True)
    batcher = StepBatcher(halves=2 if limits.pipelined and batched else 1)  # one backend alone has nothing beside it
    note = on_episode or (lambda _: None)

    def life_of(specs: Sequence[EpisodeSpec]) -> Callable[[int], Awaitable[list[Episode]]]:
        async def run(index: int) -> list[Episode]:
            env, lived = make_env(), list[Episode]()
            try:
                for spec in specs:
                    for earlier in lived[-1:]:
                        note(earlier)
                    if broken := _breach(lived):
                        episode = _begin(spec, delivery, limits)
                        episode.stop_reason, episode.error = StopReason.ENVIRONMENT_FAILURE, broken
                    else:
                        episode = await run_episode(env, spec, delivery, executor, limits, batcher, index, bool(lived))
                    lived.append(episode)
            finally:
                trouble = await _close(env)
            lived[-1].error = lived[-1].error or trouble
            note(lived[-1])
            return lived

        return run

    played: list[list[Episode]] = []

    async def run_all() -> None:
        # Twice: where the run is interrupted, each call in flight is cut short by a `close` beside it.
        threads = ThreadPoolExecutor(2 * max(1, concurrency), thread_name_prefix="environment")
        asyncio.get_running_loop().set_default_executor(threads)
        awake = asyncio.create_task(_stay_awake())
        try:
            played.extend(await batcher.run([life_of(specs) for specs in sequences if specs], concurrency))
        finally:
            awake.cancel()

    asyncio.run(run_all())  # returns nothing: asyncio writes out the repr of what a main task returns
    return played


def _breach(lived: Sequence[Episode]) -> str:
    """Say where the world of a sequence broke; "" for a whole one."""
    if not lived or lived[-1].stop_reason != StopReason.ENVIRONMENT_FAILURE:
        return ""
    error = lived[-1].error or ""
    return error if error.startswith(_BROKE) else f"{_BROKE} in {lived[-1].task_id}: {error}"


async def _stay_awake() -> None:
    """Ctrl-C is heard only by a loop that turns: one that has just gone to sleep would hear it after the next step."""
    while True:
        await asyncio.sleep(0.5)


async def _close(env: Environment) -> str:
    """Close the environment of an episode that is over; returns what went wrong, if anything."""
    try:
        await ask(env, env.close)
    except Exception as error:
        return f"closing the environment failed: {type(error).__name__}: {error}"
    return ""


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that an episode, by its index, waits for."""

    index: int
    backend: Batch
    request: Any
    future: asyncio.Future


class StepBatcher:
    """Runs episodes side by side on one event loop. When every live one waits for a backend, the waiting requests of
    each backend (a callable from a list of requests to a list of results) are handed over as one batch, in episode
    order: which requests share a batch depends on the episodes only, never on timing.

    With two halves (episodes of even and of odd index), what they wait for is answered at the same time, each backend
    in a thread. Where both wait for the same one, the half that has waited longer goes first and the other stays
    behind: from then on one compiles while the other acts. Whose turn it is depends on the episodes only, too.
    """

    def __init__(self, halves: int = 1) -> None:
        self._live, self._halves = 0, halves
        self._waiting: list[_Waiting] = []
        self._turns = [0] * halves  # when each half was answered last
        self._round = 0
        self._serving: asyncio.Task | None = None

    async def run(self, episodes: Sequence[Callable[[int], Awaitable[T]]], concurrency: int) -> list[T]:
        """Run all coroutines `episodes[i](i)`, at most `concurrency` at once; results in order."""
        results: dict[int, T] = {}
        halves = self._halves = min(self._halves, concurrency)
        numbered, workers = list(enumerate(episodes)), []
        for half in range(halves):  # each has its own queue: whoever is faster takes nothing from the other
            own, most = numbered[half::halves], len(range(half, concurrency, halves))
            queue = iter(own)
            workers += [self._worker(queue, results) for _ in range(min(len(own), most))]
        self._live = len(workers)
        await asyncio.gather(*workers)
        return [results[i] for i in range(len(episodes))]

    async def call(self, index: int, backend: Batch, request: Any) -> tuple[Any, float]:
        """Return what `backend` answers to `request`, and this request's share of the batch's seconds.

        An exception in a batch reaches every episode that waits for it; a ValueError (its request cannot be served), or
        an exception that a backend returns in the place of a result, strikes one episode only.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(index, backend, request, future))
        self._flush_if_all_wait()
        return await future

    async def _worker(self, queue: Iterator[tuple[int, Callable[[int], Awaitable[T]]]], results: dict[int, T]) -> None:
        try:
            for index, episode in queue:
                results[index] = await episode(index)
        finally:
            self._live -= 1
            self._flush_if_all_wait()

    def _flush_if_all_wait(self) -> None:
        self._forget_the_cancelled()
        if self._live and len(self._waiting) == self._live:
            asyncio.get_running_loop().call_soon(self._flush)

    def _forget_the_cancelled(self) -> None:
        """After Ctrl-C nobody waits for these any more."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.done()]

    def _flush(self) -> None:
        self._forget_the_cancelled()
        if not self._waiting or len(self._waiting) != self._live:
            return
        chosen = self._take_turns()
        batches = [[w for w in chosen if w.backend == of] for of in dict.fromkeys(w.backend for w in chosen)]
        if self._halves > 1 and len(batches) > 1:
            self._serving = asyncio.create_task(self._serve_at_once(batches))
            return
        for batch in batches:
            _hand_out(batch, *_timed(batch))

    def _take_turns(self) -> list[_Waiting]:
        """Take what is answered now, in episode order: all that waits, but for a half that waits for a backend which
        another half has, whose turn it is."""
        self._round += 1
        waiting = sorted(self._waiting, key=lambda w: w.index)
        taken: list[_Waiting] = []
        for half in sorted(range(self._halves), key=lambda half: self._turns[half]):
            own = [w for w in waiting if w.index % self._halves == half]
            if own and not any(w.backend == other.backend for w in own for other in taken):
                taken, self._turns[half] = [*taken, *own], self._round
        self._waiting = [w for w in waiting if w not in taken]
        return sorted(taken, key=lambda w: w.index)

    async def _serve_at_once(self, batches: Sequence[Sequence[_Waiting]]) -> None:
        answered = await asyncio.gather(*(asyncio.to_thread(_timed, batch) for batch in batches))
        for batch, answers in zip(batches, answered, strict=True):
            _hand_out(batch, *answers)


def _timed(batch: Sequence[_Waiting]) -> tuple[list[Any], float]:
    """Have a batch answered: a result or an exception for each, and the seconds of each."""
    started = time.perf_counter()
    try:
        results = _answers(batch[0].backend, [waiting.request for waiting in batch])
    except Exception as error:  # the episodes decide what a failed backend means to them
        results = [error] * len(batch)
    return results, (time.perf_counter() - started) / len(batch)


def _hand_out(batch: Sequence[_Waiting], results: Sequence[Any], seconds: float) -> None:
    for waiting, result in zip(batch, results, strict=True):
        if waiting.future.done():  # given up meanwhile
            continue
        if isinstance(result, Exception):
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result((result, seconds))


def _answers(backend: Batch, requests: Sequence[Any]) -> list[Any]:
    """Give one result for each request. Where one of them is bad (ValueError), each is asked alone: which one is it?"""
    try:
        return backend(requests)
    except ValueError as error:
        if len(requests) == 1:
            return [error]
        return [_answers(backend, [request])[0] for request in requests]
