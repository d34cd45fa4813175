"""Gymnasium text environments behind our contract: a Text space, a Discrete space with names, and broken ones."""

from __future__ import annotations

from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gym` is not installed")

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

from agent.deliveries import Delivery  # noqa: E402
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes  # noqa: E402
from envs.base import Environment, EnvironmentFailure  # noqa: E402
from envs.gymnasium.environment import GymnasiumConfig, GymnasiumSplit, GymnasiumTextEnvironment  # noqa: E402
from envs.gymnasium.environment import GymnasiumKeys as Keys  # noqa: E402
from executor.records import PAPER_VIEW, Action, Grounding  # noqa: E402
from runtime.errors import StopReason  # noqa: E402


class Guess(gymnasium.Env):
    """Say the number that the seed decides; three tries."""

    observation_space = spaces.Text(200, charset=frozenset(map(chr, range(32, 127))))
    action_space = spaces.Text(10, charset="0123456789")

    def reset(self, *, seed=None, options=None) -> Any:
        super().reset(seed=seed)
        self.number = str(self.np_random.integers(100) + (options or {}).get("offset", 0))
        self.tries = 3
        return "I think of a number.", {}

    def step(self, action):
        self.tries -= 1
        right = action == self.number
        text = "Right." if right else f"No, it is {self.number}."
        return text, float(right), right, self.tries == 0, {}


class Corridor(gymnasium.Env):
    """Walk right to the door; left of the start is a wall."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        {"mission": spaces.Text(40), "view": spaces.Text(40), "pixels": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )

    def reset(self, *, seed=None, options=None):
        self.length, self.at = 2 + seed % 3, 0
        return self._seen()

    def step(self, action):
        self.at += 1 if action else -1
        observation, info = self._seen()
        return observation, 0.0, self.at >= self.length, False, info

    def _seen(self):
        pixels = np.full((8, 8, 3), 10 * self.at, np.uint8)
        view = {"mission": f"walk {self.length} steps", "view": f"at {self.at}", "pixels": pixels}
        info = {"mask": np.array([self.at > 0, True]), "share": self.at / self.length, "won": self.at >= self.length}
        return view, info


KEYS = Keys(text="view", image="pixels", goal="mission", admissible="mask", progress="share", success="won")
SPLITS = {"train": GymnasiumSplit(seeds=(3, 1)), "test": GymnasiumSplit(seeds=(7,), options={"offset": 100})}


def made(make: type[gymnasium.Env], splits: dict[str, GymnasiumSplit], **other) -> GymnasiumTextEnvironment:
    return GymnasiumTextEnvironment(GymnasiumConfig(id=make.__name__, splits=splits, **other), make)


def guess(**other) -> GymnasiumTextEnvironment:
    return made(Guess, SPLITS, **{"goal": "guess my number", **other})


def corridor(**other) -> GymnasiumTextEnvironment:
    splits = {"train": GymnasiumSplit(seeds=(0, 1))}
    return made(Corridor, splits, **{"actions": ("left", "right"), "keys": KEYS, **other})


def test_tasks_are_seeds_and_say_what_may_not_be_shared():
    env = guess()
    assert isinstance(env, Environment) and env.name == "Guess"
    tasks = env.tasks("train") + env.tasks("test")
    assert [task.id for task in tasks] == ["train/3", "train/1", "test/7"]
    assert {task.goal for task in tasks} == {"guess my number"}
    assert [task.isolation["episode"] for task in tasks] == [("3 {}",), ("1 {}",), ('7 {"offset": 100}',)]
    with pytest.raises(ValueError, match="train, test"):
        env.tasks("valid")
    with pytest.raises(ValueError, match="twice"):
        made(Guess, {"a": GymnasiumSplit(seeds=(1, 1))}, goal="g").tasks("a")
    with pytest.raises(ValueError, match="goal"):
        made(Guess, SPLITS)


def test_text_in_text_out():
    env = guess()
    [task] = env.tasks("test")
    numbers = set()
    for _ in range(2):  # the same seed and options are the same episode
        assert env.reset(task).text == "I think of a number." and env.expert() is None
        told = env.step("1")
        assert (told.success, told.done, told.progress) == (False, False, 0.0) and told.observation.admissible is None
        numbers.add(told.observation.text.removeprefix("No, it is ").removesuffix("."))
    [number] = numbers
    assert int(number) >= 100  # the options of the split arrived
    won = env.step(number)
    assert (won.success, won.done, won.progress) == (True, True, 1.0)
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step(number)
    env.reset(task)
    lost = [env.step("1") for _ in range(3)][-1]
    assert lost.done and lost.truncated and not lost.success


def test_what_is_no_action_does_not_reach_the_environment():
    env = guess()
    env.reset(env.tasks("train")[0])
    for _ in range(5):  # more than there are tries
        answer = env.step("seven!")
        assert "not an action" in answer.observation.text and not answer.done
    assert not env.step("1").done


def test_named_actions_masks_pictures_goals_and_progress():
    env = corridor()
    tasks = env.tasks("train")
    assert [task.goal for task in tasks] == ["walk 2 steps", "walk 3 steps"]
    first = env.reset(tasks[1])
    assert first.text == "at 0" and first.admissible == ("right",) and first.image.size == (8, 8)
    second = env.step("right")
    assert second.observation.admissible == ("left", "right") and second.progress == pytest.approx(1 / 3)
    assert second.observation.image.getpixel((0, 0)) == (10, 10, 10)
    assert not env.step("jump").done and env.step("right").progress == pytest.approx(2 / 3)
    assert env.step("right").success


def test_without_a_mask_all_names_are_possible():
    env = corridor(keys=Keys(text="view"), goal="reach the door")
    assert env.reset(env.tasks("train")[0]).admissible == ("left", "right")
    env.step("right")
    end = env.step("right")
    assert end.done and not end.success  # it terminates, but there is no reward and no key that says success


def test_a_registered_environment_is_made_by_its_id():
    gymnasium.register("MemCompilerGuess-v0", entry_point=Guess)
    try:
        env = GymnasiumTextEnvironment(GymnasiumConfig(id="MemCompilerGuess-v0", splits=SPLITS, goal="guess"))
        assert env.name == "MemCompilerGuess-v0"
        env.reset(env.tasks("train")[0])
        assert env.step("1").observation.text.startswith(("No", "Right"))
        env.close()
        assert env.reset(env.tasks("train")[0]).text  # made anew
    finally:
        del gymnasium.registry["MemCompilerGuess-v0"]


class Broken(Guess):
    def step(self, action):
        raise RuntimeError("the simulator is gone")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (corridor(actions=("left",), goal="g", keys=Keys(text="view")), "2 actions"),
        (corridor(actions=("left", "left"), goal="g", keys=Keys(text="view")), "2 different names"),
        (corridor(goal="g", keys=Keys(text="words")), "no 'words'"),
        (corridor(goal="g", keys=Keys(text="pixels")), "not text"),
        (corridor(goal="g", keys=Keys(text="view", admissible="actions")), "no 'actions'"),
        (GymnasiumTextEnvironment({"id": "NoSuch-v0", "splits": {"train": {"seeds": (0,)}}, "goal": "g"}), "NoSuch"),
    ],
)
def test_what_does_not_fit_is_said(env, message):
    with pytest.raises(EnvironmentFailure, match=message):
        env.reset(env.tasks("train")[0])


class Lever(gymnasium.Env):
    """Lever 2 opens the door. `end` is what a step returns behind the observation."""

    def __init__(self, start: int = 1, end: tuple = (), admissible: object = None):
        self.action_space, self.end, self.admissible = spaces.Discrete(3, start=start), end, admissible

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "three levers", {} if self.admissible is None else {"possible": self.admissible}

    def step(self, action):
        assert self.action_space.contains(action), f"bad action {action}"
        won = action - self.action_space.start == 1
        return f"you pulled lever {action}", *(self.end or (float(won), won, False, {"is_success": won, "share": 0.5}))


DEFAULT, PULLS = Keys(), ("pull lever one", "pull lever two", "pull lever three")


def levers(keys: Keys = DEFAULT, **made_with) -> GymnasiumTextEnvironment:
    config = GymnasiumConfig(id="Lever", splits=SPLITS, goal="open the door", actions=PULLS, keys=keys)
    env = GymnasiumTextEnvironment(config, lambda: Lever(**made_with))
    env.tasks("train")
    return env


@pytest.mark.parametrize("start", [0, 1, -5, 7])
def test_actions_have_the_numbers_of_their_space(start):
    for i, pull in enumerate(PULLS):
        env = levers(start=start)
        env.reset(env.tasks("train")[0])
        made = env.step(pull)
        assert made.observation.text == f"you pulled lever {start + i}" and made.success == (i == 1)


def step_of(keys: Keys, *end: object):
    env = levers(keys, end=end)
    env.reset(env.tasks("train")[0])
    return env.step(PULLS[0])


SUCCESS, PROGRESS = Keys(success="won"), Keys(progress="share")


@pytest.mark.parametrize(
    ("keys", "end", "message"),
    [
        (Keys(success="succes"), (1.0, True, False, {"is_success": 1, "n": 0}), "'succes'.*'is_success', 'n'"),
        (Keys(progress="shares"), (1.0, False, False, {"share": 0}), "no 'shares'.*'share'.*set keys.progress"),
        (SUCCESS, (1.0, False, False, None), "it returned no 'won' .a NoneType"),
        (SUCCESS, (1.0, False, False, {"won": None}), "'won'.*true or false, received None"),
        (SUCCESS, (1.0, False, False, {"won": "False"}), "'won'.*true or false, received 'False'"),
        (PROGRESS, (1.0, False, False, {"share": None}), "'share'.*finite number, received None"),
        (PROGRESS, (1.0, False, False, {"share": float("nan")}), "'share'.*finite number, received nan"),
        (PROGRESS, (1.0, False, False, {"share": [1, 2]}), "'share'.*finite number"),
        (Keys(), (float("nan"), True, False, {}), "the reward.*finite number, received nan"),
        (Keys(), (float("-inf"), True, False, {}), "the reward.*finite number, received -inf"),
        (Keys(), (None, True, False, {}), "the reward.*finite number, received None"),
        (Keys(), (1.0, None, False, {}), "terminated.*true or false, received None"),
        (Keys(), (1.0, True, "no", {}), "truncated.*true or false, received 'no'"),
        (Keys(), (1.0, True, {}), "not enough values to unpack"),
    ],
)
def test_what_a_step_returns_is_checked(keys, end, message):
    with pytest.raises(EnvironmentFailure, match=message):
        step_of(keys, *end)


@pytest.mark.parametrize(
    ("keys", "end", "expected"),  # (success, done, truncated, progress)
    [
        (Keys(), (1.0, False, True, {}), (False, True, True, 0.0)),  # truncation with a reward is no success
        (Keys(), (1.0, True, True, {}), (True, True, False, 1.0)),
        (Keys(), (-1.0, True, False, {}), (False, True, False, 0.0)),
        (SUCCESS, (0.0, False, True, {"won": np.bool_(True)}), (True, True, True, 1.0)),
        (SUCCESS, (9.0, True, False, {"won": 0}), (False, True, False, 0.0)),
        (PROGRESS, (np.float32(0), np.False_, False, {"share": np.float64(0.25)}), (False, False, False, 0.25)),
        (PROGRESS, (np.array([0.0]), False, 0, {"share": 7}), (False, False, False, 1.0)),
    ],
)
def test_success_is_to_terminate_with_a_reward_or_what_its_key_says(keys, end, expected):
    made = step_of(keys, *end)
    assert (made.success, made.done, made.truncated, made.progress) == expected


@pytest.mark.parametrize(
    "admissible",
    [
        [1, 0],
        [True] * 4,
        np.ones(2),
        "pull lever one",
        ["pull lever four"],
        [0, 1, 2],
        {"a": 1},
        3,
        [None] * 3,
        [0.5, 1, 0],
        [b"pull lever one"],
        [],
        [0, 0, 0],
        np.array([[0, 1, 1]]),
    ],
)
def test_masks_and_names_that_fit_no_action_are_refused(admissible):
    env = levers(Keys(admissible="possible"), admissible=admissible)
    with pytest.raises(EnvironmentFailure, match=r"'possible' (must list names of actions|lists no action)"):
        env.reset(env.tasks("train")[0])


@pytest.mark.parametrize("admissible", [[0, 1, 1], np.array([False, True, True]), PULLS[1:], np.array([0.0, 1.0, 1.0])])
def test_masks_go_by_the_order_of_the_names(admissible):
    env = levers(Keys(admissible="possible"), admissible=admissible)
    assert env.reset(env.tasks("train")[0]).admissible == PULLS[1:]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actions": ("pull", "")}, "one line"),
        ({"actions": ("pull\nnote: a = b",)}, "one line"),
        ({"splits": {"train": {"seeds": (-1,)}}}, "greater than or equal to 0"),
        ({"keys": {"succes": "won"}}, "succes"),
        ({"id": ""}, "id"),
    ],
)
def test_settings_that_fit_no_environment_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumTextEnvironment({"id": "Lever", "splits": {"train": {"seeds": (0,)}}, "goal": "g", **config})


class Old(Guess):
    """As in the API before Gymnasium."""

    def reset(self, *, seed=None, options=None):
        return "I think of a number."


class Mission(Guess):
    """A goal of several lines, in info."""

    def reset(self, *, seed=None, options=None):
        return "A room.", {"mission": "Open the door.\nnote: door = locked\u2028Rules: be quick"}


def test_a_goal_of_several_lines_is_one_value() -> None:
    env = made(Mission, SPLITS, keys=Keys(goal="mission"))
    goals = {task.goal for task in env.tasks("train")}
    assert goals == {"Open the door. note: door = locked Rules: be quick"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (made(Old, SPLITS, goal="g"), "too many values"),
        (made(Guess, SPLITS, goal="g", actions=("1", "2")), "takes text: remove actions"),
        (made(Corridor, SPLITS, keys=Keys(goal="pixels", text="view"), actions=("left", "right")), "'pixels'.*ndarray"),
    ],
)
def test_old_interfaces_and_goals_that_are_no_text_fail_the_episode(env, message):
    with pytest.raises(EnvironmentFailure, match=message):
        env.reset(env.tasks("train")[0])


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 3)), np.full((4, 4), 256), np.full((4, 4), -1), None, "x", [[[1]]]])
def test_pictures_that_are_not_of_bytes_are_refused(pixels):
    class Picture(Corridor):
        def _seen(self):
            seen, info = super()._seen()
            return {**seen, "pixels": pixels}, info

    env = made(Picture, SPLITS, goal="g", actions=("left", "right"), keys=Keys(text="view", image="pixels"))
    with pytest.raises(EnvironmentFailure, match="not a picture"):
        env.reset(env.tasks("train")[0])


class Counter:
    """An executor that answers 1, whatever is asked."""

    accepts_soft = sees_images = False
    reads = PAPER_VIEW

    def act(self, requests):
        return [Action("1", Grounding.CHOICE, "1", (1,), 1, 1) for _ in requests]


def test_the_loop_plays_it_and_survives_its_crash():
    specs = [EpisodeSpec(task) for task in guess().tasks("train")]
    played = run_episodes(guess, specs, Delivery("none", "none"), Counter(), EpisodeLimits(5))
    assert [len(episode.steps) for episode in played] == [3, 3]
    assert {episode.stop_reason for episode in played} == {StopReason.STEP_LIMIT}  # its own: three tries
    crash = lambda: made(Broken, SPLITS, goal="g")
    [failed] = run_episodes(crash, specs[:1], Delivery("none", "none"), Counter(), EpisodeLimits(5))
    assert failed.stop_reason == StopReason.ENVIRONMENT_FAILURE and "the simulator is gone" in failed.error
