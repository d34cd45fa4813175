"""Text embeddings from an OpenAI-compatible endpoint, for memory retrieval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint, EndpointFailure

ROLE = "embedding"  # in the endpoint's cost account


class EndpointEmbedder:
    """An `Embed` (`memory.retrieval`) by an endpoint, which caches vectors by text. A bank records `name`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.name = endpoint, endpoint.config.model

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embed n texts as (n, d) float32. Raises: EndpointStop, for a missing vector or vectors of several lengths."""
        distinct, n = list(dict.fromkeys(texts)), self.endpoint.config.batch
        batches = [distinct[i : i + n] for i in range(0, len(distinct), n)]
        found: dict[str, np.ndarray] = {}
        answers = self.endpoint.run([self.endpoint.embed(batch, ROLE) for batch in batches])
        for batch, vectors in zip(batches, answers, strict=True):
            if isinstance(vectors, EndpointStop):
                raise vectors
            if isinstance(vectors, EndpointFailure):
                raise EndpointStop(f"{self.name} gives no vectors for {len(batch)} texts: {vectors}")
            found |= {text: np.frombuffer(vector, np.float32) for text, vector in zip(batch, vectors, strict=True)}
        if len(lengths := {len(vector) for vector in found.values()}) > 1:
            raise EndpointStop(f"{self.name} gives vectors of {' and '.join(map(str, sorted(lengths)))} dimensions")
        return np.stack([found[text] for text in texts]) if texts else np.zeros((0, 1), np.float32)
