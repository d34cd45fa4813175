"""Three types of memories by rule, in LangMem's sense: facts, episodes and procedures.

They stand in for LangMem where there is no language model; its own writing always needs one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from envs.command_reader import CommandReader, Fact
from memory.brainmem import rules
from memory.items import Items, Origin, stated_actions
from memory.journal import Row
from memory.packages.system import decisive, done, lesson, plain
from memory.protocol import Trace
from memory.trajectory import command_lines


@dataclass
class Place:
    """Where a need was met, and the origin that said so last."""

    place: str
    origin: Origin


@dataclass
class Procedure:
    """How often a way to do a kind of task succeeded, and by whom since the last version of its item."""

    count: int = 0
    origins: list[Origin] = field(default_factory=list)


class RuleWriter:
    """Writes the items of rows, and remembers what later rows revise."""

    def __init__(self, items: Items, reader: CommandReader) -> None:
        self._items, self._reader = items, reader
        self._places: dict[str, tuple[Place, Place | None]] = {}  # by item: the newest, and the one before it
        self._procedures: dict[str, Procedure] = {}

    def write(self, row: Row, n: int) -> list[tuple[str, str]]:
        """Write a row's items. Returns: (item, text) of each."""
        written = [item for trace in row.attempts for item in self._facts(trace, n)]
        trace = decisive(row)
        written.append(self._episode(row, trace, n))
        if trace.success:
            written += self._procedure(trace, n)
        return written

    def _facts(self, trace: Trace, n: int) -> list[tuple[str, str]]:
        """Semantic memory: one item for each need of a scene, rewritten when it is met elsewhere."""
        commands, written = done(trace), list[tuple[str, str]]()
        for fact in dict.fromkeys(self._reader.facts(commands)):
            item = f"s-{_digest(trace.task.scene, fact.need)}"
            newest, before = self._places.get(item, (None, None))
            place = Place(fact.place, Origin.of(n, trace))
            if newest is not None and newest.place != fact.place:
                before = newest
            self._places[item] = place, before
            origins = [place.origin] if before is None else [before.origin, place.origin]
            text = self._sentence(trace.task.scene, fact, before)
            actions = stated_actions(text, commands, self._reader)
            self._items.put(item, text, n, origins, actions=actions)
            written.append((item, text))
        return written

    def _sentence(self, scene: str, fact: Fact, before: Place | None) -> str:
        text = self._reader.sentence(scene, fact.need, fact.place)
        return plain(f"{text}, before that in {before.place}" if before else text)

    def _episode(self, row: Row, trace: Trace, n: int) -> tuple[str, str]:
        """Episodic memory: the commands of an episode, and why they succeeded or failed."""
        why = lesson(trace, self._reader)
        item, text = f"e-{row.key}", plain(". ".join(command_lines(replace(trace, rationale=why))))
        self._items.put(item, text, n, [Origin.of(n, trace)], actions=done(trace))
        return item, text

    def _procedure(self, trace: Trace, n: int) -> list[tuple[str, str]]:
        """Procedural memory: the steps that solve a kind of task, without the names of things, with a count. Its text
        is rewritten at the 1st, 2nd, 4th, 8th, ... success."""
        steps = general_steps(trace, self._reader)
        if not steps:
            return []
        item = f"p-{_digest(trace.task.kind, steps)}"
        known = self._procedures.setdefault(item, Procedure())
        known.count += 1
        known.origins.append(Origin.of(n, trace))
        if known.count & (known.count - 1):
            return []
        times = "time" if known.count == 1 else "times"
        text = plain(f"for {trace.task.kind or 'this'}: {steps} (succeeded {known.count} {times})")
        self._items.put(item, text, n, known.origins)
        return [(item, text)]


def general_steps(trace: Trace, reader: CommandReader) -> str:
    """Write the effects of an attempt without the kinds of its things and receptacles."""
    steps = []
    for done_ in rules.effects(trace, reader):
        general = replace(done_, thing="thing", place="receptacle" if done_.verb == "put" else done_.place)
        steps.append(reader.phrase(general))
    return ", then ".join(steps)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
