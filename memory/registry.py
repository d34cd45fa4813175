"""Registry of memory systems: built-in, registered, and from entry points `memcompiler.memories` of other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.command_reader import CommandReader
from memory.protocol import BankError, MemorySystem
from runtime.plugins import Registry
from runtime.settings import Settings

if TYPE_CHECKING:
    from memory.retrieval import Embed

ChatFunction = Callable[[Sequence[dict[str, Any]], str, int], str | None]
"""(chat messages, role in the cost account, maximal tokens) -> a language model's answer, or None on failure."""
DEFAULT = "trajectory"
RESPONSES = "responses.sqlite"  # cache of endpoint answers in a memory's folder


@dataclass(frozen=True, slots=True)
class MemoryTools:
    """Optional models for memory systems, which run by rule without them; and the environment's reader.

    Attributes:
        reader: reads the views and commands of the environment whose episodes the memory holds; None: not known.
    """

    embed: Embed | None = None
    ask: ChatFunction | None = None
    message_part: Callable[[str | bytes], dict[str, Any]] | None = (
        None  # creates message parts from texts and PNG pictures, if `ask` accepts pictures
    )
    reader: CommandReader | None = None


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """A registered memory system. `open` takes its folder, which the first commit creates.

    Attributes:
        reads_views: it follows episodes by `MemoryTools.reader`, so environments without one are refused.
        on_stores: `open` also takes an address on an object store (`memory.bank_store`).
    """

    name: str
    settings: type[Settings]
    open: Callable[[Any, Any, MemoryTools], MemorySystem]
    reads_views: bool = False
    on_stores: bool = False


def why_unread(system: str, env: str, reader: CommandReader) -> str:
    """Say why a memory system cannot follow the episodes of an environment; "" if it can, or need not."""
    if reader.reads_views or not find(system).reads_views:
        return ""
    return f"memory system {system} needs a reader of {env}'s views and commands (EnvSpec.reader): it has none"


def required_reader(system: str, path: Path, reader: CommandReader | None) -> CommandReader:
    """Return the reader of a bank's environment. Raises: BankError, if the environment is not known."""
    if reader is None:
        raise BankError(
            f"memory system {system} reads the views of its environment, and {path} names none: open it with "
            "bank show --env NAME or open_memory(..., env=NAME)"
        )
    return reader


_ALL = Registry(
    "memory system",
    "memcompiler.memories",
    MemorySpec,
    {
        "trajectory": "memory.bank:TRAJECTORY",
        "brainmem": "memory.brainmem.system:BRAINMEM",
        "s3mem": "memory.s3mem.system:S3MEM",
        "karma": "memory.karma.system:KARMA",
        "amem": "memory.amem.system:AMEM",
        "gmemory": "memory.gmemory.system:GMEMORY",
        "mem0": "memory.mem0.system:MEM0",
        "langmem": "memory.langmem.system:LANGMEM",
    },
)
BUILT_IN = _ALL.built_in
register, find, names, loaded = _ALL.register, _ALL.find, _ALL.names, _ALL.loaded
