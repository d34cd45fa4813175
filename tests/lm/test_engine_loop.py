"""One loop for an engine: requests of many threads share its steps, and end with their own weights, alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulated_engine import SimulatedLLM, SimulatedRequest, simulated_vllm
from compiler.records import Decoding
from compiler.vllm import VllmCompiler
from lm.engine_loop import EngineLoop, _Turns
from soft_mem.projector import Projector, ProjectorConfig
from tests import tiny_models
from tests.waiting import in_background, until

WIDTH = 8


@pytest.fixture(autouse=True)
def classes_of_vllm() -> Iterator[None]:
    with simulated_vllm():
        yield


def params(length: int = 1, **more: Any) -> Any:
    import vllm

    return vllm.SamplingParams(max_tokens=length, **more)


def request(*ids: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(ids)}


def as_long_as_asked(request: SimulatedRequest) -> list[int]:
    return [7] * request.params.max_tokens


def loop(step_s: float = 0.001, **more: Any) -> tuple[SimulatedLLM, EngineLoop]:
    llm: Any = SimulatedLLM(as_long_as_asked, step_s=step_s, **more)
    return llm, EngineLoop.of(llm)


def failure_of(own: EngineLoop, one: Any) -> str:
    with pytest.raises((MemoryError, RuntimeError)) as failed:
        own.run([request(1)], [one])
    return str(failed.value)


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_their_requests_whoever_ends_first() -> None:
    llm, own = loop()
    lengths = (5, 1, 9, 3)
    made = own.run([request(i) for i in range(4)], [params(n) for n in lengths])
    assert [output.prompt_token_ids for output in made if output] == [[0], [1], [2], [3]]
    assert [len(output.outputs[0].token_ids) for output in made if output] == list(lengths)
    assert llm.taken == [4, 3, 3, 2, 2, 1, 1, 1, 1]
    assert own.run([], []) == [] and EngineLoop.of(llm) is own  # type: ignore[arg-type]


def test_a_short_request_does_not_wait_for_a_long_one_of_another_thread() -> None:
    llm, own = loop()
    over = threading.Event()
    long = in_background(lambda: own.run([request(1)], [params(5000)], wanted=lambda i: not over.is_set()))
    until(lambda: bool(llm.taken))
    assert own.run([request(2)], [params(2)])[0] is not None and llm.has_unfinished_requests()
    assert 2 in llm.taken  # both were in one step
    over.set()
    assert long() == [None] and not llm.has_unfinished_requests()


def test_what_nobody_wants_is_aborted_alone() -> None:
    llm, own = loop(step_s=0.0)
    asked = [0, 0]

    def wanted(i: int) -> bool:
        asked[i] += 1
        return i == 1 or asked[0] < 4

    made = own.run([request(1), request(2)], [params(50), params(9)], wanted=wanted)
    assert made[0] is None and made[1] is not None and len(llm.taken) == 9 and llm.taken[3:] == [1] * 6


def test_an_engine_s_failure_reaches_all_that_is_in_it_and_only_that() -> None:
    llm, own = loop(step_s=0.01)
    first = in_background(lambda: failure_of(own, params(999)))
    until(lambda: bool(llm.taken))
    llm.broken = MemoryError("none left")
    assert first() == "none left"
    assert own.trouble is not None and "restart it" in own.trouble  # the engine still holds the request
    with pytest.raises(RuntimeError, match="restart it"):
        own.run([request(2)], [params()])
    llm.abort_request(list(llm.request_states))
    assert own.trouble is None and own.run([request(2)], [params()])[0] is not None


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    llm, own = loop(step_s=0.01)
    good = in_background(lambda: own.run([request(1)], [params(30)]))
    until(lambda: bool(llm.taken))
    with pytest.raises(KeyError, match="prompt_token_ids"):
        own.run([{}], [params()])
    assert good()[0] is not None and own.trouble is None


def test_a_dead_process_ends_waiting_and_later_calls() -> None:
    llm, own = loop(step_s=0.05)
    waiting = in_background(lambda: failure_of(own, params(10**6)))
    until(lambda: bool(llm.taken))
    llm.engine_core.resources.engine_dead = True
    assert "process died" in waiting()
    with pytest.raises(RuntimeError, match="process died"):
        own.call(lambda: 1)
    assert own.trouble and "process died" in own.trouble


def test_a_dropped_engine_is_freed_and_its_thread_ends() -> None:
    llm, own = loop(step_s=0.0)
    own.run([request(1)], [params()])
    gone, before = weakref.ref(llm), threading.active_count()
    del llm, own
    gc.collect()
    until(lambda: gone() is None and threading.active_count() < before)


def test_turns_are_taken_in_the_order_in_which_they_are_asked_for() -> None:
    turns, order = _Turns(), list[int]()

    def work(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        for number in range(5):
            threading.Thread(target=work, args=(number,)).start()
            until(lambda number=number: turns.asked == number + 2)
    until(lambda: len(order) == 5)
    assert order == [0, 1, 2, 3, 4]


# -- the compiler in it -----------------------------------------------------------------------------------------------


def compiler(step_s: float = 0.0, **more: Any) -> tuple[SimulatedLLM, VllmCompiler]:
    """Create a compiler on a simulated engine, where mu shows which adapter wrote the hidden states."""
    encoder = tiny_models.lm_backbone()

    def write(request: SimulatedRequest) -> Sequence[int]:
        return [*[20 + request.draw % 50] * (1 + request.draw % 7), encoder.end_id]

    llm: Any = SimulatedLLM(write, WIDTH, step_s)
    decoding = Decoding(temperature=1.0, max_new_tokens=16, latent_temperature=0.0)
    return llm, VllmCompiler(llm, encoder, projector(), decoding, **more)


def projector() -> Projector:
    """Create one whose mu is the hidden state."""
    made = Projector(ProjectorConfig(WIDTH, WIDTH, 2, kind="linear", normalise=False))
    with torch.no_grad():
        made.linear.weight.copy_(torch.eye(WIDTH))
        made.linear.bias.zero_()
    return made


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    return folder


def test_calls_in_flight_keep_the_weights_that_they_began_with(tmp_path: Path) -> None:
    """A hidden state names the adapter that wrote it. Every version of the weights is swapped in while requests run."""
    llm, ours = compiler(step_s=0.002)
    numbers = dict[int, int]()  # version -> the engine's number of its adapter

    def load(version: int) -> None:
        ours.load_adapter(tmp_path / "a", version, projector())
        assert ours.weights.lora is not None
        numbers[version] = ours.weights.lora.lora_int_id

    adapter(tmp_path / "a")
    load(1)
    asked, over = tiny_models.request(0, image=False), threading.Event()

    def ask(seed: int) -> list[Any]:
        made = []
        while not over.is_set():
            made += ours.compile([asked], [seed])
        return made

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(ask, seed) for seed in range(6)]
        for version in range(2, 8):
            time.sleep(0.04)
            load(version)
        time.sleep(0.04)
        over.set()
        made = [compilation for call in calls for compilation in call.result(30)]
    assert {compilation.weight_version for compilation in made} >= {1, 2, 3, 4, 5, 6}
    for compilation in made:
        assert set(compilation.mu.flatten().tolist()) == {float(numbers[compilation.weight_version])}
    assert list(llm.adapters) == [numbers[7]]  # the others left with their last request
    assert len(list(Path(ours._adapters.name).iterdir())) == 1


def test_tokens_are_a_function_of_request_and_seed(tmp_path: Path) -> None:
    _, ours = compiler()
    asked = [tiny_models.request(i, image=False) for i in range(6)]
    together = ours.compile(asked, list(range(6)))
    with ThreadPoolExecutor(6) as threads:
        alone = list(threads.map(lambda i: ours.compile([asked[i]], [i])[0], range(6)))
    assert [c.emission_ids for c in together] == [c.emission_ids for c in alone]
    assert len({c.emission_ids for c in ours.compile(asked[:1] * 20, list(range(20)))}) > 5  # seeds count


def test_decodings_of_threads_do_not_mix() -> None:
    _, ours = compiler(step_s=0.001)
    asked = tiny_models.request(0, image=False)

    def ask(tokens: int) -> set[int]:
        decoding = Decoding(temperature=1.0, max_new_tokens=tokens)
        return {len(ours.compile([asked], [1], decoding=decoding)[0].text_logprobs) for _ in range(10)}

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ask, (1, 2, 3))) == [{1}, {2}, {3}] and ours.decoding.max_new_tokens == 16
