"""Retrieval of the short-term units nearest to an instruction (KARMA, section 3.5)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

from memory.karma.units import ObjectUnit, letters
from memory.retrieval import unit_rows

if TYPE_CHECKING:
    import numpy as np

    from memory.retrieval import Embed

_STOP_WORDS = frozenset("a an the in on of to it is and or with from under at put find look examine some them".split())


def _text_to_embed(unit: ObjectUnit) -> str:
    """Return a unit's text with the object's type instead of its name."""
    return unit.text.replace(unit.id, unit.type)


def nearest(instruction: str, units: Sequence[ObjectUnit], k: int, embed: Embed | None = None) -> list[ObjectUnit]:
    """Return the k units with the smallest cosine distance to the instruction; break ties by the latest write, then
    by id."""
    if not units:
        return []
    far = distances(instruction, [_text_to_embed(unit) for unit in units], embed)
    order = sorted(zip(units, far, strict=True), key=lambda pair: (round(pair[1], 6), -pair[0].version, pair[0].id))
    return [unit for unit, _ in order[:k]]


def distances(query: str, texts: Sequence[str], embed: Embed | None = None) -> list[float]:
    """Return each text's cosine distance to the query. Without `embed`, vectors are idf-weighted bags of word stems."""
    rows = unit_rows(embed or _bags, [query, *texts])
    return [float(far) for far in 1.0 - rows[1:] @ rows[0]]


def _bags(texts: Sequence[str]) -> np.ndarray:
    """Return the idf-weighted stem counts of each text, (n, stems)."""
    import numpy as np

    counted = [Counter(words(text)) for text in texts]
    among = Counter(stem for counts in counted for stem in counts)
    column = {stem: n for n, stem in enumerate(sorted(among))}
    bags = np.zeros((len(texts), max(1, len(column))))
    for row, counts in zip(bags, counted, strict=True):
        for stem, count in counts.items():
            row[column[stem]] = count * log(1 + len(texts) / among[stem])
    return bags


def words(text: str) -> list[str]:
    """Return the stems of a text's words without stop words."""
    return [_stem(word) for word in letters(text) if word not in _STOP_WORDS]


def _stem(word: str) -> str:
    return re.sub(r"(?<=[a-z]{3})(ed|ing|s)$", "", word)
