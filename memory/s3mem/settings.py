"""Settings of S3Mem (arXiv 2605.28831): what the paper leaves open, and a switch for each ablation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from memory.s3mem.lexical import Dense
from memory.s3mem.units import Representation
from runtime.settings import PathName, Settings, Share

Channel = Literal["lexical", "dense", "window", "anchor", "object", "near", "relation"]
Features = Literal["numeric", "full"]
CHANNELS: tuple[Channel, ...] = ("lexical", "dense", "window", "anchor", "object", "near", "relation")


class S3MemSettings(Settings):
    writer: Literal["rules", "llm"] = "rules"  # llm: a language model that is given; by rule what it does not tell
    representation: Representation = "full"
    anchors: bool = True  # False: a question is its words alone
    edges: bool = True  # False: edges count nothing
    packing: Literal["chain", "topk"] = "chain"  # topk: by support alone, whatever the question
    router: Literal["learned", "retrieval_rank"] = "learned"
    features: Features = "numeric"  # what its heads see; full: the words, too, by a router of one's own
    router_path: PathName | None = None  # of another router than the one that ships, trained with these features
    channels: tuple[Channel, ...] = CHANNELS
    dense: Dense = "lsa"
    lexical_top: int = Field(default=24, ge=1)
    dense_top: int = Field(default=24, ge=1)
    window_top: int = Field(default=48, ge=1)
    pool: int = Field(default=128, ge=1)  # candidates, at most
    tokens: int = Field(default=400, ge=1)  # of a pack, where the question does not say
    fill: bool = False  # spend what is left of the tokens, too
    tau_sup: Share = 0.5
    tau_edge: Share = 0.5
    n_single: int = Field(default=3, ge=1)
    hops: int = Field(default=3, ge=0)
    edge_nodes: int = Field(default=16, ge=2)  # the best candidates, between which edges are scored

    @model_validator(mode="after")
    def _a_router_with_these_features(self) -> S3MemSettings:
        if self.features == "full" and self.router_path is None:
            told = "make one with: memcompiler train router --features full --out OUT"
            raise ValueError(f"features=full needs router_path, for the router that ships sees none of them; {told}")
        return self
