"""`engine: textworld` and the native engine are one environment: same tasks, same transcript, same progress."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from envs.alfworld.environment import AlfworldEnvironment, EngineOutput, TextWorldEnvironment
from envs.alfworld.export import export_split
from envs.base import Environment, EnvironmentFailure
from envs.household.environment import HouseholdEnvironment
from envs.household.world import HEAT, LOOK

pytestmark = [
    pytest.mark.alfworld,
    pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="needs the extra alfworld"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    homes = HouseholdEnvironment(scenes={"valid_seen": 2}, images=False, kinds=(LOOK, HEAT))
    export_split(homes, "valid_seen", out)
    return out


def test_both_engines_give_the_same_transcript(root: Path) -> None:
    native = AlfworldEnvironment(data_root=root, images=False)
    textworld = TextWorldEnvironment(root, images=False)
    assert isinstance(textworld, Environment)
    assert textworld.tasks("valid_seen") == native.tasks("valid_seen")
    for kind in (LOOK, HEAT):
        task = next(task for task in native.tasks("valid_seen") if task.kind == kind)
        assert textworld.reset(task) == native.reset(task)
        plan = native.expert()
        assert plan and textworld.expert() == plan
        progress = []
        for command in ("look", "dance", " inventory ", *plan):
            transition = textworld.step(command)
            assert transition == native.step(command), command
            progress.append(transition.progress)
        assert transition.success and transition.done and sorted(progress) == progress and 0.5 in progress
    textworld.close()
    with pytest.raises(EnvironmentFailure, match="reset"):
        textworld.step("look")


def test_pictures_and_failures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TextWorldEnvironment(root, images=True)
    task = env.tasks("valid_seen")[0]
    image = env.reset(task).image
    assert image is not None and image.size == (64, 64)
    assert env._theirs is not None
    monkeypatch.setattr(env._theirs, "step", lambda command: EngineOutput("You win!", (), True, frozenset()))
    with pytest.raises(EnvironmentFailure, match="TextWorld reports won=True and the native engine False"):
        env.step("look")
    env.close()


def test_a_broken_game_fails_the_episode(root: Path, tmp_path: Path) -> None:
    source = AlfworldEnvironment(data_root=root, images=False)
    trial = source.game_file(source.tasks("valid_seen")[0]).parent
    broken = tmp_path / "json_2.1.1" / "train" / "task" / "trial_1"
    broken.mkdir(parents=True)
    game = (trial / "game.tw-pddl").read_text()
    (broken / "game.tw-pddl").write_text(game.replace("(define (domain alfred)", "(define (domain alfred"))
    (broken / "traj_data.json").write_text((trial / "traj_data.json").read_text())
    env = TextWorldEnvironment(tmp_path)
    with pytest.raises(EnvironmentFailure, match="TextWorld cannot load"):
        env.reset(env.tasks("train")[0])
    env.close()


def test_a_generated_home_has_no_game_file() -> None:
    [task, *_] = HouseholdEnvironment(scenes={"a": 1}, images=False).tasks("a")
    with pytest.raises(EnvironmentFailure, match="is no task of a real game"):
        AlfworldEnvironment().game_file(task)
