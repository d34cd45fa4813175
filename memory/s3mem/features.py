"""Features of the router's heads (S3Mem, B.2): phi of a question and a unit, psi of a question and two units, hashed.

Question features occur only crossed with unit features; alone they would shift the scores of all candidates equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.feature_extraction import FeatureHasher

from memory.s3mem.index import BEST, QueryScores, event_of
from memory.s3mem.text import is_question, mentions_number, mentions_time
from memory.s3mem.units import EventUnit
from memory.words import WORD_TOKENS, word_tokens

NODE_DIMENSIONS, EDGE_DIMENSIONS = 2048, 1024  # of the hashed features (B.1)
NEAR = 5  # units
Columns = dict[str, NDArray[np.float64]]
TURN_FEATURES = frozenset({"own", "window", "actor", "bias"})
"""Features of dialogue turns. From further ones the router learns habits of the generated dialogues, which do not
transfer to LoCoMo (docs/experiments/s3mem.md has the figures)."""
FEATURES_CHOSEN_WITH = ("LoCoMo",)  # benchmarks that were in sight when the features were chosen, for the manifest
_CROSSED = (  # unit features that are crossed with the question's operations and kind
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


def node_features(query: QueryScores, rows: NDArray[np.int64]) -> Columns:
    """Compute phi: a column per feature, a row per candidate. Scores are divided by the question's best."""
    units = [query.index.units[i] for i in rows]
    found = {**_retrieval(query, rows), **_fields(query, rows, units), **_sequence(query, rows)}
    anchor = query.anchor
    question = [f"op={op}" for op in sorted(anchor.ops)] + ([f"kind={anchor.kind}"] if anchor.kind != "event" else [])
    crossed = {f"{each}&{name}": found[name] for each, name in product(question, _CROSSED)}
    columns = _by_kind({**found, **crossed, "bias": np.ones(len(rows))}, units)
    return {name: c for name, c in columns.items() if name.startswith("step:") or name[5:] in TURN_FEATURES}


def _by_kind(columns: Columns, units: Sequence[EventUnit]) -> Columns:
    """Split each column into one for steps and one for turns."""
    kinds = {kind: np.array([unit.origin.kind == kind for unit in units], dtype=float) for kind in ("step", "turn")}
    return {f"{k}:{name}": column * mask for k, mask in kinds.items() if mask.any() for name, column in columns.items()}


def _retrieval(query: QueryScores, rows: NDArray[np.int64]) -> Columns:
    """Compute retrieval scores of each unit and its neighbours, by channel."""
    index = query.index
    top = max(float(query.own.max(initial=0)), 1e-9)
    at = lambda i: np.where(i >= 0, query.own[i], 0.0) / top
    before, after = index.before[rows], index.after[rows]
    second = np.maximum(at(_of(index.before, before)), at(_of(index.after, after)))
    asks = np.array([is_question(index.searched[i]) for i in rows], dtype=float)
    prior = np.array([i >= 0 and is_question(index.searched[i]) for i in before], dtype=float)
    own, actor = query.own[rows] / top, query.by_actor[rows].astype(float)
    window = query.window[rows] / max(float(query.window.max(initial=0)), 1e-9)
    return {
        "own": own,
        "window": window,
        "previous": at(before),
        "next": at(after),
        "further": second,
        "dense": query.dense[rows] / max(float(query.dense.max(initial=0)), 1e-9),
        "covered": index.own.covered(query.terms)[rows],
        "covered_window": index.window.covered(query.terms)[rows],
        "fused": query.fused[rows] / max(float(query.fused.max(initial=0)), 1e-9),
        "rank": 1 / (1 + query.order[1][rows] / BEST),
        "asks": asks,
        "answers": prior * at(before),
        "actor": actor,
        "own_actor": own * actor,
        "window_actor": window * actor,
    }


