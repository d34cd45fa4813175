"""Mem0's open-source package behind the worker's calls: its own extraction prompt, store and deduplication.

The models are those of the parent process. The vector store is an embedded Qdrant in memory. After every `add` the new
memories are taken out again: the parent loads what its journal holds of them, so that the store is a function of the
journal.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import mem0.memory.main as package  # type: ignore[import-not-found]  # of the extra `mem0`
import numpy as np
from mem0 import Memory  # type: ignore[import-not-found]
from mem0.memory.storage import SQLiteManager  # type: ignore[import-not-found]
from qdrant_client import QdrantClient  # type: ignore[import-not-found]

from memory.packages.worker import Parent

USER, SCOPE = "bank", "user_id=bank"
DAY = "2026-01-01"  # stands for today in prompts, so that equal requests are equal on every day
CHUNK = 1000
OWN_PROMPT = package.ADDITIVE_EXTRACTION_PROMPT
_write_prompt = package.generate_additive_extraction_prompt


class Mem0Host:
    """One bank in Mem0.

    Args:
        dims: length of the vectors.
        instructions: Mem0's `custom_instructions`.
        extraction: replaces Mem0's extraction prompt (8,000 tokens), for models with a short context; "": Mem0's own.
    """

    def __init__(self, parent: Parent, dims: int, instructions: str, extraction: str = "") -> None:
        self.dims, self._parent = dims, parent
        store = {"client": QdrantClient(":memory:"), "collection_name": USER, "embedding_model_dims": dims}
        nowhere = {"api_key": "none", "openai_base_url": "http://127.0.0.1:9"}  # replaced below, never asked
        self._memory: Any = Memory.from_config(
            {
                "vector_store": {"provider": "qdrant", "config": store},
                "llm": {"provider": "openai", "config": nowhere},
                "embedder": {"provider": "openai", "config": {**nowhere, "embedding_dims": dims}},
                "history_db_path": ":memory:",
                "custom_instructions": instructions,
            }
        )
        self._memory.llm, self._memory.embedding_model = _Model(parent), _Embedder(parent, dims)
        self._extraction = extraction or OWN_PROMPT

    def load(self, vectors: np.ndarray, items: Sequence[str], start: int) -> None:
        """Store the memories of the journal from number `start` on, with their vectors."""
        self._parent.keep(items, vectors)
        for first in range(0, len(items), CHUNK):
            part = range(first, min(first + CHUNK, len(items)))
            self._memory.vector_store.insert(
                vectors=[vectors[n].tolist() for n in part],
                ids=[_id(start + n) for n in part],
                payloads=[{"user_id": USER, "data": items[n], "hash": _md5(items[n])} for n in part],
            )

    def add(self, messages: list[dict[str, str]], carried: Sequence[list[dict[str, str]]]) -> list[dict[str, str]]:
        """Extract memories from a conversation, with those of the store and the last messages of earlier ones in view.

        Returns: what Mem0 stored, {"text", "attributed_to"} each.
        """
        package.ADDITIVE_EXTRACTION_PROMPT = self._extraction
        self._memory.db = SQLiteManager(":memory:")
        for earlier in carried:
            self._memory.db.save_messages(earlier, SCOPE)
        added = []
        for stored in self._memory.add(messages, user_id=USER)["results"]:
            found = self._memory.vector_store.get(stored["id"])
            added.append({"text": stored["memory"], "attributed_to": str(found.payload.get("attributed_to", ""))})
            self._memory.vector_store.delete(stored["id"])
        return added

    def search(self, query: str, k: int, threshold: float) -> list[tuple[str, float]]:
        """Return (text, score) of the k nearest memories by Mem0's own search."""
        found = self._memory.search(query, filters={"user_id": USER}, top_k=k, threshold=threshold)["results"]
        return [(each["memory"], float(each["score"])) for each in found]


class _Model:
    """Mem0's language model, which the parent process asks."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def generate_response(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        return self._parent.ask([{"role": str(m["role"]), "content": str(m["content"])} for m in messages])


class _Embedder:
    """Mem0's embedding model, which the parent process asks."""

    def __init__(self, parent: Parent, dims: int) -> None:
        self._parent = parent
        self.config = type("Config", (), {"embedding_dims": dims, "model": "parent"})()

    def embed(self, text: str, action: str | None = None) -> list[float]:
        return self._parent.embed([text])[0]

    def embed_batch(self, texts: Sequence[str], action: str | None = None) -> list[list[float]]:
        return self._parent.embed(texts)


def _write_undated(*given: Any, **named: Any) -> str:
    """Write Mem0's prompt with a constant for today's date."""
    return _write_prompt(*given, **{**named, "current_date": DAY})


package.generate_additive_extraction_prompt = _write_undated


def _id(number: int) -> str:
    return str(uuid.UUID(int=number + 1))


def _md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()
