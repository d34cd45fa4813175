"""Continuous batching of a vLLM engine: one thread steps it, and requests enter it when they are made."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lm.vllm import LEFT_OVER, PROCESS_DIED, engine_process, tail_key, take_tails

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds of a call; a batch of emissions is the longest
LOOK_S = 0.5  # between two looks at the engine's process
_OF_ENGINE = "_memcompiler_loop"  # attribute of an `LLM`


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that were made together, and the future of their outputs."""

    requests: Sequence[Any]
    params: Sequence[Any]
    lora: LoRARequest | None
    wanted: Callable[[int], bool]
    result: Future[list[Any]] = field(default_factory=Future)
    outputs: list[Any] = field(init=False)
    left: int = field(init=False)  # requests that have not ended

    def __post_init__(self) -> None:
        self.outputs, self.left = [None] * len(self.requests), len(self.requests)

    def end(self, place: int, output: Any) -> None:
        """Store the output of one request; None if it was aborted."""
        self.outputs[place] = output
        self.left -= 1
        if not self.left:
            self.result.set_result(self.outputs)

    def abandon(self) -> None:
        """Have the engine abort what has not ended."""
        self.wanted = lambda place: False


@dataclass(slots=True, eq=False)
class _Call:
    """A function that runs between two steps, and the future of its result."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Running:
    """A request in the engine: its place in its batch, and vLLM's internal id."""

    batch: _Batch
    place: int
    id: str


