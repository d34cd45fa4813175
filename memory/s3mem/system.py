"""S3Mem as a memory system (arXiv 2605.28831): scene-event units, written once and folded from a journal; a router
that was trained once; a pack of evidence for a question, or for the objects of a goal.

Entries are units, so that a pack is a tuple of entries whose texts do not depend on what is asked.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import ClassVar

from envs.base import Task
from envs.household.telling import kind, objects
from memory.entry import MemoryEntry, Written
from memory.journal import Journal, Row
from memory.protocol import ESTIMATED, Costs, Fixed, Query, Recall, Trace
from memory.registry import Ask, MemorySpec, Tools
from memory.retrieval import Embed
from memory.s3mem import llm
from memory.s3mem.packing import Pack, ordered, packed
from memory.s3mem.pool import Candidate, Index
from memory.s3mem.router import scored
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.units import NAME, Unit
from memory.s3mem.writing import written

SCOPES = 16  # indexes that are kept: a scope's is made anew in milliseconds


class S3Mem:
    """A `MemorySystem`. Units follow from the journal's first rows; what is asked is answered within one scope: the
    scene of its task, else all that is held."""

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: S3MemSettings | None = None,
        until: int | None = None,
        ask: Ask | None = None,
        embed: Embed | None = None,
    ) -> None:
        self.path, self.settings, self._ask, self._embed = Path(path), settings or S3MemSettings(), ask, embed
        self._journal = Journal(self.path, until)
        self._units, self._rows = list[Unit](), 0
        self._scopes = OrderedDict[tuple[str, str], Index]()

    # writing ---------------------------------------------------------------------------------------------------------

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> Written:
        rows = [Row(tuple(attempts), {}) for attempts in episodes]
        if self._ask is None or self.settings.writer != "llm":
            return self._journal.append(rows)
        fresh = self._journal.unknown(rows)
        told = [Row(row.attempts, llm.answers(row.attempts, self._ask)) for row in fresh]
        return self._journal.append(told) + Written(0, len(rows) - len(fresh))

    def take_over(self, other: S3Mem) -> Written:
        return self._journal.append(list(other._journal))

    @property
    def units(self) -> list[Unit]:
        """Return all units in the order of writing."""
        fresh = self._journal.since(self._rows)
        for row in fresh:
            self._units += units_of(row)
        if fresh:
            self._rows += len(fresh)
            self._scopes.clear()
        return self._units

    @property
    def failures(self) -> Counter[str]:
        """Count what a language model answered that could not be used."""
        return sum((Counter(row.answers.get("failures", {})) for row in self._journal), Counter())

    # asking ----------------------------------------------------------------------------------------------------------

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        return [self._recalled(query) for query in queries]

    def _recalled(self, query: Query) -> Recall:
        index = self._index(query.task)
        budget, how = float(query.tokens or self.settings.tokens), self.settings.representation
        if query.text:
            picks = self.pack(index, query.text, budget, query.costs).picks
        else:
            picks = self._of_goal(index, query.task, budget, query.k)
        entries = tuple(pick.unit.entry(how, pictures=query.costs.picture > 0) for pick in picks)
        return Recall(entries, pointers=tuple(pick.unit.pointers for pick in picks))

    def pack(self, index: Index, question: str, budget: float, costs: Costs = ESTIMATED) -> Pack:
        """Pack the evidence for one question."""
        settings, asked = self.settings, index.ask(question, costs=costs)
        if settings.anchors and self._ask is not None and settings.writer == "llm":
            anchor = llm.anchor(question, asked.anchor, self._ask)
            asked = index.ask(question, anchor, costs)
        return packed(asked.anchor, *scored(asked, settings), budget, settings)

    def _of_goal(self, index: Index, task: Task, budget: float, k: int) -> list[Candidate]:
        """Unite the packs of a goal's objects: where each was seen last, and what has become of it. At most k units, of
        each object in turn the one with most support; in the order of writing."""
        known = {kind(thing) for unit in index.units for thing in unit.objects}
        wanted = sorted(objects(task, known)) or [task.goal]
        packs = [self.pack(index, f"Where was the {thing} last seen?", budget / len(wanted)) for thing in wanted]
        ranked = [sorted(pack.picks, key=lambda pick: (-pick.support, -pick.place)) for pack in packs]
        in_turn = (pick for turn in zip_longest(*ranked) for pick in turn if pick is not None)
        picks = {pick.unit.id: pick for pick in in_turn}
        return ordered(list(islice(picks.values(), k)))

    def _index(self, task: Task) -> Index:
        """Return the index of a task's scope, without what its own episodes left."""
        units = self.units
        scenes = {unit.origin.scene for unit in units}
        key = (task.scene if task.scene in scenes else "", task.id)
        own = any(unit.origin.task_id == task.id for unit in units)
        key = (key[0], task.id if own else "")
        if key not in self._scopes:
            scope, left_out = key
            inside = (unit for unit in units if not scope or unit.origin.scene == scope)
            others = [unit for unit in inside if not left_out or unit.origin.task_id != left_out]
            self._scopes[key] = Index(others, self.settings, self._embed)
            while len(self._scopes) > SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(key)
        return self._scopes[key]

    def session(self, query: Query, first: Recall) -> Fixed:
        """Recall the same at every step: what is packed follows from the question alone."""
        return Fixed(first)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        """Keep a failure as it is."""

    # as a store ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        return len(self._journal)

    def at(self, version: int) -> S3Mem:
        return S3Mem(self.path, self.settings, version, self._ask, self._embed)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((t.task.id, t.task.split) for row in self._journal for t in row.attempts)

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[MemoryEntry]:
        return (unit.entry(self.settings.representation) for unit in self.units)

    def __getitem__(self, id: str) -> MemoryEntry:
        return self.by_id[id].entry(self.settings.representation)

    @property
    def by_id(self) -> Mapping[str, Unit]:
        return {unit.id: unit for unit in self.units}


def units_of(row: Row) -> list[Unit]:
    """Return the units of an episode's attempts: a language model's, where it has told any, with the rules' for records
    that it names none for."""
    told = row.answers.get("units", {})
    return [unit for n, trace in enumerate(row.attempts) for unit in llm.merged(written(trace), told.get(str(n), []))]


def _open(path: Path, settings: S3MemSettings, tools: Tools) -> S3Mem:
    return S3Mem(path, settings, ask=tools.ask, embed=tools.embed)


S3MEM = MemorySpec(NAME, S3MemSettings, _open)
