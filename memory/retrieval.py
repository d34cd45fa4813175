"""Which entries of a bank answer a task, by words or by sentence embeddings. The storage is `memory.bank`.

Scoring. A task asks with two facts, and each gives one ranked list:

- *here*: the entries whose scene label equals the task's (the whole label: "home 1" is not "home 17"), and
- *elsewhere*: the entries of all other scenes that share a word with the goal.

Both lists are ordered by how well an entry's text (and its goal) matches the words of the goal:

    score(entry) = sum over the goal's words of  top(word) * BM25(word, entry),  top(word) = its best BM25 in the bank

over all entries, words lower-cased and stemmed (`memory.words`). BM25 weighs a word by its rarity and by how often the
entry says it; multiplying by the word's best makes that a square. The square is what puts the object first: plain BM25
takes "clean a pot, fridge" for closer to "clean a mug, fridge" (two words) than to "cool a pot, sink" (one), but only
the last knows where the pot is. Where the bank has embeddings, the cosine between the two goals takes the place of the
sum. Equal scores are ordered by id. An entry that repeats scene and goal of a better one moves behind all that do not
(the successful one counts as the original), so that ten attempts at one task do not fill M.

The lists are merged by reciprocal rank, 1/(i+1) here and 1/(j+2) elsewhere, *here* first where equal:
here 0, here 1, elsewhere 0, here 2, elsewhere 1, here 3, ... For a hot mug in home 17 that is home 17's own mug, then
home 17's other objects and other scenes' mugs by turns. A shorter list leaves its turns to the other; a task without
a scene has only *elsewhere*.

The result depends on the set of entries alone, not on the order or the batches in which they were written.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.base import Task
from memory.bm25 import BM25, idf
from memory.trajectory import goal_without_scene
from memory.words import terms, words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

Embed = Callable[[list[str]], np.ndarray]  # n texts -> (n, d), finite; d is the same in every call

WINDOW = 64  # entries of each list that are looked at, at least
MAX_QUERY = 1000  # characters of a goal that take part, and
MAX_WORDS = 50  # words: query time grows with both

COLUMNS = ("id", "goal", "scene", "task_id", "success")  # all that ranking reads, with `words` or `vector`


@dataclass(frozen=True, slots=True)
class Found:
    row: int  # number of the entry in the order of writing
    id: str
    goal: str
    scene: str
    task_id: str
    success: bool


class Retriever:
    """Ranks the entries of a bank, of which it holds what it compares: not their texts, nor their pictures."""

    def __init__(self) -> None:
        self._entries: list[Found] = []
        self._scenes: dict[str, array[int]] = {}  # rows of each
        self._words = BM25()
        self._vectors: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take in the next rows: `COLUMNS`, and `words` or `vector`."""
        facts = zip(*(rows.column(name).to_pylist() for name in COLUMNS), strict=True)
        fresh = [Found(row, *values) for row, values in zip(count(len(self)), facts, strict=False)]
        if "vector" in rows.schema.names:
            self._vectors.append(rows.column("vector").flatten().to_numpy().reshape(len(fresh), -1))
        else:
            self._words.add(map(terms, rows.column("words").to_pylist()))
        for found in fresh:
            self._scenes.setdefault(found.scene, array("i")).append(found.row)
        self._entries += fresh

    def rank(self, task: Task, k: int, vector: np.ndarray | None = None) -> list[Found]:
        """Return at most k entries, best first, none of the task's own. With `vector`, the goal's embedding (d,), by
        cosine instead of by words."""
        if k <= 0 or not self._entries:
            return []
        scene, own = encodable(task.scene), encodable(task.id)
        of_scene = np.array(self._scenes.get(scene, ()) if scene else (), dtype=np.intp)
        if vector is None:
            scores = self._by_words(task)
            # The scene counts as one more word. It adds the same to all of them, and takes digits of single precision:
            # entries that only words of nearly every entry tell apart are equal.
            in_scene, rows = scores + np.float32(idf(len(of_scene), len(self))), np.flatnonzero(scores)
        else:
            in_scene = scores = self._by_vector(vector)
            rows = np.arange(len(self))
        here = self._best(in_scene, of_scene, k, lambda f: f.task_id != own)
        elsewhere = self._best(scores, rows, k, lambda f: f.task_id != own and not (scene and f.scene == scene))
        return merge(repeats_last(here), repeats_last(elsewhere), k)

    def _by_words(self, task: Task) -> NDArray[np.float32]:
        scores = np.zeros(len(self), dtype=np.float32)
        for word in query_words(task):
            weights = self._words(terms(word)).astype(np.float32)
            scores += weights.max() * weights
        return scores

    def _by_vector(self, vector: np.ndarray) -> NDArray[np.float32]:
        self._vectors = [np.concatenate(self._vectors)]
        # Not `@`, which adds up equal rows in different ways: they would not tie.
        return np.einsum("nd,d->n", self._vectors[0], vector.astype(np.float32))

    def _best(
        self, scores: NDArray[np.float32], rows: NDArray[np.intp], k: int, keep: Callable[[Found], bool]
    ) -> list[Found]:
        """Find at least the k best of `rows` that `keep` keeps (if there are as many), by (score, id): whole groups of
        equal score, for a part of one would depend on the order of writing."""
        values, limit = scores[rows], max(WINDOW, 4 * k)
        while True:
            edge = np.partition(values, -limit)[-limit] if len(values) >= limit else -math.inf
            kept = [found for row in rows[values > edge] if keep(found := self._entries[row])]
            if edge == -math.inf or len(kept) >= k:
                return sorted(kept, key=lambda found: (-scores[found.row], found.id))
            limit *= 16


