"""Errands: household goals in ALFWorld's words, the subgoals they need, and the steps that past episodes show for them.

A subgoal is one of `find mug`, `heat mug`, `put mug in cabinet` and `use desklamp`. Places and things are written as
in views: `cabinet 3`, `mug 1`.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from envs.household.command_reader import PUT, TAKE, TREAT, USE

REFUSED = "Nothing happens"
LOOK, PLACE = "look", "put"  # kinds of errands beside the treatments heat, cool and clean
PLACES, UNSEARCHED = "places", "unsearched"  # beliefs that list a scene's places
HOLDING = "holding"  # belief: the thing in hand
_ADJECTIVES = {"hot": "heat", "cool": "cool", "clean": "clean"}
_IN = r"(?:in/on|in|on) (?:a |an |the )?(?P<target>[a-z]+)"
_GOALS = (
    re.compile(rf"(?:put|find) (?P<two>two) (?P<thing>[a-z]+) (?:and put them )?{_IN}"),
    re.compile(rf"put (?:a|an|some) (?:(?P<how>clean|hot|cool) )?(?P<thing>[a-z]+) {_IN}"),
    re.compile(rf"(?P<verb>heat|cool|clean) (?:a|an|some) (?P<thing>[a-z]+) and put it {_IN}"),
    re.compile(r"(?:look at|examine) (?:a |an |the )?(?P<thing>[a-z]+) (?:under|with) the (?P<target>[a-z]*lamp)"),
)
_LISTED = re.compile(r"Looking quickly around you, you see (?P<places>[^.]*)\.")
_SEEN = re.compile(
    r"(?:On the (?P<on>[a-z]+ \d+)|The (?P<open>[a-z]+ \d+) is open\. In it), you see (?P<things>[^.]*)\."
)
_CLOSED = re.compile(r"The (?P<place>[a-z]+ \d+) is closed\.")
_FACING = re.compile(r"You are facing the (?P<places>[^.]*)\.")
_NAME = re.compile(r"\b[a-z]+ \d+\b")
_AT = re.compile(r"(?:go to|open|close|examine|.* (?:from|to|in/on|in|on|with)) (?P<place>[a-z]+ \d+)")


@dataclass(frozen=True, slots=True)
class Errand:
    """What a goal asks for: a kind of thing, its treatment, and where it goes."""

    kind: str  # heat, cool, clean, `PLACE` or `LOOK`
    thing: str  # "mug"
    target: str  # the kind of place that receives it, or for `LOOK` the kind of lamp
    count: int = 1

    @property
    def subgoals(self) -> list[str]:
        """List the subgoals in order."""
        if self.kind == LOOK:
            return [f"find {self.thing}", f"use {self.target}"]
        treatment = [] if self.kind == PLACE else [f"{self.kind} {self.thing}"]
        return [f"find {self.thing}", *treatment, f"put {self.thing} in {self.target}"] * self.count


@dataclass(frozen=True, slots=True)
class Step:
    """A command of an episode that did a part of an errand."""

    verb: str  # take, heat, cool, clean, put or use
    thing: str
    place: str = ""

    @property
    def words(self) -> str:
        """Name the step by kinds: "cool pan with fridge"."""
        kind = kind_of(self.place)
        link = {"take": "", "put": f" in {kind}", "use": ""}.get(self.verb, f" with {kind}" if kind else "")
        return f"{self.verb} {self.thing}{link}"


@dataclass(frozen=True, slots=True)
class View:
    """What an answer shows of a place: its name, and its things; None where it is closed or not described.

    `facing` lists the places at the agent's location, where the answer names them.
    """

    place: str = ""
    closed: bool = False
    things: tuple[str, ...] | None = None
    facing: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[str]:
        """List the things of a kind in view."""
        return [thing for thing in self.things or () if kind_of(thing) == kind]


def read_errand(goal: str) -> Errand | None:
    """Parse a goal, with or without its scene; None for other wordings."""
    text = goal.split(": ", 1)[-1].strip().rstrip(".").lower()
    found = next((m for form in _GOALS if (m := form.fullmatch(text))), None)
    if found is None:
        return None
    parts = {"two": None, "how": None, "verb": None, **found.groupdict()}
    treatment = parts["verb"] or _ADJECTIVES.get(parts["how"] or "", PLACE)
    kind = LOOK if parts["target"].endswith("lamp") else treatment
    return Errand(kind, found["thing"], found["target"], 2 if parts["two"] else 1)


def steps_of(actions: Sequence[str]) -> list[Step]:
    """List the steps of an episode, without walks, looks and openings."""
    steps = list[Step]()
    for action in actions:
        if m := TAKE.fullmatch(action):
            steps.append(Step("take", m["thing"], m["place"]))
        elif m := PUT.fullmatch(action):
            steps.append(Step("put", m["thing"], m["place"]))
        elif (m := TREAT.match(action)) and m["verb"] != "slice":
            steps.append(Step(m["verb"], m["thing"], m["place"] or ""))
        elif m := USE.fullmatch(action):
            steps.append(Step("use", m["thing"]))
    return steps


def kind_of_episode(steps: Sequence[Step]) -> str:
    """Return the kind of errand that an episode did; "" for none."""
    verbs = [step.verb for step in steps]
    treatment = next((verb for verb in verbs if verb in _ADJECTIVES.values()), "")
    return treatment or (LOOK if "use" in verbs else PLACE if "put" in verbs else "")


def read_view(text: str) -> View:
    """Parse what an answer shows of the place in front of the agent."""
    if m := _SEEN.search(text):
        return View(m["on"] or m["open"], things=tuple(_NAME.findall(m["things"])))
    if m := _CLOSED.search(text):
        return View(m["place"], closed=True)
    facing = tuple(_NAME.findall(m["places"])) if (m := _FACING.search(text)) else ()
    return View(facing[0] if facing else "", facing=facing)


def listed_places(text: str) -> list[str]:
    """List the scene's places that a view of the room names."""
    listed = _LISTED.search(text)
    return _NAME.findall(listed["places"]) if listed else []


