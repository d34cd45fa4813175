"""Retrieval of a bank's entries for a task, by words or by sentence embeddings.

A query has two parts, and each gives one ranked list:

- *here*: the entries with the task's scene label (the whole label: "home 1" is not "home 17"), and
- *elsewhere*: the entries of all other scenes that share a word with the goal.

Both lists are ordered by the match of an entry's text and goal with the words of the task's goal:

    score(entry) = sum over the goal's words of  top(word) * BM25(word, entry),  top(word) = its best BM25 in the bank

over all entries, words lower-cased and stemmed (`memory.words`). BM25 weighs a word by its rarity and by how often the
entry contains it; the factor makes that a square, which ranks the object first: by plain BM25, "clean a pot, fridge" is
closer to "clean a mug, fridge" (two words) than to "cool a pot, sink" (one), but only the last knows where the pot is.
In banks with embeddings, the cosine of the two goals replaces the sum. Ties are broken by id. An entry that repeats
scene and goal of a better one (of a successful one, if any) moves behind all others, so that ten attempts at one task
do not fill M.

The lists are merged by reciprocal rank, 1/(i+1) here and 1/(j+2) elsewhere, *here* first where equal:
here 0, here 1, elsewhere 0, here 2, elsewhere 1, here 3, ... For a hot mug in home 17 that is home 17's own mug, then
alternately home 17's other objects and other scenes' mugs. A task without a scene, and one that is isolated from its
scene, have only *elsewhere*.

The result depends on the set of entries alone, not on the order or batches of writing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.base import Task
from memory.bm25 import BM25, idf
from memory.protocol import Isolation
from memory.trajectory import goal_without_scene
from memory.words import search_terms, words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

Embed = Callable[[list[str]], np.ndarray]  # n texts -> (n, d), finite; d is the same in every call

WINDOW = 64  # minimal number of candidates per list
MAX_QUERY = 1000  # characters of a goal in the query
MAX_WORDS = 50  # words of a goal in the query

COLUMNS = ("id", "goal", "scene", "task_id", "success")  # read for ranking, with `words` or `vector`


@dataclass(frozen=True, slots=True)
class RankedEntry:
    row: int  # index in the order of writing
    id: str
    goal: str
    scene: str
    task_id: str
    success: bool


class BankRanker:
    """Ranks a bank's entries from an index in memory, without their texts and pictures."""

    def __init__(self) -> None:
        self._entries: list[RankedEntry] = []
        self._scenes: dict[str, array[int]] = {}  # rows by scene
        self._words = BM25()
        self._vectors: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, rows: pa.RecordBatch) -> None:
        """Append rows with `COLUMNS`, and `words` or `vector`."""
        facts = zip(*(rows.column(name).to_pylist() for name in COLUMNS), strict=True)
        fresh = [RankedEntry(row, *values) for row, values in zip(count(len(self)), facts, strict=False)]
        if "vector" in rows.schema.names:
            self._vectors.append(rows.column("vector").flatten().to_numpy().reshape(len(fresh), -1))
        else:
            self._words.add(map(search_terms, rows.column("words").to_pylist()))
        for found in fresh:
            self._scenes.setdefault(found.scene, array("i")).append(found.row)
        self._entries += fresh

    def rank(
        self,
        task: Task,
        k: int,
        vector: np.ndarray | None = None,
        isolation: Isolation = "task",
        successes_only: bool = False,
    ) -> list[RankedEntry]:
        """Return at most k entries, best first, without the task's own.

        Args:
            vector: the goal's embedding (d,), to rank by cosine instead of by words.
            isolation: "scene" also leaves out all entries of the task's scene.
            successes_only: leave out failed episodes.
        """
        if k <= 0 or not self._entries:
            return []
        scene, own = encodable(task.scene), encodable(task.id)
        of_scene = np.array(self._scenes.get(scene, ()) if scene else (), dtype=np.intp)
        if vector is None:
            scores = self._by_words(task)
            # The scene counts as one more word. Its constant costs digits of single precision: entries that differ only
            # in words of nearly every entry tie.
            in_scene, rows = scores + np.float32(idf(len(of_scene), len(self))), np.flatnonzero(scores)
        else:
            in_scene = scores = self._by_vector(vector)
            rows = np.arange(len(self))
        fits = lambda f: f.task_id != own and (f.success or not successes_only)
        here = self._best(in_scene, of_scene, k, fits) if isolation == "task" else []
        elsewhere = self._best(scores, rows, k, lambda f: fits(f) and not (scene and f.scene == scene))
        return merge_rankings(move_repeats_last(here), move_repeats_last(elsewhere), k)

    def _by_words(self, task: Task) -> NDArray[np.float32]:
        scores = np.zeros(len(self), dtype=np.float32)
        for word in query_words(task):
            rows, found = self._words.holding(search_terms(word))
            weights = found.astype(np.float32)
            scores[rows] += weights.max(initial=0) * weights
        return scores

    def _by_vector(self, vector: np.ndarray) -> NDArray[np.float32]:
        self._vectors = [np.concatenate(self._vectors)]
        # Not `@`, whose summation order differs between rows: equal rows would not tie.
        return np.einsum("nd,d->n", self._vectors[0], vector.astype(np.float32))

    def _best(
        self, scores: NDArray[np.float32], rows: NDArray[np.intp], k: int, keep: Callable[[RankedEntry], bool]
    ) -> list[RankedEntry]:
        """Return at least the k best of `rows` that satisfy `keep`, by (score, id), in whole groups of equal score:
        part of a group would depend on the order of writing."""
        values, limit = scores[rows], max(WINDOW, 4 * k)
        while True:
            edge = np.partition(values, -limit)[-limit] if len(values) >= limit else -math.inf
            above = np.flatnonzero(values > edge)
            found = [self._entries[row] for row in rows[above].tolist()]
            best = [(-value, f.id, f) for value, f in zip(values[above].tolist(), found, strict=True) if keep(f)]
            if edge == -math.inf or len(best) >= k:
                return [f for _, _, f in sorted(best, key=itemgetter(0, 1))]
            limit *= 16


