"""Mem0 and LangMem by rule: the worked example, own tasks, failures, and what a recall is bounded by."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envs.spec import Probe
from memcompiler.doctor import run_probe
from memory.langmem.settings import LangMemSettings
from memory.langmem.system import LangMem
from memory.mem0 import agent
from memory.mem0.settings import Mem0Settings
from memory.mem0.system import MEM0, Mem0
from memory.packages import process
from memory.packages.conversation import conversation
from memory.packages.vectors import WordVectors
from memory.protocol import BankError, Query
from memory.registry import MemoryTools
from memory.similarity import lexical, terms_of
from tests.memory.worked_examples import E1, E2, READER, T3, like

TOOLS = MemoryTools(reader=READER)
RECIPE = "for pick_{0}_then_place_in_recep: take the mug, then {0} the mug with the {1}, then put the mug in the {2}"


@pytest.fixture
def mem0(tmp_path: Path) -> Mem0:
    memory = Mem0(tmp_path / "mem0", Mem0Settings(), tools=TOOLS)
    memory.commit([[E1], [E2]])
    return memory


@pytest.fixture
def langmem(tmp_path: Path) -> LangMem:
    memory = LangMem(tmp_path / "langmem", LangMemSettings(), tools=TOOLS)
    memory.commit([[E1], [E2]])
    return memory


def texts(memory: Any, task: Any, k: int = 4) -> list[str]:
    return [entry.text for entry in memory.recall([Query(task, k=k)])[0].entries]


def test_the_facts_of_two_episodes_and_their_scores_by_hand(mem0: Mem0) -> None:
    heat, clean = RECIPE.format("heat", "microwave", "cabinet"), RECIPE.format("clean", "sinkbasin", "coffeemachine")
    ours = {
        "in FloorPlan1 the mug was in shelf 1": 3 / 7,
        "in FloorPlan1 the mug was in countertop 2": 3 / 7,
        clean: 4 / (7 * 14) ** 0.5,
        heat: 3 / (7 * 14) ** 0.5,
    }
    [found] = mem0.recall([Query(T3)])
    assert [entry.text for entry in found.entries] == list(ours)
    query = terms_of("in FloorPlan1: put a hot mug in coffeemachine")
    assert [lexical(query, terms_of(text)) for text in ours] == pytest.approx(list(ours.values()))
    assert [entry.provenance.actions for entry in found.entries] == [
        ("take mug 1 from shelf 1",),
        ("take mug 1 from countertop 2",),
        (),
        (),
    ]
    assert texts(mem0, E2.task) == [
        "in FloorPlan1 the mug was in countertop 2",
        heat,
        "in FloorPlan1 microwave 1 was used to heat",
    ]
    assert len(mem0) == 6 and all(mem0[entry.id] == entry for entry in mem0)


def test_three_types_of_memories_and_their_versions_by_hand(langmem: LangMem) -> None:
    moved = "in FloorPlan1 the mug was in shelf 1, before that in countertop 2"
    [found] = langmem.recall([Query(T3, k=7)])
    e2, e1, mug, clean, heat, p2, p1 = (entry.text for entry in found.entries)
    assert e2.startswith("in FloorPlan1: put a clean mug in coffeemachine. go to shelf 1 ; take mug 1 from shelf 1")
    assert e1.endswith(f"because {RECIPE.format('heat', 'microwave', 'cabinet')}")
    assert (mug, clean, heat) == (
        moved,
        "in FloorPlan1 sinkbasin 1 was used to clean",
        "in FloorPlan1 microwave 1 was used to heat",
    )
    assert p2.endswith("then put the thing in the receptacle (succeeded 1 time)") and "heat the thing" in p1
    scores = [score for score, _ in langmem.state.items.search("in FloorPlan1: put a hot mug in coffeemachine", 7, "")]
    by_hand = [6 / (7 * 23) ** 0.5, 6 / (7 * 26) ** 0.5, 3 / (7 * 11) ** 0.5, *[2 / 56**0.5] * 2, *[2 / 119**0.5] * 2]
    assert scores == pytest.approx(by_hand)
    entry = found.entries[2]
    assert entry.id.endswith(".2") and entry.provenance.task_id == "t2"
    assert entry.provenance.actions == ("take mug 1 from shelf 1",)
    assert found.entries[0].provenance.actions == E2.actions and found.entries[5].provenance.actions == ()
    assert texts(langmem, E2.task, 7) == ["in FloorPlan1 the mug was in countertop 2", e1, heat, p1]  # of E1 alone


def test_who_repeats_a_fact_is_its_origin_for_the_task_that_told_it_first(mem0: Mem0) -> None:
    fact = "in FloorPlan1 the mug was in countertop 2"
    assert fact not in texts(mem0, E1.task)
    mem0.commit([[like(E1, "t4")]])
    entry = next(entry for entry in mem0.recall([Query(E1.task)])[0].entries if entry.text == fact)
    assert entry.provenance.task_id == "t4" and len(mem0) == 6


def test_in_the_paper_s_pipeline_a_new_place_replaces_the_old_one(tmp_path: Path) -> None:
    memory = Mem0(tmp_path, Mem0Settings(pipeline="paper"), tools=TOOLS)
    memory.commit([[E1], [E2]])
    assert texts(memory, T3)[0] == "in FloorPlan1 the mug was in shelf 1"
    assert "in FloorPlan1 the mug was in countertop 2" not in texts(memory, T3, 9)
    assert "in FloorPlan1 the mug was in countertop 2" in texts(memory, E2.task, 9)
    with pytest.raises(BankError, match="pipeline=paper is for rules"):
        MEM0.open(tmp_path, Mem0Settings(pipeline="paper"), MemoryTools(ask=lambda *_: "", reader=READER))


def test_a_procedure_counts_its_successes_and_failures_give_none(langmem: LangMem, tmp_path: Path) -> None:
    langmem.commit([[like(E1, f"s{n}")] for n in range(4)])
    assert any("heat the thing" in text and text.endswith("(succeeded 4 times)") for text in texts(langmem, T3, 99))
    for of, settings in ((Mem0, Mem0Settings()), (LangMem, LangMemSettings())):
        memory = of(tmp_path / f"lost-{of.name}", settings, tools=TOOLS)
        memory.commit([[like(E1, "t5", success=False)]])
        told = texts(memory, T3, 99)
        assert told and not any(word in text for text in told for word in ("because", "then put", "succeeded"))


def test_what_was_refused_is_no_fact(tmp_path: Path) -> None:
    refused = replace(E1, records=tuple(replace(record, refused=True) for record in E1.records), success=False)
    for of, settings in ((Mem0, Mem0Settings()), (LangMem, LangMemSettings())):
        memory = of(tmp_path / of.name, settings, tools=TOOLS)
        memory.commit([[refused]])
        assert not any("mug was in" in entry.text or entry.provenance.actions for entry in memory)


def test_step_queries_search_with_the_observation(tmp_path: Path) -> None:
    memory = Mem0(tmp_path, Mem0Settings(query="step"), tools=TOOLS)
    memory.commit([[E1], [E2]])
    query = Query(T3, k=1)
    session = memory.session(query, memory.recall([query])[0])
    assert session.recall("You see a sinkbasin 1 that is used to clean.").entries[0].text.endswith("used to clean")


def test_a_long_attempt_says_how_many_steps_are_left_out() -> None:
    told = conversation([E1], 4)
    assert [message["role"] for message in told[:3]] == ["user", "assistant", "user"]
    assert told[0]["content"] == "Task: in FloorPlan1: put a hot mug in cabinet." and len(told) == 2 + 8 + 1
    assert told[5]["content"] == "(2 steps are left out)" and told[6]["content"] == "go to cabinet 3"
    assert told[-1]["content"] == "The task was completed: in FloorPlan1: put a hot mug in cabinet"
    assert "left out" not in str(conversation([E1, E2], 6)) and "Attempt 2. Task" in str(conversation([E1, E2], 6))


def test_vectors_of_words_have_the_lexical_similarity() -> None:
    one, other = WordVectors()(["in FloorPlan1 the mug was in shelf 1", "put a hot mug in FloorPlan1"])
    cosine = one @ other / (one @ one * (other @ other)) ** 0.5
    assert cosine == pytest.approx(3 / 42**0.5)


def test_texts_that_repeat_the_prompt_are_no_memories() -> None:
    prompt = "Example: the user has a dog named Rex.\nRemember places."
    assert agent.is_quoted("The user has a dog  named Rex.", prompt) and not agent.is_quoted("has a dog", prompt)
    assert not agent.is_quoted("in FloorPlan1 the mug was in shelf 1", prompt)


def test_without_the_package_a_model_s_commit_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ROOT", tmp_path)
    monkeypatch.setattr(process, "_WORKERS", {})
    monkeypatch.delenv(process.VARIABLE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = list[Any]()
    memory = Mem0(tmp_path, Mem0Settings(), tools=MemoryTools(ask=lambda *given: asked.append(given), reader=READER))
    with pytest.raises(BankError, match="mem0ai is not installed: make mem0"):
        memory.commit([[E1]])
    assert memory.snapshot() == 0 and not asked
    check = run_probe(Probe("langmem", partial(process.package_version, "langmem"), process.FIX, core=False))
    assert (check.status, check.fix) == ("missing", "make mem0")
    monkeypatch.setenv(process.VARIABLE, "/no/such/python")
    with pytest.raises(BankError, match="cannot start /no/such/python"):
        memory.commit([[E1]])
