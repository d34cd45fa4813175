"""BrainMem and KARMA follow any environment that has a reader, and refuse the others by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.collect import CollectConfig, MemoryConfig
from configs.evaluation import EvalConfig
from configs.training import GrpoConfig
from data_gen.memory_factory import initialise_memory, open_memory
from envs.registry import find
from memcompiler.cli import app
from memory.brainmem.system import BrainMem
from memory.karma.settings import KarmaSettings
from memory.karma.units import HAND, ShortTerm
from memory.protocol import BankError, Query, Recall, Trace
from tests.walks import Truth, Walk, standin_walks

BENCHMARKS = ("eb_alfred", "eb_habitat")
NONE = ("eb_navigation", "eb_manipulation", "gymnasium")
ROBOT, WARNING = "CURRENT ROBOT STATE: ", "CONSISTENCY WARNING: "


@pytest.fixture(scope="module", params=BENCHMARKS)
def walked(request: pytest.FixtureRequest) -> tuple[str, list[Walk]]:
    return request.param, standin_walks(request.param, episodes=14, steps=50)


def working(walked: Walk, memory: BrainMem) -> list[str]:
    """Return the working memory after each step."""
    session, texts = memory.session(Query(walked.task), Recall()), []
    session.recall(walked.first)
    for record in walked.records:
        session.observe(record)
        texts.append(session.recall(record.feedback).entries[-1].text)
    return texts


def said(text: str, mark: str) -> list[str]:
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


def is_true(warning: str, before: Truth, after: Truth) -> bool:
    """Return whether a warning about a step describes the world before or after it."""
    held, door = ", ".join(before.held), re.search(r" is (open|closed) already", warning)
    if door:
        return before.opened == (door[1] == "open")
    if "this is a loop" in warning:
        return before.world == after.world
    if "put it down first" in warning:
        return bool(held) and f"while {held} was held" in warning
    return not held if "while nothing was held" in warning else "failed before with the same result" in warning


def test_working_memory_says_what_is_held_and_warns_of_true_contradictions_alone(
    walked: tuple[str, list[Walk]], tmp_path: Path
) -> None:
    name, walks = walked
    held, warned = 0, set[str]()
    for each in walks:
        before = None
        texts = working(each, BrainMem(tmp_path, reader=find(name).reader))
        for record, text, true in zip(each.records, texts, each.truths, strict=True):
            held += bool(true.held)
            assert said(text, ROBOT) == [f"holding {', '.join(true.held) or 'nothing'}"], record
            for warning in said(text, WARNING):
                assert before is None or is_true(warning, before, true), (record, warning)
                warned.add(re.sub("'.*?'", "", warning))
            before = true
    assert held > 50 and len(warned) > 4
    blind = [said(text, ROBOT) for text in working(walks[0], BrainMem(tmp_path, reader=find("household").reader))]
    assert blind != [[f"holding {', '.join(true.held) or 'nothing'}"] for true in walks[0].truths]


def test_units_of_karma_agree_with_the_world(walked: tuple[str, list[Walk]]) -> None:
    name, walks = walked
    compared = 0
    for each in walks:
        memory = ShortTerm(KarmaSettings(), find(name).reader)
        memory.begin(each.first)
        for record, true in zip(each.records, each.truths, strict=True):
            memory.observe(record, "t", frozenset())
            for unit in memory.held():
                place = [HAND] if unit.id in true.held else list(true.where.get(unit.id, ["", unit.place]))
                assert unit.place in ("", *place), (record, unit)
                assert true.opened == ("opened" in unit.states) or not {"opened", "closed"} & set(unit.states)
                compared += bool(unit.place)
    assert compared > 200


def test_a_bank_of_embodiedbench_tells_the_next_task_where_things_were(
    walked: tuple[str, list[Walk]], tmp_path: Path
) -> None:
    name, walks = walked
    config = MemoryConfig(system="brainmem", bank=str(tmp_path / "bank"))
    memory = open_memory(config, tmp_path, name)
    initialise_memory(memory, name)
    memory.commit([[Trace(each.task, tuple(each.records), success=True)] for each in walks])
    query = Query(replace(walks[0].task, id="new"))
    [told] = memory.recall([query])
    texts = "\n".join(entry.text for entry in told.entries)
    assert "then put the" in texts and "holding" not in texts
    if name == "eb_habitat":
        assert re.search(r"ball in table 1 \(\d+ of \d+ visits\)", texts)
    again: Any = open_memory(config, tmp_path)  # the bank names its environment
    assert again.recall([query]) == [told] and again.tables()
    with pytest.raises(BankError, match=f"holds episodes of {name}, whose views read differently from those of alf"):
        open_memory(config, tmp_path, "alfworld")


@pytest.mark.parametrize("system", ["brainmem", "karma"])
def test_an_environment_without_a_reader_is_refused_by_name_before_anything_is_played(
    system: str, tmp_path: Path
) -> None:
    for env in NONE:
        why = rf"memory system {system} needs a reader of {env}'s views and commands \(EnvSpec.reader\): it has none"
        with pytest.raises(BankError, match=why):
            open_memory(MemoryConfig(system=system), tmp_path, env)
        for config in (EvalConfig, CollectConfig, GrpoConfig) if env != "gymnasium" else ():  # it needs more settings
            with pytest.raises(ValueError, match=why):
                config.model_validate({"env": {"name": env}, "memory": {"system": system}})
            config.model_validate({"env": {"name": env}, "memory": {"system": "trajectory"}})


@pytest.mark.parametrize("system", ["brainmem", "karma"])
def test_a_bank_that_names_no_environment_opens_and_says_what_it_needs_where_views_are_read(
    system: str, tmp_path: Path
) -> None:
    memory: Any = open_memory(MemoryConfig(system=system), tmp_path / "bank")
    initialise_memory(memory)
    [each] = standin_walks("eb_alfred", 1, 5)
    memory.commit([[Trace(each.task, tuple(each.records), True)]])
    assert memory.snapshot() == 1 and memory.origins().total() == 1
    with pytest.raises(BankError, match=f"memory system {system} reads the views of its environment.*--env NAME"):
        memory.tables()
    assert open_memory(MemoryConfig(system=system), tmp_path / "bank", "eb_alfred").recall([Query(each.task)])
    shown = CliRunner().invoke(app, ["bank", "show", str(tmp_path / "bank"), "--env", "eb_alfred"])
    assert shown.exit_code == 0 and "episodes" in shown.output
