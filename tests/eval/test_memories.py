"""The matrix of memory systems: the shipped configuration at tiny size, and where compiling is said to help."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

import eval.evaluate
from compiler import checkpoint
from compiler.build import load_compiler
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.models import EndpointConfig
from data_gen.memory_factory import _read_by, initialise_memory, open_memory, writing_facts
from envs.household.command_reader import HouseholdReader
from eval.evaluate import run_eval
from eval.matrix import cells
from eval.memories import by_quality, by_task, rank_correlation, tasks_of
from eval.report import write_run_report
from eval.table import memory_notes, written
from lm.answer_cache import Answer, AnswerCache
from memory.gmemory.settings import GMemorySettings
from memory.gmemory.system import GMemory
from memory.protocol import MemorySystem
from memory.registry import RESPONSES, MemoryTools, names

SYSTEMS = ("trajectory", "s3mem", "amem", "mem0")
TINY = (
    "env={scenes: {train: 1, test: 2}, images: false}",
    "deliveries=[static, compiled]",
    "limit=2",
    "max_steps=1",
    "memory.pictures=0",
    "compiler.max_new_tokens=4",
    "select.environment=[household]",
    "select.size=[equal]",
)


def asked(*more: str) -> EvalConfig:
    return load_config(EvalConfig, "eval/memories", [*TINY, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained adapter and projector of the shipped small models."""
    folder = tmp_path_factory.mktemp("trained")
    executor = SimpleNamespace(embedding_table=torch.randn(10, 128))
    checkpoint.save_weights(folder, load_compiler(asked().compiler.model_copy(update={"checkpoint": None}), executor))
    return folder


def test_every_level_of_the_axis_is_a_system_and_a_list_selects_them() -> None:
    both = load_config(EvalConfig, "eval/memories", ["select={memory: [none, karma]}"])
    assert {cell.levels["memory"] for cell in cells(both)} == {"none", "karma"} and len(cells(both)) == 32
    for level, settings in both.matrix["memory"].items():  # pyright: ignore[reportAttributeAccessIssue]
        assert settings.get("memory.system", level) == level
    shipped = load_config(EvalConfig, "eval/memories")
    others = {"brainmem", "karma", "gmemory", "langmem"}
    assert set(shipped.select["memory"]) == {"none", *SYSTEMS, *others} and {*SYSTEMS, *others} <= set(names())
    with pytest.raises(ConfigError, match=r"select\.memory=mem: the matrix has none, memgen, trajectory"):
        cells(load_config(EvalConfig, "eval/memories", ["select.memory=[mem]"]))
    with pytest.raises(ConfigError, match=r"select\.home=a: the matrix has the axes environment, protocol"):
        cells(load_config(EvalConfig, "eval/memories", ["select.home=[a]"]))
    sizes = cells(load_config(EvalConfig, "eval/memories", ["select={memory: [trajectory], homes: [left_out]}"]))
    assert {(cell.config.memory.tokens, cell.config.memory.k) for cell in sizes} == {(None, 4), (400, 32)}
    assert {cell.config.memory.isolation for cell in sizes} == {"scene"}