def place_notes(text: str) -> tuple[tuple[str, str], ...]:
    """Note the places that a view of the room lists: the first of each kind, and all that have not been searched, which
    are all. () without a list.

    Kinds of which there are few are to be searched first, so that a search soon covers most kinds.
    """
    places = listed_places(text)
    counts = Counter(map(kind_of, places))
    first = {kind_of(place): place for place in reversed(places)}
    unsearched = sorted(places, key=lambda place: counts[kind_of(place)])
    return ((PLACES, ", ".join(first[kind] for kind in counts)), (UNSEARCHED, ", ".join(unsearched))) if places else ()


def next_places(unsearched: Sequence[str], in_front: Collection[str]) -> list[str]:
    """Select the places to search next, in their order: the first of each kind, and those in front of the agent."""
    listed, kinds = list[str](), set[str]()
    for place in unsearched:
        if place in in_front:
            listed.append(place)
        elif kind_of(place) not in kinds:
            listed.append(place)
            kinds.add(kind_of(place))
    return listed


def shown_notes(notes: Mapping[str, str], in_front: Collection[str]) -> dict[str, str]:
    """Return a copy of an environment's notes whose list `unsearched` has only the places to search next."""
    listed = notes.get(UNSEARCHED, "")
    shown = {UNSEARCHED: ", ".join(next_places(listed.split(", "), in_front))} if listed else {}
    return {**notes, **shown}


def places_in_front(command: str, answer: str) -> set[str]:
    """Name the places that may be in front of the agent after a command."""
    view = read_view(answer)
    return {view.place, *view.facing, place_of(command)}


def changed_notes(notes: Mapping[str, str], command: str, answer: str) -> dict[str, str]:
    """Return the notes that an answer changes: the thing in hand, "" for none, and the places that were not searched,
    without the one whose content the answer shows."""
    changed, view, listed = dict[str, str](), read_view(answer), notes.get(UNSEARCHED, "").split(", ")
    if view.things is not None and view.place in listed:
        changed[UNSEARCHED] = ", ".join(place for place in listed if place != view.place)
    if answer.startswith(REFUSED):
        return changed
    if TAKE.fullmatch(command):
        changed[HOLDING] = taken_thing(command)
    elif PUT.fullmatch(command):
        changed[HOLDING] = ""
    return changed


def taken_thing(command: str) -> str:
    """Return the thing that a take command names: "mug 1" of "take mug 1 from shelf 2"."""
    return command.removeprefix("take ").split(" from ")[0]


def place_of(command: str) -> str:
    """Return the place that a command is carried out at; "" where it names none."""
    m = _AT.fullmatch(command)
    return m["place"] if m else ""


def kind_of(name: str) -> str:
    """Return the kind of a thing or place: "mug" of "mug 1"."""
    return name.split(" ")[0]