def query_words(task: Task) -> list[str]:
    """List each word of the goal once."""
    goal = encodable(goal_without_scene(task.goal, task.scene)).lower()
    parts = (part for chunk in goal.split() for part in ([chunk] if chunk.isascii() else words(chunk)))
    return " ".join(dict.fromkeys(parts))[:MAX_QUERY].split()[:MAX_WORDS]


def repeats_last(found: Sequence[Found]) -> list[Found]:
    """Put one entry per (scene, goal) first, in the order of `found`, then the second ones, and so on."""
    seen: dict[tuple[str, str], int] = {}
    turn: dict[str, int] = {}
    for f in sorted(found, key=lambda f: not f.success):  # stable: within success and failure, best first
        turn[f.id] = seen[f.scene, f.goal] = seen.get((f.scene, f.goal), -1) + 1
    return sorted(found, key=lambda f: turn[f.id])


def merge(here: Sequence[Found], elsewhere: Sequence[Found], k: int) -> list[Found]:
    """Take the first k by reciprocal rank: 1/(i+1) here, 1/(j+2) elsewhere, `here` first where equal."""
    ranked = [(i, 0, f) for i, f in enumerate(here)] + [(j + 1, 1, f) for j, f in enumerate(elsewhere)]
    return [f for _, _, f in sorted(ranked, key=lambda r: r[:2])[:k]]


def encodable(text: str) -> str:
    """Turn lone surrogates (undecodable bytes in some environment's output) into "?": the store is UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


class SentenceEmbedder:
    """An `Embed` from sentence-transformers, loaded at the first call. `name` goes on record in the bank."""

    def __init__(self, model: str | Path, device: str | None = None, batch_size: int = 64) -> None:
        self.name = Path(model).name if Path(model).exists() else str(model)  # a bank outlives the path of its model
        self._source, self._device, self._batch_size = str(model), device, batch_size
        self._model: Any = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Embed n texts as (n, d) float32. Raises: ImportError, where sentence-transformers is missing."""
        if self._model is None:
            try:
                from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # optional
            except ImportError as e:
                raise ImportError("embeddings need sentence-transformers: uv sync --inexact --extra embed") from e
            self._model = SentenceTransformer(self._source, device=self._device)
        return self._model.encode(texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False)


def unit_rows(embed: Embed, texts: list[str]) -> np.ndarray:
    """Return `embed(texts)` as (n, d) float32 of unit length, so that a dot product is the cosine. Zero rows stay zero.
    Raises: ValueError, for another shape or values that are not finite."""
    vectors = np.asarray(embed(texts), dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ValueError(f"embed must return finite values of shape ({len(texts)}, d), got shape {vectors.shape}")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
