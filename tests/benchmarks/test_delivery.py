"""`memcompiler bench serving delivery`: its table and results.json; no test asserts a duration."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from agent.deliveries import find
from agent.episode import EpisodeLimits, run_episodes
from benchmarks.serving.lower_bound import LowerBound, lower_bound
from benchmarks.serving.scripted import DEFAULT_RECORD, Script, ScriptedStep, observation, read_script
from benchmarks.serving.shapes import MODELS, create_pair, llama_config
from compiler.brief_state import BriefState, apply_ops
from compiler.language import Kind, parse
from compiler.prompt import INSTRUCTIONS, compiler_parts
from compiler.records import CompileRequest
from envs.household.environment import INSTRUCTIONS as RULES
from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, Turn
from lm.backbone import load_encoder
from memcompiler.cli import app
from tests.fakes import CountingEnv, Recorder, spec
from tests.tiny_models import tokenizer

MODEL, MEMORY, STEPS, SOFT = "zoo/household/executor", 100, 10, 4
SIZES = [
    "--executor",
    MODEL,
    "--memory-tokens",
    str(MEMORY),
    "--steps",
    str(STEPS),
    "--concurrency",
    "1,2",
    "--n-soft",
    str(SOFT),
    "--dtype",
    "float32",
]


RECORD = [
    ("> in home 1 the mug was in cabinet 2 | go to cabinet 2\n+ plan: find mug; heat mug", "go to cabinet 2"),
    (".", "look"),
    ("> it is open | take mug 1 from cabinet 2", "take mug 1 from cabinet 2"),
    ("^ took mug 1", "go to shelf 3"),
]


def sizes(folder: Path) -> list[str]:
    (folder / "record.json").write_text(json.dumps({"episodes": [RECORD]}))
    return [*SIZES, "--lengths", str(folder / "record.json")]


def script() -> Script:
    return Script(MODEL, MODEL, MEMORY, [[ScriptedStep(*step) for step in RECORD]])


def goal(number: int) -> str:
    return f"in home {number}: put a hot mug in cabinet"


def history(t: int) -> tuple[str, ...]:
    return tuple(step_at(i).action for i in range(t))


def step_at(t: int) -> ScriptedStep:
    """The script's step t: the record's four, then its last three again and again."""
    return ScriptedStep(*RECORD[t if t < 4 else 1 + (t - 1) % 3])


def state_at(number: int, t: int) -> BriefState:
    """The Brief State that the loop has at step t: b_0 holds the goal, and each emission's operations follow."""
    state = BriefState(goal(number))
    for earlier in range(t):
        state, _ = apply_ops(parse(step_at(earlier).emission).emission.ops, state)
    return state


def compile_request(asked: Script, number: int, t: int) -> CompileRequest:
    memory = asked.spec(number).memory
    return CompileRequest(goal(number), memory, state_at(number, t), observation(t).text, None, history(t))


def row(results: dict[str, Any], delivery: str, episodes: int) -> dict[str, Any]:
    [found] = [r for r in results["rows"] if (r["delivery"], r["episodes"]) == (delivery, episodes)]
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    done = CliRunner().invoke(
        app, ["bench", "serving", "delivery", *sizes(folder), "--out", str(out := folder / "run")]
    )
    assert done.exit_code == 0, done.output
    assert (out / "config.resolved.yaml").exists() and (out / "environment.json").exists()
    return done.output, json.loads((out / "results.json").read_text())


