"""BM25 over a growing collection of documents, each a list of terms."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
K1, B = 1.2, 0.75


def idf(holding: int, documents: int) -> float:
    """Return a term's inverse document frequency. `holding`: number of documents with the term."""
    return float(np.log1p((documents - holding + 0.5) / (holding + 0.5)))


class BM25:
    """A BM25 index. Repeated query terms count once."""

    def __init__(self, documents: Iterable[Sequence[str]] = ()) -> None:
        self._lengths, self._total = array("i"), 0  # terms per document, and in all
        self._found: dict[str, tuple[array[int], array[int]]] = {}  # postings: documents and counts by term
        self._weighed: dict[str, tuple[NDArray[np.intp], Scores]] = {}  # cached (documents, scores) by term
        self.add(documents)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, documents: Iterable[Sequence[str]]) -> None:
        """Append documents."""
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
        self._weighed.clear()  # every document changes every idf

    def __call__(self, question: Collection[str]) -> Scores:
        """Return the score of every document."""
        scores = np.zeros(len(self))
        for term in self._known_terms(question):
            rows, weights = self._weights(term)
            scores[rows] += weights
        return scores

    def holding(self, question: Collection[str]) -> tuple[NDArray[np.intp], Scores]:
        """Return the documents that hold a term of the query, and their scores."""
        if len(known := self._known_terms(question)) == 1:
            return self._weights(known[0])
        scores = self(known)
        rows = np.flatnonzero(scores)
        return rows, scores[rows]

    def covered(self, question: Collection[str]) -> Scores:
        """Return for every document the idf-weighted share of the query's terms that it holds."""
        known = self._known_terms(question)
        scores = np.zeros(len(self))
        for term in known:
            scores[self._weights(term)[0]] += self._idf(term)
        return scores / max(sum(map(self._idf, known)), 1e-9)

    def _known_terms(self, question: Collection[str]) -> list[str]:
        """Return the indexed query terms, sorted to make sums reproducible to the last bit."""
        return sorted(set(question) & self._found.keys())

    def _idf(self, term: str) -> float:
        return idf(len(self._found[term][0]), len(self))

    def _weights(self, term: str) -> tuple[NDArray[np.intp], Scores]:
        """Return the documents with a term, and its score in each."""
        if term not in self._weighed:
            rows, times = (np.array(values, dtype=np.intp) for values in self._found[term])  # copies: an exported
            lengths = np.array(self._lengths)[rows]  # buffer would block further appends
            norm = K1 * (1 - B + B * lengths / (self._total / len(self)))
            self._weighed[term] = rows, self._idf(term) * (times * (K1 + 1) / (times + norm))
        return self._weighed[term]
