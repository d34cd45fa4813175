"""Vectors of words, for packages that search by vectors where no embedding model is set."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from memory.similarity import terms_of


class WordVectors:
    """An `Embed` of sets of words: 1 at the number of each of a text's terms, by a checksum.

    The cosine of two vectors is `memory.similarity.lexical`, up to terms that share a number.
    """

    name, d = "words", 2048

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embed n texts as (n, d) float32."""
        vectors = np.zeros((len(texts), self.d), dtype=np.float32)
        for n, text in enumerate(texts):
            vectors[n, [zlib.crc32(term.encode()) % self.d for term in terms_of(text)]] = 1
        return vectors
