"""The evidence router (S3Mem, Eq. 3 to 5): three linear heads over hashed features, trained once and then frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from memory.linear import Head, fit_head, heads_sha256, load_heads, save_heads
from memory.s3mem.features import EDGE_DIMENSIONS, NODE_DIMENSIONS, edge_features, hash_columns, node_features
from memory.s3mem.index import Candidate, QueryScores
from memory.s3mem.settings import S3MemSettings

SHIPPED = Path(__file__).with_name("router.safetensors")
HEADS = ("support", "anchor", "edge")
FEATURES = "numeric"  # set of features, part of the hash of the weights
MAX_NEGATIVES = 64  # negative edges of an example (B.3)
Edges = dict[tuple[str, str], float]  # probability by the unit ids of anchor and support


@dataclass(frozen=True, slots=True)
class RouterExample:
    """A training example: a scored question, and the ids of the units that answer it (`support`), that it refers to
    (`anchor`), and the ordered pairs that are read together (`edges`)."""

    query: QueryScores
    support: frozenset[str]
    anchor: frozenset[str]
    edges: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Router:
    """The three heads; `manifest` records the training data."""

    support: Head
    anchor: Head
    edge: Head
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def nodes(self, query: QueryScores) -> list[Candidate]:
        """Score the candidates of a question."""
        rows = query.candidates()
        if not len(rows):
            return []
        x = _node_matrix(query, rows)
        return make_candidates(query, rows, self.support(x), self.anchor(x))

    def edges(self, query: QueryScores, nodes: Sequence[Candidate], most: int) -> Edges:
        """Score the ordered pairs among the `most` best candidates, ranked by the larger of support and anchor."""
        best = sorted(nodes, key=lambda c: (-max(c.support, c.anchor), c.cost, c.unit.id))[:most]
        pairs = [(query.index.at[i.unit.id], query.index.at[j.unit.id]) for i, j in permutations(best, 2)]
        if not pairs:
            return {}
        scores = self.edge(hash_columns(edge_features(query, pairs), len(pairs), EDGE_DIMENSIONS))
        ids = [unit.id for unit in query.index.units]
        return {(ids[i], ids[j]): float(p) for (i, j), p in zip(pairs, scores, strict=True)}

    @property
    def heads(self) -> dict[str, Head]:
        return {name: getattr(self, name) for name in HEADS}

    @property
    def sha256(self) -> str:
        return heads_sha256(self.heads, FEATURES)

    def save(self, path: Path) -> None:
        """Write the heads as safetensors, and the manifest beside them as JSON."""
        sizes = {"node": NODE_DIMENSIONS, "edge": EDGE_DIMENSIONS}
        save_heads(path, self.heads, {"features": FEATURES, **sizes, **self.manifest}, hashed="features")


@cache
def load_router(path: Path = SHIPPED) -> Router:
    """Read a router.

    Raises:
        ValueError: weights and manifest are of different routers, or the router was trained on other features.
    """
    heads, manifest = load_heads(path, HEADS, hashed="features")
    if manifest["features"] != FEATURES:
        raise ValueError(f"{path} was trained on {manifest['features']} features, not {FEATURES}: train it again")
    return Router(**heads, manifest=manifest)


def score_candidates(
    query: QueryScores, settings: S3MemSettings, router: Router | None = None
) -> tuple[list[Candidate], Edges]:
    """Score a question's candidates, and edges between them if settings and question use any.

    Args:
        router: default: the one that the settings name.
    """
    if settings.router == "retrieval_rank":
        return _rank_candidates(query), {}
    router = router or load_router(Path(settings.router_path or SHIPPED))
    nodes = router.nodes(query)
    linked = settings.edges and settings.packing == "chain" and query.anchor.multi_hop
    return nodes, router.edges(query, nodes, settings.edge_nodes) if linked else {}


def make_candidates(
    query: QueryScores, rows: NDArray[np.int64], support: Iterable[float], anchor: Iterable[float]
) -> list[Candidate]:
    """Combine units with their scores, which are rounded so that floating-point noise does not order them."""
    how = query.index.settings.representation
    units = query.index.units
    return [
        Candidate(
            units[i],
            cost=units[i].cost(how, query.costs),
            support=round(float(s), 9),
            anchor=round(float(a), 9),
            place=int(i),
        )
        for i, s, a in zip(rows, support, anchor, strict=True)
    ]


def _rank_candidates(query: QueryScores) -> list[Candidate]:
    """Score candidates by retrieval alone (`router: retrieval_rank`): their fused score, divided by the best."""
    rows = query.candidates()
    shares = query.fused[rows] / max(float(query.fused.max(initial=0)), 1e-9)
    return make_candidates(query, rows, shares, shares)


def _node_matrix(query: QueryScores, rows: NDArray[np.int64]) -> csr_matrix:
    return hash_columns(node_features(query, rows), len(rows), NODE_DIMENSIONS)


# training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingMatrices:
    """Training data of the heads: rows of phi with support and anchor labels, rows of psi with edge labels."""

    nodes: csr_matrix
    support: NDArray[np.int64]
    anchor: NDArray[np.int64]
    pairs: csr_matrix
    links: NDArray[np.int64]


def training_matrices(examples: Iterable[RouterExample], seed: int = 0) -> TrainingMatrices:
    """Compute features and labels; in training, evidence is always among the candidates (B.3)."""
    rng = np.random.default_rng(seed)
    nodes, supports, anchors, pairs, links = [], [], [], [], []
    for example in examples:
        query, at = example.query, example.query.index.at
        wanted = [at[id] for id in sorted(example.support | example.anchor)]
        rows = np.array(sorted({*query.candidates(), *wanted}), dtype=np.int64)
        ids = [query.index.units[i].id for i in rows]
        nodes.append(_node_matrix(query, rows))
        supports += [id in example.support for id in ids]
        anchors += [id in example.anchor for id in ids]
        chosen = training_pairs(example, rows, rng)
        if chosen:
            columns = edge_features(query, [pair for pair, _ in chosen])
            pairs.append(hash_columns(columns, len(chosen), EDGE_DIMENSIONS))
            links += [label for _, label in chosen]
    labels = lambda values: np.array(values, dtype=np.int64)
    return TrainingMatrices(
        nodes=csr_matrix(vstack(nodes)),
        support=labels(supports),
        anchor=labels(anchors),
        pairs=csr_matrix(vstack(pairs)),
        links=labels(links),
    )


def fit_router(data: TrainingMatrices, c: float = 1.0) -> Router:
    """Fit the heads by balanced logistic regression with inverse regularisation strength `c`."""
    heads = ((data.nodes, data.support), (data.nodes, data.anchor), (data.pairs, data.links))
    support, anchor, edge = (fit_head(x, labels, c) for x, labels in heads)
    return Router(support, anchor, edge)


def training_pairs(
    example: RouterExample, rows: Sequence[int] | NDArray[np.int64], rng: np.random.Generator
) -> list[tuple[tuple[int, int], bool]]:
    """Sample the edges of an example: all positive ones, and at most MAX_NEGATIVES negative ones (neighbours in rank,
    pairs with evidence, random pairs)."""
    at, best = example.query.index.at, example.query.fused
    positive = {(at[i], at[j]) for i, j in example.edges}
    ranked = sorted(map(int, rows), key=lambda i: (-best[i], i))
    evidence = [at[id] for id in sorted(example.support)]
    near = [pair for i, j in pairwise(ranked) for pair in ((i, j), (j, i))]
    touching = [pair for i in evidence for j in ranked[:MAX_NEGATIVES] for pair in ((i, j), (j, i)) if i != j]
    everything = list(permutations(ranked[:MAX_NEGATIVES], 2))
    kinds = [
        near[: MAX_NEGATIVES // 4],
        _sample(touching, MAX_NEGATIVES // 2, rng),
        _sample(everything, MAX_NEGATIVES // 4, rng),
    ]
    negative = dict.fromkeys(pair for kind in kinds for pair in kind if pair not in positive)
    return [*((pair, True) for pair in sorted(positive)), *((pair, False) for pair in list(negative)[:MAX_NEGATIVES])]


def _sample(pairs: Sequence[tuple[int, int]], n: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    chosen = rng.permutation(len(pairs))[:n]
    return [pairs[i] for i in sorted(chosen)]
