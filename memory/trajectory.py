"""Trajectory entries, the paper's minimal memory: an episode's actions and why it succeeded or failed."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memory.entry import MemoryEntry, Provenance
from memory.protocol import Trace
from memory.words import SPACED
from runtime.parsing import without_newlines as one_line

if TYPE_CHECKING:
    from PIL.Image import Image


def entry_of_trace(trace: Trace) -> MemoryEntry:
    """Create the memory entry of an attempt. Its id makes an episode that is collected twice one entry."""
    task, actions, success = trace.task, trace.actions, trace.success
    return MemoryEntry(
        trajectory_id(task.id, actions, success),
        trajectory_text(task.scene, task.goal, actions=actions, success=success, rationale=trace.rationale),
        Provenance(task.id, task.scene, goal=task.goal, split=task.split, success=success, actions=actions),
        trace.views,
    )


def trajectory_text(scene: str, goal: str, actions: Sequence[str], success: bool, rationale: str = "") -> str:
    """Format an entry: scene and goal, the actions joined by ` ; `, and the rationale, a line each."""
    lines = [goal_with_scene(goal, scene), " ; ".join(actions)]
    if rationale.strip():
        lines.append(f"because {rationale}" if success else f"failed: {rationale}")
    return "\n".join(one_line(line) for line in lines)


def goal_with_scene(goal: str, scene: str) -> str:
    """Prefix a goal with its scene, if any."""
    return f"in {scene}: {goal}" if scene else goal


def goal_without_scene(goal: str, scene: str) -> str:
    """Remove the scene's label from a goal for retrieval: its number would match other numbers."""
    return re.sub(rf"(?<!{SPACED}){re.escape(scene)}(?!{SPACED})", " ", goal) if scene else goal


def trajectory_id(task_id: str, actions: Sequence[str], success: bool) -> str:
    """Hash task, actions and outcome to 16 hex digits, the same on every machine."""
    return hashlib.sha256(json.dumps([task_id, list(actions), success]).encode()).hexdigest()[:16]


def png_bytes(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
