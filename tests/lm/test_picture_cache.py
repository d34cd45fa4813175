"""The cache of preprocessed pictures."""

from __future__ import annotations

import copy

from PIL import Image

from lm.picture_cache import PictureCache


class Computed:
    """What a test computes from a picture: 10 bytes."""

    nbytes = 10


def test_the_last_used_pictures_are_kept_up_to_the_limit_by_their_pixels() -> None:
    cache, computed = PictureCache[Computed](limit=20), list[int]()

    def get(colour: int) -> bool:
        """Return whether a picture, read anew, was in the cache."""
        before = len(computed)
        cache.get(Image.new("RGB", (2, 2), (colour, 0, 0)), lambda _: computed.append(colour) or Computed())
        return len(computed) == before

    assert [get(1), get(2), get(1), get(3)] == [False, False, True, False]
    assert [get(1), get(2), get(1), get(3)] == [True, False, True, False]
    assert cache.nbytes == 20 and copy.deepcopy(cache).nbytes == 0


def test_pictures_of_equal_bytes_and_other_shapes_are_different() -> None:
    cache = PictureCache[Computed]()
    wide, high = (cache.get(Image.new("RGB", size), lambda _: Computed()) for size in ((4, 2), (2, 4)))
    assert wide is not high
