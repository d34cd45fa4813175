"""G-Memory as a memory system for one agent (arXiv 2506.07398): insights above a graph of tasks above trajectories.

A recall enters the graph of tasks at the nearest ones, goes up to the insights that they and the tasks linked with them
support, and down to the trajectories of the successful ones. Without a language model the tiers are written by rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from memory.entry import MemoryEntry
from memory.folding import FoldedMemory
from memory.gmemory import agent
from memory.gmemory.hierarchy import FOUND, INSIGHT, Hierarchy, task_text
from memory.gmemory.insights import insight_id
from memory.gmemory.settings import GMemorySettings
from memory.items import Origin, Version, provenance_of
from memory.journal import Row
from memory.protocol import Edge, Graph, Query, ReadingModels, Recall, Table
from memory.registry import ChatFunction, MemorySpec, MemoryTools

NAME = "gmemory"


class GMemory(FoldedMemory[Hierarchy, GMemorySettings]):
    """G-Memory as a `MemorySystem`, folded from the rows of its journal."""

    name: ClassVar[str] = NAME

    def new_state(self) -> Hierarchy:
        return Hierarchy(self.settings, self.reader, self._embed)

    def answers(self, state: Hierarchy, row: Row, ask: ChatFunction) -> dict[str, Any]:
        return agent.ask_about_row(state, row, ask)

    def without_neighbours(self, answers: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: answers[name] for name in ("key_steps", "failure") if name in answers}

    @property
    def reads_with(self) -> ReadingModels:
        asks = self.settings.relevance == "llm" and self._tools.ask is not None
        return (*super().reads_with, "api") if asks else super().reads_with

    def recalled(self, state: Hierarchy, query: Query, text: str) -> Recall:
        own, searched = query.task.id, "\n".join(filter(None, (query.text or task_text(query.task), text)))
        entered = [v.item for _, v in state.tasks.search(searched, self.settings.similar, own, at_least=FOUND)]
        near = state.neighbourhood(entered, own)
        most = max(0, min(self.settings.insights, query.k - 1))
        insights = [_insight_entry(*seen) for seen in islice(state.insights.ranked(near, own), most)]
        won = self._trajectories(state, query, searched, near, query.k - len(insights))
        return Recall((*insights, *(version.entry(NAME) for version in won)))

    def _trajectories(
        self, state: Hierarchy, query: Query, searched: str, near: Sequence[str], most: int
    ) -> list[Version]:
        """Return the most relevant successes of a neighbourhood, then the most similar ones of all."""
        candidates = [name for name in near if name in state.won]
        found = state.won.search(searched, 2 * most, query.task.id, candidates=candidates) if candidates else []
        relevant = sorted(found, key=lambda each: -self._relevance(query, *each))  # stable: ties by similarity
        if len(found) < most:
            relevant += state.won.search(searched, most, query.task.id, at_least=FOUND)
        return list({version.item: version for _, version in relevant}.values())[:most]

    def _relevance(self, query: Query, similarity: float, version: Version) -> int:
        """Return a trajectory's relevance, 0 to 10, by the model of the settings or by similarity."""
        ask = self._tools.ask if self.settings.relevance == "llm" else None
        said = agent.ask_relevance(query.task, version.text, ask, self.recall_failures) if ask else None
        return round(10 * similarity) if said is None else said

    def tables(self) -> list[Table]:
        insights = self.state.insights
        rows = [(each.shown(len(each.support)), str(each.score), str(len(each.support))) for each in insights]
        return [Table("insights", ("insight", "score", "tasks"), tuple(rows))]

    def graphs(self) -> list[Graph]:
        linked = self.state.edges.items()
        return [Graph("similar tasks", tuple(Edge(a, b, 1.0) for a, others in linked for b in others if a < b))]

    def __iter__(self) -> Iterator[MemoryEntry]:
        state = self.state
        for insight in state.insights:
            if (seen := insight.seen_by("")) is not None:
                yield _insight_entry(*seen)
        yield from (version.entry(NAME) for version in state.tasks)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, id: str) -> MemoryEntry:
        state = self.state
        if not id.startswith(INSIGHT):
            return state.tasks.entry(id, NAME)
        text, insight = state.insights.shown[id.removeprefix(INSIGHT)]
        return _insight_entry(text, next(reversed(insight.support.values())))


def _insight_entry(text: str, latest: Origin) -> MemoryEntry:
    """Create the entry of an insight, which names its latest supporter and no commands."""
    return MemoryEntry(INSIGHT + insight_id(text), text, provenance_of([latest], (), NAME))


def _open(path: Path, settings: GMemorySettings, tools: MemoryTools) -> GMemory:
    return GMemory(path, settings, tools=tools)


GMEMORY = MemorySpec(NAME, GMemorySettings, _open, reads_views=True)
