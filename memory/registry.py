"""All memory systems by name: ours, registered ones, those of other packages (entry points `memcompiler.memories`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory.protocol import MemorySystem
from runtime.plugins import Plugins
from runtime.settings import Settings

if TYPE_CHECKING:
    from memory.retrieval import Embed

Ask = Callable[[Sequence[dict[str, Any]], str, int], str | None]
"""(chat messages, role in the accounts, most tokens) -> what a language model answers; None where it does not."""
DEFAULT = "trajectory"
RESPONSES = "responses.sqlite"  # in a memory's folder: what its models behind endpoints have answered


@dataclass(frozen=True, slots=True)
class Tools:
    """What a system may use where it is given. Without, each runs by rule."""

    embed: Embed | None = None
    ask: Ask | None = None
    part: Callable[[str | bytes], dict[str, Any]] | None = None  # of a message, where `ask` is shown PNG pictures, too


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """A memory system as settings name it. `open` takes the folder that it lies in, or shall lie in (the first commit
    makes it)."""

    name: str
    settings: type[Settings]
    open: Callable[[Path, Any, Tools], MemorySystem]


_ALL = Plugins(
    "memory system",
    "memcompiler.memories",
    MemorySpec,
    {
        "trajectory": "memory.bank:TRAJECTORY",
        "brainmem": "memory.brainmem.system:BRAINMEM",
        "s3mem": "memory.s3mem.system:S3MEM",
        "karma": "memory.karma.system:KARMA",
    },
)
BUILT_IN = _ALL.built_in
register, find, names, loaded = _ALL.register, _ALL.find, _ALL.names, _ALL.loaded
