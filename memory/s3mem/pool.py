"""The candidates of a question (S3Mem, A.3): what any of several channels finds, over the units of one scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from memory.bm25 import BM25, Scores
from memory.protocol import ESTIMATED, Costs
from memory.retrieval import Embed
from memory.s3mem.anchors import Anchor, Known, anchor_of, dated
from memory.s3mem.lexical import dense, embedded, ranks, windows
from memory.s3mem.settings import Channel, S3MemSettings
from memory.s3mem.text import terms
from memory.s3mem.units import Unit

BEST = 10  # of the ranked channels' candidates, whose neighbours and relations count, too
RRF = 60
Mask = NDArray[np.bool_]


class Index:
    """Units of one scope (a dialogue, the histories of a scene), in the order of writing, ready to be asked."""

    def __init__(self, units: Sequence[Unit], settings: S3MemSettings, embed: Embed | None = None) -> None:
        self.units, self.settings, self._embed = list(units), settings, embed
        self.searched = [unit.searched(settings.representation) for unit in units]
        self.terms = [terms(text) for text in self.searched]
        self.groups = [unit.origin.history for unit in units]
        self.own, self.window = BM25(self.terms), BM25(windows(self.terms, self.groups))
        self.at = {unit.id: i for i, unit in enumerate(units)}

    @cached_property
    def vectors(self) -> Callable[[str], Scores]:
        """Give the cosine of each unit with a question. Raises: ValueError, where the model that embeds is missing."""
        if self.settings.dense == "embed":
            return embedded(self._embed, self.searched)
        score = dense(self.settings.dense, self.terms)
        return lambda question: score(terms(question))

    @cached_property
    def known(self) -> Known:
        steps = [unit for unit in self.units if unit.origin.kind == "step"]
        actors = {unit.origin.actor.lower() for unit in self.units} - {""}
        return Known(
            {event_of(unit) for unit in steps},
            {o for unit in self.units for o in unit.objects},
            {unit.place for unit in steps if unit.place},
            sorted(actors),
        )

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Give for each unit the one before it in its history, -1 for none."""
        same = [i > 0 and group == self.groups[i - 1] for i, group in enumerate(self.groups)]
        return np.array([i - 1 if each else -1 for i, each in enumerate(same)], dtype=np.int64)

    @cached_property
    def after(self) -> NDArray[np.int64]:
        following = np.full(len(self.units), -1, dtype=np.int64)
        known = self.before >= 0
        following[self.before[known]] = np.flatnonzero(known)
        return following

    def ask(self, question: str, anchor: Anchor | None = None, costs: Costs = ESTIMATED) -> Asked:
        """Score all units for a question. `anchor`: what it is after, where that is known already."""
        if anchor is None:
            anchor = anchor_of(question, self.known) if self.settings.anchors else Anchor(question)
        return Asked(self, anchor, costs)


def event_of(unit: Unit) -> str:
    """Name what was done, as questions are compared with it."""
    return unit.command.lower()


