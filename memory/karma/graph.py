"""Long-term memory: a scene graph of one floor, its areas, and the fixed objects in them (KARMA, section 3.3).

Areas are the cells of a grid over the reachable positions, without empty cells. An object belongs to the area with the
nearest centre. Areas that share a side are adjacent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from envs.base import FloorPlan, Position

HEAD = "Areas of this home:"
ELSEWHERE = "elsewhere"  # area of objects without a position
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
    """The areas of one floor."""

    areas: tuple[Area, ...] = ()

    @property
    def text(self) -> str:
        """Serialise all areas for a prompt; "" without areas."""
        return "\n".join([HEAD, *(area.text for area in self.areas)]) if self.areas else ""

    def area_of(self, thing: str) -> str:
        """Return the name of an object's area; "" if no area contains it."""
        return next((area.name for area in self.areas if thing in area.contains), "")

    def hops(self, start: str) -> dict[str, int]:
        """Return the number of hops from one area to each reachable area; {} for an isolated area."""
        graph = nx.Graph((area.name, other) for area in self.areas for other in area.adjacent)
        return dict(nx.single_source_shortest_path_length(graph, start)) if start in graph else {}


def read_graph(text: str) -> SceneGraph:
    """Parse the areas in a prompt's text."""
    found = [m for line in text.splitlines() if (m := _AREA.match(line))]
    return SceneGraph(tuple(Area(m[1], _position(m[4]), _names(m[2]), _names(m[3])) for m in found))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    x, y, z = map(float, text.split(", "))
    return x, y, z


def build_graph(plan: FloorPlan, grid: int = 3) -> SceneGraph:
    """Build the scene graph of a floor plan.

    The grid covers the reachable positions, or the objects where the plan gives no reachable positions.
    """
    placed = {name: at for name, at in plan.things.items() if at is not None}
    cells = _cells(plan.reachable or tuple(placed.values()), grid)
    names = {cell: f"area {number}" for number, cell in enumerate(sorted(cells), start=1)}
    contained = dict[str, list[str]]()
    for thing, at in placed.items():
        nearest = min(cells, key=lambda cell: (_distance(cells[cell], at), cell))
        contained.setdefault(names[nearest], []).append(thing)
    beside = lambda x, z: [names[c] for c in ((x - 1, z), (x, z - 1), (x, z + 1), (x + 1, z)) if c in names]
    areas = [
        Area(name, cells[cell], tuple(contained.get(name, ())), tuple(beside(*cell))) for cell, name in names.items()
    ]
    lost = tuple(thing for thing, at in plan.things.items() if at is None)
    return SceneGraph((*areas, Area(ELSEWHERE, None, lost, ())) if lost else tuple(areas))


def _cells(ground: Iterable[Position], grid: int) -> dict[tuple[int, int], Position]:
    """Return the centres of the grid cells of the bounding box that hold a position, by (column, row)."""
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
