"""ALFWorld in Gymnasium's registry: a vector environment that keeps Gymnasium's conventions."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gym` is not installed")

from gymnasium.utils.env_checker import data_equivalence  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics  # noqa: E402

from envs.alfworld.episodes import Episode  # noqa: E402
from envs.alfworld.export import export_split  # noqa: E402
from envs.household.environment import HouseholdEnvironment  # noqa: E402

pytestmark = pytest.mark.alfworld
ID = "envs.alfworld.vector:memcompiler/ALFWorld-v0"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ALFWORLD_DATA folder of generated homes."""
    pytest.importorskip("alfworld")
    out = tmp_path_factory.mktemp("exported")
    export_split(HouseholdEnvironment(scenes={"valid_seen": 2}, images=False), "valid_seen", out, limit=12)
    return out


def made(root: Path, n: int, **other: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gymnasium.make_vec(ID, num_envs=n, split="valid_seen", data_root=root, **other)


class Single(gymnasium.Env):
    """The games of one slot as an environment of its own, for Gymnasium's vectorizer."""

    def __init__(self, vector: Any, files: list[str], limit: int) -> None:
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self._files, self._limit = iter(files), limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode = Episode(next(self._files), self._limit)
        return self._episode.text, self._episode.infos()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._episode.step(action)
        won = self._episode.won
        return self._episode.text, float(won), won, self._episode.done and not won, self._episode.infos()


def test_it_is_what_gymnasiums_own_vectorizer_makes_of_the_same_games(root: Path) -> None:
    """Observations, rewards, ends, infos with their masks, and what happens at the step after an end."""
    ours, draw = made(root, 3, max_episode_steps=4), random.Random(0)
    log = [ours.reset(seed=5)]
    actions = []
    for _ in range(14):
        actions.append(tuple(draw.choice(list(one)) for one in log[-1][-1]["admissible_commands"]))
        log.append(ours.step(actions[-1]))
    files = [[log[0][1]["extra.gamefile"][i], *(log[5 * n][4]["extra.gamefile"][i] for n in (1, 2))] for i in range(3)]
    theirs = SyncVectorEnv([lambda files=files[i]: Single(ours, files, 4) for i in range(3)])
    assert theirs.metadata["autoreset_mode"] is ours.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert (theirs.observation_space, theirs.action_space) == (ours.observation_space, ours.action_space)
    assert data_equivalence(theirs.reset(seed=5), log[0], exact=True)
    for action, got in zip(actions, log[1:], strict=True):
        assert got[0] in ours.observation_space and action in ours.action_space
        assert data_equivalence(theirs.step(action), got, exact=True)
    assert [entry[3].tolist() for entry in log[1:]] == [[n % 5 == 4] * 3 for n in range(1, 15)]  # truncated


def test_a_won_game_terminates_and_the_next_one_follows(root: Path) -> None:
    env = made(root, 1)
    observation, infos = env.reset(seed=2)
    first, plan = infos["extra.gamefile"][0], expert_plan(env)
    for command in plan:
        observation, reward, terminated, truncated, infos = env.step((command,))
    assert reward.tolist() == [1.0] and terminated.tolist() == [True] and truncated.tolist() == [False]
    assert infos["won"].tolist() == [True] and infos["goal_condition_success_rate"].tolist() == [1.0]
    observation, reward, terminated, truncated, infos = env.step(("look",))
    assert infos["extra.gamefile"][0] != first and observation[0].startswith("-= Welcome")
    assert (reward.tolist(), terminated.tolist(), truncated.tolist()) == ([0.0], [False], [False])


def expert_plan(env: Any) -> list[str]:
    from envs.household.expert import plan

    [episode] = env.unwrapped._episodes
    return plan(episode.engine, episode.state) or []


def test_a_seed_is_an_order_of_games(root: Path) -> None:
    def games(env: Any, seed: int | None) -> list[str]:
        return env.reset(seed=seed)[1]["extra.gamefile"].tolist()

    env = made(root, 4)
    first, then = games(env, 1), games(env, None)
    assert not set(first) & set(then) and games(env, 1) == first and games(env, None) == then
    assert games(env, 2) != first and games(made(root, 4), 1) == first


def test_gymnasiums_wrappers_go_around_it(root: Path) -> None:
    env = DictInfoToList(RecordEpisodeStatistics(made(root, 2, max_episode_steps=3)))
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(3):
        *_, infos = env.step(env.action_space.sample())
    assert [info["episode"]["l"] for info in infos] == [3, 3] and len(infos[0]["admissible_commands"]) > 5
    env.close()


def test_what_cannot_be_is_refused(root: Path, tmp_path: Path) -> None:
    env = made(root, 2)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\) first"):
        env.step(("look", "look"))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="2 commands, one per game, not 1"):
        env.step(("look",))
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        made(root, 0)
    with pytest.raises(FileNotFoundError, match="alfworld-download"):
        made(tmp_path, 1)
