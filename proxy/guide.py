"""Decides what is added to the newest turn of a conversation: recalls, compiles and updates the Brief State (paper
Eq. 3, 4)."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from agent.deliveries import Delivery, DeliverySpec, find
from agent.records import StepInput, compile_request, delivered
from compiler.brief_state import BriefState, apply_ops, parse_brief_state, render_brief_state
from compiler.records import Compilation, Compiler, CompileRequest, Gate
from configs.proxy import ProxyConfig
from executor.prompt import MemoryBlock, Turn, memory_text
from executor.records import ExecutorView
from memory.entry import WriteResult
from memory.protocol import MemorySystem, Query, Recall, Trace
from memory.trajectory import goal_with_scene
from memory.words import word_tokens
from proxy.additions import Insertion, block_parts, offset_of, text_slot
from proxy.mapping import Conversation, Mapped, UserTurn
from proxy.sessions import ProxySession, ProxyStep, SessionStore

T = TypeVar("T")
Compile = Callable[[CompileRequest], Awaitable[Compilation]]


class GuideError(Exception):
    """Memory or compiler failed. The message names what failed, without any content.

    Args:
        queue_is_full: too many requests wait for memory and compiler; a later attempt may succeed.
    """

    def __init__(self, message: str, queue_is_full: bool = False) -> None:
        super().__init__(message)
        self.queue_is_full = queue_is_full


def usable_delivery(name: str) -> DeliverySpec:
    """Return a delivery that a proxy can make. Raises: ValueError, for others."""
    spec = find(name)
    if spec.needs_expert or spec.interdependent or spec.low_confidence_only or spec.kind == "live":
        raise ValueError(
            f"delivery {name} is not for a proxy: it needs the environment, the executor or other episodes"
        )
    return spec


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks for.

    Attributes:
        gate: threshold of the compile gate; None: as the delivery says.
        budget: maximum estimated tokens that are added to the conversation; None: no limit.
    """

    deliver: str
    gate: float | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """What the upstream reads of a compilation."""

    reads: ExecutorView
    accepts_soft: bool


