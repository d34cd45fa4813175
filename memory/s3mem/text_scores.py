"""Similarity of texts to a question: windows of neighbours, vectors with and without a model, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from memory.bm25 import Scores
from memory.retrieval import Embed, unit_rows

Dense = Literal["lsa", "hash", "embed"]
DIMENSIONS = 256


def join_neighbours(documents: Sequence[Sequence[str]], groups: Sequence[str]) -> list[list[str]]:
    """Concatenate each document with its direct neighbours of the same group."""
    joined = []
    for i, group in enumerate(groups):
        near = range(max(0, i - 1), min(len(documents), i + 2))
        joined.append([term for j in near if groups[j] == group for term in documents[j]])
    return joined


def fit_vectors(how: Dense, texts: Sequence[Sequence[str]]) -> Callable[[Sequence[str]], Scores]:
    """Fit vectors to tokenised texts; return a function from a question's terms to the cosine with each text."""
    zeros = lambda question: np.zeros(len(texts))
    if len(texts) < 2 or not any(texts):
        return zeros
    joined = [" ".join(text) for text in texts]
    if how == "hash":
        from sklearn.feature_extraction.text import HashingVectorizer

        vectors = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), n_features=2**16, alternate_sign=False)
        rows = vectors.transform(joined)
        query = lambda question: csr_matrix(vectors.transform([" ".join(question)]))
        return lambda question: csr_matrix(csr_matrix(rows) @ query(question).transpose()).toarray().ravel()
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    tfidf = TfidfVectorizer(token_pattern=r"\S+", lowercase=False, sublinear_tf=True)
    matrix = tfidf.fit_transform(joined)
    d = min(DIMENSIONS, *(n - 1 for n in matrix.shape))
    if d < 1:
        return zeros
    svd = TruncatedSVD(d, random_state=0)
    unit = lambda rows: rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-9)
    known = unit(svd.fit_transform(matrix))
    return lambda question: known @ unit(svd.transform(tfidf.transform([" ".join(question)])))[0]


def embed_texts(embed: Embed | None, texts: Sequence[str]) -> Callable[[str], Scores]:
    """Embed texts with a model; return a function from a question to the cosine with each text.

    Raises:
        ValueError: there is no model.
    """
    if embed is None:
        raise ValueError("dense=embed needs an embedding model: set memory.embed or memory.embed_api")
    known = unit_rows(embed, list(texts)) if texts else np.zeros((0, 1), dtype=np.float32)
    return lambda question: (known @ unit_rows(embed, [question])[0] if len(known) else np.zeros(0)).astype(np.float64)


def ranks(scores: Scores) -> NDArray[np.int64]:
    """Return the rank of each score, 0 for the best; ties keep their order."""
    places = np.empty(len(scores), dtype=np.int64)
    places[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return places
