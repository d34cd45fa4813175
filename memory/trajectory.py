"""The paper's minimal bank: one entry per episode, its raw trajectory and why it succeeded (or failed)."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from envs.base import Task
from memory.entry import MemoryEntry, Provenance
from memory.protocol import Trace
from memory.words import SPACED
from runtime.text import without_newlines as one_line

if TYPE_CHECKING:
    from PIL.Image import Image


def entry_from_trajectory(
    task: Task,
    actions: Sequence[str],
    observations: Sequence[str],
    success: bool,
    rationale: str = "",
    images: Iterable[bytes | Image] = (),
    id: str | None = None,
) -> MemoryEntry:
    """Make the memory entry of one episode: the commands as executed, why it succeeded or how it failed, and pictures
    in the order in which they were seen. What the commands answered is for memory systems that summarise it.

    By default the id is `trajectory_id`, so that the same episode collected twice is one entry.
    """
    return MemoryEntry(
        trajectory_id(task.id, actions, success) if id is None else id,
        trajectory_text(task.scene, task.goal, actions, success, rationale),
        Provenance(task.id, task.scene, task.goal, task.split, success, tuple(actions)),
        tuple(image if isinstance(image, bytes) else png_bytes(image) for image in images),
    )


def entry_of_trace(trace: Trace) -> MemoryEntry:
    """Make the memory entry of one attempt at a task."""
    feedback = [record.feedback for record in trace.records]
    return entry_from_trajectory(trace.task, trace.actions, feedback, trace.success, trace.rationale, trace.views)


def trajectory_text(scene: str, goal: str, actions: Sequence[str], success: bool, rationale: str = "") -> str:
    """Write scene and goal, the actions joined by ` ; `, and (with a rationale) `because ...` or `failed: ...`."""
    lines = [stated_goal(goal, scene), " ; ".join(actions)]
    if rationale.strip():
        lines.append(f"because {rationale}" if success else f"failed: {rationale}")
    return "\n".join(one_line(line) for line in lines)


def stated_goal(goal: str, scene: str) -> str:
    """State a goal as memory, compiler and executor all state it: with the scene (whose layout persists), if any."""
    return f"in {scene}: {goal}" if scene else goal


def goal_without_scene(goal: str, scene: str) -> str:
    """Return a goal as retrieval searches for it: without the scene's label, whose number would match other numbers."""
    return re.sub(rf"(?<!{SPACED}){re.escape(scene)}(?!{SPACED})", " ", goal) if scene else goal


def trajectory_id(task_id: str, actions: Sequence[str], success: bool) -> str:
    """Return 16 hex digits that depend on these three only: the same on every machine and in every run."""
    return hashlib.sha256(json.dumps([task_id, list(actions), success]).encode()).hexdigest()[:16]


def png_bytes(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