@dataclass(slots=True)
class Guide:
    """Recalls and compiles for the sessions of a proxy.

    Args:
        compile: compiles one request.
        compiler: what the deliveries are created with; None: there is none, and only `none` and `static` work.
        accepts_soft: whether the upstream reads soft tokens.
        gate: the compile gate beside the checkpoint.
    """

    config: ProxyConfig
    mapping: Mapped
    store: SessionStore
    memory: MemorySystem
    compile: Compile
    compiler: Compiler | None = None
    accepts_soft: bool = False
    gate: Gate | None = None
    compile_seconds: float = 0.0  # of all compilations so far, waiting included
    _waiting: int = 0  # requests that wait for memory or compiler, or are in a batch
    # One thread: memory systems answer one call at a time.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="memory"))

    def delivery(self, name: str) -> Delivery:
        """Create a delivery. Raises: ValueError, for one that this proxy cannot make."""
        return usable_delivery(name).create(self.compiler, self.config.seed, gate=self.gate)

    async def visit(
        self, session: ProxySession, conversation: Conversation, message: dict[str, Any], wishes: Wishes
    ) -> ProxyStep:
        """Return the step of the newest turn. A repeated request gets the same step without another compilation.

        Args:
            message: the message that ends the newest turn.

        Raises:
            GuideError: memory or compiler failed.
        """
        newest = conversation.turns[-1]
        if not self.mapping.grows_by_messages:
            newest = replace(newest, key=_numbered(newest.key, session))
        if newest.key not in session.steps:
            step = await self._new_step(session, conversation, newest, message, wishes)
            if self.store.is_full(session):
                return step
            self.store.add(session, step)
        session.newest = newest.key
        return session.steps[newest.key]

    async def _new_step(
        self,
        session: ProxySession,
        conversation: Conversation,
        newest: UserTurn,
        message: dict[str, Any],
        wishes: Wishes,
    ) -> ProxyStep:
        """Record the turns before the newest that the session does not know; return the newest with its guidance."""
        parent = session.newest if not self.mapping.grows_by_messages else None
        for turn in conversation.turns[:-1]:  # seen by the upstream without this proxy
            if turn.key not in session.steps:
                if self.store.is_full(session):
                    return self._step(session, newest, parent, message)
                self.store.add(session, self._step(session, turn, parent, message={}))
            parent = turn.key
        step = self._step(session, newest, parent, message)
        if wishes.deliver != "none" and not self.store.is_full(session):
            try:
                await self._guide(session, step, conversation, wishes)
            except GuideError:
                if self.config.on_failure == "forward":  # the request is then sent without guidance
                    self.store.add(session, self._step(session, newest, parent, message))
                    session.newest = newest.key
                raise
        return step

    def _step(self, session: ProxySession, turn: UserTurn, parent: str | None, message: dict[str, Any]) -> ProxyStep:
        before, text = session.steps[parent] if parent is not None else None, text_slot(message)
        action = turn.action or (before.reply if before is not None else "")
        state = before.state if before is not None else ""
        step = ProxyStep(turn.key, parent, turn.observation, action, state, offset=offset_of(text, self.mapping.place))
        if not self.mapping.grows_by_messages:
            step.text_length, step.text_hash = len(text), _hash(text)
        return step

    async def _guide(self, session: ProxySession, step: ProxyStep, conversation: Conversation, wishes: Wishes) -> None:
        """Fill in what the step adds, and its Brief State. Raises: GuideError."""
        if self._waiting >= self.config.queue + self.config.batch:
            raise GuideError("too many requests wait for guidance", queue_is_full=True)
        self._waiting += 1
        try:
            await self._recall_and_compile(session, step, conversation, wishes)
        finally:
            self._waiting -= 1

    async def _recall_and_compile(
        self, session: ProxySession, step: ProxyStep, conversation: Conversation, wishes: Wishes
    ) -> None:
        spec, delivery = usable_delivery(wishes.deliver), self.delivery(wishes.deliver)
        steps = [*session.path(step.parent), step]
        left = None if wishes.budget is None else wishes.budget - sum(each.tokens for each in steps)
        recalled = await self._in_thread("memory", self._recall, session, steps, spec)
        if delivery.kind == "static":
            if not any(each.pasted for each in steps):
                kept = list[str]()  # whole entries, in order
                for entry in recalled.entries:
                    if self._add(step, MemoryBlock(memory=memory_text([*kept, entry.text])), left):
                        kept.append(entry.text)
                step.pasted = True
            return
        goal = goal_with_scene(session.task.goal, session.task.scene)
        state = parse_brief_state(step.state) if step.state else BriefState(goal)
        step.state = render_brief_state(state)
        given = StepInput(
            goal=goal,
            observation=step.observation,
            image=conversation.image,
            past=tuple(Turn(each.observation, after.action) for each, after in pairwise(steps)),
            memory=recalled.entries,
            state=state if delivery.brief_state else None,
            first=steps[0].observation,
        )
        if self._gated_out(delivery, given, wishes):
            return
        compilation = await self._compiled(given, delivery)
        after, _ = apply_ops(compilation.emission.ops, state)
        step.state, step.kind = render_brief_state(after), str(compilation.emission.kind)
        soft = compilation.soft if delivery.soft else None
        read = replace(given, emission=compilation.emission, soft=soft)
        self._add(step, delivered(read, self._reader), left)  # pyright: ignore[reportArgumentType]

    @property
    def _reader(self) -> _Reader:
        view = ExecutorView(state=self.config.reads_state, soft_on=self.config.soft_on, context=self.config.format)
        return _Reader(view, self.accepts_soft)

    def _gated_out(self, delivery: Delivery, given: StepInput, wishes: Wishes) -> bool:
        """Return whether the compile gate leaves out this step; never the first, which makes the plan."""
        if wishes.gate is None:
            gate, threshold = delivery.gate, delivery.gate.threshold if delivery.gate is not None else 0.0
        else:
            gate, threshold = self.gate, wishes.gate
        return gate is not None and bool(given.past) and gate(compile_request(given)) < threshold

    async def _compiled(self, given: StepInput, delivery: Delivery) -> Compilation:
        soft_on = self.config.soft_on if self.accepts_soft and delivery.soft else "never"
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.compile_timeout_s):
                if delivery.compiler is self.compiler:
                    return await self.compile(replace(compile_request(given), soft_on=soft_on))
                assert delivery.compiler is not None
                return delivery.compiler.compile([compile_request(given)])[0]
        except TimeoutError:
            raise GuideError(f"the compiler took more than {self.config.compile_timeout_s:g} s") from None
        except Exception as error:
            full = getattr(error, "status", None) == 429
            raise GuideError(f"the compiler failed: {_kind(error)}", queue_is_full=full) from error
        finally:
            self.compile_seconds += time.perf_counter() - started

    def _add(self, step: ProxyStep, block: MemoryBlock, left: float | None) -> bool:
        """Have the step add a block, if its texts are within the tokens that are left; return whether they are."""
        parts = block_parts(block, self.config.format)
        tokens = sum(word_tokens(part) for part in parts if isinstance(part, str))
        if left is not None and tokens > left:
            return False
        step.added, step.tokens = parts, tokens
        return True

    # -- memory -------------------------------------------------------------------------------------------------------

    async def _in_thread(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Call in the memory's thread. Raises: GuideError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except Exception as error:
            raise GuideError(f"the {what} failed: {_kind(error)}") from error

    def _recall(self, session: ProxySession, steps: list[ProxyStep], spec: DeliverySpec) -> Recall:
        """Recall for the last of a path of steps. The memory session observes every step before it, once."""
        if not spec.recalls or not self.config.memory.k:
            return Recall()
        query = Query(session.task, spec.entries(self.config.memory.k), isolation=self.config.memory.isolation)
        if session.first is None:
            [session.first] = self.memory.recall([query])
        records, at, memory = session.records(steps)[:-1], session.recalled_at, session.memory
        session.memory = session.recalled_at = None  # if one of the calls fails, the next recall begins again
        if memory is not None and at is not None and at == steps[-1].parent:
            memory.observe(records[-1])
        else:  # the first step, another branch, or steps that recalled nothing: from the beginning
            memory = self.memory.session(query, session.first)
            for step, record in zip(steps, records, strict=False):
                memory.recall(step.observation)
                memory.observe(record)
        recalled = memory.recall(steps[-1].observation)
        session.memory, session.recalled_at = memory, steps[-1].key
        return recalled

    async def commit(
        self, session: ProxySession, success: bool, rationale: str, action: str, answer: str
    ) -> WriteResult:
        """Commit the newest path of a session as an episode. Raises: GuideError."""
        steps = session.path(session.newest)
        records = session.records(steps, action, answer)
        if not steps:
            return WriteResult(0)
        shown = tuple(entry.id for entry in session.first.entries) if session.first is not None else ()
        trace = Trace(session.task, records, success, rationale=rationale, shown=shown)
        return await self._in_thread("memory", self.memory.commit, [[trace]])

    # -- insertions into a request -------------------------------------------------------------------------------------

    def insertions(self, session: ProxySession, conversation: Conversation, text: str) -> dict[int, list[Insertion]]:
        """Return the additions of this turn and of earlier ones, by index of the message into which they are inserted.

        Args:
            text: of the message that ends the newest turn.
        """
        found = dict[int, list[Insertion]]()
        if self.mapping.grows_by_messages:
            for turn in conversation.turns:
                step = session.steps.get(turn.key)
                if step is not None and step.added:
                    found[turn.message] = [Insertion(step.offset, step.added)]
            return found
        newest = conversation.turns[-1]
        steps = [step for step in session.path(session.newest) if step.added and _begins(text, step)]
        kept = sorted((Insertion(step.offset, step.added) for step in steps), key=lambda each: each.offset)
        return {newest.message: kept} if kept else {}


def _numbered(key: str, session: ProxySession) -> str:
    """Return the key of a prompt's step: the newest step's if the same prompt is repeated, else a new one."""
    newest = session.newest or ""
    return newest if newest.partition(":")[0] == key else f"{key}:{len(session.steps)}"


def _begins(text: str, step: ProxyStep) -> bool:
    """Return whether a prompt begins with the prompt of a step."""
    return len(text) >= step.text_length and _hash(text[: step.text_length]) == step.text_hash


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _kind(error: BaseException) -> str:
    """Name an exception, with its HTTP status if it has one, without its message, which may quote memory."""
    return f"{type(error).__name__} {getattr(error, 'status', '')}".strip()
