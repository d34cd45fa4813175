"""What the router's heads see (S3Mem, B.2): phi of a question and a unit, psi of a question and two units, by name and
hashed. A feature of the question alone would lift all candidates alike: it stands only where it meets one of the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.feature_extraction import FeatureHasher

from memory.s3mem.pool import BEST, Asked, event_of
from memory.s3mem.settings import Features
from memory.s3mem.text import is_question, tells_number, tells_time
from memory.s3mem.units import Unit
from memory.words import WORD_TOKENS, word_tokens, words

NODE, EDGE = 2048, 1024  # dimensions (B.1)
NEAR = 5  # units apart
Columns = dict[str, NDArray[np.float64]]
OF_TURNS = frozenset({"own", "window", "actor", "bias"})
"""What `numeric` heads see of a turn. More of it, learned from template dialogues, are habits of the templates (how far
apart, how long, with which question mark), which no other people share: docs/s3mem.md has the figures."""
_MET_BY = (  # what of a unit the anchor's operations meet
    "match",
    "first",
    "last",
    "nth",
    "follows",
    "precedes",
    "changes",
    "changes_object",
    "in_steps",
    "time",
    "number",
    "range_end",
)


def node_features(asked: Asked, rows: NDArray[np.int64], features: Features = "numeric") -> Columns:
    """Compute phi: a column per name, a row per candidate. Scores are shares of the question's best."""
    units = [asked.index.units[i] for i in rows]
    found = {**_retrieval(asked, rows), **_fields(asked, rows, units), **_sequence(asked, rows)}
    anchor = asked.anchor
    met = [f"op={op}" for op in sorted(anchor.ops)] + ([f"kind={anchor.kind}"] if anchor.kind != "event" else [])
    crossed = {f"{each}&{name}": found[name] for each, name in product(met, _MET_BY)}
    columns = _by_kind({**found, **crossed, "bias": np.ones(len(rows))}, units)
    if features == "full":
        return columns
    return {name: c for name, c in columns.items() if name.startswith("step:") or name[5:] in OF_TURNS}


def _by_kind(columns: Columns, units: Sequence[Unit]) -> Columns:
    """Split each column by the kind of history, in which the same means something else."""
    kinds = {kind: np.array([unit.origin.kind == kind for unit in units], dtype=float) for kind in ("step", "turn")}
    return {f"{k}:{name}": column * mask for k, mask in kinds.items() if mask.any() for name, column in columns.items()}


def _retrieval(asked: Asked, rows: NDArray[np.int64]) -> Columns:
    """Say how well words fit: the unit's own, those around it, by each channel."""
    index = asked.index
    top = max(float(asked.own.max(initial=0)), 1e-9)
    at = lambda i: np.where(i >= 0, asked.own[i], 0.0) / top
    before, after = index.before[rows], index.after[rows]
    further = np.maximum(at(_of(index.before, before)), at(_of(index.after, after)))
    asks = np.array([is_question(index.searched[i]) for i in rows], dtype=float)
    prior = np.array([i >= 0 and is_question(index.searched[i]) for i in before], dtype=float)
    own, actor = asked.own[rows] / top, asked.by_actor[rows].astype(float)
    window = asked.window[rows] / max(float(asked.window.max(initial=0)), 1e-9)
    return {
        "own": own,
        "window": window,
        "previous": at(before),
        "next": at(after),
        "further": further,
        "dense": asked.dense[rows] / max(float(asked.dense.max(initial=0)), 1e-9),
        "covered": index.own.covered(asked.terms)[rows],
        "covered_window": index.window.covered(asked.terms)[rows],
        "fused": asked.fused[rows] / max(float(asked.fused.max(initial=0)), 1e-9),
        "rank": 1 / (1 + asked.order[1][rows] / BEST),
        "asks": asks,
        "answers": prior * at(before),
        "actor": actor,
        "own_actor": own * actor,
        "window_actor": window * actor,
    }


