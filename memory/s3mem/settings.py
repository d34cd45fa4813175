"""Settings of S3Mem (arXiv 2605.28831): choices that the paper leaves open, and a switch for each ablation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memory.s3mem.text_scores import Dense
from memory.s3mem.units import Representation
from runtime.settings import PathName, Settings, Share

Channel = Literal["lexical", "dense", "window", "anchor", "object", "near", "relation"]
CHANNELS: tuple[Channel, ...] = ("lexical", "dense", "window", "anchor", "object", "near", "relation")


class S3MemSettings(Settings):
    """Settings of the memory system `s3mem` (docs/guides/questions.md)."""

    writer: Literal["rules", "llm"] = "rules"
    """Writer of units. llm: the language model of `memory.api`; rules write the records that it omits."""
    representation: Representation = "full"
    """Text of a unit for the reader."""
    anchors: bool = True
    """Parse questions into anchors; false: a question is a bag of words."""
    edges: bool = True
    """Follow edges between units in multi-hop questions."""
    packing: Literal["chain", "topk"] = "chain"
    """Packing of multi-hop questions: along edges, or by support alone."""
    router: Literal["learned", "retrieval_rank"] = "learned"
    """Scores of candidates: the router's, or their retrieval rank."""
    router_path: PathName | None = None
    """Weights of a router (`memcompiler train router`); null: the router that ships."""
    channels: tuple[Channel, ...] = CHANNELS
    """Retrieval channels that find candidates."""
    dense: Dense = "lsa"
    """Vectors of channel `dense`: TF-IDF and SVD, hashed characters, or the model of `memory.embed`."""
    lexical_top: int = Field(default=24, ge=1)
    """Candidates of channel `lexical`."""
    dense_top: int = Field(default=24, ge=1)
    """Candidates of channel `dense`."""
    window_top: int = Field(default=48, ge=1)
    """Candidates of channel `window`."""
    pool: int = Field(default=128, ge=1)
    """Maximum number of candidates."""
    tokens: int = Field(default=400, ge=1)
    """Token budget of a pack, if the query sets none."""
    fill: bool = False
    """Spend the rest of the budget by support."""
    tau_sup: Share = 0.5
    """Support from which a unit is packed."""
    tau_edge: Share = 0.5
    """Probability from which an edge is followed."""
    n_single: int = Field(default=3, ge=1)
    """Maximum number of units in a single-hop pack."""
    hops: int = Field(default=3, ge=0)
    """Maximum number of edges in a chain."""
    edge_nodes: int = Field(default=16, ge=2)
    """Number of best candidates between which edges are scored."""
