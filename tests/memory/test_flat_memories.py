"""Mem0 and LangMem by rule: the worked example, and what recall keeps to."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.mem0.settings import Mem0Settings
from memory.mem0.system import Mem0
from memory.langmem.settings import LangMemSettings
from memory.langmem.system import LangMem
from memory.protocol import Query
from memory.registry import MemoryTools
from tests.memory.worked_examples import E1, E2, READER, T3, like


def test_x(tmp_path: Path) -> None:
    for cls, s in ((Mem0, Mem0Settings()), (LangMem, LangMemSettings())):
        m = cls(tmp_path / cls.__name__, s, tools=MemoryTools(reader=READER))
        m.commit([[E1], [E2]])
        for t in (T3, E2.task):
            for score, v in m.state.items.search(m.query_text(Query(t), ""), 9, own=t.id):
                print(round(score, 4), v.entry("x").id, v.text, v.actions)
            print()
