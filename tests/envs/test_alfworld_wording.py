"""`env.wording`: one game in the words of alfworld 0.4 and in those before it, also beside TextWorld."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from envs.alfworld.drop_in import AlfredTWEnv
from envs.alfworld.environment import AlfworldEnvironment, TextWorldGame
from envs.alfworld.export import export_split
from envs.alfworld.games import WordingName, opening
from envs.base import Task
from envs.command_reader import AgentState
from envs.household.command_reader import AlfworldReader
from envs.household.engine import NOTHING_HAPPENS, Engine
from envs.household.environment import HouseholdEnvironment
from envs.household.world import KINDS
from envs.registry import compiler_instructions_for, executor_instructions_for, settings_of
from memory.protocol import Record

pytestmark = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="needs the extra alfworld")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ALFWORLD_DATA folder with two generated homes and a game of each kind."""
    out = tmp_path_factory.mktemp("exported")
    export_split(HouseholdEnvironment(scenes={"valid_seen": 2}, images=False, kinds=KINDS), "valid_seen", out, limit=24)
    return out


def envs(root: Path) -> tuple[AlfworldEnvironment, AlfworldEnvironment]:
    return AlfworldEnvironment(root, images=False), AlfworldEnvironment(root, images=False, wording="before_0_4")


def older(text: str) -> str:
    """Put a command or an answer of alfworld 0.4 into the words of the games before it, except for locations."""
    text = re.sub(r"^move (\w+ \d+) to (\w+ \d+)$", r"put \1 in/on \2", text)
    return re.sub(r"^You move the (\w+ \d+) to the (\w+ \d+)\.$", r"You put the \1 in/on the \2.", text)


def test_both_wordings_are_one_game(root: Path) -> None:
    """States, progress and possible commands are equal over random walks; commands correspond one to one."""
    draw, puts = random.Random(0), 0
    now, then = envs(root)
    assert now.tasks("valid_seen") == then.tasks("valid_seen")  # the goals keep their words
    for task in now.tasks("valid_seen"):
        seen, same = now.reset(task), then.reset(task)
        assert seen.text == same.text
        for _ in range(80):
            assert sorted(older(c) for c in seen.admissible or () if c != "help") == list(same.admissible or ())
            assert [older(command) for command in now.expert() or ()] == (then.expert() or [])
            command = draw.choice([*(seen.admissible or ()), "dance", *(now.expert() or ())[:1] * 40])
            if command == "help":
                continue
            made, other = now.step(command), then.step(older(command))
            seen, same = made.observation, other.observation
            puts += command.startswith("move ")
            arrived = re.sub(r"You arrive at loc \d+\.", "You arrive at PLACE.", same.text)
            assert arrived == older(re.sub(r"You arrive at \w+ \d+\.", "You arrive at PLACE.", seen.text)), command
            assert now.state == then.state and (made.progress, made.success) == (other.progress, other.success)
    assert puts > 20


def test_each_wording_refuses_the_commands_of_the_other(root: Path) -> None:
    now, then = envs(root)
    task = next(task for task in now.tasks("valid_seen") if task.kind == KINDS[0])
    for env, other in ((now, then), (then, now)):
        env.reset(task)
        other.reset(task)
        *before, put = env.expert() or []
        for command in before:
            env.step(command)
            other.step(command)
        assert env.step((other.expert() or [])[-1]).observation.text == NOTHING_HAPPENS
        assert env.step(put).success


@pytest.mark.alfworld
@pytest.mark.seconds
def test_textworld_plays_an_older_game_file_word_for_word(root: Path, tmp_path: Path) -> None:
    """The file's grammar is put back to what alfworld's update to 0.4 replaced."""
    env = AlfworldEnvironment(root, images=False, wording="before_0_4")
    task = next(task for task in env.tasks("valid_seen") if task.kind == KINDS[2])
    data = json.loads(env.game_file(task).read_text())
    for new, old in (
        ("You arrive at {r.name}.", "You arrive at {lend.name}."),
        ("move {o} to {r}", "put {o} in/on {r}"),
        ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
    ):
        assert new in data["grammar"]
        data["grammar"] = data["grammar"].replace(new, old)
    (tmp_path / "game.tw-pddl").write_text(json.dumps(data))
    theirs = TextWorldGame(tmp_path / "game.tw-pddl")
    seen = theirs.reset()
    env.reset(task)
    assert seen.text == opening(Engine(env.game))
    plan = env.expert()
    assert plan and plan[-1].startswith("put ")
    for command in ("look", "dance", *plan):
        ours, seen = env.step(command), theirs.step(command)
        assert (ours.observation.text, ours.success) == (seen.text, command == plan[-1]), command
        assert ours.success == seen.won
        assert list(ours.observation.admissible or ()) == [c for c in seen.admissible if c != "help"]
    theirs.close()


