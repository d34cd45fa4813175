"""ALFWorld's games, played by the household engine or, to check what it answers, by TextWorld itself.

In `TextWorldEnvironment` everything seen, possible and won is TextWorld's, which says no more than whether the game is
won; the share of the goal's conditions, the picture and the expert are those of a native game that is given the same
commands. The two never drift apart unseen: where they disagree on a win, the episode fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from envs.alfworld.games import AlfworldGames
from envs.alfworld.reference import TextWorldGame
from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.household.environment import EngineEnvironment

if TYPE_CHECKING:
    import os
    from pathlib import Path


class AlfworldEnvironment(EngineEnvironment):
    """Real games under `data_root` (or the environment variable ALFWORLD_DATA) in the native engine."""

    name = "alfworld"

    def __init__(
        self, data_root: str | os.PathLike[str] | None = None, images: bool = True, image_size: int = 64
    ) -> None:
        self._folder = AlfworldGames(data_root)
        super().__init__(self._folder, images, image_size)

    def game_file(self, task: Task) -> Path:
        """Return the file of a task's game."""
        return self._folder.path(task)


class TextWorldEnvironment(AlfworldEnvironment):
    """Real (or exported) games in TextWorld: seconds a reset and about 50 ms a step. Needs the extra `alfworld`."""

    def __init__(
        self, data_root: str | os.PathLike[str] | None = None, images: bool = False, image_size: int = 64
    ) -> None:
        super().__init__(data_root, images, image_size)
        self._theirs: TextWorldGame | None = None

    def reset(self, task: Task) -> Observation:
        """Start the task's episode. The text is the room as first seen, as the native engine gives it."""
        self.close()
        ours = super().reset(task)
        self._theirs = TextWorldGame(self.game_file(task))
        seen = self._theirs.reset()
        try:
            _, room, _ = seen.text.split("\n\n")  # a banner, the room, the task
        except ValueError:
            raise EnvironmentFailure(f"TextWorld opens {task.id} with other than banner, room and task: "
                                     f"{seen.text!r}") from None  # fmt: skip
        return replace(ours, text=room, admissible=seen.admissible)

    def step(self, action: str) -> Transition:
        """Carry out one command."""
        if self._theirs is None:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        ours, seen = super().step(action), self._theirs.step(action)
        if seen.won != ours.success:
            raise EnvironmentFailure(f"after {action!r} TextWorld says won={seen.won} and the native engine "
                                     f"{ours.success}: please report this game")  # fmt: skip
        observation = replace(ours.observation, text=seen.text, admissible=seen.admissible)
        return Transition(observation, ours.progress, seen.won, done=seen.won)

    def close(self) -> None:
        """Forget the episode, here and in TextWorld."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
        super().close()
