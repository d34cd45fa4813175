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
    writer: Literal["rules", "llm"] = "rules"  # llm: a language model; rules write the records that it omits
    representation: Representation = "full"
    anchors: bool = True  # False: a question is a bag of words
    edges: bool = True  # False: ignore edges
    packing: Literal["chain", "topk"] = "chain"  # topk: by support alone for every question
    router: Literal["learned", "retrieval_rank"] = "learned"
    router_path: PathName | None = None  # default: the router that ships
    channels: tuple[Channel, ...] = CHANNELS
    dense: Dense = "lsa"
    lexical_top: int = Field(default=24, ge=1)
    dense_top: int = Field(default=24, ge=1)
    window_top: int = Field(default=48, ge=1)
    pool: int = Field(default=128, ge=1)  # most candidates
    tokens: int = Field(default=400, ge=1)  # of a pack, if the query sets no budget
    fill: bool = False  # spend the rest of the budget by support
    tau_sup: Share = 0.5
    tau_edge: Share = 0.5
    n_single: int = Field(default=3, ge=1)
    hops: int = Field(default=3, ge=0)
    edge_nodes: int = Field(default=16, ge=2)  # best candidates, between which edges are scored
