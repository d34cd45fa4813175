"""Records and protocol of executors, and grounding: from a free answer to an admissible command."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compiler.records import SoftOn
from executor.prompt import DEFAULT_HISTORY, Context, ExecutorRequest
from lm.reply_cleaning import extract_labelled
from runtime.parsing import parse_json_object

if TYPE_CHECKING:
    from lm.prompt import Prompt


class Grounding(StrEnum):
    """Origin of an action."""

    CHOICE = "choice"  # chosen among the admissible commands by likelihood
    EXACT = "exact"
    FUZZY = "fuzzy"
    FAILED = "failed"  # no command is close enough: the text is sent unchanged
    FREE = "free"  # the environment lists no commands


class Match(NamedTuple):
    """A grounded action."""

    action: str
    how: Grounding


def ground(text: str, admissible: Sequence[str] | None) -> Match:
    """Find the admissible command in an executor's free answer.

    In this order: the first line, up to case and white space; the command that the answer marks (`commanded`); the
    command closest to that, with a difflib similarity of at least 0.8; the first line or piece of code that is a
    command.
    """
    meant = commanded(text)
    if admissible is None:
        return Match(meant, Grounding.FREE)
    folded = {_fold(command): command for command in admissible}
    lines = [line for line in text.splitlines() if line.strip()]
    for line in (*lines[:1], meant):
        if (command := folded.get(_fold(line)) or folded.get(_fold(line.rstrip(".")))) is not None:
            return Match(command, Grounding.EXACT)
    if close := difflib.get_close_matches(_fold(meant), list(folded), n=1, cutoff=0.8):
        return Match(folded[close[0]], Grounding.FUZZY)
    spans = [*map(_bare, lines), *re.findall(r"`([^`\n]+)`", text)]
    exact = next((folded[_fold(span)] for span in spans if _fold(span) in folded), None)
    return Match(meant, Grounding.FAILED) if exact is None else Match(exact, Grounding.EXACT)


def commanded(text: str) -> str:
    """Return the command in a free answer: `action` or `command` of its JSON, else the first line that a label or fence
    marks (`lm.reply_cleaning.extract_labelled`), else the first line."""
    fields = parse_json_object(text) or {}
    named = [fields[name] for name in ("action", "command") if isinstance(fields.get(name), str)]
    if named and fields.keys() <= {"action", "command", "thought", "thoughts", "reasoning", "reason"}:
        return named[0].strip()
    return _bare(next((line for line in extract_labelled(text).splitlines() if line.strip()), ""))


def _bare(line: str) -> str:
    """Strip list, quotation, code and emphasis marks and the full stop from a line."""
    return re.sub(r"^(?:[>*•-]+\s+|>+|\d{1,3}[.)]\s+)+", "", line.strip()).strip("`* ").rstrip(".")


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


@dataclass(frozen=True, slots=True)
class Action:
    """An executor's decision."""

    action: str
    how: Grounding
    text: str  # raw output
    prompt_ids: tuple[int, ...] = ()
    tokens_in: int = 0
    tokens_out: int = 0
    # Of tokens_in, from a prefix cache; None if the backend does not report it.
    tokens_cached: int | None = field(default=None, compare=False)
    # Of a choice by likelihood: the index among the admissible commands, and the probability of the likeliest one. Of a
    # sampled choice: also its prompt and log-probability (a greedy one holds neither pixels nor soft tokens).
    chosen: int | None = field(default=None, compare=False)
    confidence: float | None = field(default=None, compare=False)
    prompt: Prompt | None = field(default=None, compare=False, repr=False)
    logprob: float | None = field(default=None, compare=False)
    turns_dropped: int = 0  # past turns that the prompt left out (`ExecutorView.context_tokens`)


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """Inputs of an executor beside goal, view and guidance."""

    state: bool = False  # the Brief State
    soft_on: SoftOn = "guidance"  # soft tokens with guidance only, so that BRIEF and NOACTION give it no memory
    history: int = DEFAULT_HISTORY  # maximum number of its last actions
    first_view: bool = False  # the episode's first view at every step: it may list the places
    goal_last: bool = False  # the goal at the end of the prompt instead of its beginning
    commands: bool = False  # the admissible commands below the instructions (`envs.spec.EnvSpec.lists_commands`)
    context: Context = "rebuilt"  # turns: a chat that grows by a turn a step
    past_guidance: bool = True  # context turns: past turns keep the guidance that they had
    past_soft: bool = False  # context turns: past turns keep their soft tokens, too
    context_tokens: int | None = None  # context turns: a longer prompt leaves out its oldest turns


PAPER_VIEW = ExecutorView()
FULL_VIEW = ExecutorView(state=True, soft_on="always")


class Executor(Protocol):
    """Chooses actions. `batched`, `needs_expert`, `concurrent` and `takes_seeds` as in `compiler.records.Compiler`."""

    accepts_soft: bool  # False where only text can be delivered (closed models)
    sees_images: bool  # whether its prompt shows the current view
    reads: ExecutorView

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]: ...
