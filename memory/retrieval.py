"""Which entries of a bank answer a task, by words or by sentence embeddings. The storage is `memory.bank`.

Scoring. A task asks with two facts, and each gives one ranked list:

- *here*: the entries whose scene label equals the task's (the whole label: "home 1" is not "home 17"), and
- *elsewhere*: the entries of all other scenes that share a word with the goal.

Both lists are ordered by how well an entry's text (and its goal) matches the words of the goal:

    score(entry) = sum over the goal's words of  top(word) * BM25(word, entry),  top(word) = its best BM25 in the bank

from LanceDB's full-text index, words lower-cased and stemmed. BM25 weighs a word by its rarity and by how often the
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.base import Task
from memory.trajectory import goal_without_scene

if TYPE_CHECKING:
    import numpy as np
    from lancedb.expr import Expr
    from lancedb.table import Table

    Embed = Callable[[list[str]], np.ndarray]  # n texts -> (n, d), finite; d is the same in every call

WINDOW = 64  # entries of each list that are looked at, at least
MAX_QUERY = 1000  # characters of a goal that take part, and
MAX_WORDS = 50  # words: query time grows with both

COLUMNS = ("id", "goal", "scene", "task_id", "success", "words")  # all that ranking reads


@dataclass(frozen=True, slots=True)
class Found:
    row: int  # row id in the bank's table
    id: str
    goal: str
    scene: str
    task_id: str
    success: bool
    score: float


class Retriever:
    """Ranks the entries of one fixed version of a table, whose full-text indexes (`words`, `scene`) cover every row
    where there are no embeddings. `row_column` holds the bank's row id: LanceDB's own, unless the table is a copy."""

    def __init__(self, table: Table, row_column: str = "_rowid") -> None:
        self._table, self._row_column = table, row_column
        self._top: dict[str, float] = {}  # goals of one benchmark share their words

    def rank(self, task: Task, k: int, vector: np.ndarray | None = None) -> list[Found]:
        """Return at most k entries, best first, none of the task's own. With `vector`, the goal's embedding (d,), by
        cosine instead of by words."""
        if k <= 0:
            return []
        from lancedb.expr import col, lit
        from lancedb.query import BooleanQuery, Occur

        scene, own = encodable(task.scene), encodable(task.id)
        words = [] if vector is not None else self._weighted(query_words(task))
        here: list[Found] = []
        if scene and vector is not None:
            here = self._best(vector, k, lambda f: f.task_id != own, col("scene") == lit(scene))
        elif scene:
            # The scene's own term adds the same to every row found (all of them must have it): the goal decides.
            query = BooleanQuery([(Occur.MUST, _match(scene, "scene")), *words])
            here = self._best(query, k, lambda f: f.task_id != own)
        elsewhere: list[Found] = []
        if words or vector is not None:
            # Passing over a few rows here is cheaper than a filter in LanceDB, which reads its column from end to end.
            query = BooleanQuery(words) if vector is None else vector
            elsewhere = self._best(query, k, lambda f: f.task_id != own and not (scene and f.scene == scene))
        return merge(repeats_last(here), repeats_last(elsewhere), k)

    def _weighted(self, words: Sequence[str]) -> list[tuple[Any, Any]]:
        """Make a clause for every word that any entry says."""
        from lancedb.query import Occur

        for word in words:
            if word not in self._top:
                best = self._search(_match(word, "words"), 1)
                self._top[word] = best[0].score if best else 0.0
        return [(Occur.SHOULD, _match(word, "words", self._top[word])) for word in words if self._top[word]]

    def _best(
        self, query: Any, k: int, keep: Callable[[Found], bool], where: Expr | None = None
    ) -> list[Found]:  # fmt: skip
        """Find at least the k best rows that `keep` keeps (if there are as many), by (score, id).

        LanceDB breaks ties by row. So rows that tie with the last one found do not count: which of their kind were
        found depends on the order of writing.
        """
        limit = max(WINDOW, 4 * k)
        while True:
            found = self._search(query, limit, where)
            edge = min(f.score for f in found) if len(found) == limit else -math.inf
            kept = [f for f in found if f.score > edge and keep(f)]
            if edge == -math.inf or len(kept) >= k:
                return sorted(kept, key=lambda f: (-f.score, f.id))
            limit *= 16

    def _search(self, query: Any, limit: int, where: Expr | None = None) -> list[Found]:
        """Find the best `limit` rows. `query`: a unit vector, or a structured query, never a query string."""
        table: Any = self._table  # the kind of query builder depends on the query
        if by_vector := hasattr(query, "shape"):
            search = table.search(query, query_type="vector").distance_type("dot")  # 1 - cosine
        else:
            search = table.search(query, query_type="fts")
        if where is not None:
            search = search.where(where, prefilter=True)
        measure, sign = ("_distance", -1.0) if by_vector else ("_score", 1.0)
        columns = [self._row_column, "id", "goal", "scene", "task_id", "success", measure]
        rows = search.select(columns).with_row_id(True).limit(limit).to_arrow().select(columns)
        lists = [column.to_pylist() for column in rows.columns]
        return [Found(*values[:-1], score=sign * values[-1]) for values in zip(*lists, strict=True)]


def query_words(task: Task) -> list[str]:
    """List each word of the goal once."""
    words = " ".join(dict.fromkeys(encodable(goal_without_scene(task.goal, task.scene)).lower().split()))
    return words[:MAX_QUERY].split()[:MAX_WORDS]


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


def _match(text: str, column: str, boost: float = 1.0) -> Any:
    """Match any word of `text`, which is data: nothing in it is an operator."""
    from lancedb.query import MatchQuery

    return MatchQuery(text, column, boost=boost)  # type: ignore[call-arg]  # pydantic's defaults escape the checker


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
    import numpy as np

    vectors = np.asarray(embed(texts), dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ValueError(f"embed must return finite values of shape ({len(texts)}, d), got shape {vectors.shape}")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
