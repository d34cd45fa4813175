"""Rule-based progressive disclosure: the alternative to compiling that the paper argues against (section 3.2.2).

Memory is shown piece by piece, as fixed triggers over what can be observed fire; nothing is learnt, and no expert is
asked. At every step:

1. An entry is opened where its first line (the goal it was written for) shares `SHARED` words with the goal or more.
2. The pieces of an open entry are its other lines, a line of actions in stretches of `STRETCH`. An entry of one line is
   a piece.
3. A piece is disclosed where it shares `SHARED` words or more with goal and view together, one of the goal's among them
   (a thing with its number, "cabinet 2", is a word of its own). Those that share most are shown, `PIECES` at most, of
   equal ones the first in M.
4. The Brief State is kept by rule, too: after which action a thing that the goal names was last in view, and which
   action was taken twice running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from compiler.brief_state import BriefState, Create, Op, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from memory.words import folded

SHARED, PIECES, STRETCH = 2, 2, 3
_WORD = re.compile(r"[^\0-@\[-`{-\x7f]+(?: \d+)?")  # letters, beyond ASCII of any script
_PLAIN = frozenset(
    "a an the in on of to it is and or with from under at put find look examine place some them you your".split()
)


class RuleDisclosure:
    """A `Compiler` whose guidance is the disclosed pieces, word for word. Stateless: b_t holds what it remembers."""

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = [disclose(request) for request in requests]
        return [Compilation(render(e), e, request=r) for e, r in zip(made, requests, strict=True)]


def disclose(request: CompileRequest) -> Emission:
    """Emit what the triggers of this step show, and what the rules note."""
    goal, view = words(request.goal), words(request.observation)
    shared = {piece: words(piece) & (goal | view) for piece in _pieces(request, goal)}
    fired = [piece for piece, common in shared.items() if len(common) >= SHARED and common & goal]
    shown = sorted(fired, key=lambda piece: -len(shared[piece]))[:PIECES]
    ops = _noted(request, request.state, goal) if request.state is not None else ()
    return Emission(" / ".join(shown), "", tuple(ops))


def words(text: str) -> frozenset[str]:
    """List the content words; a thing with its number counts as itself and as its kind."""
    found = _WORD.findall(folded(text, pairs=True))
    return frozenset(w for word in found for w in (word, word.split()[0]) if w.split()[0] not in _PLAIN)


def _pieces(request: CompileRequest, goal: frozenset[str]) -> Iterator[str]:
    for entry in request.memory:
        heading, *lines = entry.text.split("\n")
        if not lines:
            yield heading
        for line in lines if len(words(heading) & goal) >= SHARED else ():
            actions = line.split(" ; ")
            for start in range(0, len(actions), STRETCH):
                yield " ; ".join(actions[start : start + STRETCH])


def _noted(request: CompileRequest, state: BriefState, goal: frozenset[str]) -> Iterator[Op]:
    """Things of the goal that are in view now, and the action that changed nothing."""
    last = request.history[-1] if request.history else "the start"
    things = sorted(w for w in words(request.observation) if " " in w and w.split()[0] in goal)
    for thing in things:
        yield from _note(state, thing, f"in view after {last}")
    if len(request.history) > 1 and last.strip() and last == request.history[-2]:
        yield from _note(state, "repeated", last)


def _note(state: BriefState, key: str, value: str) -> Iterator[Op]:
    if (known := state.belief(key)) is None:
        yield Create(key, value)
    elif known != value:
        yield Update(key, value)
