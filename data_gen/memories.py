"""From settings to a memory system: the one that they name, the one that a run keeps, one that grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.collect import MemoryConfig
from lm.endpoint import Endpoint, EndpointFailure
from lm.ledger import EndpointStop
from memory.protocol import MemorySystem
from memory.registry import Ask, Tools, find
from memory.retrieval import SentenceEmbedder

RESPONSES = "responses.sqlite"  # a memory's file of its language model's answers


def open_memory(config: MemoryConfig, default: Path) -> MemorySystem:
    """Open the bank that the settings name (at its version), or the one at `default`."""
    spec, embed = find(config.system), SentenceEmbedder(config.embed) if config.embed else None
    path = Path(config.bank or default)
    ask = asking(Endpoint(config.api, path / RESPONSES)) if config.api else None
    memory = spec.open(path, spec.settings.model_validate(config.settings), Tools(embed, ask))
    return memory.at(config.version) if config.version is not None else memory


def asking(endpoint: Endpoint) -> Ask:
    """Return what a memory system asks a language model with; it raises EndpointStop where nothing more is asked."""

    def ask(messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str | None:
        [answer] = endpoint.run([endpoint.ask(messages, role, max_tokens)])
        if isinstance(answer, EndpointStop):
            raise answer
        return None if isinstance(answer, EndpointFailure) else answer.text

    return ask


def growing_memory(config: MemoryConfig, path: Path) -> tuple[MemorySystem, int]:
    """Open one at `path` to be committed to, with what the bank that the settings name holds; and how many traces that
    is."""
    return grown_from(config, path, open_memory(config, path) if config.bank is not None else None)


def grown_from(config: MemoryConfig, path: Path, given: MemorySystem | None) -> tuple[MemorySystem, int]:
    """Open one at `path` to be committed to, with what another one holds; and how many traces that is."""
    memory = open_memory(config.model_copy(update={"bank": None, "version": None}), path)
    memory.commit([])  # there is one, if an empty one
    if given is None:
        return memory, 0
    memory.take_over(given)
    return memory, given.origins().total()
