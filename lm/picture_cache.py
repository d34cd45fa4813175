"""Cache of preprocessed pictures: steps of an episode and rows of its memory show the same pictures again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image

CACHE_BYTES = 2**27


class HasBytes(Protocol):
    """A value that knows its size in bytes."""

    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=HasBytes)


class PictureCache(Generic[Value]):
    """Keeps what was computed from the last used pictures, up to `limit` bytes. Copies are empty."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit, self.nbytes = limit, 0
        self._kept = OrderedDict[bytes, Value]()  # the last used one at the end
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PictureCache, (self.limit,)

    def get(self, image: Image, compute: Callable[[Image], Value]) -> Value:
        """Return what `compute` makes of a picture with these pixels, computed anew only if it is not kept."""
        key = hashlib.sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = compute(image)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = value
                self.nbytes += value.nbytes
            while self.nbytes > self.limit:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return value
