"""The executor's prompt. Deliveries differ in its memory block only.

goal: in home 17: put a hot mug in cabinet
first: ...                                         the episode's first view, after step 0 (`executor.first_view`)
memory: ...                                        static: all of M, pasted
now: find mug                                      compiled: the Brief State's lines (`executor.reads_state`)
guide: in home 17 the mug was in cabinet 2 | go to cabinet 2   compiled: text guidance
soft: <mem><mem><mem><mem>                         compiled: placeholders of the soft tokens (`executor.soft_on`)
did: go to shelf 1 ; open shelf 1
view: <image>                                      executors that see
see: ...
goal: in home 17: put a hot mug in cabinet         here instead of above (`executor.goal_last`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm.prompt import PromptPart
from runtime.parsing import without_newlines

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_MARK = "[picture]"  # replaces a picture in recorded prompts
DEFAULT_HISTORY = 20  # default number of actions in the prompt


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """The memory part of the executor's prompt at one step. Empty under the delivery `none`."""

    memory: str = ""  # pasted task memory
    state: str = ""  # the Brief State's rendered lines without the goal
    guidance: str = ""
    reason: str = ""
    soft: object | None = None  # (N, d) soft tokens at the executor's scale (a torch tensor)

    @property
    def n_soft(self) -> int:
        """Return N, the number of soft tokens."""
        return 0 if self.soft is None else len(self.soft)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """Input of an executor at one step."""

    goal: str
    delivered: MemoryBlock
    history: tuple[str, ...]
    observation: str
    admissible: tuple[str, ...] | None = None
    image: Image | None = None  # the current view, for executors that see
    max_history: int = DEFAULT_HISTORY  # last actions in the prompt
    first: str = ""  # the episode's first view, if the prompt repeats it
    goal_last: bool = False  # the goal ends the prompt instead of opening it


def system_turn(instructions: str, request: ExecutorRequest, lists_commands: bool) -> str:
    """Write the system turn: the instructions and, if `lists_commands`, the admissible commands."""
    if not (instructions and lists_commands and request.admissible):
        return instructions
    return "\n".join([instructions, "The commands:", *map(without_newlines, request.admissible)])


def executor_text(request: ExecutorRequest, placeholder: str) -> str:
    """Write the user turn as text, with a `placeholder` for each soft token."""
    parts = executor_parts(request)
    return "".join(PICTURE_MARK if part.image is not None else part.text + placeholder * part.soft for part in parts)


def executor_parts(request: ExecutorRequest) -> list[PromptPart]:
    """Write the user turn as texts, places of soft tokens and a picture."""
    d = request.delivered
    goal = f"goal: {without_newlines(request.goal)}"
    lines = [*([] if request.goal_last else [goal]), *([f"first: {request.first}"] if request.first else [])]
    if d.memory:
        lines.append(f"memory:\n{d.memory}\n")
    if d.state:
        lines.append(d.state)
    if d.guidance:
        lines.append(f"guide: {d.reason + ' | ' if d.reason else ''}{d.guidance}")
    parts: list[PromptPart] = []
    if d.n_soft:
        parts = [PromptPart("\n".join([*lines, "soft: "])), PromptPart(soft=d.n_soft)]
        lines = [""]
    if did := request.history[max(0, len(request.history) - request.max_history) :]:
        lines.append(f"did: {' ; '.join(map(without_newlines, did))}")
    see = f"see: {request.observation}" + (f"\n{goal}" if request.goal_last else "")
    if request.image is None:
        return [*parts, PromptPart("\n".join([*lines, see]))]
    return [*parts, PromptPart("\n".join([*lines, "view: "])), PromptPart(image=request.image), PromptPart(f"\n{see}")]


def memory_text(texts: Sequence[str]) -> str:
    """Join the entries' texts, as static delivery pastes them and the compiler reads them."""
    return "\n\n".join(texts)
