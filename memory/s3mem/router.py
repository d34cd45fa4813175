"""The evidence router (S3Mem, Eq. 3 to 5): three linear heads over hashed features, trained once, fixed thereafter."""

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
from memory.s3mem.features import EDGE, NODE, edge_features, hashed, node_features, token_features
from memory.s3mem.pool import Asked, Candidate
from memory.s3mem.settings import Features, S3MemSettings

SHIPPED = Path(__file__).with_name("router.safetensors")
HEADS = ("support", "anchor", "edge")
NEGATIVES = 64  # edges of an example, at most (B.3)
Edges = dict[tuple[str, str], float]  # probability by the ids of anchor and support


@dataclass(frozen=True, slots=True)
class Labels:
    """An example of router training: a question to an index, by unit ids which units answer it, which ground it, and
    the ordered pairs that are read together."""

    asked: Asked
    support: frozenset[str]
    anchor: frozenset[str]
    edges: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Router:
    """`manifest`: what it was trained on, for the record."""

    support: Head
    anchor: Head
    edge: Head
    features: Features = "numeric"
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def nodes(self, asked: Asked) -> list[Candidate]:
        """Score the candidates of a question."""
        rows = asked.candidates()
        if not len(rows):
            return []
        x = node_matrix(asked, rows, self.features)
        return candidates(asked, rows, self.support(x), self.anchor(x))

    def edges(self, asked: Asked, nodes: Sequence[Candidate], most: int) -> Edges:
        """Score the ordered pairs among the `most` best candidates (max of support and anchor)."""
        best = sorted(nodes, key=lambda c: (-max(c.support, c.anchor), c.cost, c.unit.id))[:most]
        pairs = [(asked.index.at[i.unit.id], asked.index.at[j.unit.id]) for i, j in permutations(best, 2)]
        if not pairs:
            return {}
        scores = self.edge(hashed(edge_features(asked, pairs), len(pairs), EDGE))
        ids = [unit.id for unit in asked.index.units]
        return {(ids[i], ids[j]): float(p) for (i, j), p in zip(pairs, scores, strict=True)}

    @property
    def heads(self) -> dict[str, Head]:
        return {name: getattr(self, name) for name in HEADS}

    @property
    def sha256(self) -> str:
        return heads_sha256(self.heads, self.features)

    def save(self, path: Path) -> None:
        """Write the heads as safetensors, and the manifest beside them as JSON."""
        told = {"features": self.features, "node": NODE, "edge": EDGE, **self.manifest}
        save_heads(path, self.heads, told, hashed="features")


def router_of(settings: S3MemSettings) -> Router:
    """Read the router that settings name. Raises: ValueError, where its heads see other features."""
    router = load_router(Path(settings.router_path)) if settings.router_path else load_router()
    if router.features != settings.features:
        raise ValueError(f"{settings.router_path} was trained with features={router.features}: set that")
    return router


@cache
def load_router(path: Path = SHIPPED) -> Router:
    """Read a router. Raises: ValueError, where weights and manifest are not of one router."""
    heads, manifest = load_heads(path, HEADS, hashed="features")
    return Router(**heads, features=manifest["features"], manifest=manifest)


def scored(asked: Asked, settings: S3MemSettings, router: Router | None = None) -> tuple[list[Candidate], Edges]:
    """Score a question's candidates, and the edges between them where settings and question follow any. `router`:
    another one than the settings name."""
    if settings.router == "retrieval_rank":
        return by_rank(asked), {}
    router = router or router_of(settings)
    nodes = router.nodes(asked)
    linked = settings.edges and settings.packing == "chain" and asked.anchor.multi_hop
    return nodes, router.edges(asked, nodes, settings.edge_nodes) if linked else {}


def candidates(
    asked: Asked, rows: NDArray[np.int64], support: Iterable[float], anchor: Iterable[float]
) -> list[Candidate]:
    """Join units with their scores, rounded so that the last bit of a sum decides nothing."""
    how = asked.index.settings.representation
    units = asked.index.units
    return [
        Candidate(units[i], units[i].cost(how, asked.costs), round(float(s), 9), round(float(a), 9), int(i))
        for i, s, a in zip(rows, support, anchor, strict=True)
    ]