def test_readers_follow_both_wordings(root: Path) -> None:
    """Where the agent is, what it holds, and what its commands met are read alike."""
    now, then = envs(root)
    reader = AlfworldReader()
    for task in now.tasks("valid_seen"):
        played: list[list[str]] = [(now.reset(task) and now.expert()) or [], (then.reset(task) and then.expert()) or []]
        states, here = [AgentState(), AgentState()], [frozenset[str](), frozenset[str]()]
        for commands in zip(*played, strict=True):
            for i, (env, command) in enumerate(zip((now, then), commands, strict=True)):
                answer = env.step(command).observation.text
                step = Record(0, observation="", action=command, feedback=answer)
                states[i] = states[i].after(reader.read(states[i], step))
                here[i] = reader.here(answer, ())
            assert states[0] == states[1] and here[0] == here[1], commands
        assert reader.facts(played[0]) == reader.facts(played[1])
        assert reader.subgoals(played[0], task.goal, frozenset()) == reader.subgoals(played[1], task.goal, frozenset())


def config(root: Path, **env: str) -> dict:
    """What the drop-in reads of alfworld's base_config.yaml."""
    games = str(root / "json_2.1.1" / "valid_seen")
    return {
        "dataset": {"data_path": games, "num_train_games": -1},
        "env": {"task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False, **env},
        "general": {"training_method": "dagger"},
        "dagger": {"training": {"max_nb_steps_per_episode": 50}},
    }


def test_the_drop_in_and_its_planner_speak_the_older_words(root: Path) -> None:
    older = AlfredTWEnv(config(root, wording="before_0_4", expert_type="planner")).init_env(4)
    _, infos = older.reset()
    dones: tuple[bool, ...] = ()
    commands = list[str]()
    for _ in range(30):
        commands += [plan[0] if plan else "look" for plan in infos["extra.expert_plan"]]
        _, _, dones, infos = older.step(commands[-4:])
    assert all(infos["won"]) and all(dones)
    assert any(re.fullmatch(r"put \w+ \d+ in/on \w+ \d+", command) for command in commands)
    assert not any(command.startswith("move") for command in commands)
    with pytest.raises(ValueError, match="handcoded expert speaks as the games of alfworld"):
        AlfredTWEnv(config(root, wording="before_0_4", expert_type="handcoded")).init_env(1)
    with pytest.raises(ValueError, match="no wording 'old'; there are game, current, before_0_4"):
        AlfredTWEnv(config(root, wording="old"))


def test_the_vector_environment_speaks_the_older_words(root: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    found = list[str]()
    for wording in ("game", "before_0_4"):
        vector = gymnasium.make_vec(
            "envs.alfworld.vector:memcompiler/ALFWorld-v0", 2, split="valid_seen", data_root=root, wording=wording
        )
        _, infos = vector.reset(seed=0)
        takes = [next((c for c in row if c.startswith("go to")), "look") for row in infos["admissible_commands"]]
        observations, *_ = vector.step(tuple(takes))
        found.append(observations[0])
    assert found[0].startswith("You arrive at ") and found[1].startswith("You arrive at loc ")


def test_the_instructions_name_the_commands_that_the_games_accept() -> None:
    def said(wording: WordingName) -> str:
        settings = settings_of({"name": "alfworld", "wording": wording})
        return executor_instructions_for(settings).instructions + compiler_instructions_for(settings)

    assert said("game") == said("current") and said("game").count("move THING to PLACE") == 2
    assert said("before_0_4") == said("game").replace("move THING to PLACE", "put THING in/on PLACE")
    with pytest.raises(ValueError, match="wording=before_0_4 needs engine=native"):
        settings_of({"name": "alfworld", "wording": "before_0_4", "engine": "textworld"})


def test_rows_of_the_older_words_are_trained_with_instructions_in_them(tmp_path: Path) -> None:
    from data_gen.leakage import rows_environments
    from envs.manifest import Manifest

    task = Task("t", "put a mug in desk", scene="FloorPlan1", split="train", kind=KINDS[0])
    Manifest.of("alfworld", [task]).write(tmp_path / "manifest.json")
    assert "move THING to PLACE" in rows_environments([tmp_path / "rows"])["alfworld"].instructions
    (tmp_path / "config.resolved.yaml").write_text("env:\n  name: alfworld\n  wording: before_0_4\n")
    assert "put THING in/on PLACE" in rows_environments([tmp_path / "rows"])["alfworld"].instructions
