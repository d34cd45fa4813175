"""Expert plans of EB-ALFRED: an annotation's demonstration in the benchmark's skills, and what is left of it.

An annotation (`json_2.1.0/<task>/pp/ann_<n>.json`) holds ALFRED's demonstration as actions on object ids
(`plan.low_actions`). Every interaction becomes one skill, and "find a THING" stands before it wherever the robot is not
before the thing. EmbodiedBench's Python imports this module: standard library and Python 3.9 only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PUT, DROP = "put down the object in hand", "drop the object in hand"
SKILLS = {
    "PickupObject": "pick up the {}",
    "OpenObject": "open the {}",
    "CloseObject": "close the {}",
    "ToggleObjectOn": "turn on the {}",
    "ToggleObjectOff": "turn off the {}",
    "SliceObject": "slice the {}",
}
NUMBERED = ("OpenObject", "CloseObject")  # their skills name an instance (Cabinet_2), all others a kind (Cabinet)
OPPOSITES = {"open": "close", "close": "open", "turn on": "turn off", "turn off": "turn on"}


@dataclass(frozen=True)
class Interaction:
    """One skill of a plan, and the thing to find before it."""

    skill: str  # "pick up the Mug"
    thing: str  # "Mug_2", as "find a Mug_2" names it; of a put, the receptacle
    before: frozenset[str]  # things before which the robot need not find `thing` again

    @property
    def verb(self) -> str:
        return verb_of(self.skill)[0]


@dataclass
class _State:
    """What a series of skills left behind, as far as their names tell."""

    held: str = ""
    near: str = ""  # the thing found last, unless it was in hand
    receptacle: str = ""  # where a put goes: the simulator forgets it after any skill but find, open and put
    open: frozenset[str] = frozenset()
    on: frozenset[str] = frozenset()
    inside: Mapping[str, str] = field(default_factory=dict)  # thing -> the open place into which it was put
    moved: frozenset[str] = frozenset()  # not where the plan has them, so nothing is known to be beside them

    def apply(self, skill: str, thing: str) -> None:
        """Update the state by a skill that worked on `thing`."""
        verb = verb_of(skill)[0]
        if verb == "find":
            self.receptacle, self.near = thing, "" if thing == self.held else thing
        elif verb == "pick up":
            self.held = thing
            self.inside = {other: place for other, place in self.inside.items() if other != thing}
        elif verb in ("put down", "drop"):
            self.moved = self.moved | {self.held} if verb == "drop" else self.moved - {self.held}
            if verb == "put down" and self.receptacle in self.open:
                self.inside = {**self.inside, self.held: self.receptacle}
            self.held = ""
        elif verb == "open":
            self.open |= {thing}
        elif verb == "close":
            self.open -= {thing}
        elif verb == "turn on":
            self.on |= {thing}
        elif verb == "turn off":
            self.on -= {thing}
        if verb not in ("find", "open", "put down"):
            self.receptacle = ""


def verb_of(skill: str) -> tuple[str, str]:
    """Split a skill into verb and thing: ("pick up", "Mug"); a put or drop has no thing. ("", ""): another text."""
    match = re.fullmatch(r"(find) an? (\S+)|(pick up|open|close|turn on|turn off|slice) the (\S+)", skill)
    if match:
        return match[1] or match[3], match[2] or match[4]
    verbs = {PUT: "put down", DROP: "drop"}
    return verbs.get(skill, ""), ""


def interactions(annotation: Mapping[str, Any], name: Callable[[str], str]) -> list[Interaction]:
    """Translate an annotation's demonstration; [] without one. `name` returns an object id's name in skills."""
    found: list[Interaction] = []
    opened = inside = ""  # the open container, and the thing found last in it
    for low in annotation.get("plan", {}).get("low_actions", ()):
        action = low["api_action"]
        kind = action["action"]
        if kind != "PutObject" and kind not in SKILLS:
            continue  # a step or a turn
        thing = name(action["receptacleObjectId" if kind == "PutObject" else "objectId"])
        skill = PUT if kind == "PutObject" else SKILLS[kind].format(thing if kind in NUMBERED else _kind(thing))
        found.append(Interaction(skill, thing, frozenset({thing, inside} if kind == "CloseObject" else {thing})))
        if kind in NUMBERED:
            opened, inside = (thing, thing) if kind == "OpenObject" else ("", "")
        elif opened:
            inside = thing
    return found


@dataclass
class Plan:
    """A demonstration that is being played, and what is left of it after the robot did something else.

    What the robot did beside the plan is put right first: a wrong thing in hand is dropped, what was opened, closed or
    switched is reset, and the plan continues from where the thing was last picked up.
    """

    steps: Sequence[Interaction]
    done: int = 0
    lost: bool = False  # something was sliced that the plan needs whole
    state: _State = field(default_factory=_State)
    sliced: set[str] = field(default_factory=set)

    def note(self, skill: str, worked: bool = True) -> None:
        """Follow a skill. After one that did not work, the robot finds the thing again before it does more there."""
        verb, thing = verb_of(skill)
        if not worked:
            self.state.near = ""
            self.state.receptacle = self.state.receptacle if verb in ("open", "put down") else ""
            return
        moved = set[str]()  # what was put where the plan does not have it
        if self.done < len(self.steps) and self._is_next(skill):
            step = self.steps[self.done]
            thing, self.done = step.thing, self.done + 1
        elif verb == "pick up":
            thing = self.state.near if _kind(self.state.near) == thing else thing
            self._go_back(thing, after=1)  # else it is dropped
        elif verb in ("put down", "drop"):
            self._go_back(self.state.held, after=0)
            moved = {self.state.held}
        elif verb == "slice":
            thing = self.state.near if _kind(self.state.near) == thing else thing
            used, cut = ({s.thing for s in steps} for steps in (self.steps, self._slices()))
            self.lost |= thing in used - cut
        if verb == "slice":
            self.sliced.add(thing)
        self.state.apply(skill, thing)
        self.state.moved |= moved
        while self.done < len(self.steps) and self._is_cut(self.steps[self.done]):
            self.done += 1

    def left(self) -> list[str] | None:
        """List the skills from here to the goal; None if the plan has none."""
        if self.lost or self.done == len(self.steps):
            return None
        state = _State(**vars(self.state))
        skills = self._repairs(state)
        for step in self.steps[self.done :]:
            if self._is_cut(step):
                continue
            place = state.inside.get(step.thing, "") if step.verb == "pick up" else ""
            shut = place != "" and place not in state.open
            skills += _with_find(_door("open", place), state) if shut else []
            skills += _with_find(step, state)
            skills += _with_find(_door("close", place), state) if shut else []
        return skills

    def _is_cut(self, step: Interaction) -> bool:
        return step.verb == "slice" and step.thing in self.sliced

    def _is_next(self, skill: str) -> bool:
        step = self.steps[self.done]
        if skill != step.skill:
            return False
        if step.verb == "put down":
            there = _kind(self.state.receptacle) == _kind(step.thing)
            return there and self.state.held == self._expected(self.done).held
        return step.verb not in ("pick up", "slice") or self.state.near in step.before

    def _slices(self) -> list[Interaction]:
        return [step for step in self.steps if step.verb == "slice"]

    def _go_back(self, thing: str, after: int) -> None:
        """Go on from the last time that the plan picked up `thing`, or from just after it."""
        for index in reversed(range(self.done)):
            if self.steps[index].verb == "pick up" and self.steps[index].thing == thing:
                self.done = index + after
                return

    def _expected(self, done: int) -> _State:
        """Return the state that the first steps of the plan leave."""
        state = _State()
        for step in self.steps[:done]:
            state.apply(step.skill, step.thing)
        return state

    def _repairs(self, state: _State) -> list[str]:
        """List the skills that put right what was done beside the plan, and apply them to `state`."""
        expected, skills = self._expected(self.done), list[str]()
        if state.held and state.held != expected.held:
            skills.append(DROP)
            state.apply(DROP, "")
        for step in {step.thing: step for step in self.steps if step.verb in OPPOSITES}.values():
            for now, wanted, undo, redo in (
                (state.open, expected.open, "close", "open"),
                (state.on, expected.on, "turn off", "turn on"),
            ):
                if (step.thing in now) != (step.thing in wanted):
                    skills += _with_find(_door(undo if step.thing in now else redo, step.thing), state)
        return skills


def _with_find(step: Interaction, state: _State) -> list[str]:
    """List a step's skill, after a find if the robot is not before its thing; apply them to `state`."""
    skills = [step.skill]
    ready = state.receptacle if step.verb == "put down" else state.near
    if ready not in step.before or (ready in state.moved and ready != step.thing):
        skills.insert(0, f"find a {step.thing}")
        state.apply(skills[0], step.thing)
    state.apply(step.skill, step.thing)
    return skills


def _door(verb: str, thing: str) -> Interaction:
    """Create the interaction that opens, closes or switches a thing."""
    named = thing if verb in ("open", "close") else _kind(thing)
    return Interaction(f"{verb} the {named}", thing, frozenset({thing}))


def _kind(thing: str) -> str:
    return thing.split("_")[0]
