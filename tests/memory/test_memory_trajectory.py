"""The text of a raw trajectory entry, its id, and what importing the memory package costs."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from envs.base import Task
from memory.trajectory import png_bytes
from tests.memory.entries import entry_from_trajectory

TASK = Task("t1", "put a hot mug in cabinet", "home 17", "train", "heat")
ACTIONS = ["go to shelf 1", "take mug 1 from shelf 1"]


def text(success: bool, why: str = "", task: Task = TASK, actions=ACTIONS) -> str:
    return entry_from_trajectory(task, actions, success, why).text


def test_the_format():
    first = "in home 17: put a hot mug in cabinet\ngo to shelf 1 ; take mug 1 from shelf 1"
    assert text(True) == text(False) == text(True, "  ") == first
    assert text(True, "the mug was there") == f"{first}\nbecause the mug was there"
    assert text(False, "step_limit") == f"{first}\nfailed: step_limit"
    assert text(True, actions=[]).splitlines() == ["in home 17: put a hot mug in cabinet", ""][:1]
    assert text(True, task=Task("t", "look", "", "train", "")).startswith("look\n")


@given(st.text(), st.text(), st.lists(st.text(), max_size=4), st.text(min_size=1), st.booleans())
def test_a_field_never_breaks_a_line(goal, scene, actions, why, success):
    made = text(success, why, Task("t", goal, scene, "train", ""), actions)
    assert len(made.split("\n")) == 2 + bool(why.strip()) and len(made.splitlines()) <= 3


def test_newlines_become_spaces():
    assert text(True, "a\nb\r\nc\u2028d").endswith("\nbecause a b c d")


def test_the_id_depends_on_task_actions_and_success_only():
    made = entry_from_trajectory(TASK, ACTIONS, True, "why")
    assert made.id == entry_from_trajectory(replace(TASK, split="other"), tuple(ACTIONS), True).id == "26fcb616abb7619c"
    others = [(TASK, ACTIONS[:1], True), (TASK, ACTIONS, False), (Task("t2", *[""] * 4), ACTIONS, True)]
    joined = (TASK, [" ; ".join(ACTIONS)], True)
    ids = [entry_from_trajectory(t, a, s).id for t, a, s in (*others, joined)]
    assert len({made.id, *ids}) == 5
    assert entry_from_trajectory(TASK, ACTIONS, True, id="mine").id == "mine"


def test_provenance_split_and_pictures():
    picture = png_bytes(Image.new("RGB", (3, 2), "red"))
    made = entry_from_trajectory(TASK, ACTIONS, True, images=[picture, picture])
    assert made.images == (picture, picture) and Image.open(io.BytesIO(picture)).size == (3, 2)
    origin = made.provenance
    assert (origin.task_id, origin.scene, origin.goal, origin.success) == ("t1", "home 17", TASK.goal, True)
    assert origin.actions == tuple(ACTIONS) and origin.source == "trajectory"
    assert origin.split == "train"


@pytest.mark.parametrize("module", ["entry", "trajectory", "retrieval", "bank_table", "bank"])
def test_importing_does_not_load_the_database(module):
    code = f"import sys, memory.{module}; sys.exit(any(m in sys.modules for m in ('lancedb', 'pyarrow', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
