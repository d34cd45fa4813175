"""`memcompiler bank show`: what a memory knows, of every system, and what was recalled and followed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from configs.collect import MemoryConfig
from data_gen.memory_factory import initialise_memory, open_memory
from eval.memory_report import drawn, recalled_in, tables_of
from eval.player import episode_view
from memcompiler.cli import app
from memory import registry
from memory.entry import MemoryEntry, Provenance
from memory.protocol import BankError, Edge, Graph
from tests.fakes import one_step_episode
from tests.memory.test_contract import HOSTILE, trace

SYSTEMS = list(registry.BUILT_IN)


@pytest.fixture(params=SYSTEMS)
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = open_memory(MemoryConfig(system=request.param), tmp_path / "bank", "household")
    initialise_memory(made, "household")
    made.commit([[trace(i)] for i in (1, 4, 7)])
    return made


def test_the_command_tells_what_any_system_holds(memory: Any, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["bank", "show", str(tmp_path / "bank"), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert memory.name in shown.output and "episodes" in shown.output
    pictures = sorted((tmp_path / "out").glob("*.png")) if (tmp_path / "out").exists() else []
    assert len(pictures) == {"brainmem": 2, "amem": 1, "gmemory": 1}.get(memory.name, 0)
    for picture in pictures:
        with Image.open(picture) as image:
            assert image.width > 400 and len(image.convert("L").getcolors() or range(300)) > 10  # something is drawn


def test_guidelines_stand_there_with_their_utility(tmp_path: Path) -> None:
    memory = open_memory(MemoryConfig(system="brainmem"), tmp_path / "bank", "household")
    memory.commit([[trace(i)] for i in (1, 4)])
    [table] = [table for table in tables_of(memory) if table.title == "guidelines"]
    assert table.rows and table.rows[0][:2] == ("0.760", "2/2")  # 0.7 + 0.3 * 2/10


def test_a_folder_of_another_system_is_refused(memory: Any, tmp_path: Path) -> None:
    other = next(name for name in SYSTEMS if name != memory.name)
    with pytest.raises(BankError, match=f"memory.system={memory.name}"):
        open_memory(MemoryConfig(system=other), tmp_path / "bank")


def test_circles_and_hostile_names_are_drawn(tmp_path: Path) -> None:
    class Telling:
        def tables(self) -> list:
            return []

        def graphs(self) -> list[Graph]:
            circle = (Edge("a", "b", 1.0), Edge("b", "a", 0.0, "x"), Edge("c", "c", 0.5), Edge("$d", HOSTILE, 0.5))
            return [Graph(HOSTILE, circle)]

    [path] = drawn(Telling(), tmp_path)  # type: ignore[arg-type]
    assert path.stat().st_size > 1000


def test_what_was_recalled_is_told_with_whether_it_was_followed() -> None:
    kept = {"e1": entry("e1", "go to shelf 1"), "e2": entry("e2", "go to bed 1")}
    made = entry("brainmem/hints/abc", "mug: go to desk 1")
    steps = [replace(one_step_episode("t").steps[0], t=t, action=action) for t, action in enumerate(ACTIONS)]
    steps[1].memory_ids = ("e1", "brainmem/hints/abc")
    episode = replace(one_step_episode("t"), steps=steps, memory_ids=("e1", "e2"), made={made.id: made})
    table = recalled_in([episode, replace(episode, success=True)], kept)  # type: ignore[arg-type]
    assert dict((row[0], row[1:]) for row in table.rows) == {
        "e1": ("2", "100.0", "50.0"),
        "e2": ("2", "0.0", "50.0"),
        "brainmem/hints": ("2", "0.0", "50.0"),  # it was recalled after that had been done
    }
    view = episode_view(episode)
    [first, second] = view["steps"]
    assert first["fresh"] == [] and second["fresh"] == ["brainmem/hints/abc"]
    assert view["memory"]["brainmem/hints/abc"] == "mug: go to desk 1"


ACTIONS = ("go to desk 1", "go to shelf 1")


def entry(id: str, text: str) -> MemoryEntry:
    return MemoryEntry(id, text, Provenance("x", "", "", "train", True))
