"""Host synchronisations on a pretended GPU: how often the host waits for the device, each against its bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.records import Decoding
from configs.models import Speed
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from tests import tiny_models
from tests.pretend_gpu import Syncs, counting
from tests.training import grpo_trainers, sft_trainers

PER_TOKEN = 1  # the tokens are read, to know which rows have ended
PER_COMPILATION = 2  # log-probabilities; soft tokens
PER_ACTIONS = 1  # of a batch: the candidates' log-probabilities
PER_GENERATION = 5  # transformers' arguments, 4; the answer
PER_STEP = 2  # the gradient norm; losses, or the statistics of an update
# Qwen2.5-VL's tower reads the sizes of pictures: 3 times a layer, of which the tiny one has 2, and 13 times besides.
PER_PICTURES = 19


def counted(run: Callable[[], Any]) -> Syncs:
    run()  # the first time, constants are put on the device
    with counting() as syncs:
        run()
    return syncs


def assert_at_most(syncs: Syncs, bound: int) -> None:
    assert syncs.total <= bound, f"{syncs.total} host synchronisations, at most {bound} are expected:\n{syncs}"


@pytest.mark.parametrize("vlm", [False, True])
def test_a_compilation_waits_once_a_pass(vlm: bool) -> None:
    requests = [tiny_models.request(i, image=vlm) for i in range(4)]
    for speed, passes in ((Speed(drafts=0), 10), (Speed(), 10)):
        compiler = tiny_models.memory_compiler(
            vlm, device="cuda", speed=speed, decoding=Decoding(max_new_tokens=10)
        ).eval()
        syncs = counted(lambda compiler=compiler: compiler.compile(requests))
        assert_at_most(syncs, passes * PER_TOKEN + PER_COMPILATION + vlm * PER_PICTURES)


@pytest.mark.parametrize("soft", [False, True])
def test_a_batch_of_actions_waits_once(soft: bool) -> None:
    compiled = tiny_models.memory_compiler(False).compile([tiny_models.request(0, image=False)])[0].mu
    block = MemoryBlock(guidance="go to shelf 1", soft=compiled if soft else None)
    requests = [
        ExecutorRequest(
            "put a mug", block if i != 1 else MemoryBlock(), ("look",) * i, "You see a mug.", ("look", "open")
        )
        for i in range(4)
    ]
    chooses, writes = (
        FrozenExecutor(tiny_models.lm_backbone(0, "cuda"), mode, max_new_tokens=6) for mode in ("choice", "generate")
    )
    assert_at_most(counted(lambda: chooses.act(requests)), PER_ACTIONS)
    assert_at_most(counted(lambda: writes.act(requests)), 6 * PER_TOKEN + PER_GENERATION)


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("vlm", [False, True])
def test_an_sft_step_waits_as_often_with_any_number_of_micro_batches(vlm: bool, micro: int, tmp_path: Path) -> None:
    trainer = sft_trainers.trainer(tmp_path, device="cuda", vlm=vlm, micro_batch_size=micro, max_steps=9, save_every=9)
    trainer.compiler.train()
    assert_at_most(counted(trainer.take_step), PER_STEP + vlm * PER_PICTURES * 4 // micro)


@pytest.mark.parametrize("kind", ["score", "pathwise"])
def test_a_grpo_step_waits_as_often_with_any_number_of_micro_batches(kind: str, tmp_path: Path) -> None:
    settings = grpo_trainers.PATHWISE if kind == "pathwise" else {}
    trainer = grpo_trainers.trainer(tmp_path, device="cuda", tasks=1, **settings)
    samples = grpo_trainers.fresh_samples(trainer)
    assert len(samples) > 3  # micro-batches are of three
    assert_at_most(counted(lambda: trainer.learn(samples)), PER_STEP)