def by_rank(asked: Asked) -> list[Candidate]:
    """Score candidates by retrieval alone (the switch `router: retrieval_rank`): their fused rank, best 1."""
    rows = asked.candidates()
    shares = asked.fused[rows] / max(float(asked.fused.max(initial=0)), 1e-9)
    return candidates(asked, rows, shares, shares)


def node_matrix(asked: Asked, rows: NDArray[np.int64], features: Features) -> csr_matrix:
    x = hashed(node_features(asked, rows, features), len(rows), NODE)
    return x + token_features(asked, rows) if features == "full" else x


# training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Material:
    """What the heads are fitted to: rows of phi with both labels, rows of psi with theirs."""

    nodes: csr_matrix
    support: NDArray[np.int64]
    anchor: NDArray[np.int64]
    pairs: csr_matrix
    links: NDArray[np.int64]
    features: Features


def material(examples: Iterable[Labels], features: Features = "numeric", seed: int = 0) -> Material:
    """Compute features and labels. Evidence that is no candidate is put among them, here alone (B.3)."""
    rng = np.random.default_rng(seed)
    nodes, supports, anchors, pairs, links = [], [], [], [], []
    for example in examples:
        asked, at = example.asked, example.asked.index.at
        wanted = [at[id] for id in sorted(example.support | example.anchor)]
        rows = np.array(sorted({*asked.candidates(), *wanted}), dtype=np.int64)
        ids = [asked.index.units[i].id for i in rows]
        nodes.append(node_matrix(asked, rows, features))
        supports += [id in example.support for id in ids]
        anchors += [id in example.anchor for id in ids]
        chosen = training_pairs(example, rows, rng)
        if chosen:
            pairs.append(hashed(edge_features(asked, [pair for pair, _ in chosen]), len(chosen), EDGE))
            links += [label for _, label in chosen]
    whole = lambda parts: csr_matrix(vstack(parts))
    labels = (np.array(each, dtype=np.int64) for each in (supports, anchors, links))
    support, anchor, link = labels
    return Material(whole(nodes), support, anchor, whole(pairs), link, features)


def fit(told: Material, c: float = 1.0) -> Router:
    """Fit the heads: logistic loss, positives weighted as much as negatives."""
    heads = ((told.nodes, told.support), (told.nodes, told.anchor), (told.pairs, told.links))
    support, anchor, edge = (fit_head(x, labels, c) for x, labels in heads)
    return Router(support, anchor, edge, told.features)


def training_pairs(
    example: Labels, rows: Sequence[int] | NDArray[np.int64], rng: np.random.Generator
) -> list[tuple[tuple[int, int], bool]]:
    """Choose the edges of an example: the positive ones, and at most 64 others of neighbours in rank, of pairs with
    evidence, and at random."""
    at, best = example.asked.index.at, example.asked.fused
    positive = {(at[i], at[j]) for i, j in example.edges}
    ranked = sorted(map(int, rows), key=lambda i: (-best[i], i))
    evidence = [at[id] for id in sorted(example.support)]
    near = [pair for i, j in pairwise(ranked) for pair in ((i, j), (j, i))]
    touching = [pair for i in evidence for j in ranked[:NEGATIVES] for pair in ((i, j), (j, i)) if i != j]
    everything = list(permutations(ranked[:NEGATIVES], 2))
    kinds = [near[: NEGATIVES // 4], _some(touching, NEGATIVES // 2, rng), _some(everything, NEGATIVES // 4, rng)]
    negative = dict.fromkeys(pair for kind in kinds for pair in kind if pair not in positive)
    return [*((pair, True) for pair in sorted(positive)), *((pair, False) for pair in list(negative)[:NEGATIVES])]


def _some(pairs: Sequence[tuple[int, int]], n: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    chosen = rng.permutation(len(pairs))[:n]
    return [pairs[i] for i in sorted(chosen)]
