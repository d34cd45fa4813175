"""The compiler's prompt: first the memory, which a prefix cache covers for the whole episode, then the state.

The user turn is a list of texts and pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from PIL import Image

from compiler.brief_state import render_brief_state
from compiler.language import CREATE, DELETE, FOLD, GUIDE, NOTHING, UPDATE
from compiler.records import CompileRequest, Entries, History
from lm.prompt import PromptPart, merge_text_parts
from memory.entry import MemoryEntry
from memory.trajectory import compact_text
from runtime.parsing import without_newlines
from runtime.pictures import open_picture

# The system turn: one for every environment, or by environment's name for a run that has several.
Instructions: TypeAlias = str | Mapping[str, str]

INSTRUCTIONS = f"""You are a memory compiler for an embodied agent. You read the agent's task memory (what earlier \
episodes taught), its current state and its current view. Decide what the acting agent needs now, and write:
{GUIDE} reason | guidance        at most once, first or last: why it applies now, and what to do next
{CREATE} key: value              note a new fact (key `plan`: the subgoals, separated by ;)
{UPDATE} key: value              correct a fact
{DELETE} key                     drop a fact that no longer holds
{DELETE} key: item               drop one item of a list, such as a place that was searched
{FOLD} summary                   the current subgoal is done
{NOTHING}                        nothing is needed
Give guidance only when a memory applies to the current subgoal and its conditions hold. One line each, nothing else."""


def compiler_instructions(environment: str = "") -> str:
    """Write the system turn: the general instructions, and the environment's (`EnvSpec.compiler_instructions`)."""
    return f"{INSTRUCTIONS}\n\n{environment}" if environment else INSTRUCTIONS


def system_turns(environments: Instructions) -> Instructions:
    """Write the system turn of one environment, or of each."""
    if isinstance(environments, str):
        return compiler_instructions(environments)
    return {name: compiler_instructions(environment) for name, environment in environments.items()}


def instructions_of(instructions: Instructions, environment: str) -> str:
    """Return the system turn for an environment. Raises: ValueError, if there is none for it."""
    if isinstance(instructions, str):
        return instructions
    if environment not in instructions:
        raise ValueError(
            f"a compiler of {' and '.join(instructions)} got a step of {environment or 'an environment without a name'}"
        )
    return instructions[environment]


def compiler_parts(
    request: CompileRequest, images: bool = True, history: History = 1, entries: Entries = "whole"
) -> list[PromptPart]:
    """Write the user turn.

    Args:
        images: False for a text-only compiler: without pictures.
        history: the past commands shown beside a Brief State (`compiler.history`); without one, all are shown.
        entries: what is shown of a raw trajectory in memory (`compiler.entries`).
    """
    parts = [*_memory(request.memory, images, entries), PromptPart(text=state_text(request, history))]
    if images and request.image is not None:
        parts += [PromptPart(text="view: "), PromptPart(image=request.image), PromptPart(text="\n")]
    parts.append(PromptPart(text=f"see: {request.observation}"))
    return merge_text_parts(parts)


def _memory(memory: Sequence[MemoryEntry], images: bool, entries: Entries) -> list[PromptPart]:
    """Write M: each entry's text, then its pictures, so that the text gives them context."""
    parts = [PromptPart(text="memory:\n")]
    for entry in memory:
        pictures = [PromptPart(image=image) for image in pictures_of([entry])] if images else []
        text = entry.text if entries == "whole" else compact_text(entry.text)
        parts += [PromptPart(text=f"{text}\n"), *pictures, PromptPart(text="\n")]
    return parts


def pictures_of(entries: Sequence[MemoryEntry]) -> list[Image.Image]:
    """Return the pictures of M in the order of the prompt."""
    return [open_picture(png).convert("RGB") for entry in entries for png in entry.images]


def state_text(request: CompileRequest, history: History = 0) -> str:
    """Write b_t and the last commands; without b_t, the goal and all commands so far. The view answers the last."""
    state, shown = request.state, request.history
    if state is not None and history != "all":
        shown = shown[len(shown) - history :] if history < len(shown) else shown
    did = f"did: {' ; '.join(map(without_newlines, shown))}\n" if shown else ""
    written = f"goal: {without_newlines(request.goal)}" if state is None else render_brief_state(state)
    return f"{written}\n{did}"
