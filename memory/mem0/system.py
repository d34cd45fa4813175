"""Mem0 as a memory system (arXiv 2504.19413, package `mem0ai`): short facts, extracted from episodes and recalled by
similarity.

With a language model, Mem0's own package writes: its prompt, search for related facts and deduplication
(`memory.packages.mem0_host`). Without one, rules write facts of the same form, which are not Mem0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from envs.command_reader import CommandReader
from memory.items import Origin, stated_actions
from memory.journal import Row
from memory.mem0.agent import Extraction
from memory.mem0.settings import Mem0Settings
from memory.packages.conversation import Message
from memory.packages.process import PackageError
from memory.packages.system import PackageMemory, PackageState, decisive, done, lesson, plain
from memory.protocol import BankError
from memory.registry import ChatFunction, MemorySpec, MemoryTools
from memory.similarity import CachedEmbed

NAME = "mem0"
CARRIED = 10  # messages of earlier conversations that Mem0 shows in a prompt
FAILED = "package"  # count of conversations that Mem0 could not add


class Mem0State(PackageState):
    """The facts that a journal's rows tell."""

    def __init__(self, embed: CachedEmbed | None, reader: CommandReader, settings: Mem0Settings) -> None:
        super().__init__(embed, reader)
        self._replaces = settings.pipeline == "paper"
        self.rows = list[Row]()  # the last ones, whose conversations Mem0 carries on

    def learn(self, row: Row) -> None:
        """Add the next row's facts: those that Mem0 extracted, else those of the rules."""
        n, origin = self.learned, Origin.of(self.learned, decisive(row))
        if "added" in row.answers:
            commands = [command for trace in row.attempts for command in done(trace)]
            for fact in row.answers["added"]:
                actions = stated_actions(fact["text"], commands, self.reader)
                self._put(_id(fact["text"]), fact["text"], n, origin, actions)
        else:
            self._learn_by_rule(row, n)
        self.learned += 1
        self.rows = [*self.rows[-CARRIED:], row]

    def _learn_by_rule(self, row: Row, n: int) -> None:
        for trace in row.attempts:
            commands, origin = done(trace), Origin.of(n, trace)
            for fact in dict.fromkeys(self.reader.facts(commands)):
                text = plain(self.reader.sentence(trace.task.scene, fact.need, fact.place))
                name = _id(f"{trace.task.scene}\n{fact.need}") if self._replaces else _id(text)
                self._put(name, text, n, origin, stated_actions(text, commands, self.reader))
        trace = decisive(row)
        if text := lesson(trace, self.reader):
            self._put(_id(text), text, n, Origin.of(n, trace), ())

    def _put(self, name: str, text: str, n: int, origin: Origin, actions: Sequence[str]) -> None:
        """Add a fact. Who repeats it adds a version of which he alone is the origin, for tasks of earlier ones."""
        if name not in self.items or self._replaces:
            self.stored.append(text)
            self.texts.append(text)
        self.items.put(name, text, n, [origin], actions=actions)


class Mem0(PackageMemory[Mem0State, Mem0Settings]):
    """Mem0 as a `MemorySystem`. Its facts are only added; equal ones are one item."""

    name: ClassVar[str] = NAME
    package = "mem0"

    @property
    def threshold(self) -> float:
        return self.settings.threshold

    def new_state(self) -> Mem0State:
        return Mem0State(self._embed, self.reader, self.settings)

    def answers(self, state: Mem0State, row: Row, ask: ChatFunction) -> dict[str, Any]:
        """Let Mem0 extract a row's facts; without a usable answer the row has none, and the rules speak."""
        settings, reply = self.settings, Extraction(ask, self.settings.max_tokens)
        worker = self.worker(state, instructions=settings.instructions, extraction=settings.extraction)
        try:
            added = worker.call("add", ask=reply, messages=self.told(row), carried=self._carried(state))
        except PackageError:
            added, reply.failures[FAILED] = None, 1
        facts = {"added": added} if reply.usable and added is not None else {}
        return {**facts, "replies": reply.replies, "failures": dict(+reply.failures)}

    def _carried(self, state: Mem0State) -> list[list[Message]]:
        """Return the conversations of the last rows, as many as Mem0 may carry on."""
        conversations = list[list[Message]]()
        for row in reversed(state.rows):
            if sum(map(len, conversations)) >= CARRIED:
                break
            conversations.insert(0, self.told(row))
        return conversations


def _id(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _open(path: Path, settings: Mem0Settings, tools: MemoryTools) -> Mem0:
    if settings.pipeline == "paper" and tools.ask is not None:
        raise BankError("mem0: pipeline=paper is for rules; the package with a language model only adds facts (v3)")
    return Mem0(path, settings, tools=tools)


MEM0 = MemorySpec(NAME, Mem0Settings, _open, reads_views=True)
