"""Observation parser of ALFWorld's texts, which generated homes share: effects of steps, contents of places, hand."""

from __future__ import annotations

import re
from collections.abc import Iterator

from envs.command_reader import PlaceView, StepEffect

_PLACE = r"[a-z]+ \d+"
_LISTED = re.compile(rf"(?:On the|The) ({_PLACE})(?:, you see| is open\. In it, you see) ([^.]*)\.")
_ROOM = re.compile(r"Looking quickly around you, you see ([^.]*)\.")
_ENTITY = re.compile(rf"\b({_PLACE})")
_TAKEN = re.compile(rf"You pick up the ({_PLACE}) from the ({_PLACE})\.")
_PUT = re.compile(rf"You (?:move|put) the ({_PLACE}) (?:to|in/on|in|on) the ({_PLACE})\.")
_DONE = re.compile(
    rf"You (heat|cool|clean) the ({_PLACE}) using the ({_PLACE})\."
    rf"|You (slice)d the ({_PLACE}) with(?: the ({_PLACE}))?"
)
_SWITCHED = re.compile(rf"You turn (on|off) the ({_PLACE})\.")
_CARRYING = re.compile(rf"You are carrying: (?:a |an )?({_PLACE})\.")
EMPTY = "You are not carrying anything."
# Games before alfworld 0.4 name a location ("loc 4") where others name the place, which the view names, too.
ARRIVED = re.compile(rf"You arrive at (?:loc \d+\. (?:On the|The) )?(?!loc \d)(?P<place>{_PLACE})\b")


def parse_effect(feedback: str) -> StepEffect | None:
    """Parse a step's effect from the answer; None if there is none."""
    if found := _TAKEN.search(feedback):
        return StepEffect("take", found[1], found[2])
    if found := _PUT.search(feedback):
        return StepEffect("put", found[1], found[2])
    if found := _DONE.search(feedback):
        return StepEffect("slice", found[5], found[6] or "") if found[4] else StepEffect(found[1], found[2], found[3])
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


def parse_carried(text: str) -> tuple[str, ...] | None:
    """Parse what an answer says is carried; None if it does not say."""
    if carried := _CARRYING.search(text):
        return (carried[1],)
    return () if EMPTY in text else None
