"""From settings to a memory system: the one that they name, the one that a run keeps, one that grows."""

from __future__ import annotations

from pathlib import Path

from configs.collect import MemoryConfig
from memory.protocol import MemorySystem
from memory.registry import Tools, find
from memory.retrieval import SentenceEmbedder


def open_memory(config: MemoryConfig, default: Path) -> MemorySystem:
    """Open the bank that the settings name (at its version), or the one at `default`."""
    spec, embed = find(config.system), SentenceEmbedder(config.embed) if config.embed else None
    path = Path(config.bank or default)
    memory = spec.open(path, spec.settings.model_validate(config.settings), Tools(embed))
    return memory.at(config.version) if config.version is not None else memory


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
