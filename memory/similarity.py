"""Similarity of texts for memories of many short items: cosine of sentence embeddings, or of sets of words.

Without an embedding model two texts are as similar as

    lexical(A, B) = |A and B| / sqrt(|A| |B|),   A, B: sets of the texts' search terms (memory.words)

which depends on these two texts alone, so that a memory's earlier versions give the same scores.
"""

from __future__ import annotations

import base64
import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memory.retrieval import Embed, encodable, unit_rows
from memory.words import search_terms
from runtime.store import JsonLines, locked

Scores = NDArray[np.float64]
VECTORS, VECTORS_LOCK = "vectors.jsonl", ".vectors.lock"
FREQUENT = 128  # terms that are counted by bits
_FIRST_CHOICE = 512  # texts at which the frequent terms are chosen first, and again whenever their number has doubled


def terms_of(text: str) -> frozenset[str]:
    """Return the set of a text's search terms."""
    return frozenset(search_terms(encodable(text)))


def lexical(one: AbstractSet[str], other: AbstractSet[str]) -> float:
    """Return the similarity of two sets of terms, 0 to 1; 0 for an empty set."""
    return len(one & other) / math.sqrt(len(one) * len(other)) if one and other else 0.0


class TextIndex:
    """Texts in the order of writing, and their similarity to a query text.

    Args:
        embed: compares by cosine of embeddings; None: by `lexical`.
    """

    def __init__(self, embed: CachedEmbed | None = None) -> None:
        self._embed = embed
        self._new = list[str]()  # texts that are not indexed yet: an embedding model reads them as one batch
        self._words = LexicalIndex()
        self._vectors = np.zeros((0, 0), dtype=np.float32)  # (capacity, d)
        self._held = 0  # rows of `_vectors` in use
        self._last: tuple[str, Scores] = "", np.zeros(0)  # latest query and its scores

    def __len__(self) -> int:
        return (len(self._words) if self._embed is None else self._held) + len(self._new)

    def add(self, text: str) -> None:
        """Append a text."""
        self._new.append(encodable(text))

    def scores(self, text: str, store: bool = False) -> Scores:
        """Return the similarity of every text to a query. `store`: keep the query's vector on disk."""
        self._take_new()
        if (self._last[0], len(self._last[1])) != (text, len(self)):  # a recall searches several times
            self._last = text, self._score(text, store)
        return self._last[1]

    def _score(self, text: str, store: bool) -> Scores:
        if self._embed is None:
            return self._words.scores(terms_of(text))
        if not self._held:
            return np.zeros(0)
        [query] = (self._embed if store else self._embed.without_storing)([encodable(text)])
        # Not `@`, whose summation order differs between rows: equal rows would not tie.
        return np.einsum("nd,d->n", self._vectors[: self._held], query).astype(np.float64)

    def _take_new(self) -> None:
        new = self._new
        if self._embed is None:
            self._words.add(map(terms_of, new))
        elif new:
            rows = self._embed(new)  # may raise: then the texts stay new
            held = self._held + len(rows)
            if held > len(self._vectors):
                grown = np.zeros((max(2 * len(self._vectors), held), rows.shape[1]), dtype=np.float32)
                grown[: self._held] = self._vectors[: self._held] if self._held else 0
                self._vectors = grown
            self._vectors[self._held : held] = rows
            self._held = held
        self._new = []


