"""alfworld's own interface on the native engine, for code written for alfworld 0.4.2.

    from envs.alfworld.drop_in import get_environment      # instead of alfworld.agents.environment

docs/guides/alfworld-drop-in.md lists the differences from alfworld's.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.alfworld.episodes import EXPERTS, Episode, Handcoded, game_order
from envs.alfworld.games import GAME_FILE, WordingName, checked_wording, read_trial
from envs.base import EnvironmentFailure
from envs.household.world import KINDS
from runtime.progress import progress
from runtime.startup import expand_home

TASK_TYPES = dict(enumerate(KINDS, 1))  # as alfworld's configs number them
FIRST_SEED = 1234  # seed of the games' order before `seed` is called
# train_eval -> settings of the games' folder and number
_SPLITS = {
    "train": ("data_path", "num_train_games"),
    "eval_in_distribution": ("eval_id_data_path", "num_eval_games"),
    "eval_out_of_distribution": ("eval_ood_data_path", "num_eval_games"),
}
_METHODS = {"dqn": "rl", "dagger": "dagger"}  # training_method -> the config's block with its step limit


def get_environment(env_type: str) -> type["AlfredTWEnv"]:
    """Return the class of a config's env.type. Raises: ValueError, for types that need AI2-THOR."""
    if env_type != "AlfredTWEnv":
        raise ValueError(f"only AlfredTWEnv plays in the native engine, not {env_type!r}: import alfworld's own for it")
    return AlfredTWEnv


class AlfredTWEnv:
    """The games of an alfworld config.

    Args:
        config: the content of alfworld's base_config.yaml; reads `dataset`, `env`, `general`, `rl` and `dagger`.
            `env.wording`, which alfworld does not have, sets the words of commands and answers (`games.WORDINGS`).
        train_eval: "train", "eval_in_distribution" or "eval_out_of_distribution".

    Attributes:
        game_files: paths of the games, in alfworld's order; you may replace them before `init_env`.
        num_games: number of games.

    Raises:
        ValueError: another `train_eval`, a missing setting, an unknown wording, or a broken file.
        FileNotFoundError: there are no games.
    """

    def __init__(self, config: Mapping[str, Any], train_eval: str = "train") -> None:
        if train_eval not in _SPLITS:
            raise ValueError(f"no train_eval {train_eval!r}; there are {', '.join(_SPLITS)}")
        self.config, self.train_eval = config, train_eval
        self._wording: WordingName = checked_wording(config.get("env", {}).get("wording", "game"))
        self.collect_game_files()

    def collect_game_files(self, verbose: bool = False) -> None:
        """Find the games, in the file system's order; ignores `verbose`."""
        path_key, number_key = _SPLITS[self.train_eval]
        folder, number = self._folder(path_key), _setting(self.config, "dataset", number_key)
        kinds = {TASK_TYPES[n] for n in _setting(self.config, "env", "task_types") if n in TASK_TYPES}
        trials = [at for at, _, files in os.walk(folder, topdown=False) if "traj_data.json" in files]
        found = []
        with progress("ALFWorld games", len(trials)) as advance:
            for trial in trials:
                if read_trial(Path(trial), kinds):
                    found.append(os.path.join(trial, GAME_FILE))
                advance(None)
        if not found:
            raise FileNotFoundError(
                f"no playable game of the task types {sorted(kinds)} below {folder} ({len(trials)} folders have a "
                "traj_data.json): get the games with `alfworld-download`, or check env.task_types and "
                f"dataset.{path_key}"
            )
        self.game_files = found[:number] if number > 0 else found
        self.num_games = len(self.game_files)

    def init_env(self, batch_size: int) -> "BatchedGames":
        """Return an environment that plays `batch_size` games at a time."""
        train, method = self.train_eval == "train", _setting(self.config, "general", "training_method")
        if method not in _METHODS:
            raise ValueError(f"general.training_method is {method!r}; there are {', '.join(_METHODS)}")
        limit = _setting(self.config, _METHODS[method], "training", "max_nb_steps_per_episode")
        expert_type = _setting(self.config, "env", "expert_type") if train and method == "dagger" else None
        if expert_type == "handcoded" and self._wording == "before_0_4":
            raise ValueError(
                "alfworld's handcoded expert speaks as the games of alfworld 0.4 do: with env.wording=before_0_4, set "
                "env.expert_type to planner"
            )
        shuffled = train and bool(_setting(self.config, "env", "domain_randomization"))
        return BatchedGames(
            self.game_files,
            batch_size,
            limit=limit,
            expert_type=expert_type,
            shuffled=shuffled,
            wording=self._wording,
        )

    def _folder(self, key: str) -> str:
        named = _setting(self.config, "dataset", key)
        folder = expand_home(os.path.expandvars(named))
        if not os.path.isdir(folder):
            unset = " (ALFWORLD_DATA is not set)" if "$ALFWORLD_DATA" in folder else ""
            raise FileNotFoundError(
                f"dataset.{key} is {named}, which is no folder{unset}: get the games with `alfworld-download`, and set "
                "ALFWORLD_DATA or the config to their folder"
            )
        return folder


