"""Mixed into vLLM's workers: final hidden states out of the engine that generates.

A request whose `SamplingParams.extra_args` are `tail_of(key, n)` leaves the final hidden states (after the final norm)
of its last n prompt positions behind; `lm.vllm.take_tails` fetches them. vLLM's own ways lead elsewhere: pooling needs
a second engine, and its `extract_hidden_states` corrupts sampling at temperatures above 0 on CPU (0.31).

It reads what the model runner keeps between its two halves, `execute_model` and `sample_tokens`; vLLM's two runners
(V1, V2) have that in common. The engine is asked for by name (`worker_extension_cls=EXTENSION`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EXTENSION = "lm.vllm_extension.HiddenTails"
_KEY, _ROWS = "memcompiler_key", "memcompiler_rows"


def tail_of(key: str, n: int) -> dict[str, Any]:
    """`extra_args` of a request that leaves n rows behind under `key`."""
    return {_KEY: key, _ROWS: n}


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
            if _KEY in asked:
                self._tails_wanted[new.req_id] = _Tail(asked[_KEY], asked[_ROWS], len(new.prompt_token_ids))

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
