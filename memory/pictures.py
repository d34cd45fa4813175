"""Pictures that raw records point to: a record holds the path of a file, which is read when somebody is shown it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from memory.trajectory import png_bytes


def at_hand(pointers: Iterable[str]) -> tuple[str, ...]:
    """Keep the pointers behind which a file lies; an address on the net is none, and nothing is fetched."""
    return tuple(pointer for pointer in pointers if pointer and _is_file(pointer))


def _is_file(pointer: str) -> bool:
    try:
        return Path(pointer).is_file()
    except (OSError, ValueError):  # too long for a path, or no path at all
        return False


def read_picture(pointer: str) -> bytes:
    """Read a picture, of whatever format, as PNG. Raises: ValueError, where the file is none."""
    from PIL import Image

    try:
        with Image.open(pointer) as picture:
            return png_bytes(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{pointer} is no picture that can be read: {error}") from error
