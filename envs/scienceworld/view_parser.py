"""View parser of ScienceWorld: rooms with their things, containers with their contents, and the inventory."""

import re
from collections.abc import Iterator

from envs.command_reader import PlaceView, StepEffect

AGENT = "agent"
INVENTORY = "inventory"
_ROOM = re.compile(
    r"(?:This room is called|This outside location is called) the (?P<place>[a-z ]+)\. (?:In it|Here) *,? you see:"
)
_INSIDE = re.compile(r"Inside the (?P<place>[a-z0-9 ]+) is:")
_INVENTORY = re.compile(r"In your inventory, you see:")
_DOOR = re.compile(r"[Dd]oor to the (?P<room>[a-z ]+)")
_ARTICLE = re.compile(r"^(?:(?:an|a|the|A|An|The) )?(?:substance called )?")
_CONTENTS = re.compile(r" (?:In|On) the .+? (?:is|you see): (?P<contents>.*?)\.? *$")
_MOVED = re.compile(r"You (?:move|pour) the (?P<thing>[^.]+?) (?:to|into) the (?P<place>[^.]+)\.")
_EATEN = re.compile(r"The (?P<thing>[^.]+) was delicious\.")
_SWITCHED = re.compile(r"The (?P<thing>[^.]+) is now (?P<how>open|closed|activated|deactivated)\.")
_SWITCHES = {"open": "open", "closed": "close", "activated": "on", "deactivated": "off"}


def parse_views(text: str) -> Iterator[PlaceView]:
    """Yield the rooms and containers whose contents a text lists, outer ones first; an inventory is none."""
    for heading, lines in _blocks(text):
        yield PlaceView(heading, tuple(_name(line) for line in lines if _name(line)))
        for line in lines:
            yield from _inner(line)


def parse_inventory(text: str) -> tuple[str, ...] | None:
    """Return what an inventory lists; None without one, or if it lists the contents of a carried thing as well, which
    look the same."""
    if not (found := _INVENTORY.search(text)):
        return None
    lines = _lines(text[found.end() :])
    return None if any(line.endswith(":") for line in lines) else tuple(filter(None, map(_name, lines)))


def parse_doors(text: str) -> tuple[str, ...]:
    """Return the rooms to which a text lists doors."""
    return tuple(m["room"].strip() for m in _DOOR.finditer(text.partition("You also see:")[2]))


def parse_effect(answer: str) -> StepEffect | None:
    """Parse a step's effect on a thing; a move to the inventory takes it, one from there puts it down."""
    if moved := _MOVED.search(answer):
        if moved["thing"].startswith("contents of"):
            return None
        taken = moved["place"] == INVENTORY
        return StepEffect("take", moved["thing"]) if taken else StepEffect("put", moved["thing"], moved["place"])
    switched = _SWITCHED.search(answer)
    return StepEffect(_SWITCHES[switched["how"]], switched["thing"]) if switched else None


def parse_eaten(answer: str) -> str:
    """Return the thing that was eaten; "" if there is none."""
    eaten = _EATEN.search(answer)
    return eaten["thing"] if eaten else ""


def without(things: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return things without the one of that name, or whose name contains it: answers shorten "adult crocodile"."""
    words = set(name.split())
    place = next((i for i, thing in enumerate(things) if thing == name), None)
    if place is None:
        place = next((i for i, thing in enumerate(things) if words <= set(thing.split())), None)
    return things if place is None else things[:place] + things[place + 1 :]


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading of a text with the lines below it."""
    for form in (_ROOM, _INSIDE):
        for found in form.finditer(text):
            if found["place"] != INVENTORY:
                yield found["place"].strip(), _lines(text[found.end() :])


def _lines(text: str) -> list[str]:
    """Return the indented lines at the start of a text."""
    lines = text.split("\n")[1:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("\t")), len(lines))
    return [line.strip() for line in lines[:end]]


def _name(item: str) -> str:
    """Return the name in an item of a list; "" for nothing, and for the rest of an item that a comma has cut."""
    name = _ARTICLE.sub("", re.split(r"[.,(]| in the [a-z]+ stage|its terminal ", item.strip(), maxsplit=1)[0]).strip()
    return "" if name == "nothing" or name.startswith(("which ", "currently ")) else name


def _inner(item: str) -> Iterator[PlaceView]:
    """Yield the contents of a container that an item of a list describes, and of containers in it."""
    bracket = re.match(r"[^.,(]*\(containing (.*)\)", item)
    contents = bracket[1] if bracket else (m["contents"] if (m := _CONTENTS.search(item)) else "")
    if contents:
        parts = _split(contents)
        yield PlaceView(_name(item), tuple(name for part in parts if (name := _name(part))))
        for part in parts:
            yield from _inner(part)


def _split(contents: str) -> list[str]:
    """Split a list at commas outside brackets."""
    parts, depth = [""], 0
    for char in contents:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]
