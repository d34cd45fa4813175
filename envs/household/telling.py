"""What text tells: where the agent stands, what it holds, what is where, and what a task is about.

Read is the wording of ALFWorld's text world, which generated homes share; other text gives nothing to be read. Nothing
comes from the simulator's own state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from envs.base import Task
from envs.household.trajectories import ARRIVED, SOUGHT

Relation = tuple[str, str]  # object with its number, receptacle
_PLACE = r"[a-z]+ \d+"
_LISTED = re.compile(rf"(?:On the|The) ({_PLACE})(?:, you see| is open\. In it, you see) ([^.]*)\.")
_ROOM = re.compile(r"Looking quickly around you, you see ([^.]*)\.")
_ENTITY = re.compile(rf"\b({_PLACE})")
_TAKEN = re.compile(rf"You pick up the ({_PLACE}) from the ({_PLACE})\.")
_PUT = re.compile(rf"You (?:move|put) the ({_PLACE}) (?:to|in/on|in|on) the ({_PLACE})\.")
_DONE = re.compile(rf"You (heat|cool|clean) the ({_PLACE}) using the ({_PLACE})\.|You (slice)d the ({_PLACE}) with")
_SWITCHED = re.compile(rf"You turn (on|off) the ({_PLACE})\.")
_CARRYING = re.compile(rf"You are carrying: (?:a |an )?({_PLACE})\.")
EMPTY = "You are not carrying anything."
_GONE = re.compile(rf"go to ({_PLACE})")


@dataclass(frozen=True, slots=True)
class View:
    """One text: the place that it is about, and what is seen there (None where it does not list a place)."""

    at: str
    seen: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Body:
    """Where the agent stands and what it holds, as far as it was told."""

    at: str = ""
    holds: str = ""

    def after(self, action: str, feedback: str) -> Body:
        """Return it after a step."""
        body = self
        if arrived := ARRIVED.search(feedback) or (not feedback.startswith("Nothing") and _GONE.fullmatch(action)):
            body = replace(body, at=arrived[1])
        if taken := _TAKEN.search(feedback):
            return replace(body, holds=taken[1])
        if carried := _CARRYING.search(feedback):
            return replace(body, holds=carried[1])
        if _PUT.search(feedback) or EMPTY in feedback:
            return replace(body, holds="")
        return body

    @property
    def holding(self) -> str:
        return f"holding {self.holds}" if self.holds else "holding nothing"


@dataclass(frozen=True, slots=True)
class Deed:
    """What a step did to a thing: took it from a place, put it in one, heated, cooled or cleaned it there, sliced it,
    turned it on or off."""

    verb: str  # take, put, heat, cool, clean, slice, on, off
    thing: str
    place: str = ""


def deed(feedback: str) -> Deed | None:
    """Read from what the world answered what was done; None for nothing."""
    if found := _TAKEN.search(feedback):
        return Deed("take", found[1], found[2])
    if found := _PUT.search(feedback):
        return Deed("put", found[1], found[2])
    if found := _DONE.search(feedback):
        return Deed("slice", found[5]) if found[4] else Deed(found[1], found[2], found[3])
    if found := _SWITCHED.search(feedback):
        return Deed(found[1], found[2])
    return None


def views(text: str) -> Iterator[View]:
    """List the places whose content a text tells."""
    for place, content in _LISTED.findall(text):
        yield View(place, tuple(_ENTITY.findall(content)))


def room(text: str) -> tuple[str, ...]:
    """List what a first view says that the room holds."""
    return tuple(entity for content in _ROOM.findall(text) for entity in _ENTITY.findall(content))


def moved(feedback: str) -> str:
    """Return the object that a step moved; "" for none."""
    done = deed(feedback)
    return done.thing if done and done.verb in ("take", "put") else ""


def kind(entity: str) -> str:
    """Return an entity's category: "mug" for "mug 1"."""
    return re.sub(r" \d+$", "", entity)


def objects(task: Task, known: Iterable[str] = ()) -> frozenset[str]:
    """Return the object category that a goal in ALFWorld's words is about; of another goal, whichever of `known` it
    names."""
    goal = task.goal.lower()
    named = SOUGHT.search(goal)
    words = set(re.findall(r"[a-z]+", goal))
    return frozenset({named[1]} if named else words.intersection(known))


def summary(text: str, body: Body) -> str:
    """Write a state in canonical form (B.2.2): place, what is seen in order of names, what is held."""
    found = sorted({entity for view in views(text) for entity in view.seen or ()} | set(room(text)))
    seen = ", ".join(found) or " ".join(text.split())
    return f"at {body.at or 'start'} | sees: {seen} | {body.holding}"
