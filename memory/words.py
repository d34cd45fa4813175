"""Text of any script as terms, which full-text search compares."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import chain

from memory.stemming import stem

LONGEST = 40  # bytes of a word: what is longer is no word
_ASCII = re.compile("[a-z0-9]+")
_ACCENTS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
# Scripts that put no spaces between words: Thai and Lao, Burmese, Khmer, kana, Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def terms(text: str) -> list[str]:
    """List the terms of a text in their order: words (letters, marks and digits) in lower case, without accents on
    Latin letters, stemmed where they are English; of scripts without spaces each pair of neighbours."""
    return list(chain.from_iterable(map(_terms, text.lower().split())))


@lru_cache(2**16)  # commands and goals repeat: most of a bank's text has been seen
def _terms(chunk: str) -> tuple[str, ...]:
    if chunk.isascii():
        words = _ASCII.findall(chunk)
    else:
        plain = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", chunk))).lower()
        spaced = _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", plain)
        words = "".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in spaced).split()
    return tuple(stem(word) for word in words if len(word.encode()) < LONGEST)


def _pairs(run: str) -> list[str]:
    return [run[i : i + 2] for i in range(max(1, len(run) - 1))]
