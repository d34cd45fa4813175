"""A stand-in for a vLLM engine whose step takes the same time for one request as for a full batch, as decoding on a GPU
does: for measurements of scheduling and for tests, without vLLM.

Nothing is computed. What a request writes is a function of its ids, its adapter and its seed.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from compiler.vllm import VllmCompiler
from lm.prompt import PromptEncoder
from soft_mem.projector import Projector

LOGPROB = -1.0  # of every token
# Tokens of emissions at even quantiles, measured on 134 held-out ALFWorld games (mean 9.9, longest 97).
EMISSION_TOKENS = (2, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 19, 24, 30, 40)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in the engine."""

    id: str
    ids: tuple[int, ...]
    params: Any
    lora: Any  # the LoRARequest
    written: tuple[int, ...] = ()
    done: int = 0  # of `written`
    draw: int = field(init=False)  # a number that ids, adapter and seed determine

    def __post_init__(self) -> None:
        named = f"{self.ids} {self.lora and self.lora.lora_name} {getattr(self.params, 'seed', None)}"
        self.draw = int.from_bytes(hashlib.sha256(named.encode()).digest()[:6])


Write = Callable[[SimulatedRequest], Sequence[int]]  # the tokens that a request writes, at least one


class SimulatedLLM:
    """Has what `EngineLoop`, `VllmCompiler` and `VllmExecutor` use of `vllm.LLM` and its engine.

    Hidden states are all the number of their adapter (0 without one).

    Args:
        write: what a request writes.
        width: of hidden states.
        step_s: seconds of a step.
        max_num_seqs: requests in a step; others wait.

    Attributes:
        taken: number of requests in each step so far.
        adapters: folders of the adapters in the engine, by number.
        broken: raised by the next step.
    """

    def __init__(
        self, write: Write, width: int = 8, step_s: float = 0.0, max_num_seqs: int = 64, context: int = 8192
    ) -> None:
        self.write, self.width, self.step_s, self.max_num_seqs = write, width, step_s, max_num_seqs
        self.taken, self.adapters, self.broken = list[int](), dict[int, str](), None
        self.model_config = SimpleNamespace(
            max_model_len=context, is_multimodal_model=False, dtype=torch.float32, get_hidden_size=lambda: width
        )
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))
        self.llm_engine = self.output_processor = self
        self.request_states: dict[str, Any] = {}
        self._running, self._waiting = dict[str, SimulatedRequest](), deque[SimulatedRequest]()
        self._numbers, self._tails = itertools.count(), list[tuple[str, int, int, bytes]]()

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def enqueue(
        self, requests: Sequence[Any], params: Sequence[Any], lora_request: Any = None, use_tqdm: bool = True
    ) -> list[str]:
        new = [
            SimulatedRequest(str(next(self._numbers)), tuple(request["prompt_token_ids"]), one, lora_request)
            for request, one in zip(requests, params, strict=True)
        ]
        for request in new:
            request.written = tuple(self.write(request))[: request.params.max_tokens]
            self.request_states[f"{request.id}-x"] = SimpleNamespace(external_req_id=request.id)
            self._waiting.append(request)
        return [f"{request.id}-x" for request in new]

    def abort_request(self, ids: Sequence[str], internal: bool = False) -> None:
        gone = {id.removesuffix("-x") for id in ids}
        for id in ids:
            self.request_states.pop(id, None)
        self._running = {id: request for id, request in self._running.items() if id not in gone}
        self._waiting = deque(request for request in self._waiting if request.id not in gone)

    def step(self) -> list[Any]:
        """Write one token of every running request; return the outputs of the requests that are complete."""
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.popleft()
            self._check_adapter(request)
            self._running[request.id] = request
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        time.sleep(self.step_s)
        self.taken.append(len(self._running))
        for request in self._running.values():
            request.done += 1
        ended = [request for request in self._running.values() if request.done >= len(request.written)]
        return [self._end(request) for request in ended]

    def _check_adapter(self, request: SimulatedRequest) -> None:
        if request.lora is not None and request.lora.lora_int_id not in self.adapters:
            raise RuntimeError(f"the engine has no adapter {request.lora.lora_name}")

    def _end(self, request: SimulatedRequest) -> Any:
        self._check_adapter(request)
        del self._running[request.id], self.request_states[f"{request.id}-x"]
        extra = request.params.extra_args or {}
        if extra:
            rows = extra["memcompiler_rows"]
            number = 0 if request.lora is None else request.lora.lora_int_id
            states = np.full((rows, self.width), number, np.float32)
            self._tails.append((extra["memcompiler_key"], rows, self.width, states.tobytes()))
        logprobs = [{id: SimpleNamespace(logprob=LOGPROB)} for id in request.written]
        return SimpleNamespace(
            request_id=request.id,
            finished=True,
            prompt_token_ids=list(request.ids),
            prompt_logprobs=[{id: SimpleNamespace(logprob=LOGPROB)} for id in request.ids],
            num_cached_tokens=0,
            outputs=[SimpleNamespace(token_ids=request.written, logprobs=logprobs)],
        )

    def add_lora(self, request: Any) -> bool:
        self.adapters[request.lora_int_id] = request.lora_path
        return True

    def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None

    def collective_rpc(self, method: str) -> list[Any]:
        if method != "take_tails":
            return [None]
        tails, self._tails = self._tails, []
        return [tails]

    def reset_prefix_cache(self) -> bool:
        return True


def simulated_compiler(
    encoder: PromptEncoder, projector: Projector, step_s: float, max_num_seqs: int = 64, **settings: Any
) -> VllmCompiler:
    """Create a compiler of texts on a simulated engine, whose emissions have the lengths of real ones. Its caller must
    be inside `simulated_vllm`. `settings`: further ones of `VllmCompiler`."""
    word = encoder.ids("go")[0]

    def write(request: SimulatedRequest) -> list[int]:
        if request.params.extra_args:  # a second pass
            return [word]
        return [*[word] * (EMISSION_TOKENS[request.draw % len(EMISSION_TOKENS)] - 1), encoder.end_id]

    llm: Any = SimulatedLLM(write, projector.config.d_compiler, step_s, max_num_seqs)
    return VllmCompiler(llm, encoder, projector, **settings)


@contextmanager
def simulated_vllm() -> Iterator[None]:
    """Provide the classes of requests that our code imports from vLLM, without vLLM."""

    def sampling_params(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(**({"extra_args": None, "max_tokens": 1, "seed": None} | given))

    def lora_request(lora_name: str, lora_int_id: int, lora_path: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name=lora_name, lora_int_id=lora_int_id, lora_path=lora_path)

    classes = {
        "vllm": {"SamplingParams": sampling_params},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lora_request},
    }
    modules = {name: ModuleType(name) for name in classes}
    for name, module in modules.items():
        vars(module).update(classes[name])
    with patch.dict(sys.modules, modules):
        yield
