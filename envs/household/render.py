"""Renderer of the current view: a floor plan of 8x8 cells with one receptacle per cell.

A receptacle's name determines its cell. A cell shows the receptacle's type (colour), whether it is open (dark inside),
the agent (white dot), the visible things at the agent's location (small coloured dots) and the mark (frame).
"""

import colorsys
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from envs.household.engine import Engine
from envs.household.vocabulary import PLACES
from envs.household.world import State, bits

if TYPE_CHECKING:
    from PIL.Image import Image

GRID, CELL = 8, 8  # the plan has GRID x GRID cells of CELL x CELL pixels
_TYPES = tuple(PLACES)
RECEPTACLE_NAMES = tuple(f"{kind} {number}" for kind, count in PLACES.items() for number in range(1, count + 1))

BACKGROUND = (24, 24, 28)
MARK = (255, 0, 255)  # no other colour resembles it: see `_colour`
AGENT = (255, 255, 255)
_INSIDE = (8, 8, 8)


class Renderer:
    """Renderer of one game's states."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        game = engine.game
        self.cells = cells_of([receptacle.name for receptacle in game.receptacles])
        self._item_colours = [_colour(_hash_fraction(item.type), 0.9, 1.0) for item in game.items]
        self._plan = floor_plan({cell: game.receptacles[index].type for index, cell in self.cells.items()})

    def draw(self, state: State, marked: int | None = None) -> "Image":
        """Draw the view of a state, with a mark around receptacle `marked`."""
        pixels = self._plan.copy()
        for index in bits(state.opened):
            if index in self.cells:
                draw_open(pixels, self.cells[index])
        for index in self._engine.here(state):
            if index in self.cells:
                shown = bits(state.contents[index]) if self._engine.is_open(state, index) else ()
                draw_agent(pixels, self.cells[index], [self._item_colours[item] for item in shown])
        if marked is not None and marked in self.cells:
            draw_mark(pixels, self.cells[marked])
        return picture(pixels)


def floor_plan(types: Mapping[int, str]) -> np.ndarray:
    """Draw closed receptacles, given as types by cell, without an agent; (64, 64, 3) bytes."""
    pixels = np.full((GRID * CELL, GRID * CELL, 3), BACKGROUND, dtype=np.uint8)
    for cell, kind in types.items():
        top, left = _corner(cell)
        pixels[top + 1 : top + 7, left + 1 : left + 7] = _receptacle_colour(kind)
    return pixels


def draw_open(pixels: np.ndarray, cell: int) -> None:
    """Draw a cell's receptacle open."""
    top, left = _corner(cell)
    pixels[top + 2 : top + 6, left + 2 : left + 6] = _INSIDE


def draw_agent(pixels: np.ndarray, cell: int, things: Sequence[tuple[int, int, int]]) -> None:
    """Draw the agent at a cell, and the colours of the first six things there in two rows."""
    top, left = _corner(cell)
    for slot, colour in enumerate(things[:6]):
        row, column = top + 2 + slot // 3, left + 1 + 2 * (slot % 3)
        pixels[row, column : column + 2] = colour
    pixels[top + 4 : top + 7, left + 3 : left + 5] = AGENT


def draw_mark(pixels: np.ndarray, cell: int) -> None:
    """Draw the mark around a cell."""
    top, left = _corner(cell)
    pixels[top, left : left + CELL] = pixels[top + CELL - 1, left : left + CELL] = MARK
    pixels[top : top + CELL, left] = pixels[top : top + CELL, left + CELL - 1] = MARK


def picture(pixels: np.ndarray) -> "Image":
    """Convert pixels (64, 64, 3) to an image."""
    from PIL import Image

    return Image.fromarray(pixels)


def cells_of(names: list[str]) -> dict[int, int]:
    """Assign cells to receptacles, by index in `names`, while the plan has room."""
    canonical = {name: cell for cell, name in enumerate(RECEPTACLE_NAMES)}
    cells = {index: canonical[name] for index, name in enumerate(names) if name in canonical}
    free = iter(sorted(set(range(GRID * GRID)) - set(canonical.values())))
    for index, name in enumerate(names):
        if name not in canonical and (cell := next(free, None)) is not None:
            cells[index] = cell
    return cells


def _corner(cell: int) -> tuple[int, int]:
    return cell // GRID * CELL, cell % GRID * CELL


def _receptacle_colour(kind: str) -> tuple[int, int, int]:
    """Return a type's colour; types of generated homes spread evenly over hues and two brightnesses."""
    if kind not in _TYPES:
        return _colour(_hash_fraction(kind), 0.3, 0.5)
    position = _TYPES.index(kind)
    return _colour(position / len(_TYPES), 0.65, 0.45 if position % 2 else 0.75)


def _hash_fraction(name: str) -> float:
    """Map a name to a fixed number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _colour(share: float, saturation: float, value: float) -> tuple[int, int, int]:
    """Return a colour between red and blue, without hues near the mark's magenta."""
    red, green, blue = colorsys.hsv_to_rgb(share * 0.7, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)
