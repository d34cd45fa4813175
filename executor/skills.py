"""Programs of skills (KARMA, Appendix D): parsing, and progress through a program.

A program is planned once per task. Its progress follows from the actions of the episode alone: what was taken, put,
treated or switched, in the program's order. Leading skills (`GoToObject`, `Explore`) are done when the skill behind
them is possible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LEADING = ("GoToObject", "Explore")
COMMANDS = {  # ALFWorld's command for each skill; the paper's other skills have none
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
    """One call. `thing` and `place` are names (mug 1), kinds (mug), or alternative kinds (pen|mug)."""

    name: str
    thing: str
    place: str = ""

    @property
    def text(self) -> str:
        """Write the call."""
        return f"{self.name}({', '.join(filter(None, (self.thing, self.place)))})"

    @property
    def command(self) -> re.Pattern[str] | None:
        """Return a pattern of the skill's commands; None if it has none."""
        form = COMMANDS.get(self.name)
        if form is None:
            return None
        return re.compile(form.format(x=_named(self.thing), y=_named(self.place), any=_ANY))


def _named(thing: str) -> str:
    """Return a pattern of a name, or of a kind with any number."""
    kinds = (re.escape(each) if re.search(r"\d$", each) else rf"{re.escape(each)} \d+" for each in thing.split("|"))
    return f"(?:{'|'.join(kinds)})" if thing else _ANY


def read_program(lines: Sequence[str]) -> tuple[Skill, ...]:
    """Parse calls such as `PutObject(robot, "mug", "desk 1")`; ignore other text."""
    found = list[Skill]()
    for name, arguments in (call for line in lines for call in _CALL.findall(line)):
        named = [argument.strip(" \"'").lower() for argument in arguments.split(",")]
        named = [each for each in named if each and each != "robot"]
        if name in SKILLS and named:
            found.append(Skill(name, named[0], named[1] if len(named) > 1 else ""))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ProgramProgress:
    """Progress through a program."""

    leading: Skill | None  # the leading skill before the next deed
    deed: Skill | None  # the next skill that changes something; None at the end of the program
    since: tuple[str, ...]  # actions since the last deed
    put: frozenset[str]  # places where things were put


def program_progress(program: Sequence[Skill], history: Sequence[str], held: str) -> ProgramProgress:
    """Follow a program through the actions of the episode; `held` is the thing in hand."""
    at, put, leading = 0, set[str](), None
    for skill in program:
        if skill.name in LEADING:
            leading = skill
            continue
        form = skill.command
        done = next((n for n, action in enumerate(history[at:], at) if form and form.fullmatch(action)), None)
        in_hand = skill.name == "PickupObject" and re.fullmatch(_named(skill.thing), held)
        if done is None and not in_hand:
            return ProgramProgress(leading, skill, tuple(history[at:]), frozenset(put))
        if done is not None:
            found = form.fullmatch(history[done]) if form else None
            if found and skill.name == "PutObject":
                put.add(found["place"])
            at = done + 1
        leading = None
    return ProgramProgress(None, None, tuple(history[at:]), frozenset(put))
