"""alfworld's interface on the native engine: equal to the original, and enough for the code that is written for it."""

from __future__ import annotations

import importlib.util
import json
import pickle
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.alfworld import parity
from envs.alfworld.drop_in import AlfredTWEnv, get_environment
from envs.alfworld.export import export_split
from envs.base import EnvironmentFailure
from envs.household.environment import HouseholdEnvironment
from envs.household.world import HEAT, KINDS, LOOK, SIMPLE

pytestmark = [
    pytest.mark.alfworld,
    pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="needs the extra alfworld"),
]

Log = list[tuple[Any, ...]]  # what reset and step returned, one after another


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of generated homes as alfworld's files."""
    out = tmp_path_factory.mktemp("exported")
    homes = HouseholdEnvironment(scenes={"train": 1}, images=False, kinds=(LOOK, HEAT, SIMPLE))
    export_split(homes, "train", out, limit=6)
    return out / "json_2.1.1" / "train"


def config(games: Path, method: str = "dqn", steps: int = 50, **env: Any) -> dict[str, Any]:
    """What the drop-in and the original read of alfworld's base_config.yaml."""
    return {
        "dataset": dict.fromkeys(("data_path", "eval_id_data_path", "eval_ood_data_path"), str(games))
        | dict.fromkeys(("num_train_games", "num_eval_games"), -1),
        "env": {
            "type": "AlfredTWEnv",
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
            "goal_desc_human_anns_prob": 0,
        }
        | env,
        "general": {"training_method": method},
        **{block: {"training": {"max_nb_steps_per_episode": steps}} for block in ("rl", "dagger")},
    }


# Beside the original ---------------------------------------------------------------------------------------------


def walk(env: Any, episodes: int, seed: int, past: int = 0) -> tuple[Log, list[list[str]]]:
    """Play whole episodes, half by the expert where there is one, and `past` steps beyond the end of each."""
    random.seed(seed)  # what names and the expert are drawn from
    draw, log, made = random.Random(seed), [], []
    for _ in range(episodes):
        observations, infos = env.reset()
        log.append((observations, infos))
        over = 0
        while over <= past:
            made.append([command(infos, i, draw) for i in range(len(observations))])
            *seen, dones, infos = env.step(made[-1])
            log.append((*seen, dones, infos))
            over += all(dones)
    return log, made


def command(infos: dict[str, list[Any]], i: int, draw: random.Random) -> str:
    if draw.random() < 0.1:
        return draw.choice(["", "dance", "  look ", "go to nowhere 1"])
    if "extra.expert_plan" in infos and draw.random() < 0.5:
        return infos["extra.expert_plan"][i][0]
    return draw.choice(infos["admissible_commands"][i])


def replay(env: Any, log: Log, made: list[list[str]], seed: int) -> Log:
    random.seed(seed)
    commands = iter(made)
    return [env.reset() if len(entry) == 2 else env.step(next(commands)) for entry in log]


def expect_equal(theirs: Log, ours: Log) -> None:
    """Compare all that the original tells but its list of TextWorld's facts, whose order is that of a hash set."""
    for step, (expected, got) in enumerate(zip(theirs, ours, strict=True)):
        progress = got[-1].pop("goal_condition_success_rate")  # which the original has with AI2-THOR only
        assert [rate == 1 for rate in progress] == got[-1]["won"]
        expected[-1].pop("facts", None)
        assert got == expected, step


def compare(config: dict[str, Any], train_eval: str, batch: int, episodes: int, seed: int, past: int = 0) -> Log:
    from alfworld.agents.environment import alfred_tw_env

    original, drop_in = alfred_tw_env.AlfredTWEnv(config, train_eval), AlfredTWEnv(config, train_eval)
    assert drop_in.game_files == original.game_files and drop_in.num_games == original.num_games
    theirs, ours = original.init_env(batch), drop_in.init_env(batch)
    if seed:
        assert theirs.seed(seed) == ours.seed(seed)
        theirs.skip(1)
        ours.skip(1)
    log, made = walk(theirs, episodes, seed, past)
    expect_equal(log, replay(ours, log, made, seed))
    theirs.close()
    ours.close()
    return log


