"""Long-term memory: a scene graph of what does not move, floor, areas and objects (KARMA, section 3.3).

Areas are the squares of a grid over what is reachable, without those in which nobody can stand. Each object belongs to
the area whose centre is nearest; areas that share a side are navigable from each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from envs.base import FloorPlan, Position

HEAD = "Areas of this home:"
ELSEWHERE = "elsewhere"  # of things whose position nobody knows
_AREA = re.compile(
    r"^(area \d+|elsewhere): type Area, contains \[(.*?)\], adjacent \[(.*?)\], position (?:\[(.*?)\]|none)$"
)


@dataclass(frozen=True, slots=True)
class Area:
    name: str
    position: Position | None
    contains: tuple[str, ...]
    adjacent: tuple[str, ...]

    @property
    def text(self) -> str:
        at = "none" if self.position is None else f"[{', '.join(f'{x:.2f}' for x in self.position)}]"
        lists = f"contains [{', '.join(self.contains)}], adjacent [{', '.join(self.adjacent)}]"
        return f"{self.name}: type Area, {lists}, position {at}"


@dataclass(frozen=True, slots=True)
class SceneGraph:
    """One floor with its areas; `things` says where the objects stand."""

    areas: tuple[Area, ...] = ()
    things: tuple[tuple[str, Position | None], ...] = ()

    @property
    def text(self) -> str:
        """Serialise the areas whole, as every prompt holds them; "" for none."""
        return "\n".join([HEAD, *(area.text for area in self.areas)]) if self.areas else ""

    def only(self, things: Iterable[str]) -> SceneGraph:
        """Return the graph as it is for someone who has visited no more than these."""
        known = frozenset(things)
        areas = (Area(a.name, a.position, tuple(t for t in a.contains if t in known), a.adjacent) for a in self.areas)
        return SceneGraph(tuple(areas), tuple(thing for thing in self.things if thing[0] in known))

    def area_of(self, thing: str) -> str:
        return next((area.name for area in self.areas if thing in area.contains), "")

    def hops(self, start: str) -> dict[str, int]:
        """Count the steps from one area to each other one that can be reached; {} from nowhere."""
        graph = nx.Graph((area.name, other) for area in self.areas for other in area.adjacent)
        return dict(nx.single_source_shortest_path_length(graph, start)) if start in graph else {}


def read_graph(text: str) -> SceneGraph:
    """Read the areas from a prompt's text, wherever in it; where the objects stand it does not say."""
    found = [m for line in text.splitlines() if (m := _AREA.match(line))]
    areas = tuple(Area(m[1], _position(m[4]), _names(m[2]), _names(m[3])) for m in found)
    return SceneGraph(areas, tuple((thing, None) for area in areas for thing in area.contains))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    x, y, z = map(float, text.split(", "))
    return x, y, z


def build_graph(plan: FloorPlan, grid: int = 3, radius: float | None = None) -> SceneGraph:
    """Lay the grid over where one can stand (or, where nobody knows that, over the objects), and each object into the
    area whose centre is nearest, if that is within `radius` metres."""
    placed = {name: at for name, at in plan.things.items() if at is not None}
    ground = plan.reachable or tuple(placed.values())
    cells = _cells(ground, grid)
    names = {cell: f"area {number}" for number, cell in enumerate(sorted(cells), start=1)}
    homes = dict[str, list[str]]()
    for thing, at in placed.items():
        cell = min(cells, key=lambda c: (_distance(cells[c], at), c))
        if radius is None or _distance(cells[cell], at) <= radius:
            homes.setdefault(names[cell], []).append(thing)
    beside = lambda x, z: [names[c] for c in ((x - 1, z), (x, z - 1), (x, z + 1), (x + 1, z)) if c in names]
    areas = [Area(name, cells[cell], tuple(homes.get(name, ())), tuple(beside(*cell))) for cell, name in names.items()]
    lost = tuple(thing for thing, at in plan.things.items() if at is None)
    areas += [Area(ELSEWHERE, None, lost, ())] if lost else []
    return SceneGraph(tuple(areas), tuple(plan.things.items()))


def _cells(ground: Iterable[Position], grid: int) -> dict[tuple[int, int], Position]:
    """Return the squares of the bounding box in which one can stand, with their centres."""
    points = [(x, z) for x, _, z in ground]
    if not points:
        return {}
    low = [min(axis) for axis in zip(*points, strict=True)]
    side = [(max(axis) - start) / grid for axis, start in zip(zip(*points, strict=True), low, strict=True)]
    number = lambda value, axis: min(grid - 1, int((value - low[axis]) / side[axis])) if side[axis] else 0
    centre = lambda n, axis: round(low[axis] + (n + 0.5) * side[axis], 2)
    cells = {(number(x, 0), number(z, 1)) for x, z in points}
    return {(x, z): (centre(x, 0), 0.0, centre(z, 1)) for x, z in cells}


def _distance(one: Position, other: Position) -> float:
    return math.hypot(one[0] - other[0], one[2] - other[2])