def _of(neighbour: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(rows >= 0, neighbour[rows], -1)


def _fields(query: QueryScores, rows: NDArray[np.int64], units: Sequence[EventUnit]) -> Columns:
    """Compute which fields of the unit the question names, and what its text mentions."""
    named = set(query.anchor.objects)
    changes_object = [any(c.key.rpartition(".")[0] in named for c in unit.changes) for unit in units]
    numbers = lambda values: np.array(list(values), dtype=float)
    return {
        "object": query.objects[rows],
        "date": query.on_date[rows].astype(float),
        "in_steps": query.in_steps[rows].astype(float),
        "place": query.at_place[rows].astype(float),
        "changes": numbers(bool(unit.changes) for unit in units),
        "changes_object": numbers(changes_object),
        "time": numbers(mentions_time(unit.event) for unit in units),
        "number": numbers(mentions_number(unit.event) for unit in units),
        "length": numbers(min(word_tokens(unit.event) / (50 * WORD_TOKENS), 2.0) for unit in units),
    }


def _sequence(query: QueryScores, rows: NDArray[np.int64]) -> Columns:
    """Compute the unit's position among the matches that the question counts or orders."""
    matches, occurrence, index = query.matches, query.occurrence, query.index
    many, place = max(int(occurrence.max(initial=0)), 1), occurrence[rows]
    chosen = _wanted_match(query, many)
    wanted = matches & ((occurrence == chosen) if chosen else occurrence > 0)
    beside = lambda neighbour: np.where(neighbour >= 0, wanted[neighbour], False)
    first, last = np.flatnonzero(matches)[[0, -1]] if matches.any() else (-1, -1)
    ends = np.flatnonzero(query.in_steps)[[0, -1]] if query.in_steps.any() else (-1, -1)
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


def _wanted_match(query: QueryScores, many: int) -> int:
    """Return the number of the match that the question means; 0 for any."""
    ops = query.anchor.ops
    return query.anchor.nth or (1 if "first" in ops else many if "last" in ops else 0)


# pairs ----------------------------------------------------------------------------------------------------------------


def edge_features(query: QueryScores, pairs: Sequence[tuple[int, int]]) -> Columns:
    """Compute psi of ordered pairs of unit indices: a column per feature, a row per pair."""
    ops = sorted(query.anchor.ops)
    rows = [_pair(query, i, j, ops) for i, j in pairs]
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}


def _pair(query: QueryScores, i: int, j: int, ops: Sequence[str]) -> dict[str, float]:
    one, other, occurrence = query.index.units[i], query.index.units[j], query.occurrence
    same_history = one.origin.history == other.origin.history
    apart = other.order - one.order if same_history else 0
    mine, theirs, question = set(query.index.terms[i]), set(query.index.terms[j]), set(query.terms)
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
        "retrieved": all(query.order[0][each] < BEST for each in (i, j)),
        "both_match": bool(query.matches[i] and query.matches[j]),
        "from_match": bool(query.matches[i]),
        "to_match": bool(query.matches[j]),
        "next_occurrence": bool(occurrence[i] and occurrence[j] == occurrence[i] + 1),
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


# hashing --------------------------------------------------------------------------------------------------------------


@cache
def hash_bucket(name: str, dimensions: int) -> tuple[int, float]:
    """Return where a name is hashed to, and its sign there."""
    row = FeatureHasher(dimensions).transform([{name: 1.0}])
    return int(row.indices[0]), float(row.data[0])


def hash_columns(columns: Mapping[str, NDArray[np.float64]], n: int, dimensions: int) -> csr_matrix:
    """Hash columns of n rows into a sparse matrix (n, dimensions)."""
    places = [hash_bucket(name, dimensions) for name in columns]
    data = np.concatenate([sign * column for (_, sign), column in zip(places, columns.values(), strict=True)])
    at = np.repeat([place for place, _ in places], n)
    matrix = csr_matrix((data, (np.tile(np.arange(n), len(places)), at)), shape=(n, dimensions))
    matrix.eliminate_zeros()
    return matrix