class EngineLoop:
    """Steps one engine while it has requests. Thread-safe: requests of all threads share the engine's batches.

    `of(llm)` returns the only loop of an engine. Its thread keeps nothing alive, so that dropping the engine frees it.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._running: dict[str, _Running] = {}  # by the id in vLLM's outputs
        self._busy = False  # requests are in the engine that this loop will bring to their end
        self._tails: dict[str, Tensor] = {}  # that no request has taken yet, by key
        self._inbox: queue.SimpleQueue[_Batch | _Call | None] = queue.SimpleQueue()
        self._turn = contextlib.nullcontext() if engine_process(llm) else _IN_THIS_PROCESS
        threading.Thread(target=_serve, args=(weakref.ref(self), self._inbox), daemon=True, name="vllm").start()
        weakref.finalize(self, self._inbox.put, None)

    @classmethod
    def of(cls, llm: LLM) -> EngineLoop:
        """Return the loop of an engine, and start it the first time."""
        with _CREATING:
            if (loop := getattr(llm, _OF_ENGINE, None)) is None:
                setattr(llm, _OF_ENGINE, loop := cls(llm))
        return loop

    @property
    def trouble(self) -> str | None:
        """Return why this engine cannot answer any more, without calling it; None if nothing is known."""
        process = engine_process(self.llm)
        if process is not None and process.engine_dead:
            return PROCESS_DIED
        return LEFT_OVER if not self._busy and self.llm.llm_engine.has_unfinished_requests() else None

    def run(
        self,
        requests: Sequence[Any],
        params: Sequence[Any],
        lora: LoRARequest | None = None,
        wanted: Callable[[int], bool] = lambda place: True,
    ) -> list[RequestOutput | None]:
        """Run requests, which enter the same step, beside those of other threads; return their outputs in order.

        Before every step, request i is aborted if `wanted(i)` is false and it has not ended; its output is then None.
        A request whose `extra_args` are `lm.vllm.tail_of(...)` has its hidden states in the output's `tail`; None if
        part of them came from the prefix cache.

        Raises:
            RuntimeError: the engine died or hangs, or holds requests of an earlier failure.
        """
        if not requests:
            return []
        batch = _Batch(requests, params, lora, wanted)
        try:
            return self._wait(batch, batch.result)
        except BaseException:  # also Ctrl-C
            batch.abandon()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a function of the engine between two steps. Raises: RuntimeError, as `run`."""
        call = _Call(function)
        return self._wait(call, call.result)

    def _wait(self, item: _Batch | _Call, result: Future[T]) -> T:
        process = engine_process(self.llm)
        if process is not None and process.engine_dead:
            raise RuntimeError(PROCESS_DIED)
        self._inbox.put(item)
        return wait_watching(process, result)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def work(self, item: _Batch | _Call) -> None:
        """Take an item, and step until nothing runs."""
        self._take(item)
        while self._running:
            with contextlib.suppress(queue.Empty):
                while (new := self._inbox.get_nowait()) is not None:
                    self._take(new)
            try:
                with self._turn:
                    ended = self._step()
            except BaseException as error:
                failed, self._running = {one.batch: None for one in self._running.values()}, {}
                self._tails.clear()
                self._busy = False
                for batch in failed:
                    batch.result.set_exception(error)
                return
            for one, output in ended:
                one.batch.end(one.place, output)
        self._busy = False

    def _take(self, item: _Batch | _Call) -> None:
        try:
            with self._turn:
                if isinstance(item, _Batch):
                    self._enter(item)
                else:
                    item.result.set_result(item.function())
        except BaseException as error:
            item.result.set_exception(error)

    def _enter(self, batch: _Batch) -> None:
        """Give a batch to the engine. Raises: RuntimeError, if an earlier failure left requests in it."""
        if reason := self.trouble:
            raise RuntimeError(reason)
        self._busy = True
        ids = self.llm.enqueue(batch.requests, batch.params, lora_request=batch.lora, use_tqdm=False)
        states = self.llm.llm_engine.output_processor.request_states
        for place, id in enumerate(ids):
            self._running[str(states[id].external_req_id)] = _Running(batch, place, id)

    def _step(self) -> list[tuple[_Running, Any]]:
        """Abort the requests that are no longer wanted, and step once; return the ended requests with their outputs."""
        late = {name: one for name, one in self._running.items() if not one.batch.wanted(one.place)}
        if late:
            self.llm.llm_engine.abort_request([one.id for one in late.values()], internal=True)
        ended: dict[str, Any] = dict.fromkeys(late)
        if len(late) < len(self._running):
            outputs = {output.request_id: output for output in self.llm.llm_engine.step() if output.finished}
            ended |= {name: output for name, output in outputs.items() if name in self._running and name not in late}
        self._add_tails(ended)
        return [(self._running.pop(name), output) for name, output in ended.items()]

    def _add_tails(self, ended: dict[str, Any]) -> None:
        """Fetch the hidden states of requests that have ended, at one go."""
        keys = {name: tail_key(one.batch.params[one.place]) for name in ended if (one := self._running[name])}
        if any(key and ended[name] is not None for name, key in keys.items()):
            self._tails |= take_tails(self.llm)
        for name, key in keys.items():
            tail = self._tails.pop(key, None)
            if key and ended[name] is not None:
                ended[name].tail = tail


def _serve(loop: weakref.ref[EngineLoop], inbox: queue.SimpleQueue[_Batch | _Call | None]) -> None:
    """Run a loop's thread, which holds the loop only while it works."""
    while (item := inbox.get()) is not None:
        if (alive := loop()) is not None:
            alive.work(item)
        del alive, item


def wait_watching(process: Any, result: Future[T], timeout: float = TIMEOUT) -> T:
    """Wait for a result until the engine's process dies or the time-out passes: vLLM's own client waits forever for a
    killed process (0.31).

    Raises:
        RuntimeError: the process died, or the time-out passed.
    """
    deadline = time.monotonic() + timeout
    while not _done(result, min(LOOK_S, timeout)):
        if process is not None and process.engine_dead:
            raise RuntimeError(PROCESS_DIED)
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM's engine did not answer within {timeout:g} s: restart it with smaller batches")
    return result.result()


def _done(result: Future[Any], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        result.exception(seconds)
    return result.done()


class _Turns:
    """A lock that is given in the order in which it is asked for."""

    def __init__(self) -> None:
        self._changed, self.asked, self._served = threading.Condition(), 0, 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self.asked = self.asked, self.asked + 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


# Engines in this process take turns: vLLM holds the state of a forward pass in variables of its modules.
_IN_THIS_PROCESS = _Turns()
_CREATING = threading.Lock()
