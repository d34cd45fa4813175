"""S3Mem as a memory system (arXiv 2605.28831): scene-event units from a journal, a trained router, and an evidence pack
for a question or for the objects of a goal.

Each unit is one entry, so entry texts do not depend on the question.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import ClassVar

from envs.base import Task
from envs.command_reader import kind
from envs.household.command_reader import HouseholdReader
from memory.entry import MemoryEntry, WriteResult
from memory.journal import Journal, Row
from memory.protocol import ESTIMATED, FixedSession, Isolation, Query, ReadingModels, Recall, TokenCosts, Trace
from memory.registry import ChatFunction, MemorySpec, MemoryTools
from memory.retrieval import Embed
from memory.s3mem.index import Candidate, UnitIndex
from memory.s3mem.llm_writer import merge_units, parse_with_model, write_units_json
from memory.s3mem.packing import pack_evidence, reading_order
from memory.s3mem.router import score_candidates
from memory.s3mem.rule_writer import write_units
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.units import NAME, EventUnit

MAX_INDEXES = 16  # cached indexes: rebuilding one takes milliseconds


class S3Mem:
    """A `MemorySystem` of scene-event units.

    Queries search one scope: the scene of their task if the memory knows it, else all units; with isolation by scene,
    the units of all other scenes.

    Args:
        until: number of journal rows to read (default: all).
        ask: language model of `writer: llm`.
        embed: embedding model of `dense: embed`.
    """

    name: ClassVar[str] = NAME

    def __init__(
        self,
        path: str | Path,
        settings: S3MemSettings | None = None,
        until: int | None = None,
        ask: ChatFunction | None = None,
        embed: Embed | None = None,
    ) -> None:
        self.path, self.settings, self._ask, self._embed = Path(path), settings or S3MemSettings(), ask, embed
        self._journal = Journal(self.path, until)
        self.recall_failures = Counter[str]()  # unusable parses of questions
        self._units, self._rows = list[EventUnit](), 0
        self._of_scene = dict[str, list[EventUnit]]()
        self._tasks = set[tuple[str, str]]()  # (scene, task) of all units, and ("", task)
        self._scopes = OrderedDict[tuple[str, str, Isolation], UnitIndex]()

    # writing ----------------------------------------------------------------------------------------------------------

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        rows = [Row(tuple(attempts), {}) for attempts in episodes]
        if self._ask is None or self.settings.writer != "llm":
            return self._journal.append(rows)
        fresh = self._journal.unknown(rows)
        answered = [Row(row.attempts, write_units_json(row.attempts, self._ask)) for row in fresh]
        return self._journal.append(answered) + WriteResult(0, len(rows) - len(fresh))

    def merge_from(self, other: S3Mem) -> WriteResult:
        return self._journal.append(list(other._journal))

    @property
    def units(self) -> list[EventUnit]:
        """All units in the order of writing."""
        fresh = self._journal.since(self._rows)
        for unit in (unit for row in fresh for unit in _units_of_row(row)):
            self._units.append(unit)
            self._of_scene.setdefault(unit.origin.scene, []).append(unit)
            self._tasks |= {(unit.origin.scene, unit.origin.task_id), ("", unit.origin.task_id)}
        if fresh:
            self._rows += len(fresh)
            self._scopes.clear()
        return self._units

    @property
    def failures(self) -> Counter[str]:
        """Counts of the language model's unusable answers, by reason."""
        return self._journal.failures

    @property
    def reads_with(self) -> ReadingModels:
        """Return the models that a recall asks."""
        embeds = self._embed is not None and self.settings.dense == "embed" and "dense" in self.settings.channels
        return (*(("embed",) if embeds else ()), *(("api",) if self._parser is not None else ()))

    @property
    def _parser(self) -> ChatFunction | None:
        """Return the model that parses questions; None: the rules do."""
        return self._ask if self.settings.anchors and self.settings.writer == "llm" else None

    # retrieval --------------------------------------------------------------------------------------------------------

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        by_scene = sorted(range(len(queries)), key=lambda n: queries[n].task.scene)  # they share an index
        recalled = {n: self._recall(queries[n]) for n in by_scene}
        return [recalled[n] for n in range(len(queries))]

    def _recall(self, query: Query) -> Recall:
        index = self._index(query.task, query.isolation)
        budget, how = float(query.tokens or self.settings.tokens), self.settings.representation
        if query.text:
            picks = self._pack(index, query.text, budget, query.costs)
        else:
            picks = self._pack_goal(index, query.task, budget, query.k)
        entries = tuple(pick.unit.entry(how, pictures=query.costs.picture > 0) for pick in picks)
        return Recall(entries, record_ids=tuple(pick.unit.pointers for pick in picks))

    def _pack(self, index: UnitIndex, question: str, budget: float, costs: TokenCosts = ESTIMATED) -> list[Candidate]:
        """Pack the evidence for one question."""
        settings, scores = self.settings, index.score(question, costs=costs)
        if self._parser is not None:
            anchor = parse_with_model(question, scores.anchor, self._parser, self.recall_failures)
            scores = index.score(question, anchor, costs)
        return pack_evidence(scores.anchor, *score_candidates(scores, settings), budget=budget, settings=settings)

    def _pack_goal(self, index: UnitIndex, task: Task, budget: float, k: int) -> list[Candidate]:
        """Pack at most k units about where each of the goal's objects was last seen: of each object in turn the unit
        with most support, in the order of writing."""
        known = {kind(thing) for unit in index.units for thing in unit.objects}
        wanted = sorted(HouseholdReader().goal_things(task.goal, known)) or [task.goal]
        packs = [self._pack(index, f"Where was the {thing} last seen?", budget / len(wanted)) for thing in wanted]
        ranked = [sorted(pack, key=lambda pick: (-pick.support, -pick.place)) for pack in packs]
        in_turn = (pick for turn in zip_longest(*ranked) for pick in turn if pick is not None)
        picks = {pick.unit.id: pick for pick in in_turn}
        return reading_order(list(islice(picks.values(), k)))

    def _index(self, task: Task, isolation: Isolation = "task") -> UnitIndex:
        """Return the cached index of a task's scope, without the units of its own episodes."""
        units = self.units
        scope = task.scene if task.scene in self._of_scene else ""
        covered = bool(scope) and isolation == "scene"  # the task's own episodes are of its scene
        left_out = task.id if not covered and (scope, task.id) in self._tasks else ""
        key = (scope, left_out, isolation)
        if key not in self._scopes:
            inside = self._of_scene[scope] if scope else units
            if covered:
                inside = [unit for unit in units if unit.origin.scene != scope]
            others = [unit for unit in inside if not left_out or unit.origin.task_id != left_out]
            self._scopes[key] = UnitIndex(others, self.settings, self._embed)
            while len(self._scopes) > MAX_INDEXES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(key)
        return self._scopes[key]

    def session(self, query: Query, first: Recall) -> FixedSession:
        """Return a session that recalls the same at every step: packs depend on the goal alone."""
        return FixedSession(first)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        """Return None: this memory learns from no further attempt."""

    # storage ----------------------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        return len(self._journal)

    def at(self, version: int) -> S3Mem:
        return S3Mem(self.path, self.settings, version, ask=self._ask, embed=self._embed)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((t.task.id, t.task.split) for row in self._journal for t in row.attempts)

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[MemoryEntry]:
        return (unit.entry(self.settings.representation) for unit in self.units)

    def __getitem__(self, id: str) -> MemoryEntry:
        return self.by_id[id].entry(self.settings.representation)

    @property
    def by_id(self) -> Mapping[str, EventUnit]:
        return {unit.id: unit for unit in self.units}


def _units_of_row(row: Row) -> list[EventUnit]:
    """Return the units of an episode's attempts: a language model's, and rule-written ones for the other records."""
    written = row.answers.get("units", {})
    return [u for n, trace in enumerate(row.attempts) for u in merge_units(write_units(trace), written.get(str(n), []))]


def _open(path: Path, settings: S3MemSettings, tools: MemoryTools) -> S3Mem:
    return S3Mem(path, settings, ask=tools.ask, embed=tools.embed)


S3MEM = MemorySpec(NAME, S3MemSettings, _open)
