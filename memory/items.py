"""Items of a memory with their versions: who contributed to them, what a task may see, and which one fits a query.

An item is a short text that episodes wrote and later episodes may have rewritten. A recall for a task shows an item's
newest version to which none of the task's own episodes contributed; an item without one is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.base import Task
from envs.command_reader import CommandReader, Fact
from memory.entry import MemoryEntry, Provenance
from memory.protocol import Trace
from memory.retrieval import encodable
from memory.similarity import CachedEmbed, TextIndex, best_rows, terms_of


@dataclass(frozen=True, slots=True)
class Origin:
    """An attempt that contributed to an item: the number of its journal row, its task and its outcome."""

    row: int
    task: Task
    success: bool

    @classmethod
    def of(cls, row: int, trace: Trace) -> Origin:
        return cls(row, trace.task, trace.success)


@dataclass(frozen=True, slots=True)
class Version:
    """An item's text after some row.

    Attributes:
        item: the item's name.
        number: 1 for the item's first version.
        row: number of the row that wrote it.
        origins: all attempts that contributed to this text.
        actions: commands whose facts the text states.
        images: pictures of the episode.
        told: the origin whose episode the text tells, whose task and outcome its entry names; None: the latest.
    """

    item: str
    number: int
    row: int
    text: str
    origins: tuple[Origin, ...]
    actions: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    told: Origin | None = None

    def entry(self, system: str) -> MemoryEntry:
        """Return the memory entry."""
        origins = self.origins if self.told is None else (self.told,)
        provenance = provenance_of(origins, self.actions, system)
        return MemoryEntry(f"{system}/{self.item}.{self.number}", self.text, provenance, self.images)


def provenance_of(origins: Sequence[Origin], actions: tuple[str, ...], source: str) -> Provenance:
    """Return the provenance of a text: that of its latest origin, with the commands whose facts it states."""
    latest = max(origins, key=lambda origin: origin.row)
    task = latest.task
    return Provenance(task.id, task.scene, task.goal, task.split, latest.success, actions, source)


class Items:
    """The versions of a memory's items, searched by similarity.

    Args:
        embed: compares texts by embeddings; None: by words.
    """

    def __init__(self, embed: CachedEmbed | None = None) -> None:
        self._versions, self._index = list[Version](), TextIndex(embed)
        self._of_item: dict[str, list[int]] = {}
        self._of_task: dict[str, list[int]] = {}  # versions to which a task's episodes contributed
        self._current = np.zeros(0, dtype=bool)  # (capacity): whether the version is its item's newest
        self._wrote = np.zeros(0, dtype=np.int64)  # (capacity): row of each version

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._of_item)

    def __iter__(self) -> Iterator[Version]:
        """Iterate over the newest versions in the order in which items were created."""
        return (self._versions[of[-1]] for of in self._of_item.values())

    def __contains__(self, item: str) -> bool:
        return item in self._of_item

    def put(
        self,
        item: str,
        text: str,
        row: int,
        origins: Sequence[Origin],
        *,
        actions: Sequence[str] = (),
        images: tuple[bytes, ...] = (),
        told: Origin | None = None,
        searched: str | None = None,
    ) -> Version:
        """Add an item's first or next version. `searched`: text that queries are compared with; None: `text`."""
        n, of = len(self._versions), self._of_item.setdefault(item, [])
        distinct = tuple({(origin.row, origin.task.id, origin.success): origin for origin in origins}.values())
        version = Version(item, len(of) + 1, row, encodable(text), distinct, tuple(actions), images, told)
        if n == len(self._current):
            self._current, self._wrote = np.resize(self._current, 2 * n + 16), np.resize(self._wrote, 2 * n + 16)
        if of:
            self._current[of[-1]] = False
        self._current[n], self._wrote[n] = True, row
        of.append(n)
        for task_id in {origin.task.id for origin in origins}:
            self._of_task.setdefault(task_id, []).append(n)
        self._versions.append(version)
        self._index.add(version.text if searched is None else searched)
        return version

    def version(self, item: str, number: int = 0) -> Version:
        """Return an item's version by number, its newest by default. Raises: KeyError, for an unknown one."""
        of = self._of_item[item]
        if not 0 <= number <= len(of):
            raise KeyError(f"{item}.{number}")
        return self._versions[of[number - 1]]

    def entry(self, id: str, system: str) -> MemoryEntry:
        """Return an entry by its id, superseded ones too. Raises: KeyError, for an unknown id."""
        item, _, number = id.removeprefix(f"{system}/").rpartition(".")
        if not id.startswith(f"{system}/") or not (number.isascii() and number.isdecimal()) or int(number) < 1:
            raise KeyError(id)
        return self.version(item, int(number)).entry(system)

    def visible(self, item: str, own: str) -> Version | None:
        """Return an item's newest version to which task `own` did not contribute; None if there is none."""
        newest = self._newest_without(item, set(self._of_task.get(own, ())))
        return None if newest is None else self._versions[newest]

    def search(
        self,
        text: str,
        k: int,
        own: str = "",
        *,
        at_least: float = 0.0,
        candidates: Sequence[str] | None = None,
        store: bool = False,
    ) -> list[tuple[float, Version]]:
        """Return at most k visible versions with their scores, best first; of equal ones later rows first.

        Args:
            own: task whose episodes are left out; "": none is.
            at_least: minimal score.
            candidates: items to search; None: all.
            store: keep the text's vector on disk, for texts that every reading of the journal searches for.
        """
        shown = self._shown(own)
        if candidates is not None:
            among = np.zeros_like(shown)
            among[[n for item in candidates for n in self._of_item[item]]] = True
            shown &= among
        scores = np.where(shown, self._index.scores(text, store), -np.inf)
        name = lambda n: f"{self._versions[n].item}.{self._versions[n].number}"
        rows = best_rows(scores, k, wrote=self._wrote, name=name, at_least=at_least)
        return [(float(scores[n]), self._versions[n]) for n in rows]

    def _shown(self, own: str) -> NDArray[np.bool_]:
        """Return for every version whether a task sees it."""
        n = len(self._versions)
        shown: NDArray[np.bool_] = self._current[:n].copy()
        of_task = self._of_task.get(own, [])
        shown[of_task] = False
        left_out = set(of_task)
        for item in dict.fromkeys(self._versions[n].item for n in of_task):
            if (newest := self._newest_without(item, left_out)) is not None:
                shown[newest] = True
        return shown

    def _newest_without(self, item: str, left_out: AbstractSet[int]) -> int | None:
        return next((n for n in reversed(self._of_item.get(item, [])) if n not in left_out), None)


