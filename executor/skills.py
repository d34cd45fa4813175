"""Programs of skills (KARMA, Appendix D): how they are written, and the command that carries one on.

A program is planned once for a task and carried out without asking again. How far it is follows from the actions of the
episode alone: what was taken, put, treated or switched, in the program's order. Skills that only lead somewhere
(`GoToObject`, `Explore`) are done when the deed behind them is possible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LEADING = ("GoToObject", "Explore")
COMMANDS = {  # what does a deed, in ALFWorld's words; the paper's others have none there
    "PickupObject": r"take {x} from (?P<place>{any})",
    "PutObject": r"(?:move|put) {x} (?:to|in/on|in|on) (?P<place>{y})",
    "HeatObject": r"heat {x} with {any}",
    "CoolObject": r"cool {x} with {any}",
    "CleanObject": r"clean {x} with {any}",
    "SliceObject": r"slice {x} with {any}",
    "SwitchOn": r"use {x}",
    "ToggleOn": r"use {x}",
    "OpenObject": r"open {x}",
    "CloseObject": r"close {x}",
}
SKILLS = (*LEADING, *COMMANDS, "SwitchOff", "ToggleOff", "BreakObject", "ThrowObject")
_ANY = r"[a-z]+ \d+"
_CALL = re.compile(r"(\w+)\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class Skill:
    """One call. `thing` and `place` are names (mug 1), kinds (mug), or several kinds of which one serves (pen|mug)."""

    name: str
    thing: str
    place: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}({', '.join(filter(None, (self.thing, self.place)))})"

    @property
    def command(self) -> re.Pattern[str] | None:
        """Return what commands of this deed look like; None for one that no command does."""
        form = COMMANDS.get(self.name)
        if form is None:
            return None
        return re.compile(form.format(x=_named(self.thing), y=_named(self.place), any=_ANY))


def _named(thing: str) -> str:
    """Match a thing by its name, or by its kind whatever its number."""
    kinds = (re.escape(each) if re.search(r"\d$", each) else rf"{re.escape(each)} \d+" for each in thing.split("|"))
    return f"(?:{'|'.join(kinds)})" if thing else _ANY


def read_program(lines: Sequence[str]) -> tuple[Skill, ...]:
    """Read calls such as `PutObject(robot, "mug", "desk 1")`; what is no skill is left out."""
    found = list[Skill]()
    for name, arguments in (call for line in lines for call in _CALL.findall(line)):
        named = [argument.strip(" \"'").lower() for argument in arguments.split(",")]
        named = [each for each in named if each and each != "robot"]
        if name in SKILLS and named:
            found.append(Skill(name, named[0], named[1] if len(named) > 1 else ""))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a program is: the skill that leads on (None for none), the deed that is next (None: all are done), the
    actions since the last deed, and the places where things were put."""

    leading: Skill | None
    deed: Skill | None
    since: tuple[str, ...]
    put: frozenset[str]


def progress(program: Sequence[Skill], history: Sequence[str], held: str) -> Progress:
    """Follow a program through the actions of the episode; `held` is what is in hand now."""
    at, put, leading = 0, set[str](), None
    for skill in program:
        if skill.name in LEADING:
            leading = skill
            continue
        form = skill.command
        done = next((n for n, action in enumerate(history[at:], at) if form and form.fullmatch(action)), None)
        in_hand = skill.name == "PickupObject" and re.fullmatch(_named(skill.thing), held)
        if done is None and not in_hand:
            return Progress(leading, skill, tuple(history[at:]), frozenset(put))
        if done is not None:
            found = form.fullmatch(history[done]) if form else None
            if found and skill.name == "PutObject":
                put.add(found["place"])
            at = done + 1
        leading = None
    return Progress(None, None, tuple(history[at:]), frozenset(put))