class LexicalIndex:
    """Sets of terms, and their similarity (`lexical`) to a query's set.

    The most frequent terms are counted by bits, a machine word per 64 of them and text; rarer ones by lists of the
    texts that contain them. Which terms are frequent changes no score.
    """

    def __init__(self) -> None:
        self._sizes = array("i")  # terms per text
        self._holding: dict[str, array[int]] = {}  # texts by term
        self._bits: dict[str, int] = {}  # number of the bit of each frequent term
        self._masks = np.zeros((FREQUENT // 64, 0), dtype=np.uint64)  # (words, capacity)
        self._next_choice = _FIRST_CHOICE

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, texts: Iterable[AbstractSet[str]]) -> None:
        """Append texts."""
        for terms in texts:
            n = len(self._sizes)
            self._sizes.append(len(terms))
            for term in terms:
                self._holding.setdefault(term, array("i")).append(n)
            if n >= self._next_choice:
                self._choose_frequent()
            elif self._bits:
                self._masks[:, n] = self._mask(terms)

    def scores(self, terms: AbstractSet[str]) -> Scores:
        """Return the similarity of every text to a set of terms."""
        n = len(self)
        counts = np.zeros(n, dtype=np.int64)
        frequent, rare = terms & self._bits.keys(), terms & (self._holding.keys() - self._bits.keys())
        for word, mask in enumerate(self._mask(frequent) if frequent else ()):
            counts += np.bitwise_count(self._masks[word, :n] & mask)
        for term in rare:
            counts[np.array(self._holding[term], dtype=np.intp)] += 1
        sizes = np.array(self._sizes, dtype=np.int64) * len(terms)
        return counts / np.sqrt(np.maximum(sizes, 1))

    def _mask(self, terms: AbstractSet[str]) -> NDArray[np.uint64]:
        """Return the bits of the frequent ones among some terms."""
        value = sum(1 << self._bits[term] for term in terms if term in self._bits)
        return np.frombuffer(value.to_bytes(FREQUENT // 8, "little"), dtype="<u8").astype(np.uint64)

    def _choose_frequent(self) -> None:
        """Choose the frequent terms anew, with room for as many texts again."""
        n = len(self._sizes)
        chosen = sorted(self._holding, key=lambda term: (-len(self._holding[term]), term))[:FREQUENT]
        self._bits, self._next_choice = {term: bit for bit, term in enumerate(chosen)}, 2 * n
        self._masks = np.zeros((FREQUENT // 64, 2 * n + 1), dtype=np.uint64)
        for term, bit in self._bits.items():
            self._masks[bit // 64, np.array(self._holding[term], dtype=np.intp)] |= np.uint64(1 << bit % 64)


def best_rows(
    scores: Scores, k: int, *, wrote: NDArray[np.int64], name: Callable[[int], str], at_least: float = 0.0
) -> list[int]:
    """Return the k rows of highest score, best first; of equal ones those written later, then by name.

    Args:
        wrote: the journal row that wrote each row.
        name: a row's name.
        at_least: rows of a lower score, and rows of score -inf, are left out.
    """
    rows = np.flatnonzero(scores >= at_least)
    if k <= 0 or not len(rows):
        return []
    if len(rows) > k:
        values = scores[rows]
        rows = rows[values >= np.partition(values, -k)[-k]]
    order = rows[np.lexsort((-wrote[rows], -scores[rows]))]
    if len(order) > k:  # keep all that tie with the last
        last = order[k - 1]
        tied = (scores[order] == scores[last]) & (wrote[order] == wrote[last])
        order = order[: int(np.flatnonzero(tied)[-1]) + 1]
    return sorted((int(row) for row in order), key=lambda row: (-scores[row], -wrote[row], name(row)))[:k]


class CachedEmbed:
    """Unit vectors of texts, stored in a memory's folder by model and text.

    The file may be deleted: vectors are then computed again.
    """

    def __init__(self, embed: Embed, folder: Path) -> None:
        self._embed, self._folder = embed, folder
        self._known: dict[str, NDArray[np.float32]] | None = None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed n texts as (n, d) float32 rows of unit length."""
        known, keys = self._read(), [self._key(text) for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if missing:
            vectors = unit_rows(self._embed, list(missing.values()))
            known |= dict(zip(missing, vectors, strict=True))
            self._write({key: known[key] for key in missing})
        return np.stack([known[key] for key in keys]) if keys else np.zeros((0, 0), dtype=np.float32)

    def without_storing(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts that are not the memory's, such as a query."""
        return unit_rows(self._embed, list(texts))

    def _key(self, text: str) -> str:
        model = getattr(self._embed, "name", "")
        return hashlib.sha256(f"{model}\n{text}".encode("utf-8", "replace")).hexdigest()[:32]

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self._folder / VECTORS, ("key", "vector"))

    def _read(self) -> dict[str, NDArray[np.float32]]:
        if self._known is None:
            decode = lambda text: np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32)
            self._known = {row["key"]: decode(row["vector"]) for row in self._lines}
        return self._known

    def _write(self, vectors: dict[str, NDArray[np.float32]]) -> None:
        """Store vectors if the folder exists and may be written to."""
        encode = lambda vector: base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        if not self._folder.is_dir():
            return
        try:
            with locked(self._folder / VECTORS_LOCK):
                self._lines.append(*({"key": key, "vector": encode(vector)} for key, vector in vectors.items()))
        except OSError:
            pass  # a read-only bank
