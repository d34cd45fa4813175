"""A household game: its constant facts (`Game`) and its changing ones (`State`).

`envs.alfworld.games` and `generate.py` build games; engine, expert and renderer read them. Items and receptacles are
numbered in ALFWorld's order of listing. Sets of items are bit masks (bit i: item i), so that a copy of a state takes
about a microsecond.
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

# Treatment of an object before it is placed, by task type, and the receptacle types that perform it.
TREATMENTS = {CLEAN: "clean", HEAT: "heat", COOL: "cool"}
APPLIANCES = {"clean": ("sinkbasin", "sink"), "heat": ("microwave",), "cool": ("fridge",)}

# ALFWorld's PDDL predicates of items: constant flags, and the `State` mask of each changing fact.
FLAGS = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
CONDITIONS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "toggled"}

NOWHERE = -1  # location of an unreachable receptacle; as an item: none


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place that holds things. `location` is the agent's location to use it, which several may share."""

    name: str  # "cabinet 3"
    type: str  # "cabinet"
    openable: bool
    location: int
    position: Position | None = field(default=None, compare=False)  # affects no rule and no text


@dataclass(frozen=True, slots=True)
class Item:
    """An object. `inside` lists the items in a receptacle object; None for other objects."""

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
    """The goal of a task; `kind` determines the meaning of the other fields (`engine.Engine.progress`)."""

    kind: str
    item_type: str
    receptacle_type: str = ""  # destination; "" for look_at_obj_in_light
    lamp_type: str = ""  # only for look_at_obj_in_light

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown task type {self.kind!r}; known are {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Wording:
    """Phrases in which releases differ; the defaults are ALFWorld 0.4's."""

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


# The phrases of games before alfworld 0.4, as the script by which it updated its games shows them.
BEFORE_0_4 = Wording(
    put="put {o} in/on {r}", put_feedback="You put the {o} in/on the {r}.", arrive="You arrive at {l}.", help=""
)


@dataclass(slots=True)
class State:
    """All changing facts of a game; mutable.

    As in real games, an item can be in two receptacles at once, or at another location than its receptacle's.
    """

    location: int
    contents: list[int]  # by receptacle: the mask of items in it
    taken: list[int]  # by receptacle: TextWorld's explicit "not in receptacle" facts
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
    """One game: places, things, start, goal and wording. Immutable."""

    receptacles: tuple[Receptacle, ...]
    items: tuple[Item, ...]
    start: State
    goal: Goal
    task: str  # the task sentence without its full stop, e.g. "put a hot mug in cabinet"
    can_contain: frozenset[tuple[str, str]]  # (receptacle type, item type)
    wording: Wording = field(default_factory=Wording)
    locations: tuple[str, ...] = ()  # names of locations ("loc 3"), if the wording uses them
    reachable: tuple[Position, ...] = field(default=(), compare=False)  # known positions of the agent

    @property
    def plan(self) -> FloorPlan:
        """Return the fixed layout: reachable receptacles, and positions of the agent."""
        return FloorPlan({r.name: r.position for r in self.receptacles if r.location != NOWHERE}, self.reachable)

    def places(self, item: int, state: State) -> list[int]:
        """Return the receptacles that hold an item: usually one, none while the agent holds it."""
        bit = 1 << item
        return [r for r, mask in enumerate(state.contents) if mask & bit]


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of set bits, from low to high."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