@pytest.mark.seconds
def test_the_last_line_is_the_ratio_of_what_the_file_holds(measured: tuple[str, dict[str, Any]]) -> None:
    output, results = measured
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"ratio: \d+\.\d\d", last)
    assert last == f"ratio: {results['ratio']['compiled']['hf x1']:.2f}"
    compiled, static = (row(results, name, 1)["seconds"]["total"]["values"] for name in ("compiled", "static"))
    ratio = sum(compiled[1:]) / sum(static[1:])  # of the steady state: the first step stands apart
    assert results["ratio"]["compiled"]["hf x1"] == pytest.approx(ratio)
    cases = re.findall(r"^(\w+) over static, (.+) \(lower bounds [\d.]+\) ratio: ([\d.]+)$", output, re.MULTILINE)
    assert cases == [
        (name, at, f"{results['ratio'][name][at]:.2f}")
        for at in ("hf x1", "hf x2")
        for name in ("compiled", "compiled_gated")
    ]
    assert set(results["ratio"]) == {"compiled", "compiled_gated"} and set(results["ratio"]["compiled"]) == {
        "hf x1",
        "hf x2",
    }
    assert "as in " in output


@pytest.mark.seconds
def test_every_row_holds_every_step_and_its_parts_make_the_whole(measured: tuple[str, dict[str, Any]]) -> None:
    _, results = measured
    assert [(r["engine"], r["episodes"], r["delivery"]) for r in results["rows"]] == [
        ("hf", n, delivery) for n in (1, 2) for delivery in ("none", "static", "compiled", "compiled_gated")
    ]
    for found in results["rows"]:
        seconds = {name: found["seconds"][name]["values"] for name in found["seconds"]}
        assert all(len(values) == STEPS for values in seconds.values())
        parts = zip(seconds["emission"], seconds["second_pass"], seconds["executor"], strict=True)
        assert seconds["total"] == pytest.approx([sum(part) for part in parts])
        for name, of in found["seconds"].items():
            assert of["first"] == seconds[name][0] and of["mean"] == pytest.approx(sum(seconds[name][1:]) / (STEPS - 1))
        compiled = [found["delivery"].startswith("compiled")] * STEPS
        if found["delivery"] == "compiled_gated":
            compiled = [t == 0 or RECORD.index((step_at(t).emission, step_at(t).action)) != 1 for t in range(STEPS)]
            assert found["compiled"] == pytest.approx(sum(compiled[1:]) / (STEPS - 1))
        assert [first > 0 for first in seconds["emission"]] == compiled
        later = sum(seconds["total"][1:])
        assert found["steps_per_second"] == pytest.approx(found["episodes"] * (STEPS - 1) / later)


@pytest.mark.seconds
def test_the_second_pass_is_made_beside_guidance_and_noaction_is_counted(
    measured: tuple[str, dict[str, Any]],
) -> None:
    _, results = measured
    found, emitted_here = row(results, "compiled", 1), [parse(step_at(t).emission).emission for t in range(STEPS)]
    guided = [bool(emission.guidance) for emission in emitted_here]
    assert 0 < sum(guided) < STEPS  # there is something to tell apart
    assert [second > 0 for second in found["seconds"]["second_pass"]["values"]] == guided
    assert found["noaction"] == sum(e.kind == Kind.NOACTION for e in emitted_here[1:]) / (STEPS - 1)
    assert found["soft_read"] == sum(guided[1:]) / (STEPS - 1)


