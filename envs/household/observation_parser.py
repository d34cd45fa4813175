"""Observation parser of ALFWorld's texts, which generated homes share: agent position, hand, contents of places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from envs.base import Task
from envs.household.command_reader import ARRIVED, SOUGHT

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
class PlaceView:
    """A place in a text, and its visible contents (None: not listed)."""

    at: str
    seen: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class AgentState:
    """The agent's place and held item, as far as observations show them."""

    at: str = ""
    holds: str = ""

    def after(self, action: str, feedback: str) -> AgentState:
        """Return the state after a step."""
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
class StepEffect:
    """The effect of a step on a thing."""

    verb: str  # take, put, heat, cool, clean, slice, on, off
    thing: str
    place: str = ""


def parse_effect(feedback: str) -> StepEffect | None:
    """Parse a step's effect from the answer; None if there is none."""
    if found := _TAKEN.search(feedback):
        return StepEffect("take", found[1], found[2])
    if found := _PUT.search(feedback):
        return StepEffect("put", found[1], found[2])
    if found := _DONE.search(feedback):
        return StepEffect("slice", found[5]) if found[4] else StepEffect(found[1], found[2], found[3])
    if found := _SWITCHED.search(feedback):
        return StepEffect(found[1], found[2])
    return None


def parse_places(text: str) -> Iterator[PlaceView]:
    """Yield the places whose contents a text lists."""
    for place, content in _LISTED.findall(text):
        yield PlaceView(place, tuple(_ENTITY.findall(content)))


def parse_room(text: str) -> tuple[str, ...]:
    """Parse the places that a first view lists."""
    return tuple(entity for content in _ROOM.findall(text) for entity in _ENTITY.findall(content))


def moved_object(feedback: str) -> str:
    """Return the object that a step moved; "" if there is none."""
    done = parse_effect(feedback)
    return done.thing if done and done.verb in ("take", "put") else ""


def kind(entity: str) -> str:
    """Return an entity's category: "mug" for "mug 1"."""
    return re.sub(r" \d+$", "", entity)


def goal_objects(task: Task, known: Iterable[str] = ()) -> frozenset[str]:
    """Return the object category in a goal of ALFWorld; for another goal, the ones of `known` that it names."""
    goal = task.goal.lower()
    named = SOUGHT.search(goal)
    words = set(re.findall(r"[a-z]+", goal))
    return frozenset({named[1]} if named else words.intersection(known))


def state_summary(text: str, body: AgentState) -> str:
    """Write a state in canonical form (B.2.2): place, sorted visible entities, held item."""
    found = sorted({entity for view in parse_places(text) for entity in view.seen or ()} | set(parse_room(text)))
    seen = ", ".join(found) or " ".join(text.split())
    return f"at {body.at or 'start'} | sees: {seen} | {body.holding}"
