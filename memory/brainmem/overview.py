"""What BrainMem knows, for people: guidelines with their utility, experiences by task type, and both graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from memory.brainmem.knowledge import Knowledge
from memory.brainmem.semantic import listed
from memory.protocol import Edge, Graph, Table

ROOMS, FACTS, MOVES = 4, 30, 30  # rooms that are drawn, relations and transitions of one


def tables(known: Knowledge, failures: Mapping[str, int]) -> list[Table]:
    """List guidelines, experiences and, where a language model was asked, its answers that could not be used."""
    guidelines = tuple(
        (
            f"{g.utility:.3f}",
            f"{g.n_success}/{g.n_total}",
            "protected" if g.protected else "",
            ", ".join(sorted(g.task_types)),
            g.text,
        )
        for g in listed(known.guidelines, len(known.guidelines))
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
        found.append(Table("answers that could not be used", ("asked for", "times"), rows))
    return found


def graphs(known: Knowledge) -> list[Graph]:
    """Give both graphs of the rooms that most episodes were in."""
    visits = Counter(t.topic.room for t in known.graph.trajectories)
    rooms = [room for room, _ in visits.most_common(ROOMS)] or sorted(known.spatial.rooms)[:ROOMS]
    made = [graph for room in rooms for graph in (_space(known, room), _moves(known, room))]
    return [graph for graph in made if graph.edges]


def _space(known: Knowledge, room: str) -> Graph:
    """Draw which object was in which receptacle, by the share of visits that found it there."""
    told = [(pair, of.counts("")) for pair, of in known.spatial.rooms.get(room, {}).items()]
    sure = sorted((each for each in told if each[1][0]), key=lambda e: (-e[1][0] / e[1][1], -e[1][0], e[0]))[:FACTS]
    edges = (Edge(thing, place, seen / of, f"{seen}/{of}") for (thing, place), (seen, of, _) in sure)
    return Graph(f"what is where in {room or 'the room'}", tuple(edges))


def _moves(known: Knowledge, room: str) -> Graph:
    """Draw the transitions that were taken most often, by the share of times that they were not refused."""
    mine = [t for t in known.graph.transitions.values() if t.before[0] == room and t.before != t.after]
    often = sorted(mine, key=lambda t: (-t.n_success, t.action))[:MOVES]
    share = lambda t: t.n_success / max(1, t.n_success + t.lost.total())
    edges = (Edge(_short(t.before[1]), _short(t.after[1]), share(t), f"{t.action} ({t.n_success})") for t in often)
    return Graph(f"trajectories in {room or 'the room'}", tuple(edges))


def _short(summary: str) -> str:
    """Name a state by place and what is held."""
    place = re.search(r"at ([^|]+?) \|", summary)
    held = re.search(r"holding (?!nothing)(.+)$", summary)
    return " + ".join(filter(None, [place[1] if place else "start", held[1] if held else ""]))