@pytest.fixture
def textworld(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TextWorld at ten times its speed; its planner writes into sys.argv."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    with parity.memoised_textworld():
        yield


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the original's processes end so
def test_a_batch_is_the_originals_over_whole_episodes(games: Path, textworld: None) -> None:
    """Two games at a time, by seed 1234 as nobody says otherwise; more rounds than games, steps beyond the end."""
    limited = config(games, steps=8, task_types=[1, 2])
    log = compare(limited, "eval_out_of_distribution", batch=2, episodes=3, seed=0, past=1)
    ends = [entry for entry in log if len(entry) == 4 and all(entry[2])]
    assert len(ends) == 6 and len({path for entry in log if len(entry) == 2 for path in entry[1]["extra.gamefile"]}) > 2


def test_the_expert_and_the_shuffled_names_are_the_originals(games: Path, textworld: None) -> None:
    shuffled = config(games, "dagger", steps=25, domain_randomization=True)
    log = compare(shuffled, "train", batch=1, episodes=3, seed=5)
    assert {plan[0] for *_, infos in log for plan in infos["extra.expert_plan"]} - {"look"}


@pytest.mark.slow
def test_real_games_are_the_originals(shared_data: Path, textworld: None) -> None:
    """Without the tasks of two objects, where the original's expert depends on the order of a hash set."""
    real = config(shared_data / "alfworld" / "json_2.1.1" / "valid_seen", "dagger", task_types=[1, 2, 3, 4, 5])
    log = compare(real, "train", batch=1, episodes=4, seed=11)
    assert any(infos["won"][0] for *_, infos in log)


# Experts and settings --------------------------------------------------------------------------------------------


def test_the_planners_plan_wins_from_any_state(games: Path) -> None:
    env = AlfredTWEnv(config(games, "dagger", expert_type="planner")).init_env(2)
    env.seed(3)
    draw = random.Random(0)
    _, infos = env.reset()
    for _ in range(10):
        *_, infos = env.step([draw.choice(commands) for commands in infos["admissible_commands"]])
    left = [len(plan) for plan in infos["extra.expert_plan"]]
    for step in range(max(left)):
        commands = [plan[0] if plan else "look" for plan in infos["extra.expert_plan"]]
        _, scores, dones, infos = env.step(commands)
        assert [len(plan) for plan in infos["extra.expert_plan"]] == [max(0, n - step - 1) for n in left]
    assert scores == (1, 1) and dones == (True, True) and infos["won"] == [True, True]


def test_where_the_handcoded_expert_stops_it_says_look(games: Path) -> None:
    env = AlfredTWEnv(config(games, "dagger", steps=300)).init_env(1)
    env.reset()
    plans = [env.step(["help"])[-1]["extra.expert_plan"][0] for _ in range(205)]
    assert plans[0] != ["look"] and plans[199] != ["look"] and plans[200:] == [["look"]] * 5


def test_there_is_an_expert_where_the_original_has_one(games: Path) -> None:
    for method, train_eval, expected in (
        ("dqn", "train", False),
        ("dagger", "eval_in_distribution", False),
        ("dagger", "train", True),
    ):
        _, infos = AlfredTWEnv(config(games, method), train_eval).init_env(1).reset()
        assert ("extra.expert_plan" in infos) is expected


def test_games_are_limited_and_chosen_by_their_type(games: Path) -> None:
    wanted = config(games, task_types=[2])
    every = AlfredTWEnv(wanted).game_files
    assert every and all("look_at_obj" in path for path in every)
    wanted["dataset"] |= {"num_train_games": 1, "num_eval_games": 0}
    assert AlfredTWEnv(wanted).game_files == every[:1]
    assert AlfredTWEnv(wanted, "eval_in_distribution").game_files == every


# What code written for alfworld does -------------------------------------------------------------------------------


def test_a_loop_in_the_manner_of_react_and_reflexion(games: Path) -> None:
    """One game at a time; the banner is cut off, the task type read off the game's folder, success is infos["won"]."""
    loaded = config(games)
    env = get_environment(loaded["env"]["type"])(loaded, train_eval="eval_out_of_distribution").init_env(batch_size=1)
    env.skip(1)
    solved = {}
    for _ in range(5):
        observation, info = env.reset()
        room, task = observation[0].split("\n\n")[1:]
        assert room.startswith("You are in the middle of a room.") and task.startswith("Your task is to: ")
        name = "/".join(info["extra.gamefile"][0].split("/")[-3:-1])
        assert name.startswith(KINDS)
        won, spoken = False, []
        for action in walkthrough(Path(info["extra.gamefile"][0])):
            observation, _, done, info = env.step([action])
            spoken.append(observation[0])
            won = info["won"][0]
            if done[0]:
                break
        assert "Nothing happens." not in spoken
        solved[name] = won
    assert len(solved) == 5 and all(solved.values())


def walkthrough(game: Path) -> list[str]:
    return json.loads(game.read_text())["walkthrough"]


class Worker:
    """One environment of a trainer's group, made in another process from a pickled base."""

    def __init__(self, base: bytes, seed: int) -> None:
        self.env = pickle.loads(base).init_env(batch_size=1)
        self.env.seed(seed)

    def told(self, text: Any, infos: dict[str, Any]) -> dict[str, Any]:
        infos["observation_text"] = text
        for key in infos:
            infos[key] = infos[key][0]
        return infos


def test_a_loop_in_the_manner_of_verl_agent(games: Path) -> None:
    """Groups by seed: workers of one group meet the same games; every worker flattens its infos in place."""
    base = pickle.dumps(get_environment("AlfredTWEnv")(config(games, "dagger", expert_type="planner")))
    workers = [Worker(base, seed=7 + i // 2) for i in range(4)]
    met: list[list[str]] = [[], [], [], []]
    for _ in range(2):
        infos = [worker.told(*worker.env.reset()) for worker in workers]
        for games_met, info in zip(met, infos, strict=True):
            games_met.append(info["extra.gamefile"])
        rewards = [0.0] * 4
        for _ in range(30):
            for i, worker in enumerate(workers):
                action = (infos[i]["extra.expert_plan"] or ["look"])[0]
                text, scores, dones, told = worker.env.step([action])
                infos[i] = worker.told(text, told)
                rewards[i] = 10.0 * float(infos[i]["won"]) + float(infos[i]["goal_condition_success_rate"])
                assert scores[0] == int(infos[i]["won"]) and dones[0] == infos[i]["won"]
        assert rewards == [11.0] * 4 and {info["observation_text"] for info in infos}
    assert met[0] == met[1] != met[2] == met[3]


def test_one_game_can_be_set_by_hand(games: Path) -> None:
    base = AlfredTWEnv(config(games))
    chosen = sorted(base.game_files)[2]
    base.game_files, base.num_games = [chosen], 1
    env = base.init_env(2)
    _, infos = env.reset()
    assert infos["extra.gamefile"] == [chosen, chosen]
    env.gamefiles = other = sorted(base.game_files)[:1]  # as is done to a live environment, with a new seed
    env.seed(0)
    assert env.reset()[1]["extra.gamefile"] == other * 2


# Bad input ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_played_is_named(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no train_eval 'valid'; there are train, eval_in_distribution"):
        AlfredTWEnv(config(games), "valid")
    with pytest.raises(FileNotFoundError, match=r"no playable game .* below .* \(0 folders .*alfworld-download"):
        AlfredTWEnv(config(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="ALFWORLD_DATA is not set"):
        AlfredTWEnv(config(Path("$ALFWORLD_DATA/json_2.1.1/train")))
    with pytest.raises(ValueError, match="there is no user 'no-such-user'"):
        AlfredTWEnv(config(Path("~no-such-user/x")))
    monkeypatch.setenv("HOME", str(games.parent))
    assert AlfredTWEnv(config(Path("~", games.name))).game_files == AlfredTWEnv(config(games)).game_files
    with pytest.raises(ValueError, match=r"config has no dataset.data_path: take it from"):
        AlfredTWEnv({"dataset": {}})
    with pytest.raises(ValueError, match=r"AlfredThorEnv.*alfworld's own"):
        get_environment("AlfredThorEnv")
    with pytest.raises(ValueError, match="training_method is 'ppo'; there are dqn, dagger"):
        AlfredTWEnv(config(games, "ppo")).init_env(1)
    with pytest.raises(ValueError, match="expert_type is 'fast'; there are handcoded, planner"):
        AlfredTWEnv(config(games, "dagger", expert_type="fast")).init_env(1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        AlfredTWEnv(config(games)).init_env(0)
    base = AlfredTWEnv(config(games))
    base.game_files = []
    with pytest.raises(ValueError, match="there are no games to play"):
        base.init_env(1)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("game.tw-pddl", b"{", r"game.tw-pddl is broken \(.*move its folder away"),
        ("game.tw-pddl", b"\xff\xfe", "game.tw-pddl is broken"),
        ("traj_data.json", b"[]", "traj_data.json holds a list"),
        ("game.tw-pddl", b'{"solvable": true}', "not an ALFWorld game.*grammar, pddl_problem"),
    ],
)
def test_broken_and_foreign_files_are_named(
    games: Path, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    copied = Path(shutil.copytree(next(games.glob("*/*")), tmp_path / "task" / "trial"))
    (copied / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        AlfredTWEnv(config(tmp_path))


def test_a_game_that_is_none_fails_when_it_is_played(games: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(next(games.glob("*/*")), tmp_path / "task" / "trial"))
    (copied / "game.tw-pddl").write_text(json.dumps({"solvable": True, "grammar": "", "pddl_problem": "(:init )"}))
    env = AlfredTWEnv(config(tmp_path)).init_env(1)
    with pytest.raises(EnvironmentFailure, match=r"cannot play .*game.tw-pddl: the PDDL problem"):
        env.reset()


def test_commands_come_after_a_reset_one_a_game(games: Path) -> None:
    env = AlfredTWEnv(config(games)).init_env(2)
    with pytest.raises(EnvironmentFailure, match=r"call reset\(\) first"):
        env.step(["look", "look"])
    env.reset()
    for wrong in (["look"], "lo"):
        with pytest.raises(ValueError, match="a list of 2 commands"):
            env.step(wrong)


def test_without_alfworld_the_planner_remains(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"uv sync --extra alfworld, or set env.expert_type to planner"):
        AlfredTWEnv(config(games, "dagger")).init_env(1)
    assert AlfredTWEnv(config(games, "dagger", expert_type="planner")).init_env(1).reset()[1]["extra.expert_plan"][0]
