"""Scores of texts for a question: BM25, windows of neighbours, and vectors without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

Scores = NDArray[np.float64]
Dense = Literal["lsa", "hash", "none"]
K1, B = 1.2, 0.75
DIMENSIONS = 256


class BM25:
    """BM25 over documents of terms; each term of a question counts once. `idf`: of a term that none holds, 0."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self.n = len(documents)
        mean = sum(map(len, documents)) / max(self.n, 1)
        found: dict[str, list[tuple[int, float]]] = {}
        for i, document in enumerate(documents):
            length = K1 * (1 - B + B * len(document) / mean) if mean else K1
            for term, times in Counter(document).items():
                found.setdefault(term, []).append((i, times * (K1 + 1) / (times + length)))
        self.idf = {t: float(np.log1p((self.n - len(at) + 0.5) / (len(at) + 0.5))) for t, at in found.items()}
        self._found = {
            term: (np.array([i for i, _ in at]), self.idf[term] * np.array([weight for _, weight in at]))
            for term, at in found.items()
        }

    def __call__(self, question: Collection[str]) -> Scores:
        """Score every document."""
        scores = np.zeros(self.n)
        for term in sorted(set(question) & self._found.keys()):  # in one order, to the last bit
            rows, weights = self._found[term]
            scores[rows] += weights
        return scores

    def covered(self, question: Collection[str]) -> Scores:
        """Give for every document the share of the question's terms that it holds, by their idf."""
        told = sorted(set(question) & self._found.keys())
        scores = np.zeros(self.n)
        for term in told:
            scores[self._found[term][0]] += self.idf[term]
        return scores / max(sum(self.idf[term] for term in told), 1e-9)


def windows(documents: Sequence[Sequence[str]], groups: Sequence[str]) -> list[list[str]]:
    """Join each document with its neighbours of the same group."""
    joined = []
    for i, group in enumerate(groups):
        near = range(max(0, i - 1), min(len(documents), i + 2))
        joined.append([term for j in near if groups[j] == group for term in documents[j]])
    return joined


def dense(how: Dense, texts: Sequence[Sequence[str]]) -> Callable[[Sequence[str]], Scores]:
    """Fit vectors to texts of terms; return what gives the cosine of each with a question's."""
    nothing = lambda question: np.zeros(len(texts))
    if how == "none" or len(texts) < 2 or not any(texts):
        return nothing
    joined = [" ".join(text) for text in texts]
    if how == "hash":
        from sklearn.feature_extraction.text import HashingVectorizer

        vectors = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), n_features=2**16, alternate_sign=False)
        rows = vectors.transform(joined)
        asked = lambda question: csr_matrix(vectors.transform([" ".join(question)]))
        return lambda question: csr_matrix(csr_matrix(rows) @ asked(question).transpose()).toarray().ravel()
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    tfidf = TfidfVectorizer(token_pattern=r"\S+", lowercase=False, sublinear_tf=True)
    matrix = tfidf.fit_transform(joined)
    d = min(DIMENSIONS, *(n - 1 for n in matrix.shape))
    if d < 1:
        return nothing
    svd = TruncatedSVD(d, random_state=0)
    unit = lambda rows: rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-9)
    known = unit(svd.fit_transform(matrix))
    return lambda question: known @ unit(svd.transform(tfidf.transform([" ".join(question)])))[0]


def ranks(scores: Scores) -> NDArray[np.int64]:
    """Give each its place, 0 for the best; equal ones in their order."""
    places = np.empty(len(scores), dtype=np.int64)
    places[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return places