def query_words(task: Task) -> list[str]:
    """Return the distinct words of a task's goal."""
    goal = encodable(goal_without_scene(task.goal, task.scene)).lower()
    parts = (part for chunk in goal.split() for part in ([chunk] if chunk.isascii() else words(chunk)))
    return " ".join(dict.fromkeys(parts))[:MAX_QUERY].split()[:MAX_WORDS]


def move_repeats_last(found: Sequence[RankedEntry]) -> list[RankedEntry]:
    """Order entries by their number among those of equal (scene, goal), then as in `found`."""
    seen: dict[tuple[str, str], int] = {}
    turns = [0] * len(found)
    for i in sorted(range(len(found)), key=lambda i: not found[i].success):  # stable sort
        f = found[i]
        turns[i] = seen[f.scene, f.goal] = seen.get((f.scene, f.goal), -1) + 1
    return [found[i] for i in sorted(range(len(found)), key=turns.__getitem__)]


def merge_rankings(here: Sequence[RankedEntry], elsewhere: Sequence[RankedEntry], k: int) -> list[RankedEntry]:
    """Merge two lists by reciprocal rank, 1/(i+1) here and 1/(j+2) elsewhere; ties prefer `here`."""
    ranked = [(i, 0, f) for i, f in enumerate(here)] + [(j + 1, 1, f) for j, f in enumerate(elsewhere)]
    return [f for _, _, f in sorted(ranked, key=lambda r: r[:2])[:k]]


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


class SentenceEmbedder:
    """An `Embed` from sentence-transformers, loaded at the first call. The bank records `name`."""

    def __init__(self, model: str | Path, device: str | None = None, batch_size: int = 64) -> None:
        self.name = Path(model).name if Path(model).exists() else str(model)  # paths may change
        self._source, self._device, self._batch_size = str(model), device, batch_size
        self._model: Any = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Embed n texts as (n, d) float32. Raises: ImportError, without sentence-transformers."""
        if self._model is None:
            try:
                from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # optional
            except ImportError as e:
                raise ImportError("embeddings need sentence-transformers: uv sync --inexact --extra embed") from e
            self._model = SentenceTransformer(self._source, device=self._device)
        return self._model.encode(texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False)


def unit_rows(embed: Embed, texts: list[str]) -> np.ndarray:
    """Return `embed(texts)` as (n, d) float32 rows of unit length; zero rows stay zero.

    Raises:
        ValueError: another shape, or values that are not finite.
    """
    vectors = np.asarray(embed(texts), dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ValueError(f"embed must return finite values of shape ({len(texts)}, d), got shape {vectors.shape}")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
