"""A-Mem as a memory system (arXiv 2502.12110): a graph of notes. A new note is linked with others, whose
descriptions are then updated.

Without a language model the notes are written by rule. Departures from the released code: the compared text contains
the episode, changed notes are found by their new text at once, and links go both ways and name notes, not positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from memory.amem import agent
from memory.amem.notes import FOUND, Notes
from memory.amem.settings import AMemSettings
from memory.entry import MemoryEntry
from memory.folding import FoldedMemory
from memory.items import Version
from memory.journal import Row
from memory.protocol import Edge, Graph, Query, Recall, Table
from memory.registry import ChatFunction, MemorySpec, MemoryTools
from memory.trajectory import goal_with_scene

NAME = "amem"


class AMem(FoldedMemory[Notes, AMemSettings]):
    """A-Mem as a `MemorySystem`, folded from the rows of its journal."""

    name: ClassVar[str] = NAME

    def new_state(self) -> Notes:
        return Notes(self.settings, self.reader, self._embed)

    def answers(self, state: Notes, row: Row, ask: ChatFunction) -> dict[str, Any]:
        return agent.ask_about_row(state, row, ask)

    def without_neighbours(self, answers: Mapping[str, Any]) -> Mapping[str, Any]:
        own = ("keywords", "tags", "context")
        return {"notes": [{name: note[name] for name in own if name in note} for note in answers.get("notes", ())]}

    def recalled(self, state: Notes, query: Query, text: str) -> Recall:
        """Recall the best notes in the first half of the entries, notes linked with them, and then further ones."""
        own, goal = query.task.id, goal_with_scene(query.task.goal, query.task.scene)
        searched = "\n".join(filter(None, (query.text or goal, text)))
        hits = [version for _, version in state.items.search(searched, query.k, own, at_least=FOUND)]
        first = hits[: (query.k + 1) // 2]
        if self.settings.variant == "released":
            chosen = self._followed_by_links(state, first, own, query.k - len(first))
        else:
            chosen = [*first, *self._best_links(state, first, searched, query)]
        chosen = list({version.item: version for version in (*chosen, *hits)}.values())[: query.k]
        return Recall(tuple(version.entry(NAME) for version in chosen))

    def _best_links(self, state: Notes, first: list[Version], searched: str, query: Query) -> list[Version]:
        """Return the notes linked with the first ones, best first."""
        shown = {version.item for version in first}
        names = dict.fromkeys(name for version in first for name in state.links[version.item] if name not in shown)
        if not names:
            return []
        found = state.items.search(searched, query.k, query.task.id, candidates=list(names))
        return [version for _, version in found]

    def _followed_by_links(self, state: Notes, first: list[Version], own: str, most: int) -> list[Version]:
        """Return each note with the notes linked with it behind it, of which there are `most` in all."""
        chosen = dict[str, Version]()
        for version in first:
            chosen.setdefault(version.item, version)
            for name in state.links[version.item]:
                if most > 0 and name not in chosen and (linked := state.items.visible(name, own)):
                    chosen[name] = linked
                    most -= 1
        return list(chosen.values())

    def tables(self) -> list[Table]:
        state = self.state
        rows = [
            (version.item, attributes.context, ", ".join(attributes.keywords), ", ".join(attributes.tags))
            for version in state.items
            for attributes in [state.attributes(version)]
        ]
        return [Table("notes", ("note", "context", "keywords", "tags"), tuple(rows))]

    def graphs(self) -> list[Graph]:
        edges = (Edge(one, other, 1.0) for one, others in self.state.links.items() for other in others if one < other)
        return [Graph("links between notes", tuple(edges))]

    def __iter__(self) -> Iterator[MemoryEntry]:
        return (version.entry(NAME) for version in self.state.items)

    def __len__(self) -> int:
        return len(self.state.items)

    def __getitem__(self, id: str) -> MemoryEntry:
        return self.state.items.entry(id, NAME)


def _open(path: Path, settings: AMemSettings, tools: MemoryTools) -> AMem:
    return AMem(path, settings, tools=tools)


AMEM = MemorySpec(NAME, AMemSettings, _open, reads_views=True)