@pytest.mark.seconds
def test_tokens_are_those_of_the_prompts_and_of_what_was_said(measured: tuple[str, dict[str, Any]]) -> None:
    """One episode at a time, so that each mean is one prompt's: counted again from the prompts themselves."""
    _, results = measured
    asked, reader = script(), TokenExecutor(load_encoder(MODEL), RULES)
    memory = asked.spec(1000).memory
    text = "\n\n".join(entry.text for entry in memory)
    held = len(reader.tokenizer(text)["input_ids"])
    assert MEMORY <= held == row(results, "static", 1)["memory_tokens"] < MEMORY + held / len(memory) + 1

    def prompts(delivered: Sequence[MemoryBlock]) -> list[int]:
        """Tokens of every step's chat, whose past turns keep guidance, but no soft tokens."""
        past = [Turn(observation(t).text, step_at(t).action, replace(delivered[t], soft=None)) for t in range(STEPS)]
        chats = [
            ExecutorRequest(
                goal(1000), delivered[t], history(t), observation(t).text, context="turns", past=tuple(past[:t])
            )
            for t in range(STEPS)
        ]
        return [len(reader.encode(chat).ids) for chat in chats]

    tokens = {name: row(results, name, 1)["tokens"] for name in ("none", "static", "compiled")}
    assert tokens["none"]["executor_in"]["values"] == prompts([MemoryBlock()] * STEPS)
    assert tokens["static"]["executor_in"]["values"] == prompts([MemoryBlock(memory=text)] * STEPS)
    emitted = [parse(step_at(t).emission).emission for t in range(STEPS)]
    soft = [torch.zeros(SOFT, 1) if e.guidance else None for e in emitted]
    assert tokens["compiled"]["executor_in"]["values"] == prompts(
        [MemoryBlock(guidance=e.guidance, reason=e.reason, soft=z) for e, z in zip(emitted, soft, strict=True)]
    )
    backbone = load_encoder(MODEL)
    assert tokens["compiled"]["compiler_in"]["values"] == [
        len(backbone.encode(compiler_parts(compile_request(asked, 1000, t)), INSTRUCTIONS).ids) for t in range(STEPS)
    ]
    assert tokens["compiled"]["compiler_out"]["values"] == [
        len(backbone.ids(step_at(t).emission)) + 1 + SOFT * (z is not None) for t, z in enumerate(soft)
    ]
    for of in tokens.values():
        assert of["executor_out"]["values"] == [
            len(reader.tokenizer(step_at(t).action)["input_ids"]) for t in range(STEPS)
        ]
    # Between steps both models keep what they read: pasted memory the executor, memory the compiler.
    pasted, compiled = tokens["static"], tokens["compiled"]
    assert min(pasted["executor_cached"]["values"][1:]) > held and min(compiled["compiler_cached"]["values"][1:]) > held
    new = [now - before for before, now in itertools.pairwise(pasted["executor_in"]["values"])]
    uncached = zip(pasted["executor_in"]["values"][1:], pasted["executor_cached"]["values"][1:], strict=True)
    assert all(read - cached <= more + 8 for (read, cached), more in zip(uncached, new, strict=True))


def test_what_is_said_comes_from_a_run_or_a_file(tmp_path: Path) -> None:
    assert len(read_script(DEFAULT_RECORD)) == 16
    (tmp_path / "mine.json").write_text(json.dumps({"episodes": [[[".", "look"], ["+ a: b", "north"]], [[".", "x"]]]}))
    assert read_script(tmp_path / "mine.json") == [
        [ScriptedStep(".", "look"), ScriptedStep("+ a: b", "north")]
    ]  # one step is no episode
    [played] = run_episodes(
        CountingEnv, [spec(3)], find("compiled").create(Recorder(), 0), Recorder(), EpisodeLimits(5)
    )
    (tmp_path / "episodes.jsonl").write_text(json.dumps(played.to_json()) + "\n")
    assert read_script(tmp_path) == [[ScriptedStep(step.emission_text, "north") for step in played.steps]]
    missing = {"nowhere": "does not exist", "bad.json": "does not hold steps", "no.json": "no compiled"}
    for bad, message in missing.items():
        (tmp_path / "bad.json").write_text("[]")
        (tmp_path / "no.json").write_text('{"episodes": []}')
        with pytest.raises(ValueError, match=message):
            read_script(tmp_path / bad)


