"""Sentence embeddings as an option for retrieval; full-text search needs none of this."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Embed = Callable[[list[str]], np.ndarray]  # n texts -> (n, d), finite; d is the same in every call


class SentenceEmbedder:
    """An `Embed` from sentence-transformers, loaded at the first call. `name` goes on record in the bank."""

    def __init__(self, model: str | Path, device: str | None = None, batch_size: int = 64) -> None:
        self.name = Path(model).name if Path(model).exists() else str(model)  # a bank outlives the path of its model
        self._source, self._device, self._batch_size = str(model), device, batch_size
        self._model: Any = None

    def __call__(self, texts: list[str]) -> np.ndarray:
        """(n, d) float32. Raises ImportError, naming the step to take, where sentence-transformers is missing."""
        if self._model is None:
            self._model = self._load()
        return self._model.encode(texts, batch_size=self._batch_size, convert_to_numpy=True, show_progress_bar=False)

    def _load(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # optional
        except ImportError as e:
            raise ImportError("embeddings need sentence-transformers: uv sync --inexact --extra embed") from e
        return SentenceTransformer(self._source, device=self._device)


def unit_rows(embed: Embed, texts: list[str]) -> np.ndarray:
    """Return `embed(texts)` as (n, d) float32 of unit length, so that a dot product is the cosine. Zero rows stay zero.

    Raises:
        ValueError: when `embed` returns another shape or values that are not finite.
    """
    import numpy as np

    vectors = np.asarray(embed(texts), dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ValueError(f"embed must return finite values of shape ({len(texts)}, d), got shape {vectors.shape}")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
