"""The examples run from any folder, and memory solves the task of the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import loop, my_memory, own_environment
from memory.protocol import MemorySystem, Query
from memory.registry import MemoryTools
from tests.memory.worked_examples import E1, E2, T3, like


@pytest.mark.slow
def test_the_agent_of_the_example_solves_its_task_with_memory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loop.main() == {"with memory": True, "without memory": False}
    shown = capsys.readouterr().out
    assert "go to microwave 1 (because in the tomato was in microwave 1)" in shown


@pytest.mark.slow
def test_an_environment_in_one_file_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._ALL, "_added", {})
    results = own_environment.main()
    assert (results["environment"], results["split"], results["n_tasks"]) == ("pantry", "test", 6)
    assert results["results"]["static"]["success"]["mean"] > results["results"]["none"]["success"]["mean"] > 0


@pytest.mark.slow
def test_a_memory_in_one_file_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memory import registry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._ALL, "_added", {})
    results = my_memory.main("limit=6")
    assert results["n_tasks"] == 6 and set(results["results"]) == {"none", "static"}
    assert results["bank_entries"] > 6
    assert results["results"]["static"]["success"]["mean"] > results["results"]["none"]["success"]["mean"] > 0


def test_the_memory_of_the_example_keeps_to_the_protocol(tmp_path: Path) -> None:
    memory = my_memory.SPEC.open(tmp_path, my_memory.DiarySettings(), MemoryTools())
    lost, elsewhere = like(E1, "t8", success=False), like(E1, "t9", scene="FloorPlan2")
    memory.commit([[E1], [E2], [lost], [elsewhere]])
    recalled = lambda of, **query: [e.provenance.task_id for e in memory.recall([Query(of, **query)])[0].entries]
    assert isinstance(memory, MemorySystem) and len(memory) == 4 and memory.snapshot() == 4
    assert recalled(T3) == ["t1", "t2"] and recalled(T3, k=1) == ["t2"] and recalled(E2.task) == ["t1"]
    assert recalled(T3, isolation="scene") == ["t9"] and recalled(T3, k=0) == []
    assert [entry.text for entry in memory.at(1)] == [memory[next(iter(memory)).id].text]
