"""BM25: which of many texts, as lists of terms, answer a question. More texts may be added at any time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
K1, B = 1.2, 0.75


def idf(holding: int, documents: int) -> float:
    """Weigh a term by its rarity."""
    return float(np.log1p((documents - holding + 0.5) / (holding + 0.5)))


class BM25:
    """BM25 over documents of terms; each term of a question counts once."""

    def __init__(self, documents: Iterable[Sequence[str]] = ()) -> None:
        self._lengths, self._total = array("i"), 0  # how many terms documents have, each and in all
        self._found: dict[str, tuple[array[int], array[int]]] = {}  # documents that hold a term, and how often
        self._weighed: dict[str, tuple[NDArray[np.intp], Scores]] = {}  # terms asked for since a document was added
        self.add(documents)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, documents: Iterable[Sequence[str]]) -> None:
        """Add documents behind those that are there."""
        found = self._found
        for document in documents:
            i = len(self._lengths)
            for term, times in Counter(document).items():
                if (at := found.get(term)) is None:
                    at = found[term] = array("i"), array("i")
                at[0].append(i)
                at[1].append(times)
            self._lengths.append(len(document))
            self._total += len(document)
        self._weighed.clear()  # every document moves the weight of every term

    def __call__(self, question: Collection[str]) -> Scores:
        """Score every document."""
        scores = np.zeros(len(self))
        for term in self._told(question):
            rows, weights = self._weights(term)
            scores[rows] += weights
        return scores

    def covered(self, question: Collection[str]) -> Scores:
        """Give for every document the share of the question's terms that it holds, by their idf."""
        told = self._told(question)
        scores = np.zeros(len(self))
        for term in told:
            scores[self._weights(term)[0]] += self._idf(term)
        return scores / max(sum(map(self._idf, told)), 1e-9)

    def _told(self, question: Collection[str]) -> list[str]:
        """List the question's terms that any document holds, in one order: sums are the same to the last bit."""
        return sorted(set(question) & self._found.keys())

    def _idf(self, term: str) -> float:
        return idf(len(self._found[term][0]), len(self))

    def _weights(self, term: str) -> tuple[NDArray[np.intp], Scores]:
        """Return the documents that hold a term, and what it adds to each."""
        if term not in self._weighed:
            rows, times = (np.array(values, dtype=np.intp) for values in self._found[term])  # copies: an array that
            lengths = np.array(self._lengths)[rows]  # something looks into cannot grow
            norm = K1 * (1 - B + B * lengths / (self._total / len(self)))
            self._weighed[term] = rows, self._idf(term) * (times * (K1 + 1) / (times + norm))
        return self._weighed[term]
