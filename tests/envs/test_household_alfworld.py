"""Real ALFWorld games in the native engine: they load, their walkthroughs win, and TextWorld agrees word for word."""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from envs.alfworld.environment import AlfworldEnvironment
from envs.alfworld.games import demangled, load_game, task_sentence
from envs.base import EnvironmentFailure, Task
from envs.household.engine import Engine
from envs.household.environment import HouseholdEnvironment
from envs.household.expert import plan
from envs.household.world import COOL, KINDS, LOOK, SIMPLE
from tests.envs.exact_search import excess, wander

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "alfworld"
EVERY = 71  # of the 3,553 train games, which lie in the archive sorted by task type


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ALFWORLD_DATA folder with every 71st train game."""
    archive = DATA / "train.tar.xz"
    if not archive.is_file():
        pytest.skip(f"the real games are not here: no {archive}")
    root = tmp_path_factory.mktemp("alfworld")
    trials: dict[str, int] = {}
    with tarfile.open(archive, "r|xz") as packed:  # a stream: only the games needed are kept
        for member in packed:
            trial = member.name.rpartition("/")[0]
            if member.isfile() and trials.setdefault(trial, len(trials)) % EVERY == 0:
                content = packed.extractfile(member)
                assert content is not None
                path = root / "json_2.1.1" / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    return root


@pytest.fixture(scope="session")
def env(data_root: Path) -> HouseholdEnvironment:
    return AlfworldEnvironment(data_root=data_root, images=False)


def stored(data_root: Path, task: Task) -> dict[str, object]:
    return json.loads((data_root / "json_2.1.1" / task.data["path"]).read_text())


@pytest.mark.seconds
def test_games_are_listed_as_tasks(env: HouseholdEnvironment, data_root: Path) -> None:
    tasks = env.tasks("train")
    assert len(tasks) >= 50 and {task.kind for task in tasks} == set(KINDS)
    assert len({task.id for task in tasks}) == len(tasks)
    assert {task.kind for task in tasks[:25]} == set(KINDS)  # the first ones are a sample, not all of one kind
    for task in tasks:
        assert task.scene.startswith("FloorPlan") and task.split == "train" and task.goal[-1] != "."
        assert not Path(task.data["path"]).is_absolute()
        content = (data_root / "json_2.1.1" / task.data["path"]).read_bytes()
        assert task.data["sha256"] == hashlib.sha256(content).hexdigest()
        assert task.isolation == {"gamefile": (task.id.removeprefix("train/"),), "scene": (task.scene,)}
    assert env.tasks("train") == tasks


def test_stored_walkthroughs_and_the_expert_win(env: HouseholdEnvironment, data_root: Path) -> None:
    rng = random.Random(0)
    longer: Counter[int] = Counter()
    for task in env.tasks("train"):
        walkthrough = stored(data_root, task)["walkthrough"]
        assert isinstance(walkthrough, list)
        observation = env.reset(task)
        assert observation.text.startswith("You are in the middle of a room.")
        for command in walkthrough:
            assert command in (observation.admissible or ())
            transition = env.step(command)
            observation = transition.observation
        assert transition.success and transition.progress == 1, task.id

        env.reset(task)
        commands = env.expert() or []
        assert commands and [env.step(command) for command in commands][-1].success, task.id
        longer[len(commands) - len(walkthrough)] += 1

        observation = env.reset(task)
        for _ in range(30):
            observation = env.step(rng.choice(observation.admissible or ())).observation
        commands = env.expert()
        if commands is None:  # the one dead end there is: with something in hand that may be put nowhere
            held, places = env.game.items[env.state.held].type, {receptacle.type for receptacle in env.game.receptacles}
            assert env.state.held >= 0 and not any((place, held) in env.game.can_contain for place in places), task.id
        else:
            assert [env.step(command) for command in commands or ["look"]][-1].success, task.id
    assert max(longer) <= 0, longer  # the stored walkthroughs are a planner's


@pytest.mark.seconds
def test_no_way_is_shorter_in_real_games(env: HouseholdEnvironment) -> None:
    rng = random.Random(5)
    counted: Counter[int] = Counter()
    for task in env.tasks("train"):
        env.reset(task)
        engine = Engine(env.game)
        state = engine.reset()
        wander(engine, state, rng)
        commands = plan(engine, state)
        # Longer plans can take the exact search half a minute: many things of a kind, in many places.
        if commands is not None and (len(commands) < 9 or task.kind == LOOK):
            counted[excess(engine, state)] += 1
    assert counted.total() >= 30 and set(counted) == {0}, counted


@pytest.mark.alfworld
def test_textworld_agrees_word_for_word(env: HouseholdEnvironment, data_root: Path) -> None:
    textworld = pytest.importorskip("textworld")
    pddl = pytest.importorskip("textworld.envs.pddl")
    wrappers = pytest.importorskip("alfworld.agents.environment.alfred_tw_env")
    rng = random.Random(4)
    for kind in (LOOK, COOL, SIMPLE):
        tasks = [task for task in env.tasks("train") if task.kind == kind]
        task = min(tasks, key=lambda task: (data_root / "json_2.1.1" / task.data["path"]).stat().st_size)  # the fastest
        path = data_root / "json_2.1.1" / task.data["path"]
        theirs = wrappers.AlfredDemangler(pddl.PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)))
        theirs.load(str(path))
        game_state = theirs.reset()
        observation = env.reset(task)
        banner, room, sentence = game_state.feedback.split("\n\n")
        assert (banner, sentence) == ("-= Welcome to TextWorld, ALFRED! =-", f"Your task is to: {task.goal}.")
        assert observation.text == room
        script = stored(data_root, task)["walkthrough"]
        assert isinstance(script, list)
        for step in range(15):
            assert list(observation.admissible or ()) == list(game_state["admissible_commands"])
            local = [c for c in observation.admissible or () if not c.startswith("go to")]
            command = script[step] if step < len(script) else rng.choice([*local, rng.choice(observation.admissible)])
            transition = env.step(command)
            observation = transition.observation
            game_state, _, _ = theirs.step(command)
            assert observation.text == game_state.feedback, command
            assert transition.success == bool(game_state["won"]), command


# What needs no data ---------------------------------------------------------------------------------------------

PROBLEM = """
(define (problem plan) (:domain alfred)
(:objects agent1 - agent Mug_bar_1 - object)
(:init
    (receptacleType Cabinet_bar_1 CabinetType) (receptacleType Cabinet_bar_2 CabinetType)
    (receptacleType Sink_bar_3_bar_SinkBasin SinkBasinType) (openable Cabinet_bar_1)
    (objectType Mug_bar_1 MugType) (objectType Mug_bar_0 MugType) (canContain CabinetType MugType)
    (pickupable Mug_bar_1) (pickupable Mug_bar_0) (cleanable Mug_bar_1) (isReceptacleObject Mug_bar_1)
    (atLocation agent1 loc_bar_9)
    (inReceptacle Mug_bar_1 Sink_bar_3_bar_SinkBasin) (inReceptacle Mug_bar_0 Cabinet_bar_1)
    (receptacleAtLocation Cabinet_bar_1 loc_bar_1) (receptacleAtLocation Cabinet_bar_2 loc_bar_2)
    (receptacleAtLocation Sink_bar_3_bar_SinkBasin loc_bar_3)
    (objectAtLocation Mug_bar_1 loc_bar_3) (objectAtLocation Mug_bar_0 loc_bar_1)
)
(:goal (and (exists (?r - receptacle) (exists (?o - object)
    (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r CabinetType))))))
)"""
GRAMMAR = '''
grammar :: """
    {
        "task": [{"rhs": "Your task is to: put a \\"nice\\" mug in cabinet."}],
        "GotoLocation.feedback": [{"rhs": "You arrive at {lend.name}. #examineReceptacle.feedback#"}],
        "PutObject.feedback": [{"rhs": "You put the {o.name} in/on the {r.name}."}]
    }
