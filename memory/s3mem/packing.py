"""Selection of evidence from scored candidates within a token budget (S3Mem, 3.3 and A.4); nothing here is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from memory.s3mem.anchors import Anchor
from memory.s3mem.index import Candidate
from memory.s3mem.router import Edges
from memory.s3mem.settings import S3MemSettings

REPEATS = frozenset({"count", "compare"})  # operations whose questions need repeated events


@dataclass(slots=True)
class _Packing:
    """An evidence pack under construction; `left` is the rest of the token budget."""

    left: float
    repeats: bool
    picks: list[Candidate] = field(default_factory=list)
    pointers: set[str] = field(default_factory=set)  # ids of the packed records
    states: set[tuple[str, str]] = field(default_factory=set)  # packed state changes: key, value after

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits the budget and adds a record and, if it has any, a state change."""
        if candidate.cost > self.left or self.pointers.issuperset(candidate.unit.pointers):
            return False
        states = _states(candidate)
        return self.repeats or not states or not states <= self.states

    def add(self, candidate: Candidate) -> None:
        self.picks.append(candidate)
        self.left -= candidate.cost
        self.pointers.update(candidate.unit.pointers)
        self.states |= _states(candidate)


def _states(candidate: Candidate) -> set[tuple[str, str]]:
    return {(change.key, change.after) for change in candidate.unit.changes}


def pack_evidence(
    anchor: Anchor, candidates: Sequence[Candidate], edges: Edges, *, budget: float, settings: S3MemSettings
) -> list[Candidate]:
    """Select candidates for a question within `budget` tokens and order them for the reader.

    Single-hop: by support, at most `n_single` above `tau_sup`. Multi-hop: from the best anchor along at most `hops`
    edges above `tau_edge`. With `fill`, further candidates spend the rest of the budget by support.
    """
    repeats = bool(anchor.ops & REPEATS)
    packing = _Packing(budget, repeats)
    ranked = sorted(candidates, key=lambda c: (-c.support, -c.anchor, c.cost, c.unit.id))
    if not (anchor.multi_hop and settings.packing == "chain" and _pack_chain(packing, candidates, edges, settings)):
        packing = _Packing(budget, repeats)
        _pack_single_hop(packing, ranked, settings)
    if settings.fill:
        for candidate in ranked:
            if packing.fits(candidate):
                packing.add(candidate)
    return reading_order(packing.picks, causal="cause" in anchor.ops)


def _pack_single_hop(packing: _Packing, ranked: Sequence[Candidate], settings: S3MemSettings) -> None:
    for candidate in ranked:
        if len(packing.picks) == settings.n_single or candidate.support < settings.tau_sup:
            break
        if packing.fits(candidate):
            packing.add(candidate)
    if not packing.picks:
        first = next((candidate for candidate in ranked if packing.fits(candidate)), None)
        if first is not None:
            packing.add(first)


def _pack_chain(packing: _Packing, candidates: Sequence[Candidate], edges: Edges, settings: S3MemSettings) -> bool:
    """Grow a chain of edges from the best anchor; return False if no edge passes the threshold."""
    by_anchor = sorted(candidates, key=lambda c: (-c.anchor, -c.support, c.cost, c.unit.id))
    start = next((candidate for candidate in by_anchor if packing.fits(candidate)), None)
    if start is None:
        return False
    packing.add(start)
    for _ in range(settings.hops):
        links = [(c, p) for c, p in _links(packing, candidates, edges) if p >= settings.tau_edge]
        if not links:
            break
        best, _ = min(links, key=lambda link: (-link[1] * link[0].support, link[0].cost, link[0].unit.id))
        packing.add(best)
    return len(packing.picks) > 1


def _links(packing: _Packing, candidates: Sequence[Candidate], edges: Edges) -> Iterator[tuple[Candidate, float]]:
    """Yield each candidate that fits, with the probability of its best edge from the pack."""
    inside = [pick.unit.id for pick in packing.picks]
    for candidate in candidates:
        if packing.fits(candidate):
            yield candidate, max((edges.get((id, candidate.unit.id), 0.0) for id in inside), default=0.0)


def reading_order(picks: Sequence[Candidate], causal: bool = False) -> list[Candidate]:
    """Sort candidates by time; with `causal`, also put every cause before its effects."""
    in_time = sorted(picks, key=lambda c: c.place)
    if not causal:
        return in_time
    by_id = {pick.unit.id: pick for pick in in_time}
    graph = {id: set[str]() for id in by_id}
    for pick in in_time:
        for kind, effect in pick.unit.relations:
            if kind == "causes" and effect in graph:
                graph[effect].add(pick.unit.id)
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError:
        return in_time
    done = list[Candidate]()
    place = {id: i for i, id in enumerate(by_id)}
    ready = list(sorter.get_ready())
    while ready:
        ready.sort(key=place.__getitem__)
        done.append(by_id[first := ready.pop(0)])
        sorter.done(first)
        ready += sorter.get_ready()
    return done
