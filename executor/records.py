"""What comes out of an executor, whatever runs it: an action, grounded in what the environment takes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compiler.records import SoftOn
from executor.prompt import HISTORY, ExecutorRequest
from lm.replies import marked
from runtime.told import json_object

if TYPE_CHECKING:
    from lm.prompt import Prompt


class Grounding(StrEnum):
    CHOICE = "choice"  # chosen among the admissible commands by likelihood
    EXACT = "exact"
    FUZZY = "fuzzy"
    FAILED = "failed"  # nothing close enough: sent as it is, and counted
    FREE = "free"  # the benchmark enumerates no commands


class Match(NamedTuple):
    action: str
    how: Grounding


def ground(text: str, admissible: Sequence[str] | None) -> Match:
    """Find the admissible command that an executor's free answer means.

    Its first line, if that is a command up to case and white space; else the one that it marks out (`commanded`) or the
    closest to that by difflib's similarity, if it is at least 0.8; else the first line or piece of code that is one.
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
    said = next((folded[_fold(span)] for span in spans if _fold(span) in folded), None)
    return Match(meant, Grounding.FAILED) if said is None else Match(said, Grounding.EXACT)


def commanded(text: str) -> str:
    """Return the one command in a free answer: its JSON's `action` or `command`, else the first line of what a label or
    a fence marks out (`lm.replies.marked`), of all of it where nothing does."""
    said = json_object(text) or {}
    named = [said[name] for name in ("action", "command") if isinstance(said.get(name), str)]
    if named and said.keys() <= {"action", "command", "thought", "thoughts", "reasoning", "reason"}:
        return named[0].strip()
    return _bare(next((line for line in marked(text).splitlines() if line.strip()), ""))


def _bare(line: str) -> str:
    """Strip a line of marks of lists, quotations, code and emphasis, and of its full stop."""
    return re.sub(r"^(?:[>*•-]+\s+|>+|\d{1,3}[.)]\s+)+", "", line.strip()).strip("`* ").rstrip(".")


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


@dataclass(frozen=True, slots=True)
class Action:
    action: str
    how: Grounding
    text: str  # what the executor produced
    prompt_ids: tuple[int, ...]
    tokens_in: int
    tokens_out: int
    # Of tokens_in, out of a prefix cache; None where the backend does not say.
    tokens_cached: int | None = field(default=None, compare=False)
    # Of an action chosen among the admissible ones by likelihood: which one it is. Of one that was drawn, besides: what
    # it was drawn from, and how likely it was. (A greedy action keeps neither pixels nor soft tokens in the record.)
    chosen: int | None = field(default=None, compare=False)
    sure: float | None = field(default=None, compare=False)  # how likely it holds the likeliest of them
    prompt: Prompt | None = field(default=None, compare=False, repr=False)
    logprob: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reads:
    """What an executor reads beside goal, view and actions: of what was compiled, beside guidance with its reason."""

    state: bool = False  # the Brief State, too, which is the compiler's own otherwise
    # Soft tokens with EXPERIENCE and HYBRID only, so that it acts without memory on BRIEF and NOACTION; or always.
    soft_on: SoftOn = "guidance"
    history: int = HISTORY  # of its last actions, at most
    first_view: bool = False  # the episode's first one, too, at every step: it may tell which places there are
    goal_last: bool = False  # the goal ends the prompt, behind all that is to be read for its sake
    commands: bool = False  # the possible commands, below its instructions (`envs.spec.EnvSpec.lists_commands`)


PAPER = Reads()
EVERYTHING = Reads(state=True, soft_on="always")


class Executor(Protocol):
    """A backend. `accepts_soft` is False where only text can be delivered (closed models); `sees_images` says whether
    it is to be shown the current view, `reads` what of a compilation. `batched` as in `compiler.records.Compiler`."""

    accepts_soft: bool
    sees_images: bool
    reads: Reads

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]: ...
