"""Opening pictures that others sent or stored: a small file may decompress to gigabytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 24


def open_picture(data: bytes, formats: Sequence[str] = ("PNG",)) -> Image:
    """Open and decode a picture of one of the formats. Raises: ValueError, for others and more than MAX_PIXELS."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(data), formats=list(formats))  # reads the header only
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels, at most {MAX_PIXELS:,} are read")
        picture.load()
    except Exception as error:  # decoders raise many types for broken files
        raise ValueError(f"not a {' or '.join(formats)} of 1 to {MAX_PIXELS:,} pixels that can be decoded") from error
    return picture