@pytest.mark.slow
def test_the_matrix_runs_with_every_system_resumes_and_its_page_compares_them(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Path] = []
    monkeypatch.setattr(eval.evaluate, "write_run_report", pages.append)  # of the cells; a page takes a second
    played = f"select.memory=[none,{','.join(SYSTEMS)}]"
    settings = asked("select.homes=[left_out]", played, f"compiler.checkpoint={trained}")
    monkeypatch.setattr(eval.evaluate, "_pool_cells", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # killed after the last cell
        run_eval(settings, tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(eval.evaluate, "write_run_report", pages.append)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/cells/*/episodes.jsonl")}
    results = run_eval(settings, tmp_path / "run")
    assert len(before) == 10 and all(path.stat().st_mtime_ns == at for path, at in before.items())
    rows = results["memories"]["rows"]
    assert {row["memory"] for row in rows} == set(SYSTEMS) and len(rows) == 8
    for row in rows:
        assert set(row["deliveries"]) == {"static", "compiled"} and row["none"]["n"] == 2
        assert row["gain"]["n"] == 2
        for delivery, of in row["writing"].items():
            assert (of["system"], of["written_by"], of["requests"], of["price"]) == (row["memory"], "rules", 0, 0.0)
            assert (of["read_by"], of["failures"], of["recall_failures"]) == ("rules", {}, {})
            assert of["episodes"] == 2 or "frozen" in row["condition"], delivery  # online: of the two tasks
    assert {found["memories"] for found in results["memories"]["helps"]} == {4}
    page = write_run_report(tmp_path / "run").read_text()
    assert "Where compiling helps: " in page and "tokens / solved task" in page
    assert "Every task: " in page and "trajectory, written by rules, read by rules." in page


def test_writing_a_memory_is_counted_from_its_own_account(tmp_path: Path) -> None:
    config = asked().memory.model_copy(update={"tokens": None, "bank": str(tmp_path)})
    initialise_memory(memory := open_memory(config, tmp_path))
    assert writing_facts(config, memory)["written_by"] == "rules"
    account = AnswerCache(tmp_path / RESPONSES, "writer")
    for number, role in enumerate(("extract", "extract", "merge")):
        account.keep(f"request {number}", role, Answer("{}", 1000, 50))
    account.count("extract", "timeout", 1000, 0)
    priced = config.model_copy(update={"api": EndpointConfig(model="writer", price_in=2.0, price_out=10.0)})
    found = writing_facts(priced, memory)
    assert (found["written_by"], found["requests"], found["tokens_in"], found["tokens_out"]) == ("writer", 4, 4000, 150)
    assert found["price"] == pytest.approx((4000 * 2 + 150 * 10) / 1e6)
    assert found["roles"]["extract"] == {"requests": 3, "tokens_in": 3000, "tokens_out": 100}
    assert writing_facts(config, memory)["price"] is None  # of a model whose prices the settings do not name


def test_results_name_who_reads_a_memory_and_count_unusable_answers_of_recalls(tmp_path: Path) -> None:
    named = {"api": EndpointConfig(model="writer"), "embed": "minilm"}
    config = asked("memory.system=gmemory").memory.model_copy(update={"tokens": None, **named})
    household = MemoryTools(reader=HouseholdReader())
    memory = GMemory(tmp_path, GMemorySettings(relevance="llm"), tools=replace(household, ask=lambda *_: "no number"))
    memory.recall_failures["relevance"] += 2
    found = writing_facts(config, memory)
    assert found["read_by"] == "writer" and found["recall_failures"] == {"relevance": 2} and found["failures"] == {}
    assert written(found, "unusable") == "0 + 2"
    by_rule = GMemory(tmp_path, GMemorySettings(), tools=replace(household, ask=lambda *_: "no number"))
    assert writing_facts(config, by_rule)["read_by"] == "rules"
    vectors = lambda texts: np.ones((len(texts), 2), dtype=np.float32)
    both = GMemory(
        tmp_path, GMemorySettings(relevance="llm"), tools=replace(household, embed=vectors, ask=lambda *_: "")
    )
    assert writing_facts(config, both)["read_by"] == "minilm and writer"
    silent = cast(MemorySystem, SimpleNamespace(name="own", path=tmp_path, origins=Counter, __len__=lambda: 0))
    assert _read_by(config, silent) == "not stated" and _read_by(asked().memory, silent) == "rules"
    results = {"results": {"static": {"writing": found}, "live": {"writing": found}, "none": {}}}
    [note] = memory_notes(results)
    assert note.endswith(
        "gmemory, written by rules, read by writer; unusable answers of models: 2 relevance at recall."
    )


# where compiling helps ------------------------------------------------------------------------------------------------


def successes(solved: str) -> dict[str, Fraction]:
    """Success by task from a text such as "1101"."""
    return {f"t{number}": Fraction(int(digit)) for number, digit in enumerate(solved)}


def test_worked_example_of_gains_by_what_the_other_memories_solve() -> None:
    pasted = {"good": successes("1110"), "bad": successes("1000")}
    compiled = {"good": successes("1111"), "bad": successes("1101")}
    # good: the other solves t0 (gain 0); none solves t1, t2, t3 (gains 0, 0, 1)
    # bad: the other solves t0, t1, t2 (gains 0, 1, 0); none solves t3 (gain 1)
    none, everyone = by_task(pasted, compiled)
    assert (none["others"], none["pairs"], none["gain"]["n"]) == ("none", 4, 3)
    assert none["gain"]["mean"] == pytest.approx((0 + 0 + (1 + 1) / 2) / 3)  # t1, t2, t3, where t3 has two memories
    assert (everyone["others"], everyone["pairs"]) == ("all", 4)
    assert everyone["gain"]["mean"] == pytest.approx((0 + 1 + 0) / 3)


def test_quality_and_gain_are_measured_on_different_tasks() -> None:
    """Three memories that differ by chance alone on each task: the same tasks would say that the worst gains most."""
    tasks = [f"task {number}" for number in range(200)]
    level = {"low": 3, "middle": 5, "high": 7}
    solves = lambda memory, task: Fraction(int(hash_of(f"{memory} {task}") % 10 < level[memory]))
    pasted = {memory: {task: solves(memory, task) for task in tasks} for memory in level}
    better = {memory: {task: Fraction(1) for task in tasks} for memory in level}
    found = by_quality(pasted, better)
    assert found["rank_correlation"] == -1.0
    assert found["points"]["low"]["quality"] < found["points"]["high"]["quality"]
    half = found["points"]["low"]
    assert half["quality"] + half["gain"] == pytest.approx(1.0)  # means over both ways round
    helps_the_best = {**pasted, "low": dict.fromkeys(tasks, Fraction(0)), "high": dict.fromkeys(tasks, Fraction(1))}
    assert by_quality(pasted, helps_the_best)["rank_correlation"] == 1.0
    same = {"a": pasted["low"], "b": pasted["low"], "c": pasted["low"]}
    assert by_quality(same, same)["rank_correlation"] is None
    assert rank_correlation([(0.1, 0.2), (0.3, 0.4)]) is None
    json.dumps(found)


def test_the_interval_of_the_rank_correlation_resamples_tasks_and_is_wide_where_chance_decides() -> None:
    tasks = [f"task {number}" for number in range(60)]
    solves = lambda memory, task, level: Fraction(int(hash_of(f"{memory} {task}") % 10 < level))
    clear = {name: {t: solves(name, t, level) for t in tasks} for name, level in (("a", 1), ("b", 5), ("c", 9))}
    all_solved = {memory: dict.fromkeys(tasks, Fraction(1)) for memory in clear}
    assert by_quality(clear, all_solved)["interval"] == [-1.0, -1.0]  # the same order in every resample
    close = {name: {t: solves(name, t, 5) for t in tasks} for name in "abc"}
    low, high = by_quality(close, all_solved)["interval"]
    assert low < 0 and high - low > 0.5
    assert by_quality(all_solved, all_solved)["interval"] is None


def test_every_task_is_listed_and_first_those_to_which_compiling_adds_most() -> None:
    pasted = {"good": successes("110"), "bad": successes("100")}
    compiled = {"good": successes("011"), "bad": successes("111")}
    assert tasks_of(pasted, compiled) == [
        {"task": "t2", "of": {"good": [0.0, 1.0], "bad": [0.0, 1.0]}},
        {"task": "t1", "of": {"good": [1.0, 1.0], "bad": [0.0, 1.0]}},
        {"task": "t0", "of": {"good": [1.0, 0.0], "bad": [1.0, 1.0]}},
    ]


def hash_of(text: str) -> int:
    from hashlib import sha256

    return int.from_bytes(sha256(text.encode()).digest()[:4], "big")
