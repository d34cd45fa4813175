"""Settings of the main job, from collection to evaluation."""

from __future__ import annotations

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.training import GrpoConfig, SftConfig
from runtime.settings import Settings


class QuickstartConfig(Settings):
    """The main job: collect, SFT, rollouts, evaluation. One file holds all of it."""

    seed: int = 0  # scenes, SFT and evaluation take it from here (quickstart.yaml refers to it)
    collect: CollectConfig
    sft: SftConfig
    grpo: GrpoConfig
    eval: EvalConfig
