"""The compiler's prompt: memory first and byte-identical all episode long (a prefix cache covers it), state last.

A prompt is a list of chat messages whose user turn is a list of parts, text and images in order. Text from memory and
environment is data: it is concatenated, never used as a template.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from compiler.brief_state import render_brief_state
from compiler.language import CREATE, DELETE, FOLD, GUIDE, NOTHING, UPDATE
from compiler.records import CompileRequest
from memory.entry import MemoryEntry

INSTRUCTIONS = f"""You are a memory compiler for an embodied agent. You read the agent's task memory (what earlier \
episodes taught), its current state and its current view. Decide what the acting agent needs now, and write:
{GUIDE} reason | guidance        at most once and first: why it applies now, and what to do next
{CREATE} key: value              note a new fact (key `plan`: the subgoals, separated by ;)
{UPDATE} key: value              correct a fact
{DELETE} key                     drop a fact that no longer holds
{FOLD} summary                   the current subgoal is done
{NOTHING}                        nothing is needed
Give guidance only when a memory applies to the current subgoal and its conditions hold. One line each, nothing else."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the user turn: text, or an image."""

    text: str = ""
    image: Image.Image | None = None


def compiler_parts(request: CompileRequest, images: bool = True) -> list[Part]:
    """The user turn. With images=False (a text-only compiler) pictures are left out."""
    parts = [*_memory(request.memory, images), Part(text=_state(request))]
    if images and request.image is not None:
        parts += [Part(text="view: "), Part(image=request.image), Part(text="\n")]
    parts.append(Part(text=f"see: {request.observation}"))
    return merge(parts)


def messages(parts: Sequence[Part], instructions: str = "") -> list[dict]:
    """Chat messages for `apply_chat_template`: content parts if there is an image, plain text otherwise."""
    if any(part.image is not None for part in parts):
        content: object = [
            {"type": "image"} if p.image is not None else {"type": "text", "text": p.text} for p in parts
        ]
    else:
        content = "".join(part.text for part in parts)
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, {"role": "user", "content": content}]


def images_of(parts: Sequence[Part]) -> list[Image.Image]:
    return [part.image for part in parts if part.image is not None]


def merge(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring text parts joined."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.image is None and merged[-1].image is None:
            merged[-1] = Part(text=merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def _memory(entries: Sequence[MemoryEntry], images: bool) -> list[Part]:
    parts = [Part(text="memory:\n")]
    for entry in entries:
        pictures = [Part(image=Image.open(io.BytesIO(png)).convert("RGB")) for png in entry.images] if images else []
        parts += [*pictures, Part(text=f"{entry.text}\n\n")]
    return parts


def _state(request: CompileRequest) -> str:
    if request.state is not None:
        return render_brief_state(request.state) + "\n"
    did = f"did: {' ; '.join(request.history)}\n" if request.history else ""
    return f"goal: {request.goal}\n{did}"