def _setting(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"the config has no {'.'.join(keys)}: take it from alfworld's configs/base_config.yaml")
        found = found[key]
    return found


class BatchedGames:
    """A batch of games in this process, with the methods of TextWorld's batched environments.

    A finished game does not change until `reset` starts the next games of the order.

    Raises:
        ValueError: no games, an empty batch, or an unknown expert.
        ModuleNotFoundError: the handcoded expert needs the package alfworld.
    """

    def __init__(
        self,
        game_files: Sequence[str],
        batch_size: int,
        limit: int,
        expert_type: str | None,
        shuffled: bool,
        wording: WordingName = "game",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if expert_type is not None and expert_type not in EXPERTS:
            raise ValueError(f"env.expert_type is {expert_type!r}; there are {', '.join(EXPERTS)}")
        if expert_type == "handcoded":
            Handcoded.check()
        self.gamefiles, self.batch_size = list(game_files), batch_size
        self._limit, self._expert_type, self._shuffled = limit, expert_type, shuffled
        self._wording: WordingName = wording
        self._episodes: list[Episode] = []
        self.seed(FIRST_SEED)

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Restart the order of `gamefiles`. Raises: ValueError, if there are none."""
        if not self.gamefiles:
            raise ValueError("there are no games to play: set game_files (before init_env) or gamefiles")
        self._order = game_order(self.gamefiles, seed)
        return [seed]

    def skip(self, nb_games: int = 1) -> None:
        """Skip the next games of the order."""
        for _ in range(nb_games):
            next(self._order)

    def reset(self) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
        """Start the next games; return observations and infos by game."""
        files = [next(self._order) for _ in range(self.batch_size)]
        self._episodes = [
            Episode(path, self._limit, self._expert_type, self._shuffled, self._wording) for path in files
        ]
        return self._seen()

    def step(
        self, commands: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[int, ...], tuple[bool, ...], dict[str, list[Any]]]:
        """Carry out one command per game; return observations, scores (1 once won), done flags and infos.

        Raises:
            ValueError: another number of commands, or a string instead of a list.
            EnvironmentFailure: no reset yet.
        """
        if not self._episodes:
            raise EnvironmentFailure("no live episodes: call reset() first")
        if isinstance(commands, str) or len(commands) != self.batch_size:
            raise ValueError(f"step takes a list of {self.batch_size} commands, one per game, not {commands!r:.80}")
        for episode, command in zip(self._episodes, commands, strict=True):
            episode.step(command)
        observations, infos = self._seen()
        infos["extra.gamefile"] = [None] * self.batch_size  # alfworld names the game at reset only
        scores = tuple(int(episode.won) for episode in self._episodes)
        return observations, scores, tuple(episode.done for episode in self._episodes), infos

    def close(self) -> None:
        """Drop the episodes."""
        self._episodes = []

    def _seen(self) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
        infos = [episode.infos() for episode in self._episodes]
        return tuple(episode.text for episode in self._episodes), {key: [one[key] for one in infos] for key in infos[0]}
