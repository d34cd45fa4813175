"""Compiler, executor and readers on a pretended GPU: nothing is refused, and the results are the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agent.records import Episode, StepRecord
from compiler.brief_state import BriefState, render_brief_state
from compiler.gate import WIDTH, CompileGate
from compiler.records import Compilation, CompileRequest, Decoding
from configs.load import ConfigError
from configs.models import CompilerConfig, ExecutorConfig, Speed
from eval.paper.attention import last_token_logits
from eval.paper.latents import gathered, plane, recompiled
from eval.qa.hf_readers import HfReader, HfVisionReader
from eval.qa.readers import build_prompt
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.backbone import Backbone, load_configured_backbone
from lm.device import describe_placement, device_of
from memory.linear import Head
from memory.trajectory import png_bytes
from tests import tiny_models, tiny_vlms
from tests.pretend_gpu import counting
from tests.training import grpo_trainers

DEVICES = ("cpu", "cuda")
COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look")
PLAIN = Speed(drafts=0, prefix_mib=0, second_pass="always")


def assert_same(found: Sequence[Compilation], expected: Sequence[Compilation]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.emission_ids == b.emission_ids
        for name in ("text_logprobs", "mu", "log_sigma", "soft"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4, msg=name)


# devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "role"), [("auto", CompilerConfig), ("cuda", ExecutorConfig)])
def test_a_model_is_loaded_where_its_settings_say(device: str, role: Any) -> None:
    backbone = load_configured_backbone(role(device=device, dtype="auto"))
    assert {p.device for p in backbone.model.parameters()} == {torch.device("cuda:0")}
    assert {p.dtype for p in backbone.model.parameters()} == {torch.bfloat16}  # which this GPU computes in
    holder = FrozenExecutor(backbone) if role is ExecutorConfig else None
    found = {"executor": {"device": "cuda:0", "dtype": "bfloat16"}} if holder else {}
    assert describe_placement(executor=holder, compiler=None) == found


def test_a_device_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^device=cuda:1: this machine has 1 CUDA device.*$"):
        device_of("cuda:1")
    assert device_of("cpu") == "cpu"


def test_attention_is_never_given_to_cudnn() -> None:
    """Not with a mask, not without one, not in a backward pass: by what torch itself would choose."""
    compiler = tiny_models.memory_compiler(False, device="cuda", dtype=torch.bfloat16)
    requests = [tiny_models.request(i, image=False) for i in range(3)]

    def kernels(asked: list[CompileRequest]) -> set[str]:
        with counting() as syncs:
            compiler.compile(asked)
            prompts = [compiler.encode(request) for request in asked]
            compiler.score(prompts, [compiler.emission_ids("look")] * len(asked)).logits.sum().backward()
        return syncs.attention_kernels

    assert kernels(requests) | kernels(requests[:1]) == {"flash", "efficient"}
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert "cudnn" in kernels(requests)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


# the compiler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vlm", [False, True])
def test_greedy_compilation_is_the_cpu_s_with_every_lever(vlm: bool) -> None:
    requests = [tiny_models.request(i, image=vlm and i != 1) for i in range(6)]
    on_cpu, here = (tiny_models.uneven_writer(vlm, Decoding(max_new_tokens=16), PLAIN, device) for device in DEVICES)
    expected = on_cpu.compile(requests)
    assert len({len(made.emission_ids) for made in expected}) > 2
    assert_same(here.compile(requests), expected)
    speed = Speed(prefix_mib=64, second_pass="always")
    fast = tiny_models.uneven_writer(vlm, Decoding(max_new_tokens=16), speed, "cuda")
    assert_same(fast.compile(requests), expected)
    again = fast.compile(requests)
    assert_same(again, expected)
    assert all(made.tokens_cached for made in again)


def test_drawn_compilation_is_the_same_with_and_without_drafts() -> None:
    writer = tiny_models.uneven_writer(False, Decoding(0.7, 16), PLAIN, "cuda")
    requests, seeds = [tiny_models.request(i, image=False) for i in range(5)], list(range(5))
    expected = writer.compile(requests, seeds)
    writer.speed = Speed(second_pass="always")
    assert_same(writer.compile(requests, seeds), expected)
    assert {made.z.device.type for made in writer.compile(requests) if made.z is not None} == {"cpu"}


def test_a_compile_gate_asks_for_a_compilation_where_it_should() -> None:
    engine = grpo_trainers.engine(device="cuda")
    compiler = tiny_models.memory_compiler(False, device="cuda")
    for threshold, compiled in ((0.9, False), (0.1, True)):
        gated = type(engine)(
            engine.make_env, engine.executor, engine.limits, gate=CompileGate(Head(np.zeros(WIDTH), 0.0), threshold)
        )
        [episode] = gated.run(compiler, [grpo_trainers.spec(0)], "compiled_gated")
        assert [step.compilation is not None for step in episode.steps] == [True, compiled]


# the executor ---------------------------------------------------------------------------------------------------------


def asked(i: int, soft: bool, image: bool = False) -> ExecutorRequest:
    made = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = MemoryBlock(state="now: find mug", guidance=f"go to shelf {i}", soft=made)
    picture = Image.new("RGB", (64, 64), (40 * i, 90, 10)) if image else None
    return ExecutorRequest("put a mug", delivered, ("look",) * i, "You see nothing.", COMMANDS[: 3 + i], picture)


def backbone(family: str, device: str) -> Backbone:
    if family in ("text", "qwen"):
        return tiny_models.lm_backbone(0, device) if family == "text" else tiny_models.vlm_backbone(0, device)
    made = tiny_vlms.backbone(family)  # scores each candidate in a row of its own
    made.model.to(device)
    return made


@pytest.mark.parametrize(("family", "mode"), [*product(("text", "qwen"), ("choice", "generate")), ("gemma3", "choice")])
def test_actions_are_the_cpu_s_with_and_without_soft_tokens(family: str, mode: Any) -> None:
    on_cpu, here = (FrozenExecutor(backbone(family, device), mode, max_new_tokens=5) for device in DEVICES)
    requests = [asked(i, soft=i != 1, image=family != "text" and i != 2) for i in range(3)]
    for some in (requests, requests[1:2], requests[:1]):
        expected, found = on_cpu.act(some), here.act(some)
        assert [action.text for action in found] == [action.text for action in expected]
        if mode == "choice":
            assert [a.confidence for a in found] == pytest.approx([a.confidence for a in expected], abs=1e-5)


def test_actions_are_drawn_on_the_host() -> None:
    on_cpu, here = (FrozenExecutor(tiny_models.lm_backbone(0, device), temperature=30.0) for device in DEVICES)
    requests = [asked(i % 3, soft=True) for i in range(8)]
    drawn = [[action.action for action in executor.act(requests)] for executor in (on_cpu, here)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1
    assert here.hash() == on_cpu.hash()


# figures and readers --------------------------------------------------------------------------------------------------


def test_attention_logits_are_the_cpu_s() -> None:
    executors = [FrozenExecutor(tiny_models.lm_backbone(0, device)) for device in DEVICES]
    expected, found = (last_token_logits(e, e.encode(asked(0, soft=True))) for e in executors)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_soft_and_text_tokens_come_to_a_figure() -> None:
    compiler, executor = tiny_models.memory_compiler(device="cuda"), FrozenExecutor(tiny_models.lm_backbone(0, "cuda"))
    state, memory = BriefState("put a mug in cabinet"), (tiny_models.entry(1, "in home 1: put a mug in shelf"),)
    steps = []
    for i in range(4):
        episode = Episode("t", state.goal, "home 1", "test", "", "", "compiled", 0)
        [made] = compiler.compile([CompileRequest(state.goal, memory, state, f"You see a mug {i}.", None, ())])
        assert made.mu is not None and made.z is not None
        norms = {"mu_norm": made.mu.norm(dim=-1).mean().item(), "z_norm": made.z.norm(dim=-1).mean().item()}
        soft = {"n": float(len(made.mu)), "sigma_mean": 1.0, **norms}
        step = StepRecord(0, f"You see a mug {i}.", None, ("look",), render_brief_state(state), soft=soft)
        step.compiler_prompt_ids, step.emission_ids = made.prompt_ids, made.emission_ids
        episode.steps.append(step)
        again = recompiled(compiler, episode, 0, memory)
        assert again is not None
        steps.append((again, "go to shelf 1 ; open cabinet 2 ; take mug 1 from shelf 1", i))
    spaces = gathered(executor, steps)
    assert spaces and all(np.isfinite(plane(tokens)).all() for tokens in spaces.values())


def test_a_reader_of_text_answers_as_on_the_cpu() -> None:
    prompts = [
        build_prompt(["Ann: the mug was in cabinet 2"], "Where is the mug?"),
        build_prompt([], "Where is the pen?"),
    ]
    told = []
    for device in DEVICES:
        made = tiny_models.lm_backbone(0, device)
        reader = HfReader("tiny", made.model.eval(), made.processor)
        told.append([reader.answer(prompts), reader.log_probs(prompts, ["cabinet 2", "Not mentioned"])])
    assert told[1][0] == told[0][0] and told[1][1] == pytest.approx(told[0][1], abs=1e-4)


def test_a_reader_that_sees_answers_as_on_the_cpu() -> None:
    prompt = build_prompt(["the mug is here"], "Where?", (), [[png_bytes(Image.new("RGB", (64, 64), "red"))]])
    readers = [HfVisionReader("tiny", tiny_models.vlm_backbone(0, device)) for device in DEVICES]
    answers = [(reader.answer([prompt]), reader.log_probs([prompt], ["shelf"])) for reader in readers]
    assert answers[1][0] == answers[0][0] and answers[1][1] == pytest.approx(answers[0][1], abs=1e-4)


def test_readers_are_loaded_on_the_gpu() -> None:
    text, seeing = HfReader.load("zoo/household/executor"), HfVisionReader.load("zoo/household/compiler")
    assert (text.model.device, seeing.backbone.device) == (torch.device("cuda:0"),) * 2
    assert text.answer([build_prompt(["a mug"], "Where?")])[0] is not None
