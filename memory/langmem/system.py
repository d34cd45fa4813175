"""LangMem as a memory system (package `langmem`): facts, episodes and procedures that a language model writes and
revises, recalled by similarity.

With a language model, LangMem's own manager writes (`memory.packages.langmem_host`). Without one, rules write three
types of memories in its sense (`memory.langmem.rules`), which are not LangMem's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from envs.command_reader import CommandReader
from memory.items import Origin, stated_actions
from memory.journal import Row
from memory.langmem.agent import ToolCalls
from memory.langmem.rules import RuleWriter
from memory.langmem.settings import LangMemSettings
from memory.packages.process import PackageError, PackageHost
from memory.packages.system import PackageMemory, PackageState, decisive, done
from memory.registry import ChatFunction, MemorySpec, MemoryTools
from memory.replies import line
from memory.similarity import CachedEmbed

NAME = "langmem"
LONGEST = 1_000  # characters of an item, and of a field of it
FAILED = "package"  # count of conversations that LangMem could not write
Put = tuple[str, str, str, dict[str, Any]]  # insert or update, item, kind, content


class LangMemState(PackageState):
    """The items that a journal's rows wrote."""

    def __init__(self, embed: CachedEmbed | None, reader: CommandReader, settings: LangMemSettings) -> None:
        super().__init__(embed, reader)
        self._kind = "Fact" if settings.schemas == "typed" else "Memory"  # of texts of the rules
        self._rules = RuleWriter(self.items, reader)
        self._commands = list[list[str]]()  # by row

    def learn(self, row: Row) -> None:
        """Add what the next row wrote: LangMem's puts, else the items of the rules."""
        n = self.learned
        self._commands.append([command for trace in row.attempts for command in done(trace)])
        if "puts" in row.answers:
            for op, item, kind, content in row.answers["puts"]:
                self._put(op, item, kind, content, Origin.of(n, decisive(row)))
        else:
            for item, text in self._rules.write(row, n):
                self._store(item, self._kind, {"content": text}, text)
        self.learned += 1

    def _put(self, op: str, item: str, kind: str, content: Mapping[str, Any], origin: Origin) -> None:
        """Add an item, or its next version, whose origins are also those of the version that it replaces."""
        clean = {str(name): line(str(value), LONGEST) for name, value in content.items()}
        text = line(" ".join(clean.values()), LONGEST)
        if not text or (op == "update") != (item in self.items):  # its episodes are left out here
            return
        before = self.items.version(item).origins if op == "update" else ()
        origins = (*before, origin)
        commands = [command for row in dict.fromkeys(each.row for each in origins) for command in self._commands[row]]
        actions = stated_actions(text, commands, self.reader)
        self.items.put(item, text, origin.row, origins, actions=actions)
        self._store(item, kind, clean, text)

    def _store(self, item: str, kind: str, content: dict[str, Any], text: str) -> None:
        self.stored.append([item, kind, content, text])
        self.texts.append(text)


class LangMem(PackageMemory[LangMemState, LangMemSettings]):
    """LangMem as a `MemorySystem`."""

    name: ClassVar[str] = NAME
    package = "langmem"

    def new_state(self) -> LangMemState:
        return LangMemState(self._embed, self.reader, self.settings)

    def answers(self, state: LangMemState, row: Row, ask: ChatFunction) -> dict[str, Any]:
        """Let LangMem write a row's memories; without a usable answer the row has none, and the rules speak."""
        settings, reply = self.settings, ToolCalls(ask, self.settings.max_tokens)
        worker = self.worker(
            state,
            schema=settings.schemas,
            instructions=settings.instructions,
            query_limit=settings.query_limit,
        )
        puts = self._written(worker, row, reply)
        if puts is None:
            reply.failures[FAILED] += 1
        written = {"puts": _named(puts, row)} if puts is not None and reply.usable else {}
        return {**written, "replies": reply.replies, "failures": dict(+reply.failures)}

    def _written(self, worker: PackageHost, row: Row, reply: ToolCalls) -> list[Put] | None:
        """Return LangMem's puts; None if it raised twice, as it does after a malformed repair of a call."""
        for repeated in (False, True):
            try:
                return worker.call("add", ask=reply, messages=self.told(row), repeated=repeated)
            except PackageError:
                continue
        return None


def _named(puts: list[Put], row: Row) -> list[Put]:
    """Return puts whose new items are named by their row, instead of LangMem's random keys."""
    named, new = list[Put](), 0
    for op, key, kind, content in puts:
        named.append((op, key if op == "update" else f"n-{row.key}-{new}", kind, content))
        new += op == "insert"
    return named


def _open(path: Path, settings: LangMemSettings, tools: MemoryTools) -> LangMem:
    return LangMem(path, settings, tools=tools)


LANGMEM = MemorySpec(NAME, LangMemSettings, _open, reads_views=True)