def _of(neighbour: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(rows >= 0, neighbour[rows], -1)


def _fields(asked: Asked, rows: NDArray[np.int64], units: Sequence[Unit]) -> Columns:
    """Say which fields of the unit the anchor names, and what else there is in them."""
    named = set(asked.anchor.objects)
    changes_object = [any(c.key.rpartition(".")[0] in named for c in unit.changes) for unit in units]
    numbers = lambda values: np.array(list(values), dtype=float)
    return {
        "object": asked.objects[rows],
        "date": asked.on_date[rows].astype(float),
        "in_steps": asked.in_steps[rows].astype(float),
        "place": asked.at_place[rows].astype(float),
        "changes": numbers(bool(unit.changes) for unit in units),
        "changes_object": numbers(changes_object),
        "time": numbers(tells_time(unit.event) for unit in units),
        "number": numbers(tells_number(unit.event) for unit in units),
        "length": numbers(min(word_tokens(unit.event) / (50 * WORD_TOKENS), 2.0) for unit in units),
    }


def _sequence(asked: Asked, rows: NDArray[np.int64]) -> Columns:
    """Say where the unit stands among what the question counts, orders or looks beside."""
    matches, occurrence, index = asked.matches, asked.occurrence, asked.index
    many, place = max(int(occurrence.max(initial=0)), 1), occurrence[rows]
    chosen = _turn_of(asked, many)
    beside = lambda neighbour: np.where(neighbour >= 0, matches[neighbour] & _is(occurrence[neighbour], chosen), False)
    first, last = np.flatnonzero(matches)[[0, -1]] if matches.any() else (-1, -1)
    ends = np.flatnonzero(asked.in_steps)[[0, -1]] if asked.in_steps.any() else (-1, -1)
    columns = {
        "match": matches[rows],
        "first": place == 1,
        "last": place == many,
        "nth": (place == chosen) & (place > 0),
        "follows": beside(index.before[rows]),
        "precedes": beside(index.after[rows]),
        "between": (rows > first) & (rows < last),
        "range_end": (rows == ends[0]) | (rows == ends[1]),
    }
    return {name: np.asarray(column, dtype=float) for name, column in columns.items()}


def _turn_of(asked: Asked, many: int) -> int:
    """Return which of the matches is meant; 0 for any."""
    ops = asked.anchor.ops
    return asked.anchor.nth or (1 if "first" in ops else many if "last" in ops else 0)


def _is(occurrence: NDArray[np.int64], chosen: int) -> NDArray[np.bool_]:
    return (occurrence == chosen) if chosen else occurrence > 0


# pairs ---------------------------------------------------------------------------------------------------------------


def edge_features(asked: Asked, pairs: Sequence[tuple[int, int]]) -> Columns:
    """Compute psi of ordered pairs: a column per name, a row per pair."""
    units = asked.index.units
    ops = sorted(asked.anchor.ops)
    rows = [_pair(asked, i, j, units[i], units[j], ops) for i, j in pairs]
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}


def _pair(asked: Asked, i: int, j: int, one: Unit, other: Unit, ops: Sequence[str]) -> dict[str, float]:
    same_history = one.origin.history == other.origin.history
    apart = other.order - one.order if same_history else 0
    mine, theirs, question = set(asked.index.terms[i]), set(asked.index.terms[j]), set(asked.terms)
    kinds = [kind for kind, id in one.relations if id == other.id]
    keys = {c.key for c in one.changes} & {c.key for c in other.changes}
    flags = {
        "bias": True,
        "same_history": same_history,
        "adjacent": abs(apart) == 1,
        "near": 2 <= abs(apart) <= NEAR,
        "forward": apart > 0,
        "backward": apart < 0,
        "next": apart == 1,
        "previous": apart == -1,
        "same_place": bool(one.place) and one.place == other.place,
        "same_action": one.action == other.action,
        "same_event": event_of(one) == event_of(other),
        "same_key": bool(keys),
        "same_actor": one.origin.actor == other.origin.actor,
        "retrieved": all(asked.order[0][each] < BEST for each in (i, j)),
        "both_match": bool(asked.matches[i] and asked.matches[j]),
        "from_match": bool(asked.matches[i]),
        "to_match": bool(asked.matches[j]),
        "next_occurrence": _follows(asked, i, j),
        **{f"relation={kind}": True for kind in kinds},
    }
    found = {name: 1.0 for name, flag in flags.items() if flag}
    found |= {
        "distance": min(abs(apart), 50) / 50,
        "shared_objects": len(set(one.objects) & set(other.objects)) / 5,
        "shared_terms": len(mine & theirs) / max(len(mine | theirs), 1),
        "shared_question": len(mine & theirs & question) / max(len(question), 1),
        "new_question": len((theirs - mine) & question) / max(len(question), 1),
    }
    return found | {f"op={op}&{name}": value for op in ops for name, value in found.items()}


def _follows(asked: Asked, i: int, j: int) -> bool:
    return bool(asked.occurrence[i] and asked.occurrence[j] == asked.occurrence[i] + 1)


# hashing -------------------------------------------------------------------------------------------------------------


@cache
def bucket(name: str, dimensions: int) -> tuple[int, float]:
    """Return where a name is hashed to, and its sign there."""
    row = FeatureHasher(dimensions).transform([{name: 1.0}])
    return int(row.indices[0]), float(row.data[0])


def hashed(columns: Mapping[str, NDArray[np.float64]], n: int, dimensions: int) -> csr_matrix:
    """Hash columns of n rows into a sparse matrix (n, dimensions)."""
    places = [bucket(name, dimensions) for name in columns]
    data = np.concatenate([sign * column for (_, sign), column in zip(places, columns.values(), strict=True)])
    at = np.repeat([place for place, _ in places], n)
    matrix = csr_matrix((data, (np.tile(np.arange(n), len(places)), at)), shape=(n, dimensions))
    matrix.eliminate_zeros()
    return matrix


def token_features(asked: Asked, rows: Iterable[int]) -> csr_matrix:
    """Hash the words of question and unit, and those that both have (the switch `features: full`)."""
    question = {f"q={word}" for word in words(asked.anchor.text)}
    told = ({*words(asked.index.units[i].serialised())} for i in rows)
    rows_of_names = [
        [*question, *(f"u={w}" for w in unit), *(f"both={w}" for w in unit if f"q={w}" in question)] for unit in told
    ]
    return csr_matrix(FeatureHasher(NODE, input_type="string").transform(rows_of_names))
