"""Opens memory systems from settings: existing banks, and banks that grow during a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from configs.collect import MemoryConfig, MemoryModels
from configs.models import model_path
from envs.command_reader import CommandReader, alike
from envs.registry import known
from lm.answer_cache import EndpointStop, price, read_totals
from lm.endpoint import Endpoint, EndpointFailure, content_part
from lm.endpoint_embedder import EndpointEmbedder
from memory.bank import MemoryBank
from memory.bank_store import Place, StoreAddress, place_of
from memory.budgeted import BudgetedMemory
from memory.protocol import BankError, MemorySystem, ReadsWithModels
from memory.registry import RESPONSES, ChatFunction, MemoryTools, find, why_unread
from memory.retrieval import Embed, SentenceEmbedder
from runtime.store import read_json, to_json, write_atomically

MARK = "memory.json"  # names the memory system of a folder, and the environment of its episodes


def open_memory(config: MemoryConfig, default: Path, env: str | None = None) -> MemorySystem:
    """Open the bank that the settings name, at their version, or the one at `default`.

    Args:
        env: the environment whose episodes the memory follows; None: the one that the bank names, if it does.

    Raises:
        BankError: the folder belongs to another memory system, or to an environment whose views the memory system
            cannot read, or reads differently from those of `env`; or the bank is on an object store, and the memory
            system keeps files in a folder.
    """
    spec, place = find(config.system), place_of(config.bank or default)
    if isinstance(place, StoreAddress) and not spec.on_stores:
        raise BankError(f"{place}: memory system {config.system} keeps its episodes in a file: name a folder")
    if (system := stored_system(place)) not in (None, config.system):
        raise BankError(
            f"{place} belongs to memory system {system}: set memory.system={system}, or name another folder"
        )
    answers = _answers_file(config, place)
    ask = chat_function(Endpoint(config.api, answers)) if config.api else None
    tools = MemoryTools(
        embedder(config, answers),
        ask,
        content_part if config.api and config.api.images else None,
        _reader(config.system, place, env),
    )
    memory = spec.open(place, spec.settings.model_validate(config.settings), tools)
    if config.tokens is not None:
        memory = cast(MemorySystem, BudgetedMemory(memory, config.tokens, _token_counter(str(config.tokenizer))))
    return memory.at(config.version) if config.version is not None else memory


def _answers_file(config: MemoryModels, place: Place) -> Path | None:
    """Return the file of endpoints' answers, unless the settings name one.

    Raises: BankError, for a bank on an object store with an endpoint that names no file."""
    if isinstance(place, Path):
        return place / RESPONSES
    for name, api in (("api", config.api), ("embed_api", config.embed_api)):
        if api is not None and not api.cache:
            raise BankError(
                f"{place} cannot hold an endpoint's answers: name a file for them (memory.{name}.cache=FILE)"
            )
    return None


def embedder(models: MemoryModels, cache: Path | None) -> Embed | None:
    """Return the embedding function of the settings, None without one.

    Args:
        cache: file of an endpoint's answers; None: the settings name one.
    """
    if models.embed_api is not None:
        return EndpointEmbedder(Endpoint(models.embed_api, cache))
    return SentenceEmbedder(models.embed) if models.embed else None


def _token_counter(tokenizer: str) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model_path(tokenizer))
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])


def _reader(system: str, place: Place, env: str | None) -> CommandReader | None:
    """Return the reader of the environment's views; None for no environment, or for one that is not installed here."""
    if (name := env or _marked(place, "env")) is None or (spec := known(name)) is None:
        return None
    if why := why_unread(system, name, spec.reader):
        raise BankError(why)
    before = known(of) if (of := _marked(place, "env")) else None
    if before is not None and find(system).reads_views and not alike(before.reader, spec.reader):
        raise BankError(f"{place} holds episodes of {before.name}, whose views read differently from those of {name}")
    return spec.reader


def initialise_memory(memory: MemorySystem, env: str | None = None) -> None:
    """Create the memory's files if there are none, and mark its folder with the names of system and environment.

    Raises: BankError, for a bank on an object store."""
    mark = memory.path / MARK
    memory.commit([])
    if not mark.exists():
        named = {"system": memory.name, "env": env}
        write_atomically(mark, to_json({key: name for key, name in named.items() if name}))