class Asked:
    """A question to an index: the scores of all its units."""

    def __init__(self, index: Index, anchor: Anchor, costs: Costs = ESTIMATED) -> None:
        self.index, self.anchor, self.costs = index, anchor, costs
        self.terms = terms(anchor.text)
        self.own, self.window = index.own(self.terms), index.window(self.terms)
        self.dense = np.maximum(index.vectors(anchor.text), 0.0) if "dense" in index.settings.channels else 0 * self.own
        self.order = [ranks(scores) for scores in (self.own, self.window, self.dense)]

    @cached_property
    def fused(self) -> Scores:
        """Fuse the ranked channels by reciprocal rank; a unit that one does not find gets nothing of it."""
        pairs = zip(self.order, (self.own, self.window, self.dense), strict=True)
        return sum(((scores > 0) / (RRF + order + 1) for order, scores in pairs), np.zeros(len(self.own)))

    # what the anchor names ------------------------------------------------------------------------------------------

    def _mask(self, wanted: object) -> Mask:
        return np.array(wanted, dtype=bool).reshape(len(self.index.units))

    @cached_property
    def event(self) -> Mask:
        """Mark the units of the events that are named."""
        events = set(self.anchor.events)
        return self._mask([event_of(unit) in events and unit.origin.kind == "step" for unit in self.index.units])

    @cached_property
    def objects(self) -> Scores:
        """Give the share of the named objects that each unit is about."""
        named = set(self.anchor.objects) - set(self.anchor.sources)
        found = [len(named.intersection(unit.objects)) for unit in self.index.units]
        return np.array(found, dtype=float) / max(len(named), 1)

    @cached_property
    def in_steps(self) -> Mask:
        if self.anchor.steps is None:
            return self._mask([False] * len(self.index.units))
        low, high = self.anchor.steps
        return self._mask([u.origin.kind == "step" and low <= _number(u) <= high for u in self.index.units])

    @cached_property
    def on_date(self) -> Mask:
        return self._mask([bool(self.anchor.dates) and dated(u.when, self.anchor.dates) for u in self.index.units])

    @cached_property
    def at_place(self) -> Mask:
        return self._mask([bool(u.place) and u.place in self.anchor.places for u in self.index.units])

    @cached_property
    def by_actor(self) -> Mask:
        sources = set(self.anchor.sources)
        return self._mask([u.origin.actor.lower() in sources for u in self.index.units])

    @cached_property
    def matches(self) -> Mask:
        """Mark what the question counts, orders or looks beside: the named event, else all that is about the named
        objects; within the named steps."""
        found = self.event
        if not self.anchor.events and self.anchor.objects:
            found = self.objects >= 1
        return found & self.in_steps if self.anchor.steps else found

    @cached_property
    def occurrence(self) -> NDArray[np.int64]:
        """Number the matches from 1, 0 for the others."""
        return np.where(self.matches, np.cumsum(self.matches), 0)

    # candidates ------------------------------------------------------------------------------------------------------

    def channels(self) -> dict[Channel, NDArray[np.int64]]:
        """List what each channel of the settings finds, the best first."""
        settings = self.index.settings
        ranked: dict[Channel, tuple[Scores, int]] = {
            "lexical": (self.own, settings.lexical_top),
            "dense": (self.dense, settings.dense_top),
            "window": (self.window, settings.window_top),
        }
        on = set(settings.channels)
        found: dict[Channel, NDArray[np.int64]] = {}
        found |= {name: _top(scores, n) for name, (scores, n) in ranked.items() if name in on}
        best = _top(self.fused, BEST)
        if "anchor" in on:
            exact = self.event | (self.on_date & (self.own > 0))
            exact |= self.in_steps if not self.anchor.events and not self.anchor.objects else exact
            found["anchor"] = np.flatnonzero(exact)
        if "object" in on:
            found["object"] = _top(self.objects * (self.objects >= 1), settings.lexical_top)
        if "near" in on:
            around = [*best, *found.get("anchor", ())[:BEST]]
            near = [*self.index.before[around], *self.index.after[around]] if around else []
            found["near"] = np.array([i for i in near if i >= 0], dtype=np.int64)
        if "relation" in on:
            others = (id for i in best for _, id in self.index.units[i].relations)
            found["relation"] = np.array([self.index.at[id] for id in others if id in self.index.at], dtype=np.int64)
        return found

    def candidates(self) -> NDArray[np.int64]:
        """Unite the channels: at most `pool` units, those that the ranked channels like best, in order of writing."""
        united = np.array(sorted(set(chain.from_iterable(self.channels().values()))), dtype=np.int64)
        if len(united) > self.index.settings.pool:
            liked = self.fused[united] + self.matches[united]
            united = np.sort(united[np.argsort(-liked, kind="stable")[: self.index.settings.pool]])
        return united


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit that may answer a question, with what the router thinks of it. `place`: in the order of writing."""

    unit: Unit
    cost: float
    support: float
    anchor: float
    place: int


def _number(unit: Unit) -> int:
    """Return the number of a step, as its history counts them."""
    told = unit.when.rpartition(" ")[2]
    return int(told) if told.isdecimal() else unit.order


def _top(scores: Scores, n: int) -> NDArray[np.int64]:
    """Return the best n that have any score, the best first; equal ones in their order."""
    order = np.argsort(-scores, kind="stable")[:n]
    return order[scores[order] > 0]
