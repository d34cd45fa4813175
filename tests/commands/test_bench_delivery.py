"""`memcompiler bench delivery`: what its table and file hold. Nothing here looks at how long anything took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.scripted import ACTION_TOKENS, EMISSION_TOKENS, GUIDANCE, REASON, Script, emission, observation
from compiler.brief_state import BriefState, apply_ops, render_brief_state
from compiler.prompt import INSTRUCTIONS, compiler_parts
from compiler.records import CompileRequest
from envs.household.environment import INSTRUCTIONS as RULES
from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.backbone import load_encoder
from memcompiler.cli import app

MODEL, MEMORY, STEPS, SOFT = "zoo/household/executor", 200, 3, 4
SIZES = [
    "--model", MODEL, "--memory-tokens", str(MEMORY), "--steps", str(STEPS), "--concurrency", "1,2",
    "--n-soft", str(SOFT), "--dtype", "float32",
]  # fmt: skip


def script() -> Script:
    return Script(MODEL, MEMORY, SOFT)


def goal(number: int) -> str:
    return f"in home {number}: put a hot mug in cabinet"


def history(t: int) -> tuple[str, ...]:
    return tuple(f"go to shelf {i}" for i in range(1, t + 1))


def state_at(number: int, t: int) -> BriefState:
    """The Brief State that the loop has at step t: b_0 holds the goal, and each emission's operations follow."""
    state = BriefState(goal(number))
    for earlier in range(t):
        state, _ = apply_ops(emission(earlier).ops, state)
    return state


def compile_request(asked: Script, number: int, t: int) -> CompileRequest:
    memory = asked.spec(number).memory
    return CompileRequest(goal(number), memory, state_at(number, t), observation(t).text, None, history(t))


def row(results: dict[str, Any], delivery: str, episodes: int) -> dict[str, Any]:
    [found] = [r for r in results["rows"] if (r["delivery"], r["episodes"]) == (delivery, episodes)]
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench") / "run"
    done = CliRunner().invoke(app, ["bench", "delivery", *SIZES, "--engine", "hf", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "config.resolved.yaml").exists() and (out / "environment.json").exists()
    return done.output, json.loads((out / "results.json").read_text())


def test_the_last_line_is_the_ratio_of_what_the_file_holds(measured: tuple[str, dict[str, Any]]) -> None:
    output, results = measured
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(r"ratio: \d+\.\d\d", last)
    assert last == f"ratio: {results['ratio']['hf 1']:.2f}"
    compiled, static = (row(results, name, 1)["seconds"]["total"]["median"] for name in ("compiled", "static"))
    assert results["ratio"] == {"hf 1": pytest.approx(compiled / static), "hf 2": results["ratio"]["hf 2"]}
    assert "emissions are 48 tokens and actions 8, forced" in " ".join(output.split())


def test_every_row_holds_every_step_and_its_parts_make_the_whole(measured: tuple[str, dict[str, Any]]) -> None:
    _, results = measured
    assert [(r["engine"], r["episodes"], r["delivery"]) for r in results["rows"]] == [
        ("hf", 1, "static"), ("hf", 1, "compiled"), ("hf", 2, "static"), ("hf", 2, "compiled"),
    ]  # fmt: skip
    for found in results["rows"]:
        seconds = {name: found["seconds"][name]["values"] for name in found["seconds"]}
        assert all(len(values) == STEPS == found["n"] for values in seconds.values())
        parts = zip(seconds["emission"], seconds["second_pass"], seconds["executor"], strict=True)
        assert seconds["total"] == pytest.approx([sum(part) for part in parts])
        compiled = found["delivery"] == "compiled"
        assert all((second > 0) == compiled and (first > 0) == compiled for first, second, _ in
                   zip(seconds["emission"], seconds["second_pass"], seconds["executor"], strict=True))  # fmt: skip
        assert found["second_pass_share"] == pytest.approx(sum(seconds["second_pass"]) / sum(seconds["total"]))
        assert found["steps_per_second"] == pytest.approx(found["episodes"] * STEPS / sum(seconds["total"]))


def test_tokens_are_those_of_the_prompts(measured: tuple[str, dict[str, Any]]) -> None:
    """One episode at a time, so that each mean is one prompt's: counted again from the prompts themselves."""
    _, results = measured
    asked, reader = script(), TokenExecutor(load_encoder(MODEL), RULES)
    memory = asked.spec(1000).memory
    text = "\n\n".join(entry.text for entry in memory)
    held = len(reader.tokenizer(text)["input_ids"])
    assert MEMORY <= held == row(results, "static", 1)["memory_tokens"] < MEMORY + held / len(memory) + 1

    def prompt(t: int, delivered: MemoryBlock) -> int:
        return len(reader.encode(ExecutorRequest(goal(1000), delivered, history(t), observation(t).text)).ids)

    static, compiled = row(results, "static", 1)["tokens"], row(results, "compiled", 1)["tokens"]
    assert static["executor_in"]["values"] == [prompt(t, MemoryBlock(memory=text)) for t in range(STEPS)]
    now = ["\n".join(render_brief_state(state_at(1000, t)).split("\n")[1:]) for t in range(STEPS)]
    assert now[0] == "" and now[1].startswith("now: find mug\nnext: heat mug ; put mug in cabinet\n")
    assert len(set(now)) == STEPS
    soft = torch.zeros(SOFT, 1)
    assert compiled["executor_in"]["values"] == [
        prompt(t, MemoryBlock(state=now[t], guidance=GUIDANCE, reason=REASON, soft=soft)) for t in range(STEPS)
    ]
    backbone = load_encoder(MODEL)
    assert compiled["compiler_in"]["values"] == [
        len(backbone.encode(compiler_parts(compile_request(asked, 1000, t)), INSTRUCTIONS).ids) for t in range(STEPS)
    ]
    assert compiled["compiler_out"]["values"] == [EMISSION_TOKENS + 1 + SOFT] * STEPS  # and the end of turn
    for tokens in (static, compiled):
        assert tokens["executor_out"]["values"] == [ACTION_TOKENS] * STEPS
        assert tokens["executor_cached"]["mean"] == tokens["compiler_cached"]["mean"] == 0  # no cache between steps


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.vllm
@pytest.mark.slow
def test_the_prefix_cache_holds_the_memory_of_compiled_prompts(repository: Path, tmp_path: Path) -> None:
    """In a process of its own: the engines end with it."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-m", "memcompiler", "bench", "delivery", *SIZES, "--engine", "vllm", "-o", str(tmp_path)],
        cwd=repository, capture_output=True, text=True, timeout=560, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.stdout.strip().splitlines()[-1] == f"ratio: {results['ratio']['vllm 1']:.2f}"
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
    assert tokens["compiler_out"]["values"] == [EMISSION_TOKENS + 1 + SOFT] * STEPS
    assert tokens["executor_out"]["values"] == [ACTION_TOKENS] * STEPS
    assert row(results, "compiled", 2)["seconds"]["second_pass"]["median"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "numbers such as 1,4,16"),
        (["--concurrency", "0"], "numbers such as 1,4,16"),
        (["--engine", "both,hf"], "hf, vllm or both"),
        (["--memory-tokens", "9000", "--engine", "hf"], "lower --memory-tokens"),
        (["--dtype", "int8"], "float32"),
    ],
)
def test_bad_input_gives_one_clear_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "delivery", "--model", MODEL, *arguments])
    assert done.exit_code == 1 and message in done.output, done.output
    assert "Traceback" not in done.output
