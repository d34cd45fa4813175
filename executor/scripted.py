"""A planner without a model, for ALFWorld's text world and generated homes.

It reads the rendered prompt and the admissible commands, and has no state between steps. So its use of memory can be
verified by hand, and the tables of memory systems take minutes on a CPU.

    take, treat and put   what the goal requires, as soon as a command for it is admissible
    where to look         first the place in the guidance; then this scene's places of the thing in the prompt (found on
                          visits, taken before, named by entries); then the other places in order, after the current one
    never                 actions that failed here before, and places of its last actions, according to the prompt
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.household.command_reader import PUT, SOUGHT, TAKE, USE
from envs.household.vocabulary import LAMP
from executor.prompt import ExecutorRequest, executor_text
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding

_PLACE, _GO = r"([a-z]+ \d+)", "go to "
_AT = re.compile(rf"(?:arrive at|On the|open the|The|from the|to the|with the|using the) {_PLACE}\b")
_GONE = re.compile(rf"\bgo to {_PLACE}")
_TAKEN = re.compile(rf"\btake [a-z]+ \d+ from {_PLACE}")
_FAILED = re.compile(r"^Failed here before: (.+)$", re.MULTILINE)
_TARGET = re.compile(r"\b(?:in|on) (?:the )?([a-z]+)\.?$")
_TREATED = {
    "clean": ("clean", "sinkbasin"),
    "heat": ("heat", "microwave"),
    "hot": ("heat", "microwave"),
    "cool": ("cool", "fridge"),
}
CHARACTERS = 4  # per token, to estimate token counts without a tokenizer


@dataclass(frozen=True, slots=True)
class GoalParts:
    """The requirements of a goal, in ALFWorld's words."""

    scene: str
    thing: str
    target: str = ""  # kind of place; "": examine the thing under the lamp
    treat: str = ""
    appliance: str = ""
    two: bool = False

    @classmethod
    def of(cls, stated: str) -> GoalParts:
        """Parse a goal, with or without its scene."""
        scene, _, goal = stated.removeprefix("in ").rpartition(": ") if stated.startswith("in ") else ("", "", stated)
        thing = m[1] if (m := SOUGHT.search(goal)) else ""
        treat, appliance = next((_TREATED[w] for w in goal.split() if w in _TREATED), ("", ""))
        target = "" if LAMP in goal else m[1] if (m := _TARGET.search(goal)) else ""
        return cls(
            scene=scene,
            thing=thing,
            target=target,
            treat=treat,
            appliance=appliance,
            two=" two " in f" {goal} ",
        )


@dataclass(slots=True)
class ScriptedPlanner:
    """An `Executor` that plans by rule."""

    reads: ExecutorView = PAPER_VIEW
    batched: bool = False
    accepts_soft: bool = False
    sees_images: bool = False

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        return [self._act(request) for request in requests]

    def hash(self) -> str:
        """Return a name instead of a hash of weights."""
        return "scripted"

    def _act(self, request: ExecutorRequest) -> Action:
        prompt, commands = executor_text(request, ""), request.admissible
        if commands is None:
            raise ValueError("the scripted planner needs an environment that lists its commands")
        action = planned(prompt, commands)
        estimate = lambda text: len(text) // CHARACTERS + 1
        return Action(action, Grounding.CHOICE, action, tokens_in=estimate(prompt), tokens_out=estimate(action))


def planned(prompt: str, commands: Sequence[str]) -> str:
    """Choose a command from the prompt."""
    before, _, view = prompt.rpartition("see: ")
    wanted = GoalParts.of(before.partition("\n")[0].removeprefix("goal: "))
    failed = {action for line in _FAILED.findall(before) for action in line.split("; ")}
    possible = [command for command in commands if command not in failed]
    at = m[-1] if (m := _AT.findall(view)) else ""
    held = next((c.removeprefix("examine ") for c in commands if re.fullmatch(rf"examine {wanted.thing} \d+", c)), "")
    chosen = _with(held, at, wanted, view=view, possible=possible) if held else _without(at, wanted, possible)
    if chosen:
        return chosen
    sought = wanted.thing if not held else LAMP if not wanted.target else ""
    places = [command.removeprefix(_GO) for command in possible if command.startswith(_GO)]
    if not sought:  # go to where the thing is treated or belongs
        kind = wanted.appliance if _untreated(at, wanted, view) else wanted.target
        places = [place for place in places if kind_and_number(place)[0] == kind] or places
        return f"{_GO}{min(places, key=kind_and_number)}" if places else "look"
    begins = not at or view.startswith(("You pick up", "You move", "You put"))
    return _search(before, sought, scene=wanted.scene, at=at, places=places, begins=begins)


