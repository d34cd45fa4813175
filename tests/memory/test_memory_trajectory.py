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
from memory.protocol import Record, Trace
from memory.trajectory import compact_text, entry_of_trace, png_bytes
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


ROOM = "You are in the middle of a room. Looking quickly around you, you see a desk 1, a shelf 1, and a safe 1."
SHELF = "You arrive at shelf 1. On the shelf 1, you see a book 1, a candle 2, a candle 1, and a mug 1."


def raw(task: Task, view: str, turns: list[tuple[str, str]], success: bool = True, why: str = "") -> str:
    views = [view, *(answer for _, answer in turns)]
    records = tuple(Record(t, views[t], command, answer) for t, (command, answer) in enumerate(turns))
    return entry_of_trace(Trace(task, records, success, rationale=why), "raw").text


def test_a_raw_entry_of_an_alfworld_episode_says_a_long_list_once():
    turns = [
        ("go to shelf 1", SHELF),
        ("look", ROOM),
        ("go to safe 1", "You arrive at safe 1. The safe 1 is closed."),
        ("go to shelf 1", SHELF),
        ("take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1."),
        ("go to safe 1", "You arrive at safe 1. The safe 1 is closed."),
    ]
    assert raw(TASK, ROOM, turns, why="in home 17 the mug was in shelf 1").split("\n") == [
        "in home 17: put a hot mug in cabinet",
        ROOM,
        "> go to shelf 1",
        SHELF,
        "> look",
        "(as before)",
        "> go to safe 1",
        "You arrive at safe 1. The safe 1 is closed.",
        "> go to shelf 1",
        "(as before)",
        "> take mug 1 from shelf 1",
        "You pick up the mug 1 from the shelf 1.",
        "> go to safe 1",
        "You arrive at safe 1. The safe 1 is closed.",
        "because in home 17 the mug was in shelf 1",
    ]


def test_a_raw_entry_of_a_scienceworld_episode_keeps_the_lines_of_an_answer():
    hall = (
        "This room is called the hallway. In it, you see: \n\tthe agent\n\ta picture\n\nYou also see:\n\tA door (open)"
    )
    turns = [
        ("open door to kitchen", "The door is already open."),
        ("look around", hall),
        ("read note", "> run\nbecause\n> leave\n(as before)"),
        ("wait", ""),
    ]
    assert raw(Task("boil/0", "boil water", "", "train", "boil"), hall, turns, success=False, why="step_limit") == (
        "boil water\n"
        "This room is called the hallway. In it, you see:\n\tthe agent\n\ta picture\n You also see:\n\tA door (open)\n"
        "> open door to kitchen\nThe door is already open.\n"
        "> look around\n(as before)\n"
        "> read note\n > run\n because\n > leave\n (as before)\n"
        "> wait\n"
        "failed: step_limit"
    )


MARKS = ["> x", "because y", "failed: z", "", "(as before)"]
ANSWERS = st.text(st.sampled_from("ab >:;(\n\r\t\u2028")) | st.sampled_from(MARKS)


@given(st.lists(st.tuples(st.text(), ANSWERS), min_size=1, max_size=5), ANSWERS, st.text(), ANSWERS, st.booleans())
def test_answers_are_data_so_that_a_raw_entry_can_be_read_back(turns, view, goal, why, success):
    task = Task("t", goal, "home 17", "train", "")
    made = raw(task, view, turns, success, why)
    assert compact_text(made) == text(success, why, task, [command for command, _ in turns])
    assert sum(line.startswith("> ") for line in made.split("\n")) == len(turns)
    assert len(made.splitlines()) == len(made.split("\n")) and not any(line == "" for line in made.split("\n"))


def test_an_entry_of_commands_is_its_own_compact_text():
    assert compact_text(text(True, "it was there")) == text(True, "it was there")


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
