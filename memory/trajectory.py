"""Entries of the paper's minimal memory: an episode's trajectory, and why it succeeded or failed (section 5.1).

`text: commands` is the compact form, `text: raw` the whole trajectory:

    in home 17: put a mug in desk                            in home 17: put a mug in desk
    go to shelf 1 ; take mug 1 from shelf 1 ; ...            You are in the middle of a room. ... you see a desk 1, ...
    because in home 17 the mug was in shelf 1                > go to shelf 1
                                                             You arrive at shelf 1. On the shelf 1, you see a mug 1.
                                                             > take mug 1 from shelf 1
                                                             You pick up the mug 1 from the shelf 1.
                                                             ...
                                                             because in home 17 the mug was in shelf 1

In a raw text, `> ` marks a command, and only a command. An answer keeps its lines, without empty ones: lines after its
first are indented, and so is a first line that would read as a command or a rationale. An answer of `LONG` characters
or more that repeats the first view or an earlier answer word for word becomes `REPEATED`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from memory.entry import MemoryEntry, Provenance
from memory.protocol import Trace
from memory.words import SPACED
from runtime.parsing import without_newlines as one_line
from runtime.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image


EntryText = Literal["raw", "commands"]
LONG, REPEATED = 80, "(as before)"
_COMMAND, _WON, _LOST = "> ", "because ", "failed: "
_PART_OF_WORD = re.compile(SPACED)
_MARKS = (_COMMAND, _WON, _LOST, REPEATED)  # no line of an answer starts with one of them


class TrajectorySettings(Settings):
    """Settings of the memory system `trajectory`."""

    text: EntryText = "commands"
    """What an entry shows of its episode. raw: first view, commands and answers, as in the paper. commands: the
    commands alone."""
    outcomes: Literal["success", "all"] = "all"
    """Episodes that are recalled: successful ones, as in the paper, or all. The bank stores all."""


def entry_of_trace(trace: Trace, text: EntryText = "commands") -> MemoryEntry:
    """Create the memory entry of an attempt. Its id makes an episode that is collected twice one entry."""
    task, actions, success = trace.task, trace.actions, trace.success
    return MemoryEntry(
        trajectory_id(task.id, actions, success),
        "\n".join((raw_lines if text == "raw" else command_lines)(trace)),
        Provenance(task.id, task.scene, goal=task.goal, split=task.split, success=success, actions=actions),
        trace.views,
    )


def command_lines(trace: Trace) -> list[str]:
    """Write scene and goal, the actions joined by ` ; `, and the rationale, a line each."""
    return [_heading(trace), one_line(" ; ".join(trace.actions)), *_rationale(trace)]


def raw_lines(trace: Trace) -> list[str]:
    """Write scene and goal, the first view, command and answer by turns, and the rationale."""
    lines = [_heading(trace), *(first := _answer_lines(trace.first))]
    known = {"\n".join(first)}
    for record in trace.records:
        answer = _answer_lines(record.feedback)
        text = "\n".join(answer)
        lines.append(f"{_COMMAND}{one_line(record.action)}")
        lines += [REPEATED] if len(text) >= LONG and text in known else answer
        known.add(text)
    return [*lines, *_rationale(trace)]


def compact_text(text: str) -> str:
    """Return an entry's text with the commands alone; the text itself if it is no raw trajectory.

    Retrieval and readers of entries use it, so that they read the same from either form.
    """
    heading, *lines = text.split("\n")
    commands = [line.removeprefix(_COMMAND) for line in lines if line.startswith(_COMMAND)]
    if not commands:
        return text
    rationale = lines[-1:] if lines[-1].startswith((_WON, _LOST)) else []
    return "\n".join([heading, " ; ".join(commands), *rationale])


def _heading(trace: Trace) -> str:
    return one_line(goal_with_scene(trace.task.goal, trace.task.scene))


def _rationale(trace: Trace) -> list[str]:
    why = trace.rationale
    return [one_line(f"{_WON if trace.success else _LOST}{why}")] if why.strip() else []


def _answer_lines(answer: str) -> list[str]:
    """Return the lines of an answer as a raw text has them."""
    first, *rest = [line.rstrip() for line in answer.splitlines() if line.strip()] or [""]
    indented = [line if line[0].isspace() else f" {line}" for line in rest]
    return [f" {first}" if first.startswith(_MARKS) else first, *indented] if first else []


def goal_with_scene(goal: str, scene: str) -> str:
    """Prefix a goal with its scene, if any."""
    return f"in {scene}: {goal}" if scene else goal


def goal_without_scene(goal: str, scene: str) -> str:
    """Remove the scene's label from a goal for retrieval: its number would match other numbers."""
    kept, start = list[str](), 0
    at = goal.find(scene) if scene else -1  # no pattern of the scene: compiling one takes longer than a recall
    while at >= 0:
        end = at + len(scene)
        if (at and _PART_OF_WORD.match(goal, at - 1)) or _PART_OF_WORD.match(goal, end):
            at = goal.find(scene, at + 1)
        else:
            kept.append(goal[start:at])
            start, at = end, goal.find(scene, end)
    return " ".join([*kept, goal[start:]])


def trajectory_id(task_id: str, actions: Sequence[str], success: bool) -> str:
    """Hash task, actions and outcome to 16 hex digits, the same on every machine."""
    return hashlib.sha256(json.dumps([task_id, list(actions), success]).encode()).hexdigest()[:16]


def png_bytes(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
