"""Picture files that records refer to by path; they are read on demand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from memory.trajectory import png_bytes


def existing_files(pointers: Iterable[str]) -> tuple[str, ...]:
    """Keep the paths of existing files. URLs are dropped; nothing is downloaded."""
    return tuple(pointer for pointer in pointers if pointer and _is_file(pointer))


def _is_file(pointer: str) -> bool:
    try:
        return Path(pointer).is_file()
    except (OSError, ValueError):  # too long, or not a path
        return False


def read_picture(pointer: str) -> bytes:
    """Read an image file of any format as PNG bytes. Raises: ValueError, for an unreadable file."""
    from PIL import Image

    try:
        with Image.open(pointer) as picture:
            return png_bytes(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{pointer} is not a readable picture: {error}") from error
