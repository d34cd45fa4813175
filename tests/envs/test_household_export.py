"""Exported homes: they load in alfworld and TextWorld, which say of them, and allow, exactly what we do."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from envs.alfworld.environment import AlfworldEnvironment, TextWorldGame
from envs.alfworld.export import export_game, export_split
from envs.base import EnvironmentFailure, Task
from envs.household.environment import HouseholdEnvironment
from envs.household.world import KINDS, Item

SPLIT = "test_experience"

needs_alfworld = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="needs the extra alfworld")


def homes() -> HouseholdEnvironment:
    return HouseholdEnvironment(scenes={"test": 4}, images=False, kinds=KINDS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    export_split(homes(), SPLIT, out)
    return out


def original(task: Task) -> Task:
    """The generated task that an exported one was."""
    return next(
        t for t in homes().tasks(SPLIT) if t.id == f"{SPLIT}/{task.id.rpartition('trial_')[2].replace('_', '/')}"
    )


@pytest.mark.alfworld
@needs_alfworld
def test_an_export_is_a_split_of_real_games(root: Path) -> None:
    tasks = AlfworldEnvironment(data_root=root, images=False).tasks(SPLIT)
    assert len(tasks) == len(homes().tasks(SPLIT)) and {task.kind for task in tasks} == set(KINDS)
    for task in tasks:
        generated = original(task)
        assert (task.goal, task.kind, task.scene) == (generated.goal, generated.kind, generated.scene)
        assert task.isolation["scene"] == generated.isolation["scene"]


@pytest.mark.alfworld
@needs_alfworld
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_game_plays_as_it_did(root: Path, kind: str) -> None:
    ours, exported = homes(), AlfworldEnvironment(data_root=root, images=False)
    rng = random.Random(kind)
    for task in (task for task in exported.tasks(SPLIT) if task.kind == kind):
        observation = ours.reset(original(task))
        assert exported.reset(task) == observation
        assert exported.expert() == ours.expert()
        for _ in range(60):
            command = rng.choice(observation.admissible or ())
            transition = ours.step(command)
            assert exported.step(command) == transition, command
            observation = transition.observation


@pytest.mark.alfworld
@needs_alfworld
@pytest.mark.parametrize("kind", KINDS)
def test_textworld_plays_it_alike(root: Path, kind: str) -> None:
    env = AlfworldEnvironment(data_root=root, images=False)
    task = next(task for task in env.tasks(SPLIT) if task.kind == kind)
    theirs, rng = TextWorldGame(env.game_file(task)), random.Random(kind)
    for walk in (0, 10):
        seen, observation = theirs.reset(), env.reset(task)
        expected = ["-= Welcome to TextWorld, ALFRED! =-", observation.text, f"Your task is to: {task.goal}."]
        assert seen.text.split("\n\n") == expected and seen.admissible == observation.admissible
        for _ in range(walk):  # from the start, and from somewhere else
            local = [command for command in seen.admissible if not command.startswith("go to")]
            command = rng.choice([*local, rng.choice(seen.admissible)])
            seen, transition = theirs.step(command), env.step(command)
            assert (seen.text, seen.admissible) == (transition.observation.text, transition.observation.admissible)
        commands = env.expert()
        assert commands
        for position, command in enumerate(commands):
            assert not seen.won
            seen, transition = theirs.step(command), env.step(command)
            assert (seen.text, seen.admissible) == (transition.observation.text, transition.observation.admissible)
            assert seen.won == transition.success == (position == len(commands) - 1)
    theirs.close()


@pytest.mark.alfworld
@needs_alfworld
def test_alfworld_finds_every_exported_game(root: Path) -> None:
    tw = pytest.importorskip("alfworld.agents.environment.alfred_tw_env")
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"eval_id_data_path": str(root / "json_2.1.1" / SPLIT), "num_eval_games": 0},
    }
    games = tw.AlfredTWEnv(config, train_eval="eval_in_distribution").game_files
    listed = AlfworldEnvironment(data_root=root, images=False).tasks(SPLIT)
    assert sorted(games) == sorted(str(root / "json_2.1.1" / task.data["path"]) for task in listed)


@pytest.mark.alfworld
@needs_alfworld
def test_an_export_keeps_to_its_limit_and_to_its_folder(tmp_path: Path) -> None:
    written = export_split(homes(), "test", tmp_path, limit=3)
    assert len(written) == len(list(tmp_path.glob("json_2.1.1/test/*/trial_*/game.tw-pddl"))) == 3
    game = json.loads((written[0] / "game.tw-pddl").read_text())
    assert list(game) == ["pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"] and game["solvable"]
    about = json.loads((written[0] / "traj_data.json").read_text())
    first = homes().tasks("test")[0]
    assert about["task_type"] == first.kind and about["turk_annotations"]["anns"] == [{"task_desc": first.goal}]
    with pytest.raises(FileExistsError, match="holds games already"):
        export_split(homes(), "test", tmp_path)
    export_split(homes(), SPLIT, tmp_path, limit=1)  # another split may stand beside it
    with pytest.raises(ValueError, match="no split 'tset'; there are train, valid_seen, valid_unseen, test, test_exp"):
        AlfworldEnvironment(data_root=tmp_path).tasks("tset")


@pytest.mark.alfworld
@needs_alfworld
def test_a_game_that_would_be_another_one_is_refused() -> None:
    env = homes()
    env.reset(env.tasks("test")[0])
    game = env.game
    misnamed = (Item("thing 7", "mug"), *game.items[1:])
    worded = replace(game.wording, put="put {o} in/on {r}")
    for other in (replace(game, items=misnamed), replace(game, wording=worded)):
        with pytest.raises(ValueError, match="it differs when read back"):
            export_game(other, None)
    assert export_game(game, None)["solvable"] is False


def test_without_alfworld_the_export_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.alfworld import export

    export._rules.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match="uv sync --extra alfworld"):
        export_split(homes(), "test", tmp_path, limit=1)
    assert not list(tmp_path.rglob("*.tw-pddl"))
