"""Gymnasium text environments behind our contract: a Text space, a Discrete space with names, and broken ones."""

from __future__ import annotations

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gym` is not installed")

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

from agent.deliveries import Delivery  # noqa: E402
from agent.episode import EpisodeSpec, Limits, run_episodes  # noqa: E402
from envs.base import Environment, EnvironmentFailure  # noqa: E402
from envs.gymnasium.environment import GymnasiumConfig, GymnasiumSplit, GymnasiumTextEnvironment  # noqa: E402
from envs.gymnasium.environment import GymnasiumKeys as Keys  # noqa: E402
from executor.records import PAPER, Action, Grounding  # noqa: E402
from runtime.errors import StopReason  # noqa: E402


class Guess(gymnasium.Env):
    """Say the number that the seed decides; three tries."""

    observation_space = spaces.Text(200, charset=frozenset(map(chr, range(32, 127))))
    action_space = spaces.Text(10, charset="0123456789")

    def reset(self, *, seed=None, options=None):
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
    assert lost.done and not lost.success  # truncated


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


class Counter:
    """An executor that answers 1, whatever is asked."""

    accepts_soft = sees_images = False
    reads = PAPER

    def act(self, requests):
        return [Action("1", Grounding.CHOICE, "1", (1,), 1, 1) for _ in requests]


def test_the_loop_plays_it_and_survives_its_crash():
    specs = [EpisodeSpec(task) for task in guess().tasks("train")]
    played = run_episodes(guess, specs, Delivery("none", "none"), Counter(), Limits(5))
    assert [len(episode.steps) for episode in played] == [3, 3]
    assert {episode.stop_reason for episode in played} == {StopReason.DONE}
    crash = lambda: made(Broken, SPLITS, goal="g")
    [failed] = run_episodes(crash, specs[:1], Delivery("none", "none"), Counter(), Limits(5))
    assert failed.stop_reason == StopReason.ENVIRONMENT_FAILURE and "the simulator is gone" in failed.error