""";
action PutObject { template :: "put {o} in/on {r}"; feedback :: "#PutObject.feedback#"; }
'''


def test_a_game_of_an_older_release_is_worded_its_own_way() -> None:
    engine = Engine(load_game({"pddl_problem": PROBLEM, "grammar": GRAMMAR}))
    state = engine.reset()
    assert engine.game.task == "put a nice mug in cabinet"
    assert engine.intro().endswith("you see a cabinet 2, a cabinet 1, and a sinkbasin 1.")
    assert "help" not in engine.commands(state)
    assert engine.step(state, "go to sinkbasin 1") == "You arrive at loc 2. On the sinkbasin 1, you see a mug 1."
    engine.step(state, "take mug 1 from sinkbasin 1")
    assert engine.step(state, "go to cabinet 1") == "You arrive at loc 3. On the cabinet 1, you see nothing."
    assert engine.step(state, "put mug 1 in/on cabinet 1") == "You put the mug 1 in/on the cabinet 1."
    assert engine.won(state)


def test_names_count_down_as_alfworlds_do() -> None:
    names = demangled(["mug_bar_b", "mug_bar_a", "sink_bar_1_bar_sinkbasin", "agent1"])
    assert names == {
        "mug_bar_a": "mug 2",
        "mug_bar_b": "mug 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "agent1": "agent1",
    }


def test_a_help_rule_in_the_grammar_is_read() -> None:
    rule = '"help.feedback": [{"rhs": "\\nAvailable commands:\\n  look\\n"}]'
    grammar = GRAMMAR + f'action help {{ template :: "help"; feedback :: "#help.feedback#"; grammar :: """{rule}"""; }}'
    engine = Engine(load_game({"pddl_problem": PROBLEM, "grammar": grammar}))
    assert engine.step(engine.reset(), "help") == "Available commands:\n  look\n"


def test_a_goal_that_is_not_alfworlds_is_refused() -> None:
    with pytest.raises(ValueError, match="six task types"):
        load_game({"pddl_problem": PROBLEM.replace("(inReceptacle ?o ?r)", "(isSliced ?o)"), "grammar": GRAMMAR})
    with pytest.raises(ValueError, match=":goal"):
        load_game({"pddl_problem": "(define (problem p))", "grammar": GRAMMAR})
    assert task_sentence("") == ""


def write_game(root: Path, folder: str, about: object, solvable: bool = True) -> None:
    trial = root / "json_2.1.1" / "train" / folder / "trial_1"
    trial.mkdir(parents=True)
    game = {"pddl_problem": PROBLEM, "grammar": GRAMMAR, "solvable": solvable, "walkthrough": []}
    (trial / "game.tw-pddl").write_text(json.dumps(game))
    (trial / "traj_data.json").write_text(json.dumps(about))


def test_games_that_alfworld_skips_are_skipped(tmp_path: Path) -> None:
    about = {"task_type": SIMPLE}
    write_game(tmp_path, "pick_and_place_simple-Mug-None-Cabinet-7", about)
    write_game(tmp_path, "pick_and_place_simple-Cup-None-Cabinet-8", {**about, "scene": {"floor_plan": "FloorPlan8"}})
    write_game(tmp_path, "pick_and_place_simple-Egg-None-Cabinet-8", {**about, "scene": {"scene_num": 9}})
    write_game(tmp_path, "pick_and_place_simple-AppleSliced-None-Cabinet-7", about)
    write_game(tmp_path, "pick_and_place_with_movable_recep-Mug-Pan-Cabinet-7", about)
    write_game(tmp_path, "pick_and_place_simple-Pan-None-Cabinet-7", about, solvable=False)
    write_game(tmp_path, "pick_and_place_simple-Pot-None-Cabinet-7", {"task_type": "juggle"})
    write_game(
        tmp_path,
        "pick_and_place_simple-Cup-None-Shelf-9",
        {**about, "scene": {"floor_plan": "home 9", "key": "seed-0/train/home-9"}},
    )
    env = AlfworldEnvironment(data_root=tmp_path)
    tasks = sorted(env.tasks("train"), key=lambda task: task.id)
    assert [task.scene for task in tasks] == ["FloorPlan8", "home 9", "FloorPlan9", "FloorPlan7"]
    assert tasks[0].isolation["scene"] == ("FloorPlan8",) and tasks[1].isolation["scene"] == ("seed-0/train/home-9",)
    assert tasks[0].goal == "put a nice mug in cabinet"
    image = env.reset(tasks[0]).image
    assert image is not None and image.size == (64, 64)


def test_missing_games_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="alfworld-download"):
        AlfworldEnvironment().tasks("train")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*train.*ALFWORLD_DATA"):
        AlfworldEnvironment().tasks("train")
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    env = AlfworldEnvironment()
    with pytest.raises(FileNotFoundError, match="no playable game"):
        env.tasks("train")
    with pytest.raises(ValueError, match="train, valid_seen, valid_unseen"):
        env.tasks("test")
    with pytest.raises(EnvironmentFailure, match="cannot play"):
        env.reset(Task("x", "", "", "train", SIMPLE, data={"path": "train/none/game.tw-pddl"}))
