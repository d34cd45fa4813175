"""Tables and graphs of BrainMem's state for `memcompiler bank show`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from memory.brainmem.knowledge import Knowledge
from memory.brainmem.semantic import best_guidelines
from memory.protocol import Edge, Graph, Table

ROOMS, FACTS, MOVES = 4, 30, 30  # rooms drawn; relations and transitions per room


def tables(known: Knowledge, failures: Mapping[str, int]) -> list[Table]:
    """Return tables of guidelines, experiences and, if there are any, a language model's unusable answers."""
    guidelines = tuple(
        (
            f"{g.utility:.3f}",
            f"{g.n_success}/{g.n_total}",
            "protected" if g.protected else "",
            ", ".join(sorted(g.task_types)),
            g.text,
        )
        for g in best_guidelines(known.guidelines, len(known.guidelines))
    )
    kinds = Counter(e.task_type for e in known.experiences)
    won = Counter(e.task_type for e in known.experiences if e.success)
    experiences = tuple((kind or "-", str(n), str(won[kind])) for kind, n in sorted(kinds.items()))
    found = [
        Table("guidelines", ("utility", "won", "", "task types", "text"), guidelines),
        Table("experiences", ("task type", "episodes", "won at first"), experiences),
    ]
    if failures:
        rows = tuple((role, str(n)) for role, n in sorted(failures.items()))
        found.append(Table("unusable answers", ("role", "times"), rows))
    return found


def graphs(known: Knowledge) -> list[Graph]:
    """Return both graphs of the most visited rooms."""
    visits = Counter(t.topic.room for t in known.graph.trajectories)
    rooms = [room for room, _ in visits.most_common(ROOMS)] or sorted(known.spatial.rooms)[:ROOMS]
    found = [graph for room in rooms for graph in (_space(known, room), _moves(known, room))]
    return [graph for graph in found if graph.edges]


def _space(known: Knowledge, room: str) -> Graph:
    """Return the spatial graph of a room, weighted by the share of visits that found the object."""
    counted = [(pair, of.counts("")) for pair, of in known.spatial.rooms.get(room, {}).items()]
    sure = sorted((each for each in counted if each[1][0]), key=lambda e: (-e[1][0] / e[1][1], -e[1][0], e[0]))[:FACTS]
    edges = (Edge(thing, place, seen / of, f"{seen}/{of}") for (thing, place), (seen, of, _) in sure)
    return Graph(f"objects and places in {room or 'the room'}", tuple(edges))


def _moves(known: Knowledge, room: str) -> Graph:
    """Return the most frequent transitions of a room, weighted by their success rate."""
    mine = [t for t in known.graph.transitions.values() if t.before[0] == room and t.before != t.after]
    often = sorted(mine, key=lambda t: (-t.n_success, t.action))[:MOVES]
    share = lambda t: t.n_success / max(1, t.n_success + t.lost.total())
    edges = (Edge(_short(t.before[1]), _short(t.after[1]), share(t), f"{t.action} ({t.n_success})") for t in often)
    return Graph(f"trajectories in {room or 'the room'}", tuple(edges))


def _short(summary: str) -> str:
    """Label a state by the agent's place and held object."""
    place = re.search(r"at ([^|]+?) \|", summary)
    held = re.search(r"holding (?!nothing)(.+)$", summary)
    return " + ".join(filter(None, [place[1] if place else "start", held[1] if held else ""]))
