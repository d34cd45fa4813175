"""Opens memory systems from settings: existing banks, and banks that grow during a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from configs.collect import MemoryConfig, MemoryModels
from configs.models import model_path
from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint, EndpointFailure, content_part
from lm.endpoint_embedder import EndpointEmbedder
from memory.budgeted import BudgetedMemory
from memory.protocol import BankError, MemorySystem
from memory.registry import RESPONSES, ChatFunction, MemoryTools, find
from memory.retrieval import Embed, SentenceEmbedder
from runtime.store import read_json, to_json, write_atomically

MARK = "memory.json"  # names the memory system of a folder


def open_memory(config: MemoryConfig, default: Path) -> MemorySystem:
    """Open the bank that the settings name, at their version, or the one at `default`.

    Raises:
        BankError: the folder belongs to another memory system.
    """
    spec, path = find(config.system), Path(config.bank or default)
    if (system := stored_system(path)) not in (None, config.system):
        raise BankError(f"{path} belongs to memory system {system}: set memory.system={system}, or name another folder")
    ask = chat_function(Endpoint(config.api, path / RESPONSES)) if config.api else None
    tools = MemoryTools(
        embedder(config, path / RESPONSES), ask, content_part if config.api and config.api.images else None
    )
    memory = spec.open(path, spec.settings.model_validate(config.settings), tools)
    if config.tokens is not None:
        memory = cast(MemorySystem, BudgetedMemory(memory, config.tokens, _token_counter(str(config.tokenizer))))
    return memory.at(config.version) if config.version is not None else memory


def embedder(models: MemoryModels, cache: Path) -> Embed | None:
    """Return the embedding function of the settings, None without one.

    Args:
        cache: file of an endpoint's answers, if the settings name none.
    """
    if models.embed_api is not None:
        return EndpointEmbedder(Endpoint(models.embed_api, cache))
    return SentenceEmbedder(models.embed) if models.embed else None


def _token_counter(tokenizer: str) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model_path(tokenizer))
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])


def initialise_memory(memory: MemorySystem) -> None:
    """Create the memory's files if there are none, and mark its folder with the system's name."""
    memory.commit([])
    if not (memory.path / MARK).exists():
        write_atomically(memory.path / MARK, to_json({"system": memory.name}))


def stored_system(path: Path) -> str | None:
    """Return the memory system of a folder; None for no folder, or for a bank without a mark (of older versions)."""
    mark = path / MARK
    return read_json(mark).get("system") if mark.exists() else None


def chat_function(endpoint: Endpoint) -> ChatFunction:
    """Return the function by which a memory system calls a language model. It raises EndpointStop."""

    def ask(messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str | None:
        [answer] = endpoint.run([endpoint.ask(messages, role, max_tokens)])
        if isinstance(answer, EndpointStop):
            raise answer
        return None if isinstance(answer, EndpointFailure) else answer.text

    return ask


def clear_memory(path: Path) -> None:
    """Delete a memory's files but the endpoints' cached answers, so that it can be rebuilt from a record."""
    for entry in path.iterdir() if path.exists() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif not entry.name.startswith(RESPONSES):
            entry.unlink()


def open_growing_memory(config: MemoryConfig, path: Path) -> tuple[MemorySystem, int]:
    """Open a writable memory at `path`, filled from the settings' bank; also return its number of traces."""
    return open_memory_from(config, path, open_memory(config, path) if config.bank is not None else None)


def open_memory_from(config: MemoryConfig, path: Path, given: MemorySystem | None) -> tuple[MemorySystem, int]:
    """Open a writable memory at `path`, filled from `given`; also return its number of traces."""
    memory = open_memory(config.model_copy(update={"bank": None, "version": None}), path)
    initialise_memory(memory)
    if given is None:
        return memory, 0
    memory.merge_from(given)
    return memory, given.origins().total()
