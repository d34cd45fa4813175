"""From settings to environments: in this process or in workers, the same episodes either way; export and leakage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envs.alfworld.environment import AlfworldSettings
from envs.embodiedbench.spec import EmbodiedBenchSettings
from envs.gymnasium.environment import GymnasiumConfig, GymnasiumSettings
from envs.household.environment import HouseholdSettings
from envs.registry import Environments, evaluation_split, find
from envs.scienceworld.environment import ScienceWorldSettings
from memcompiler.cli import app

HOME = {"scenes": {"train": 2, "test": 2}, "images": False}


def transcript(envs: Environments) -> list[str]:
    env = envs.lease()
    try:
        said = [env.reset(envs.tasks("test")[0]).text]
        return said + [env.step(command).observation.text for command in env.expert() or []]
    finally:
        env.close()


def test_workers_and_this_process_play_alike() -> None:
    with Environments(HouseholdSettings(**HOME)) as here, Environments(HouseholdSettings(**HOME, workers=2)) as there:
        assert here.capacity > 1000 and there.capacity == 2
        assert here.tasks("test") == there.tasks("test")
        assert transcript(here) == transcript(there) and len(transcript(here)) > 3


def test_task_types_and_splits() -> None:
    kinds = ("look_at_obj_in_light", "pick_two_obj_and_place")
    with Environments(HouseholdSettings(**HOME, kinds=kinds)) as envs:
        assert {task.kind for task in envs.tasks("train")} == set(kinds)
    assert evaluation_split(HouseholdSettings()) == "test" and evaluation_split(AlfworldSettings()) == "valid_seen"
    science = ScienceWorldSettings(tasks_file="tasks.jsonl")
    assert evaluation_split(science) == "agentsquare"
    assert evaluation_split(EmbodiedBenchSettings(name="eb_habitat")) == "base"
    assert find("scienceworld").splits(science).held_out == ("agentsquare", "agentsquare_variations")
    assert find("scienceworld").splits(ScienceWorldSettings()).held_out == ("test", "agentsquare_variations")


def test_a_gymnasium_environment_from_settings() -> None:
    pytest.importorskip("gymnasium")
    settings = GymnasiumConfig(id="FrozenLake-v1", splits={"test": {"seeds": (1, 2)}}, goal="reach the goal")
    with Environments(GymnasiumSettings(gymnasium=settings)) as envs:
        assert [task.goal for task in envs.tasks("test")] == ["reach the goal"] * 2


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EMBODIEDBENCH_PYTHON", raising=False)
    with pytest.raises(FileNotFoundError, match="EMBODIEDBENCH_PYTHON is not set"):
        Environments(EmbodiedBenchSettings(name="eb_alfred")).lease()
    result = CliRunner().invoke(app, ["leakage", "env=eb_alfred"])
    assert result.exit_code == 1 and "EMBODIEDBENCH_" in result.output


def test_leakage_of_official_task_files_without_their_simulator(shared_data: Path) -> None:
    """EmbodiedBench's own files do not meet the paper's rule for EB-Habitat: the check says so."""
    habitat = ["leakage", "env.name=eb_habitat", f"env.data_root={shared_data / 'embodiedbench'}"]
    shared = CliRunner().invoke(app, [*habitat, "split=train_validation", "memory.experience_split=train_validation"])
    assert shared.exit_code == 1 and "shared scene" in shared.output and "shared template" in shared.output
    apart = CliRunner().invoke(
        app,
        [
            *habitat,
            "split=train_validation",
            "memory.experience_split=train_validation",
            "leakage.held_out=[common_sense, long_horizon]",
        ],
    )
    assert apart.exit_code == 0, apart.output


@pytest.mark.alfworld
def test_export_and_play_what_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("alfworld")
    out = tmp_path / "games"
    home = ["env.scenes={train: 1, test: 2}"]
    result = CliRunner().invoke(app, ["env", "export", *home, "--limit", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    with Environments(AlfworldSettings(data_root=str(out), images=False)) as envs:
        assert len(envs.tasks("test")) == 3 and len(transcript(envs)) > 2
    again = CliRunner().invoke(app, ["env", "export", *home, "--out", str(out)])
    assert again.exit_code == 1 and "error:" in again.output
    other = CliRunner().invoke(app, ["env", "export", "env=alfworld", "--out", str(out)])
    assert other.exit_code == 1 and "only generated homes" in other.output


def test_the_leakage_command(tmp_path: Path) -> None:
    clean = CliRunner().invoke(app, ["leakage", "env.scenes={train: 2, test: 2}", "--out", str(tmp_path)])
    assert clean.exit_code == 0, clean.output
    assert json.loads((tmp_path / "leakage.json").read_text())["clean"] is True
    leak = CliRunner().invoke(app, ["leakage", "env.scenes={train: 2, test: 2}", "split=test"])
    assert leak.exit_code == 1 and "shared scene" in leak.output
    files = CliRunner().invoke(app, ["leakage", "--train", str(tmp_path / "manifest.json")])
    assert files.exit_code == 0, files.output