def _with(held: str, at: str, wanted: GoalParts, view: str, possible: Sequence[str]) -> str:
    """Return the command that treats, puts or lights the thing in hand here; "" without one."""
    if not wanted.target:
        return next((c for c in possible if (m := USE.fullmatch(c)) and m["thing"] == LAMP), "")
    if _untreated(at, wanted, view):
        return next((c for c in possible if c.startswith(f"{wanted.treat} {held} with {wanted.appliance}")), "")
    puts = (c for c in possible if (m := PUT.fullmatch(c)) and m["kind"] == wanted.target and f" {held} " in c)
    return next(puts, "") or (f"open {at}" if at.startswith(wanted.target) and f"open {at}" in possible else "")


def _untreated(at: str, wanted: GoalParts, view: str) -> bool:
    """Return whether the thing in hand needs treatment: it was just picked up, or it is not at its target, and the view
    does not report the treatment."""
    if not wanted.treat or f"You {wanted.treat} the {wanted.thing}" in view:
        return False
    return "You pick up" in view or kind_and_number(at)[0] != wanted.target


def _without(at: str, wanted: GoalParts, possible: Sequence[str]) -> str:
    """Return the command that takes the thing or opens the place here; "" without one. In goals with two things, one at
    the target stays there."""
    takes = [m for c in possible if (m := TAKE.fullmatch(c)) and m["thing"] == wanted.thing]
    takes = [m for m in takes if not (wanted.two and kind_and_number(m["place"])[0] == wanted.target)]
    return takes[0][0] if takes else f"open {at}" if f"open {at}" in possible else ""


def _search(prompt: str, sought: str, scene: str, at: str, places: Sequence[str], begins: bool) -> str:
    """Go to the next place: first the places that the prompt names. `begins`: the search starts anew."""
    recent = _recent(prompt)
    been = {*_GONE.findall(recent)}.difference(_TAKEN.findall(recent)) | {at}  # where one was taken may be another
    facts = [place for place in dict.fromkeys(_facts(prompt, sought, scene)) if place in places or place == at]
    later = facts if begins else facts[facts.index(at) + 1 :] if at in facts else []
    guided = m[1] if (m := re.search(rf"^guide: .*\bgo to {_PLACE}$", prompt, re.MULTILINE)) else ""
    listed = sorted({*places, at} - {"", *facts} | ({at} if at and at not in facts else set()), key=kind_and_number)
    start = listed.index(at) + 1 if at in listed else 0
    rest = [*listed[start:], *listed[:start]]
    turns = [*([guided] if guided in places else []), *later, *rest, *facts]
    fresh = [place for place in turns if place not in been] or [place for place in turns if place != at]
    return f"{_GO}{fresh[0]}" if fresh else "look"


def _recent(prompt: str) -> str:
    """Return the parts of a prompt with recent actions: its own, and those of steps that memory shows."""
    did = re.findall(r"^did: .*$", prompt, re.MULTILINE)
    return "\n".join([*did, *re.findall(r"Action: .*$", prompt, re.MULTILINE)])


def _facts(prompt: str, sought: str, scene: str) -> list[str]:
    """List the places of the thing in this scene according to the prompt, the most reliable source first."""
    room = "\n".join(re.findall(rf"^In {re.escape(scene)}: .*$", prompt, re.MULTILINE))
    entries = "\n".join(re.findall(rf"^in {re.escape(scene)}: .*\n((?:.+\n?)*)", prompt, re.MULTILINE))
    patterns = m[1] if (m := re.search(r"^Room Successful Patterns:\n((?:.+\n?)*)", prompt, re.MULTILINE)) else ""
    return [
        *re.findall(rf"\b{sought} \d+ is in {_PLACE}", prompt),
        *re.findall(rf"\b{sought} in {_PLACE} \(", room),
        *re.findall(rf"take {sought} \d+ from {_PLACE}", f"{patterns}\n{entries}"),
        *re.findall(rf"\bin {re.escape(scene)} the {sought} was in {_PLACE}", prompt),
        *re.findall(rf"^\[in {re.escape(scene)}, [^\]]*at {_PLACE}\] .*\b{sought} \d", prompt, re.MULTILINE),
    ]


def kind_and_number(place: str) -> tuple[str, int]:
    """Split a place into kind and number, the order of places."""
    kind, _, number = place.rpartition(" ")
    return kind, int(number) if number.isdecimal() else 0
