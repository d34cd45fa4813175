"""`memcompiler reproduce`: every shipped chain at tiny size to its rows of the paper's tables, killed and resumed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from configs.load import CONFIGS, load_config
from configs.reproduce import Chain, find_chain, shipped_chains
from memcompiler.cli import app
from tests.faulty_server import FaultyServer

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "envs" / "embodiedbench_standin"
MODELS: dict[str, Any] = {
    "compiler": {
        "model": "zoo/household/compiler",
        "engine": "hf",
        "dtype": "float32",
        "instructions": "none",
        "max_new_tokens": 8,
        "soft": {"n_tokens": 2, "emb_std": "auto"},
    },
    "executor": {"engine": "hf", "dtype": "float32", "instructions": "none", "max_new_tokens": 8},
}
SMALL: dict[str, Any] = {
    "executors": {"tiny": {"model": "zoo/household/executor", "chat_template": {}}},
    "collect": {"limit": 3, "executor": {"model": "zoo/household/executor"}},
    "sft": {"max_steps": 2, "batch_size": 2, "loader_workers": 0, "latent": "none", "backend": "replicated"},
    "grpo": {"updates": 1, "tasks": 2, "group_size": 2, "max_steps": 2, "cluster": "local", "micro_batch_size": 8},
    "eval": {"limit": 2, "max_steps": 2},
    "processes": {"separate": False, "sft": 1},
}
MEASURED = "**measured**"


def tiny(folder: Path, benchmark: str, **changes: dict[str, Any]) -> Path:
    """Write the shipped chain of a benchmark at tiny size: other models, few tasks and steps, and nothing else."""
    asked: dict[str, Any] = {"base": str(CONFIGS / "reproduce" / f"{benchmark}.yaml"), "shared": dict(MODELS), **SMALL}
    shipped = find_chain(benchmark).config.evaluations
    asked["evaluations"] = {name: {"executors": ["tiny"]} for name, of in shipped.items() if of.executors}
    for block, change in changes.items():
        asked[block] = {**asked.get(block, {}), **change}
    path = folder / f"{benchmark}.yaml"
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    return path


def reproduce(*arguments: object) -> str:
    """Output of a command that must succeed."""
    answer = CliRunner().invoke(app, ["reproduce", *map(str, arguments)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def rows(out: Path, table: int) -> dict[str, dict[str, Any]]:
    """Cells of a table's measured rows by method."""
    made = json.loads((out / "tables" / f"table{table}.json").read_text())
    return {row["method"]: row["cells"] for row in made["rows"] if row["source"] == "measured"}


# -- every benchmark ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ALFWorld games made from generated homes: 8 of train, 3 of valid_unseen in other homes."""
    pytest.importorskip("alfworld")
    from envs.alfworld.export import export_split
    from envs.household.environment import HouseholdEnvironment

    folder = tmp_path_factory.mktemp("games")
    homes = HouseholdEnvironment(scenes={"train": 2, "valid_unseen": 1}, images=False)
    export_split(homes, "train", folder, 8)
    export_split(homes, "valid_unseen", folder, 3)
    for about in (folder / "json_2.1.1" / "valid_unseen").rglob("traj_data.json"):
        about.write_text(about.read_text().replace('"home 1"', '"FloorPlan10"'))
    return folder


@pytest.mark.slow
@pytest.mark.alfworld
def test_alfworld_ends_in_its_rows_of_tables_2_3_and_5(games: Path, tmp_path: Path) -> None:
    asked, out = tiny(tmp_path, "alfworld"), tmp_path / "run"
    command = (asked, "--executor", "tiny", "--out", out, f"shared.env.data_root={games}")
    shown = reproduce(*command)
    assert shown.count(MEASURED) > 8
    assert {"No Mem", "AMMI (static injection)", "Ours"} <= rows(out, 2).keys()
    assert rows(out, 2)["Ours"]["AlfWorld"]["n"] == 2
    assert rows(out, 3).keys() >= {"MemCompiler (Full)", "w/o Brief State (raw obs as state)"}
    assert rows(out, 5)["SCMC"]["Compiler tokens"]["value"] > 0
