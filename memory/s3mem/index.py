"""Retrieval of candidate units (S3Mem, A.3): an index of one scope's units, and the channels that search it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from memory.bm25 import BM25, Scores
from memory.protocol import ESTIMATED, TokenCosts
from memory.retrieval import Embed
from memory.s3mem.anchors import Anchor, Vocabulary, matches_date, parse_question
from memory.s3mem.settings import Channel, S3MemSettings
from memory.s3mem.text import terms
from memory.s3mem.text_scores import embed_texts, fit_vectors, join_neighbours, ranks
from memory.s3mem.units import EventUnit

BEST = 10  # best candidates of the ranked channels, whose neighbours and relations become candidates, too
RRF = 60  # constant of reciprocal rank fusion
Mask = NDArray[np.bool_]


class UnitIndex:
    """Searchable units of one scope (a dialogue, the histories of a scene), in the order of writing."""

    def __init__(self, units: Sequence[EventUnit], settings: S3MemSettings, embed: Embed | None = None) -> None:
        self.units, self.settings, self._embed = list(units), settings, embed
        self.searched = [unit.searched(settings.representation) for unit in units]
        self.terms = [terms(text) for text in self.searched]
        self.groups = [unit.origin.history for unit in units]
        self.own, self.window = BM25(self.terms), BM25(join_neighbours(self.terms, self.groups))
        self.at = {unit.id: i for i, unit in enumerate(units)}

    @cached_property
    def vectors(self) -> Callable[[str], Scores]:
        """Function from a question to the cosine with each unit. Raises: ValueError without an embedding model."""
        if self.settings.dense == "embed":
            return embed_texts(self._embed, self.searched)
        score = fit_vectors(self.settings.dense, self.terms)
        return lambda question: score(terms(question))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        steps = [unit for unit in self.units if unit.origin.kind == "step"]
        actors = {unit.origin.actor.lower() for unit in self.units} - {""}
        return Vocabulary(
            events={event_of(unit) for unit in steps},
            objects={o for unit in self.units for o in unit.objects},
            places={unit.place for unit in steps if unit.place},
            actors=sorted(actors),
        )

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Index of the previous unit of the same history, -1 for none."""
        same = [i > 0 and group == self.groups[i - 1] for i, group in enumerate(self.groups)]
        return np.array([i - 1 if each else -1 for i, each in enumerate(same)], dtype=np.int64)

    @cached_property
    def after(self) -> NDArray[np.int64]:
        """Index of the next unit of the same history, -1 for none."""
        following = np.full(len(self.units), -1, dtype=np.int64)
        known = self.before >= 0
        following[self.before[known]] = np.flatnonzero(known)
        return following

    def score(self, question: str, anchor: Anchor | None = None, costs: TokenCosts = ESTIMATED) -> QueryScores:
        """Score all units for a question. `anchor`: the parsed question, if it is known already."""
        if anchor is None:
            anchor = parse_question(question, self.vocabulary) if self.settings.anchors else Anchor(question)
        return QueryScores(self, anchor, costs)


def event_of(unit: EventUnit) -> str:
    """Return the unit's command as questions name it."""
    return unit.command.lower()


class QueryScores:
    """The scores of an index's units for one question, by channel."""

    def __init__(self, index: UnitIndex, anchor: Anchor, costs: TokenCosts = ESTIMATED) -> None:
        self.index, self.anchor, self.costs = index, anchor, costs
        self.terms = terms(anchor.text)
        self.own, self.window = index.own(self.terms), index.window(self.terms)
        self.dense = np.maximum(index.vectors(anchor.text), 0.0) if "dense" in index.settings.channels else 0 * self.own
        self.order = [ranks(scores) for scores in (self.own, self.window, self.dense)]

    @cached_property
    def fused(self) -> Scores:
        """Reciprocal rank fusion of the ranked channels; a channel adds 0 for a unit that it does not find."""
        pairs = zip(self.order, (self.own, self.window, self.dense), strict=True)
        return sum(((scores > 0) / (RRF + order + 1) for order, scores in pairs), np.zeros(len(self.own)))

    # masks of units that the anchor names -----------------------------------------------------------------------------

    def _mask(self, wanted: object) -> Mask:
        return np.array(wanted, dtype=bool).reshape(len(self.index.units))

    @cached_property
    def event(self) -> Mask:
        """Steps whose event the question names."""
        events = set(self.anchor.events)
        return self._mask([event_of(unit) in events and unit.origin.kind == "step" for unit in self.index.units])

    @cached_property
    def objects(self) -> Scores:
        """Share of the named objects that each unit contains."""
        named = set(self.anchor.objects) - set(self.anchor.sources)
        found = [len(named.intersection(unit.objects)) for unit in self.index.units]
        return np.array(found, dtype=float) / max(len(named), 1)

    @cached_property
    def in_steps(self) -> Mask:
        if self.anchor.steps is None:
            return self._mask([False] * len(self.index.units))
        low, high = self.anchor.steps
        return self._mask([u.origin.kind == "step" and low <= _step_number(u) <= high for u in self.index.units])

    @cached_property
    def on_date(self) -> Mask:
        return self._mask(
            [bool(self.anchor.dates) and matches_date(u.when, self.anchor.dates) for u in self.index.units]
        )

    @cached_property
    def at_place(self) -> Mask:
        return self._mask([bool(u.place) and u.place in self.anchor.places for u in self.index.units])

    @cached_property
    def by_actor(self) -> Mask:
        sources = set(self.anchor.sources)
        return self._mask([u.origin.actor.lower() in sources for u in self.index.units])

    @cached_property
    def matches(self) -> Mask:
        """Units that the question counts or orders: of the named events, else with all named objects; within the named
        steps."""
        found = self.event
        if not self.anchor.events and self.anchor.objects:
            found = self.objects >= 1
        return found & self.in_steps if self.anchor.steps else found

    @cached_property
    def occurrence(self) -> NDArray[np.int64]:
        """Number of each match, from 1; 0 for other units."""
        return np.where(self.matches, np.cumsum(self.matches), 0)

    # candidates -------------------------------------------------------------------------------------------------------

    def channels(self) -> dict[Channel, NDArray[np.int64]]:
        """Return the units that each enabled channel finds, ranked channels best first."""
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
        """Return the union of all channels in the order of writing: at most `pool` units, by fused rank."""
        united = np.array(sorted(set(chain.from_iterable(self.channels().values()))), dtype=np.int64)
        if len(united) > self.index.settings.pool:
            scores = self.fused[united] + self.matches[united]
            united = np.sort(united[np.argsort(-scores, kind="stable")[: self.index.settings.pool]])
        return united


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit that may answer a question, with the router's scores."""

    unit: EventUnit
    cost: float  # tokens
    support: float
    anchor: float
    place: int  # in the order of writing


def _step_number(unit: EventUnit) -> int:
    """Return the step number that `when` states, else the unit's index in its history."""
    number = unit.when.rpartition(" ")[2]
    return int(number) if number.isdecimal() else unit.order


def _top(scores: Scores, n: int) -> NDArray[np.int64]:
    """Return the n best units with a positive score, best first; ties keep their order."""
    order = np.argsort(-scores, kind="stable")[:n]
    return order[scores[order] > 0]