def stored_system(place: Place) -> str | None:
    """Return the memory system of a folder; None for no folder, or for a bank without a mark (of older versions)."""
    return _marked(place, "system")


def _marked(place: Place, key: str) -> str | None:
    """Return what a folder's mark says; None without a mark, as on an object store."""
    mark = place / MARK if isinstance(place, Path) else None
    return read_json(mark).get(key) if mark is not None and mark.exists() else None


def chat_function(endpoint: Endpoint) -> ChatFunction:
    """Return the function by which a memory system calls a language model. It raises EndpointStop."""

    def ask(messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str | None:
        [answer] = endpoint.run([endpoint.ask(messages, role, max_tokens)])
        if isinstance(answer, EndpointStop):
            raise answer
        return None if isinstance(answer, EndpointFailure) else answer.text

    return ask


def writing_facts(config: MemoryConfig, memory: MemorySystem) -> dict[str, Any]:
    """Return who wrote and who reads a memory, and what that cost: `system`, `written_by` and `read_by` (names of
    models, or "rules"), `episodes`, `entries`, requests and tokens by role of its endpoints' account, and unusable
    answers by role, of writing (`failures`) and of recalls since the memory was opened (`recall_failures`).

    `price` is in the currency of the settings; null where the memory's account names a model that they do not.
    """
    inner = memory.memory if isinstance(memory, BudgetedMemory) else memory
    place = inner.place if isinstance(inner, MemoryBank) else memory.path
    path = Path(config.api.cache) if config.api and config.api.cache else _answers_file(config, place)
    models = read_totals(path) if path is not None else {}
    embedding = models.pop(str(config.embedding_model), {})
    counts = {
        name: sum(of[name] for roles in models.values() for of in roles.values())
        for name in ("requests", "tokens_in", "tokens_out")
    }
    known = config.api is not None and set(models) <= {config.api.model}
    paid = price(config.api, counts["tokens_in"], counts["tokens_out"]) if config.api and known else None
    return {
        "system": memory.name,
        "written_by": " and ".join(models) or "rules",
        "read_by": _read_by(config, inner),
        "episodes": memory.origins().total(),
        "entries": len(memory),
        **counts,
        "price": 0.0 if not models else paid,
        "roles": {role: of for roles in models.values() for role, of in roles.items()},
        "embeddings": embedding,
        "failures": dict(getattr(inner, "failures", {})),
        "recall_failures": dict(inner.recall_failures) if isinstance(inner, ReadsWithModels) else {},
    }


def _read_by(config: MemoryConfig, memory: MemorySystem) -> str:
    """Return the names of the models that a recall asks, or "rules"; "not stated" for a system that does not say which
    of the settings' models it asks."""
    names = config.model_names()
    if isinstance(memory, ReadsWithModels):
        return " and ".join(names.get(model, model) for model in memory.reads_with) or "rules"
    return "not stated" if names else "rules"


def clear_memory(path: Path) -> None:
    """Delete a memory's files but the endpoints' cached answers, so that it can be rebuilt from a record."""
    for entry in path.iterdir() if path.exists() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif not entry.name.startswith(RESPONSES):
            entry.unlink()


def open_growing_memory(config: MemoryConfig, path: Path, env: str) -> tuple[MemorySystem, int]:
    """Open a writable memory at `path`, filled from the settings' bank; also return its number of traces."""
    return open_memory_from(config, path, env, open_memory(config, path, env) if config.bank is not None else None)


def open_memory_from(
    config: MemoryConfig, path: Path, env: str, given: MemorySystem | None
) -> tuple[MemorySystem, int]:
    """Open a writable memory at `path`, filled from `given`; also return its number of traces."""
    memory = open_memory(config.model_copy(update={"bank": None, "version": None}), path, env)
    initialise_memory(memory, env)
    if given is None:
        return memory, 0
    memory.merge_from(given)
    return memory, given.origins().total()
