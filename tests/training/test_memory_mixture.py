"""A compiler trained on the memory of several systems: their collections are rows of one training."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler import checkpoint
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.training import SftConfig
from data_gen.rows import SftRow, load_rows
from eval.provenance import training_of
from memcompiler.collection import run_collect
from training.sft import train_sft

HOMES = "env={scenes: {train: 4, test: 2}, images: false, visual_share: 0}"


def guided(rows: list[SftRow]) -> int:
    return sum(bool(row.emission.startswith(">")) for row in rows)


@pytest.mark.slow
def test_rows_of_two_memory_systems_train_one_compiler_and_results_name_both(tmp_path: Path) -> None:
    for system in ("trajectory", "s3mem"):
        asked = [HOMES, f"memory={{system: {system}, pictures: 0}}", "limit=8"]
        run_collect(load_config(CollectConfig, "collect/quickstart", asked), tmp_path / system)
    folders = [tmp_path / system / "rows" for system in ("trajectory", "s3mem")]
    ours, theirs = ([row.memory_text for row in load_rows(folder)] for folder in folders)
    assert set(ours) != set(theirs)
    for folder in folders:  # the expert compiles from either
        assert guided(load_rows(folder)) > 3
    rows = "[" + ", ".join(map(str, folders)) + "]"
    few = [f"rows={rows}", "max_steps=1", "batch_size=4", "micro_batch_size=4"]
    train_sft(load_config(SftConfig, "sft/quickstart", few), tmp_path / "sft")
    state = checkpoint.read_state(checkpoint.find(tmp_path / "sft"))
    assert state["memory_systems"] == ["trajectory", "s3mem"]
    evaluated = EvalConfig(deliveries=("compiled",), compiler={"checkpoint": str(tmp_path / "sft")})
    assert (training_of(evaluated) or {})["memory"] == "trajectory and s3mem"
