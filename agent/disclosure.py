"""Rule-based progressive disclosure: the alternative to compiling that the paper argues against (section 3.2.2).

Fixed triggers on observable words show pieces of memory, without learning and without an expert. At every step:

1. An entry is opened if its first line (the goal of its episode) shares at least `SHARED` words with the goal.
2. The pieces of an open entry are its other lines, with lines of actions split into `STRETCH` actions each. An entry of
   one line is one piece. Of a raw trajectory, the pieces are those of its commands and rationale.
3. A piece is disclosed if it shares at least `SHARED` words with goal and view together, and one with the goal (a thing
   with its number, "cabinet 2", counts as one word). At most `PIECES` are shown, those with the most shared words
   first, then in the order of M.
4. Rules update the Brief State, too: after which action a thing of the goal was last in view, and which action was
   repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from compiler.brief_state import BriefState, Create, Op, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from memory.trajectory import compact_text
from memory.words import fold_text

SHARED, PIECES, STRETCH = 2, 2, 3
_WORD = re.compile(r"[^\0-@\[-`{-\x7f]+(?: \d+)?")  # letters, beyond ASCII of any script
_PLAIN = frozenset(
    "a an the in on of to it is and or with from under at put find look examine place some them you your".split()
)


class RuleDisclosure:
    """A stateless `Compiler` whose guidance is the disclosed pieces, verbatim."""

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        emissions = [disclose(request) for request in requests]
        return [Compilation(render(e), e, request=r) for e, r in zip(emissions, requests, strict=True)]


def disclose(request: CompileRequest) -> Emission:
    """Write the emission: disclosed pieces as guidance, and the rules' notes as operations."""
    goal, view = words(request.goal), words(request.observation)
    shared = {piece: words(piece) & (goal | view) for piece in _pieces(request, goal)}
    fired = [piece for piece, common in shared.items() if len(common) >= SHARED and common & goal]
    shown = sorted(fired, key=lambda piece: -len(shared[piece]))[:PIECES]
    ops = _noted(request, request.state, goal) if request.state is not None else ()
    return Emission(" / ".join(shown), "", tuple(ops))


def words(text: str) -> frozenset[str]:
    """Return the content words; a numbered thing counts as itself and as its kind."""
    found = _WORD.findall(fold_text(text, pairs=True))
    return frozenset(w for word in found for w in (word, word.split()[0]) if w.split()[0] not in _PLAIN)


def _pieces(request: CompileRequest, goal: frozenset[str]) -> Iterator[str]:
    for entry in request.memory:
        heading, *lines = compact_text(entry.text).split("\n")
        if not lines:
            yield heading
        for line in lines if len(words(heading) & goal) >= SHARED else ():
            actions = line.split(" ; ")
            for start in range(0, len(actions), STRETCH):
                yield " ; ".join(actions[start : start + STRETCH])


def _noted(request: CompileRequest, state: BriefState, goal: frozenset[str]) -> Iterator[Op]:
    """Note the goal's things in view, and a repeated action."""
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