# facts that a text states -------------------------------------------------------------------------------------------


def facts_with_actions(actions: Sequence[str], reader: CommandReader) -> list[tuple[Fact, tuple[str, ...]]]:
    """List the facts of an episode's commands, each with the one or two commands from which a reader sees it."""
    found, total = list[tuple[Fact, tuple[str, ...]]](), len(reader.facts(actions))
    alone = [reader.facts([action]) for action in actions]
    missing = total - sum(map(len, alone))
    for n, action in enumerate(actions):
        found += [(fact, (action,)) for fact in alone[n]]
        if missing > 0 and not alone[n]:  # a lamp's place is where the agent went before it
            pairs = ((earlier, action) for earlier in reversed(actions[:n]))
            told = next(((facts, pair) for pair in pairs if (facts := reader.facts(pair)) and facts != alone[n]), None)
            if told is not None and reader.facts(told[1][:1]) == []:
                found += [(fact, told[1]) for fact in told[0]]
                missing -= len(told[0])
    return found


def stated_actions(text: str, actions: Sequence[str], reader: CommandReader) -> tuple[str, ...]:
    """Return the commands whose facts a text states: it must contain the needed thing (or the verb of a treatment) and
    the numbered place, such as `mug` and `countertop 2`."""
    said, plain = terms_of(text), " ".join(encodable(text).lower().split())
    kept = [told for fact, told in facts_with_actions(actions, reader) if states(fact, said, plain, reader)]
    return tuple(dict.fromkeys(command for told in kept for command in told))


def states(fact: Fact, said: frozenset[str], plain: str, reader: CommandReader) -> bool:
    """Return whether a text states a fact. `said`: the text's terms. `plain`: the text in lower case on one line."""
    place = re.search(rf"(?<!\w){re.escape(fact.place.lower())}(?!\w)", plain) if fact.place else None
    return place is not None and terms_of(reader.thing(fact.need)) <= said
