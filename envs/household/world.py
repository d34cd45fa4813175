"""What a household game is: the facts that never change (`Game`) and the few that do (`State`).

Both the reader of real ALFWorld games (`envs.alfworld.games`) and the scene generator (`generate.py`) build a `Game`;
the engine, the expert and the renderer read nothing else. Items and receptacles are numbered in the order in which
ALFWorld lists them, and sets of items are Python integers used as bit masks (bit i = item i), so that a state is copied
in about a microsecond and a list "in order" is simply the bits from low to high.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from envs.base import FloorPlan, Position

# Task types, as ALFWorld names them.
SIMPLE = "pick_and_place_simple"
CLEAN = "pick_clean_then_place_in_recep"
HEAT = "pick_heat_then_place_in_recep"
COOL = "pick_cool_then_place_in_recep"
LOOK = "look_at_obj_in_light"
TWO = "pick_two_obj_and_place"
KINDS = (SIMPLE, LOOK, CLEAN, HEAT, COOL, TWO)

# What has to be done to an object before it is placed, by task type: the verb, and the receptacle types that do it.
TREATMENTS = {CLEAN: "clean", HEAT: "heat", COOL: "cool"}
APPLIANCES = {"clean": ("sinkbasin", "sink"), "heat": ("microwave",), "cool": ("fridge",)}

# What ALFWorld's PDDL says of items: what each allows for good, and the mask of `State` that a changing fact goes into.
FLAGS = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
CONDITIONS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "toggled"}

NOWHERE = -1  # location of a receptacle that nobody can walk to; "no item" where an item is expected


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place things lie in or on. `location` is where the agent stands to use it (several may share one)."""

    name: str  # "cabinet 3"
    type: str  # "cabinet"
    openable: bool
    location: int
    position: Position | None = field(default=None, compare=False)  # no rule and no text depends on it


@dataclass(frozen=True, slots=True)
class Item:
    """An object. `inside` names the items a receptacle object holds; None for an object that holds nothing ever."""

    name: str  # "mug 1"
    type: str  # "mug"
    pickupable: bool = True
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    sliceable: bool = False
    toggleable: bool = False
    inside: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What makes the task done; `kind` says how the other fields read (see `engine.Engine.conditions`)."""

    kind: str
    item_type: str
    receptacle_type: str = ""  # where to; "" for look_at_obj_in_light
    lamp_type: str = ""  # only for look_at_obj_in_light

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown task type {self.kind!r}; known are {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Wording:
    """The phrases in which released games differ. The defaults are those of ALFWorld 0.4."""

    put: str = "move {o} to {r}"
    put_feedback: str = "You move the {o} to the {r}."
    arrive: str = "You arrive at {r}."  # {l} is the name of the location
    help: str = (  # "" in games that have no such command
        "Available commands:\n"
        "  look:                             look around your current location\n"
        "  inventory:                        check your current inventory\n"
        "  go to (receptacle):               move to a receptacle\n"
        "  open (receptacle):                open a receptacle\n"
        "  close (receptacle):               close a receptacle\n"
        "  take (object) from (receptacle):  take an object from a receptacle\n"
        "  move (object) to (receptacle):  place an object in or on a receptacle\n"
        "  examine (something):              examine a receptacle or an object\n"
        "  use (object):                     use an object\n"
        "  heat (object) with (receptacle):  heat an object using a receptacle\n"
        "  clean (object) with (receptacle): clean an object using a receptacle\n"
        "  cool (object) with (receptacle):  cool an object using a receptacle\n"
        "  slice (object) with (object):     slice an object using a sharp object\n"
    )


@dataclass(slots=True)
class State:
    """Everything that changes in a game. Mutable and small; `copy` is how a planner or a test branches.

    An item can be in two receptacles at once, and its recorded location need not be its receptacle's: real games hold
    such contradictions and TextWorld shows them, so we keep them too.
    """

    location: int
    contents: list[int]  # by receptacle: the mask of items in it
    taken: list[int]  # by receptacle: TextWorld's remembered "not in receptacle"
    standing: list[int]  # by location: TextWorld's objectAtLocation
    held: int = NOWHERE
    opened: int = 0  # mask over receptacles; all masks below are over items
    hot: int = 0
    cool: int = 0
    clean: int = 0
    sliced: int = 0
    toggled: int = 0

    @classmethod
    def empty(cls, location: int, receptacles: int, locations: int) -> Self:
        return cls(location, [0] * receptacles, [0] * receptacles, [0] * locations)

    def copy(self) -> Self:
        return replace(self, contents=self.contents[:], taken=self.taken[:], standing=self.standing[:])


@dataclass(frozen=True)
class Game:
    """One game: its places and things, how it starts, what is asked and how it speaks. Never changed once built."""

    receptacles: tuple[Receptacle, ...]
    items: tuple[Item, ...]
    start: State
    goal: Goal
    task: str  # the task sentence without its full stop, e.g. "put a hot mug in cabinet"
    can_contain: frozenset[tuple[str, str]]  # (receptacle type, item type)
    wording: Wording = field(default_factory=Wording)
    locations: tuple[str, ...] = ()  # names of the agent's places ("loc 3"), where the wording needs them
    reachable: tuple[Position, ...] = field(default=(), compare=False)  # where the agent can stand, where that is known

    @property
    def plan(self) -> FloorPlan:
        """Return what does not move: receptacles that one can walk to, and where one can stand."""
        return FloorPlan({r.name: r.position for r in self.receptacles if r.location != NOWHERE}, self.reachable)

    def places(self, item: int, state: State) -> list[int]:
        """Return the receptacles an item is in (usually one, none while it is held)."""
        bit = 1 << item
        return [r for r, mask in enumerate(state.contents) if mask & bit]


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, from low to high."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