def test_shapes_have_the_papers_proportions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parameters(name: str) -> int:
        with torch.device("meta"):
            model = LlamaForCausalLM(llama_config(name, "small", tokenizer()))
        return sum(p.numel() for p in model.model.layers.parameters())

    sizes = {role: parameters(name) for role, name in MODELS.items()}
    assert sizes["compiler"] / sizes["executor"] == pytest.approx(0.5, abs=0.02)
    monkeypatch.setitem(MODELS, "executor", MODELS["compiler"])
    small = lambda name, shapes, words: LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=len(words)
    )
    monkeypatch.setattr("benchmarks.serving.shapes.llama_config", small)
    for folder in create_pair("small", tmp_path, "float32"):
        assert load_encoder(folder).ids("go to cabinet 2") == load_encoder(MODEL).ids("go to cabinet 2")


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.engine
def test_the_prefix_cache_holds_the_memory_of_compiled_prompts(repository: Path, tmp_path: Path) -> None:
    """In a process of its own: the engines end with it."""
    pytest.importorskip("vllm")
    out = tmp_path / "run"
    arguments = ["bench", "serving", "delivery", *sizes(tmp_path), "--engine", "vllm", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "memcompiler", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((out / "results.json").read_text())
    assert done.stdout.strip().splitlines()[-1] == f"ratio: {results['ratio']['compiled']['vllm x1']:.2f}"
    tokens, asked, backbone = row(results, "compiled", 1)["tokens"], script(), load_encoder(MODEL)

    def prompt(number: int, t: int) -> tuple[int, ...]:
        return backbone.encode(compiler_parts(compile_request(asked, number, t)), INSTRUCTIONS).ids

    before, cached, block = [prompt(1500, 0)], [], row(results, "compiled", 1)["cache_block"]  # 1500: the warm-up
    for t in range(STEPS):
        ids = prompt(1000, t)
        cached.append(max(shared(ids, other) for other in before) // block * block)
        before.append(ids)
    memory = shared(before[1], before[2])  # instructions and memory, and a little more
    assert tokens["compiler_cached"]["values"] == cached
    assert cached[0] < memory - MEMORY + block and min(cached[1:]) > memory - block  # all of it, to whole blocks
    assert tokens["compiler_in"]["values"] == [len(ids) for ids in before[1:]]
    guided = [bool(parse(step_at(t).emission).emission.guidance) for t in range(STEPS)]
    assert tokens["compiler_out"]["values"] == [  # an end of turn is forced behind those that were written
        len(backbone.ids(step_at(t).emission)) + 2 + SOFT * read for t, read in enumerate(guided)
    ]
    seconds = row(results, "compiled", 1)["seconds"]["second_pass"]["values"]
    assert [second > 0 for second in seconds] == guided


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "numbers such as 1,4,16"),
        (["--lengths", "nowhere"], "does not exist"),
        (["--concurrency", "0"], "numbers such as 1,4,16"),
        (["--engine", "both,hf"], "hf, vllm or both"),
        (["--memory-tokens", "9000", "--engine", "hf"], "lower --memory-tokens"),
        (["--dtype", "int8"], "float32"),
        (["--context", "chat"], "turns or rebuilt"),
    ],
)
def test_bad_input_gives_one_clear_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serving", "delivery", "--executor", MODEL, *arguments])
    assert done.exit_code == 1 and message in done.output, done.output
    assert "Traceback" not in done.output


@pytest.mark.seconds
def test_the_lower_bound_follows_from_bandwidth_and_peak(measured: tuple[str, dict[str, Any]]) -> None:
    bound = LowerBound(weights=1000, head=500, itemsize=4, bandwidth=6000.0, peak=20_000.0)
    assert bound.pass_seconds(tokens=2, predicted=1) == 1.0  # 6,000 bytes in a second; 5,000 FLOPs are less
    assert bound.pass_seconds(tokens=20, predicted=4) == 2.2  # 44,000 FLOPs
    assert bound.step_seconds(20, 3, 4) == pytest.approx(8.2 + 2 * 1.0)  # 80 tokens, 4 predicted; then twice 4 and 4
    made = lower_bound(MODEL, "float32")
    config = AutoConfig.from_pretrained(MODEL)
    assert made.head == config.vocab_size * config.hidden_size  # the table is read once, as the head
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(MODEL).parameters() if p.ndim == 2)
    assert made.weights + made.head == total and min(made.bandwidth, made.peak) > 0
    _, results = measured
    bounds = {name: row(results, name, 1)["lower_bound"] for name in ("none", "static", "compiled")}
    assert 0 < bounds["none"] < bounds["static"] and bounds["compiled"] > 0
