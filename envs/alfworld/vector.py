"""ALFWorld's games as a Gymnasium vector environment in one process (extra `gym`).

    import gymnasium
    envs = gymnasium.make_vec("envs.alfworld.vector:memcompiler/ALFWorld-v0", num_envs=64, split="train")

The step after an episode's end starts the next game and ignores its command (`AutoresetMode.NEXT_STEP`).
"""

import os
import string
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs.alfworld.episodes import Episode, game_order
from envs.alfworld.games import AlfworldGames, WordingName

ID = "memcompiler/ALFWorld-v0"
LONGEST_TEXT, LONGEST_COMMAND = 8192, 256  # characters, far above any text's and command's

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class AlfworldVectorEnv(VectorEnv):
    """`num_envs` games at a time, in an order drawn by `reset(seed=...)`.

    Observations and actions are tuples of strings. The reward is 1 when a game is won, which terminates it;
    `max_episode_steps` truncates it. Infos, each an array with its mask: admissible_commands, won,
    goal_condition_success_rate, extra.gamefile.

    Args:
        split: "train", "valid_seen", "valid_unseen", or a folder written by `memcompiler env export`.
        data_root: folder of json_2.1.1 (default: $ALFWORLD_DATA).
        wording: words of commands and answers, as `env.wording`: "game", "current" or "before_0_4".

    Raises:
        ValueError: the split or the wording is unknown, or `num_envs` is below 1.
        FileNotFoundError: there are no games.
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 50,
        split: str = "train",
        data_root: str | os.PathLike[str] | None = None,
        wording: WordingName = "game",
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, not {num_envs}")
        games = AlfworldGames(data_root, wording)
        self._files = [str(games.path(task)) for task in games.tasks(split)]
        self.num_envs, self._limit = num_envs, max_episode_steps
        self._wording: WordingName = wording
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        self.single_observation_space = Text(LONGEST_TEXT, charset=string.printable)
        self.single_action_space = Text(LONGEST_COMMAND, min_length=0, charset=string.printable)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._episodes: list[Episode] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start the next games, or with a seed the first of its order; ignores `options`."""
        super().reset(seed=seed)
        if seed is not None or not self._episodes:
            self._order = game_order(self._files, int(self.np_random.integers(2**32)))
        self._episodes = [self._next() for _ in range(self.num_envs)]
        return self._seen()

    def step(self, actions: Sequence[str]) -> tuple[tuple[str, ...], Floats, Flags, Flags, dict[str, Any]]:
        """Carry out one command per game. Raises: ValueError, for another number of commands; ResetNeeded."""
        if not self._episodes:
            raise gymnasium.error.ResetNeeded("no live episodes: call reset() first")
        if len(actions) != self.num_envs:
            raise ValueError(f"step takes {self.num_envs} commands, one per game, not {len(actions)}")
        for i, (episode, command) in enumerate(zip(self._episodes, actions, strict=True)):
            if episode.done:
                self._episodes[i] = self._next()
            else:
                episode.step(command)
        observations, infos = self._seen()
        won = np.array([episode.won for episode in self._episodes])
        return observations, won.astype(np.float64), won, self._done() & ~won, infos

    def _next(self) -> Episode:
        return Episode(next(self._order), self._limit, wording=self._wording)

    def _done(self) -> Flags:
        return np.array([episode.done for episode in self._episodes])

    def _seen(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        infos: dict[str, Any] = {}
        for i, episode in enumerate(self._episodes):
            infos = self._add_info(infos, episode.infos(), i)
        return tuple(episode.text for episode in self._episodes), infos


gymnasium.register(ID, vector_entry_point=f"{__name__}:{AlfworldVectorEnv.__name__}", max_episode_steps=50)
