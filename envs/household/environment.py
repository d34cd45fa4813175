"""The household as an `Environment`: one live episode of the engine, in homes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.household.engine import Command, Engine
from envs.household.expert import plan
from envs.household.generate import DEFAULT_KINDS, Generator
from envs.household.world import Game, State

if TYPE_CHECKING:
    from PIL.Image import Image

    from envs.household.render import Renderer

DEFAULT_SCENES: Mapping[str, int] = {"train": 64, "test": 40}


class Games(Protocol):
    """Where tasks and their games come from."""

    def tasks(self, split: str) -> list[Task]: ...

    def game(self, task: Task) -> tuple[Game, int | None]:
        """Return a task's game, and the item whose receptacle the picture marks, if any."""
        ...


class EngineEnvironment:
    """Games of the household engine: one live episode, a step in tens of microseconds.

    `step` never raises on a command that is not possible: it answers "Nothing happens.", as ALFWorld does.
    """

    name = "household"

    def __init__(self, games: Games, images: bool, image_size: int) -> None:
        if image_size < 64:
            raise ValueError(f"image_size must be at least 64 pixels for the plan to be readable, not {image_size}")
        self._games = games
        self._images, self._image_size = images, image_size
        self._engine: Engine | None = None
        self._state: State | None = None
        self._commands: dict[str, Command] = {}
        self._marked: int | None = None
        self._renderer: Renderer | None = None

    # The contract of `envs.base.Environment` ----------------------------------------------------------------------

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, always in the same order.

        Raises:
            ValueError: for a split that does not exist.
            FileNotFoundError: for real games that are not installed; the message says how to get them.
        """
        return self._games.tasks(split)

    def reset(self, task: Task) -> Observation:
        """Start the task's episode. The text is the room as first seen; the goal is `task.goal`."""
        game, self._marked = self._games.game(task)
        self._engine = Engine(game)
        self._state = self._engine.reset()
        self._renderer = None
        return self._observe(self._engine.intro())

    def step(self, action: str) -> Transition:
        """Carry out one command."""
        engine, state = self._live()
        text = engine.step(state, action, self._commands)
        progress = engine.progress(state)
        success = progress == 1.0
        return Transition(self._observe(text), progress, success, done=success)

    def expert(self) -> list[str] | None:
        """Near-shortest commands from the current state to success, None when there is no way."""
        engine, state = self._live()
        return plan(engine, state)

    def close(self) -> None:
        """Forget the episode. The environment can be reset again."""
        self._engine = self._state = self._renderer = None

    # For those who look behind the text (tests, analyses, search) -------------------------------------------------

    @property
    def game(self) -> Game:
        """The game being played."""
        return self._live()[0].game

    @property
    def state(self) -> State:
        """The live state; copy it before changing it."""
        return self._live()[1]

    @property
    def marked_receptacle(self) -> str | None:
        """Name of the receptacle that wears the mark now: where the visual family's item lies, None in the hand."""
        marked = self._marked_index()
        return None if marked is None else self.game.receptacles[marked].name

    def image(self) -> Image:
        """The current view."""
        from envs.household.render import Renderer

        engine, state = self._live()
        if self._renderer is None:
            self._renderer = Renderer(engine, self._image_size)
        return self._renderer.draw(state, self._marked_index())

    def _live(self) -> tuple[Engine, State]:
        if self._engine is None or self._state is None:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        return self._engine, self._state

    def _marked_index(self) -> int | None:
        if self._marked is None:
            return None
        return next(iter(self.game.places(self._marked, self.state)), None)

    def _observe(self, text: str) -> Observation:
        engine, state = self._live()
        self._commands = engine.commands(state)
        image = self.image() if self._images else None
        return Observation(text, image, tuple(sorted(self._commands)))


class HouseholdEnvironment(EngineEnvironment):
    """Homes that `generate.Generator` makes, without any files (`seed` to `kinds` are its arguments).

    For every name S in `scenes` there are the splits S (train or evaluate) and S + "_experience" (fill a memory).
    """

    def __init__(
        self,
        seed: int = 0,
        scenes: Mapping[str, int] = DEFAULT_SCENES,
        images: bool = True,
        image_size: int = 64,
        visual_share: float = 0.5,
        fixed_objects: int = 6,
        wandering_objects: int = 3,
        kinds: Sequence[str] = DEFAULT_KINDS,
    ) -> None:
        games = Generator(seed, scenes, visual_share, fixed_objects, wandering_objects, tuple(kinds))
        super().__init__(games, images, image_size)
