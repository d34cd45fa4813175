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
    "collect": {"limit": 3, "executor": {"model": "zoo/household/executor", "mode": "choice"}},
    "sft": {"max_steps": 2, "batch_size": 2, "loader_workers": 0, "latent": "none", "backend": "replicated"},
    "grpo": {"updates": 1, "tasks": 2, "group_size": 2, "max_steps": 2, "cluster": "local", "micro_batch_size": 8},
    "eval": {"limit": 2, "max_steps": 2},
    "processes": {"separate": False, "sft": 1},
}
MEASURED = "**measured**"


def tiny(folder: Path, benchmark: str, **changes: dict[str, Any]) -> Path:
    """Write the shipped chain of a benchmark at tiny size: its first executor is a tiny model, and little is played."""
    chain = find_chain(benchmark).config
    first = next(iter(chain.executors))
    evaluations = {n: {"executors": ["tiny"]} for n, of in chain.evaluations.items() if first in (of.executors or ())}
    asked: dict[str, Any] = {"base": str(CONFIGS / "reproduce" / f"{benchmark}.yaml"), "shared": MODELS, **SMALL}
    asked["evaluations"] = evaluations
    for block, change in changes.items():
        asked[block] = {**asked.get(block, {}), **change}
    path = folder / f"{benchmark}.yaml"
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    return path


def reproduce(chain: Path, out: Path, *arguments: str) -> str:
    """Run a tiny chain to its end; returns the output."""
    asked = ["reproduce", str(chain), "--executor", "tiny", "--out", str(out), *arguments]
    answer = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def rows(out: Path, table: int) -> dict[str, dict[str, Any]]:
    """Return the cells of a table's measured rows by method."""
    made = json.loads((out / "tables" / f"table{table}.json").read_text())
    return {row["method"]: row["cells"] for row in made["rows"] if row["source"] == "measured"}


# -- to the tables -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ALFWorld games made from generated homes: 8 of train, 3 of valid_unseen in another home."""
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


@pytest.fixture(scope="module")
def alfworld(games: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """ALFWorld's chain at tiny size, and its folder with all results."""
    folder = tmp_path_factory.mktemp("alfworld")
    chain = tiny(folder, "alfworld", shared={**MODELS, "env": {"data_root": str(games)}})
    reproduce(chain, folder / "run")
    return chain, folder / "run"


@pytest.mark.slow
@pytest.mark.alfworld
def test_alfworld_s_chain_ends_in_tables_2_3_and_5(alfworld: tuple[Path, Path]) -> None:
    chain, out = alfworld
    ours = rows(out, 2)
    assert ours.keys() >= {"No Mem", "AMMI (static injection)", "Ours"} and ours["Ours"]["AlfWorld"]["n"] == 2
    without = "w/o Brief State (raw obs as state)"
    assert rows(out, 3).keys() >= {"MemCompiler (Full)", "w/o Soft-Mem (text only)", without}
    text = (out / "tables" / "table3.md").read_text()
    assert "no\\_brief (trained on alfworld without Brief State)" in text and "unlike the paper's" not in text
    assert rows(out, 5)["SCMC"]["Compiler tokens"]["value"] > 0

    before = {path: path.stat().st_mtime_ns for path in out.rglob("episodes.jsonl")}
    assert reproduce(chain, out).count("finished in") == 8  # of 8 stages
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("episodes.jsonl")}


@pytest.mark.slow
@pytest.mark.scienceworld
def test_scienceworld_s_chain_ends_in_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    task = {
        "task": "scienceworld",
        "id": 0,
        "goal": "Your task is to find the animal that lives longest, outside.",
        "subgoals": ["You move to the outside."],
        "difficulty": "easy",
        "additional_info": {"var": 5, "env_name": "lifespan-longest-lived"},
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    env = {"kinds": ["lifespan-longest-lived"], "tasks_file": str(tmp_path / "tasks.jsonl"), "workers": 1}
    memory = {"experience_limit": 2, "k": 2}
    chain = tiny(tmp_path, "scienceworld", shared={**MODELS, "env": env, "memory": memory})
    reproduce(chain, tmp_path / "run", "--tables", "2")
    ours = rows(tmp_path / "run", 2)["Ours"]
    assert ours["ScienceWorld"]["n"] == 1 and ours["AlfWorld"] is None


@pytest.fixture
def embodiedbench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """EmbodiedBench's stand-in and a teacher behind an endpoint; returns the changes of the collection."""
    monkeypatch.setenv("EMBODIEDBENCH_PYTHON", sys.executable)
    monkeypatch.setenv("EMBODIEDBENCH_HOME", str(STANDIN))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with FaultyServer(answer=lambda messages: "> the mug was found at once | find a Mug") as server:
        yield {**SMALL["collect"], "api": {"base_url": server.url}, "successful_only": False, "max_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["eb_alfred", "eb_habitat"])
def test_embodiedbench_s_chains_end_in_tables_1_and_6(
    benchmark: str, embodiedbench: dict[str, Any], tmp_path: Path
) -> None:
    # The stand-in has few of the six subsets, and all of EB-Habitat's training tasks share something with them.
    played: dict[str, Any] = {
        "eb_alfred": {"leakage": {"held_out": ["base"]}},
        "eb_habitat": {"leakage": {"held_out": []}, "split": "train_validation"},
    }[benchmark]
    chain = tiny(
        tmp_path,
        benchmark,
        shared={**MODELS, "env": {"resolution": 64}},
        collect={**embodiedbench, **played},
        grpo={**SMALL["grpo"], **played},
        eval={**SMALL["eval"], "matrix": {"split": ["base"]}},
    )
    reproduce(chain, tmp_path / "run")
    name = {"eb_alfred": "EB-ALFRED", "eb_habitat": "EB-Habitat"}[benchmark]
    for table in (1, 6):
        ours = rows(tmp_path / "run", table)["Ours"]
        assert ours[f"{name} Base"]["n"] == 2 and ours[f"{name} Long"] is None and ours[f"{name} Avg."] is None
