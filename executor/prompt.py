"""The executor's prompt. Deliveries differ in its memory block only.

Context `turns` is a chat that grows by a turn a step. What is compiled ends the newest user turn, so everything before
it stays as it is from step to step, and a prefix cache reads only what is new:

system     the instructions; static: all of M, pasted
user       Goal: in home 17: put a hot mug in cabinet
           You are in the middle of a room. ...              the first view
assistant  go to shelf 1
user       On the shelf 1, you see nothing.
           Memory: in home 17 the mug was in cabinet 2. Do now: go to cabinet 2       compiled: text guidance
           Soft memory: <mem><mem><mem><mem>                 compiled: placeholders of the soft tokens

Context `rebuilt` is one user turn, written anew at every step:

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from envs.spec import ExecutorInstructions
from lm.prompt import ChatTurn, PromptPart, chat_of, merge_text_parts
from runtime.parsing import without_newlines

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_MARK = "[picture]"  # replaces a picture in recorded prompts
DEFAULT_HISTORY = 20  # default number of actions in the prompt
Context: TypeAlias = Literal["turns", "rebuilt"]
# What the system turn says: the same in every environment, or by environment's name for a run that has several.
Rules: TypeAlias = str | Mapping[str, ExecutorInstructions]
# Ends the instructions of context `turns`, under every delivery.
FOLLOWS = "When a message says what to do now, answer with that very command."
PASTED, DO_NOW, SOFT = "Memory of past episodes:", "Do now: ", "Soft memory: "


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
class Turn:
    """A past step in context `turns`: the view, what was compiled beside it, and the command that answered it."""

    observation: str
    action: str
    compiled: MemoryBlock = MemoryBlock()


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
    context: Context = "rebuilt"
    past: tuple[Turn, ...] = ()  # context turns: the steps before this one
    dropped: int = 0  # context turns: past answers and the views after them, from the oldest, that the chat leaves out
    environment: str = ""  # whose instructions are shown, by name; "": the executor was loaded for one

    @property
    def blocks(self) -> list[MemoryBlock]:
        """List what was compiled at the steps that the prompt shows, in its order."""
        return [*(turn.compiled for turn in _shown(self)), self.delivered]

    @property
    def n_soft(self) -> int:
        """Return the number of soft tokens in the prompt."""
        return sum(block.n_soft for block in self.blocks)


def rules_of(rules: Rules, environment: str, lists_commands: bool = False) -> ExecutorInstructions:
    """Return the instructions for an environment, and whether the commands are listed below them.

    Args:
        lists_commands: whether they are, under rules that are the same in every environment.

    Raises:
        ValueError: there are none for it.
    """
    if isinstance(rules, str):
        return ExecutorInstructions(rules, lists_commands)
    if environment not in rules:
        raise ValueError(
            f"an executor of {' and '.join(rules)} got a step of {environment or 'an environment without a name'}"
        )
    return rules[environment]


def system_turn(instructions: str, request: ExecutorRequest, lists_commands: bool) -> str:
    """Write the system turn: the instructions and, if `lists_commands`, the admissible commands."""
    if not (instructions and lists_commands and request.admissible):
        return instructions
    return "\n".join([instructions, "The commands:", *map(without_newlines, request.admissible)])


def executor_text(request: ExecutorRequest, placeholder: str) -> str:
    """Write the newest user turn as text, with a `placeholder` for each soft token."""
    parts = executor_parts(request) if request.context == "rebuilt" else _newest_turn(request, ())
    return "".join(PICTURE_MARK if part.image is not None else part.text + placeholder * part.soft for part in parts)


def executor_chat(request: ExecutorRequest, instructions: str = "", lists_commands: bool = False) -> list[ChatTurn]:
    """Write the chat that the executor answers."""
    if request.context == "rebuilt":
        return chat_of(executor_parts(request), system_turn(instructions, request, lists_commands))
    pasted = f"{PASTED}\n\n{request.delivered.memory}" if request.delivered.memory else ""
    follows = FOLLOWS if instructions else ""
    system = "\n\n".join(filter(None, (" ".join(filter(None, (instructions, follows))), pasted)))
    chat = [ChatTurn.of("system", system)] if system else []
    for number, turn in enumerate(_shown(request)):
        view = PromptPart(_goal_line(request) * (number == 0) + turn.observation)
        chat += [ChatTurn("user", (view, *_compiled(turn.compiled))), ChatTurn.of("assistant", turn.action)]
    commands = (request.admissible or ()) if lists_commands else ()
    return [*chat, ChatTurn("user", tuple(_newest_turn(request, commands)))]


def _shown(request: ExecutorRequest) -> list[Turn]:
    """Return the past turns that the chat shows. The first view always stays; with turns left out, the oldest command
    that is shown answers it, and its own guidance goes."""
    if not request.dropped:
        return list(request.past)
    first, kept = request.past[0], request.past[request.dropped :]
    return [Turn(first.observation, kept[0].action), *kept[1:]]


def _newest_turn(request: ExecutorRequest, commands: Sequence[str]) -> list[PromptPart]:
    """Write the newest user turn: view, listed commands, Brief State, and last what is compiled."""
    parts = [] if request.image is None else [PromptPart(image=request.image), PromptPart("\n")]
    lines = [_goal_line(request) * (not request.past) + request.observation]
    if commands:
        lines += ["The commands:", *map(without_newlines, commands)]
    return [*parts, PromptPart("\n".join(lines)), *added_parts(replace(request.delivered, memory=""), "turns")]


def added_parts(block: MemoryBlock, context: Context) -> list[PromptPart]:
    """Write a memory block as it stands in a user turn: at its end in context `turns`, in lines of its own in context
    `rebuilt`. (The executor's own prompt of context `turns` has pasted memory in the system turn.)"""
    if context == "turns":
        pasted = f"\n{PASTED}\n\n{block.memory}" if block.memory else ""
        head = pasted + (f"\n{block.state}" if block.state else "")
        return [*([PromptPart(head)] if head else []), *_compiled(block)]
    lines = [f"memory:\n{block.memory}\n"] if block.memory else []
    lines += [block.state] if block.state else []
    lines += [f"guide: {_guide(block)}"] if block.guidance else []
    head = "".join(f"{line}\n" for line in lines)
    if block.n_soft:
        return [PromptPart(f"{head}soft: "), PromptPart(soft=block.n_soft), PromptPart("\n")]
    return [PromptPart(head)] if head else []


def _goal_line(request: ExecutorRequest) -> str:
    return f"Goal: {without_newlines(request.goal)}\n"


def _compiled(block: MemoryBlock) -> list[PromptPart]:
    """Write guidance with its reason, and the places of soft tokens."""
    parts = [PromptPart(f"\n{_guidance_line(block)}")] if block.guidance else []
    if block.n_soft:
        parts += [PromptPart(f"\n{SOFT}"), PromptPart(soft=block.n_soft)]
    return parts


def _guidance_line(block: MemoryBlock) -> str:
    """Write guidance with its reason, in context `turns`."""
    return (f"Memory: {block.reason.rstrip('.')}. " if block.reason else "") + DO_NOW + block.guidance


def _guide(block: MemoryBlock) -> str:
    """Write guidance with its reason, in context `rebuilt`."""
    return f"{block.reason} | {block.guidance}" if block.reason else block.guidance


def memory_span(request: ExecutorRequest) -> tuple[str, str]:
    """Return the text of memory that the prompt shows at this step (pasted, or this step's guidance), and what stands
    before it; ("", "") without any."""
    block, turns = request.delivered, request.context == "turns"
    if block.memory:
        return (f"{PASTED}\n\n" if turns else "\nmemory:\n"), block.memory
    if not block.guidance:
        return "", ""
    return ("\n", _guidance_line(block)) if turns else ("\nguide: ", _guide(block))


def executor_parts(request: ExecutorRequest) -> list[PromptPart]:
    """Write the user turn of context `rebuilt` as texts, places of soft tokens and a picture."""
    goal = f"goal: {without_newlines(request.goal)}"
    lines = [*([] if request.goal_last else [goal]), *([f"first: {request.first}"] if request.first else [])]
    parts = [PromptPart("".join(f"{line}\n" for line in lines)), *added_parts(request.delivered, "rebuilt")]
    did = request.history[max(0, len(request.history) - request.max_history) :]
    lines = [f"did: {' ; '.join(map(without_newlines, did))}"] if did else []
    see = f"see: {request.observation}" + (f"\n{goal}" if request.goal_last else "")
    if request.image is None:
        return merge_text_parts([*parts, PromptPart("\n".join([*lines, see]))])
    last = [PromptPart("\n".join([*lines, "view: "])), PromptPart(image=request.image), PromptPart(f"\n{see}")]
    return merge_text_parts([*parts, *last])


def memory_text(texts: Sequence[str]) -> str:
    """Join the entries' texts, as static delivery pastes them and the compiler reads them."""
    return "\n\n".join(texts)
