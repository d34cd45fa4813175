"""Household environment: episodes of the engine, and generated homes with settings and spec."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, NonNegativeInt

from envs.base import EnvironmentFailure, Observation, Task, TaskSequence, Transition
from envs.household.command_reader import HouseholdReader
from envs.household.engine import Command, Engine
from envs.household.errands import REFUSED, changed_notes, place_notes, places_in_front, shown_notes
from envs.household.expert import plan
from envs.household.generate import DEFAULT_KINDS, Generator
from envs.household.sequences import SequenceSettings, sequences
from envs.household.world import Game, State
from envs.spec import EnvSettings, EnvSpec, Probe, Splits, WorkerSpec, last_view

if TYPE_CHECKING:
    from PIL.Image import Image

    from envs.household.render import Renderer

DEFAULT_SCENES: Mapping[str, int] = {"train": 64, "test": 40}
INSTRUCTIONS = """You are an agent in a household. Each turn you see where you are and what is there. Answer with \
exactly one command and nothing else, for example: go to shelf 1, open drawer 2, take mug 1 from shelf 1, move mug 1 \
to desk 1, heat mug 1 with microwave 1, clean mug 1 with sinkbasin 1, cool mug 1 with fridge 1, use desklamp 1."""


class Games(Protocol):
    """A source of tasks and their games."""

    def tasks(self, split: str) -> list[Task]: ...

    def game(self, task: Task) -> tuple[Game, int | None]:
        """Return a task's game, and the item whose receptacle the picture marks (None: no mark)."""
        ...

    def worlds(self, split: str) -> list[Task]:
        """Return one task for each world of a split, which accepts any goal (`sequences.with_goal`)."""
        ...


class EngineEnvironment:
    """Environment of games in the household engine, with one live episode.

    As in ALFWorld, the answer to an impossible command is "Nothing happens.".

    Args:
        notes_places: keep three beliefs up to date in the agent's Brief State: the first place of each kind, the first
            of each kind that was not searched yet (`next_places`), and the thing in hand.
    """

    name = "household"

    def __init__(
        self,
        games: Games,
        images: bool,
        seed: int = 0,
        sequences: Mapping[str, Any] | None = None,
        notes_places: bool = False,
    ) -> None:
        self._games, self._images, self._notes_places = games, images, notes_places
        self._seed, self._sequences = seed, SequenceSettings.model_validate(sequences or {})
        self._playing: tuple[Engine, State] | None = None
        self._commands: dict[str, Command] = {}
        self._marked: int | None = None
        self._notes: dict[str, str] = {}  # values of the beliefs of `notes_places`, by key, with all unsearched places
        self._shown: dict[str, str] = {}  # as the agent has them
        self._plan: list[str] | None = None  # rest of the expert's plan, while the episode follows it
        self._renderer: Renderer | None = None

    def tasks(self, split: str) -> list[Task]:
        return self._games.tasks(split)

    def reset(self, task: Task) -> Observation:
        """Start the task's episode and describe the room."""
        game, self._marked = self._games.game(task)
        engine = Engine(game)
        self._playing, self._plan, self._renderer = (engine, engine.reset()), None, None
        self._notes = {}
        return self._first(engine.intro())

    def sequences(self, split: str) -> list[TaskSequence]:
        """List the sequences of the settings, each of which is in one of the split's worlds."""
        game_of = lambda task: self._games.game(task)[0]
        return sequences(self._games.worlds(split), game_of, settings=self._sequences, seed=self._seed, split=split)

    def proceed(self, task: Task) -> Observation:
        """Start another task in this world without changing its state; describe the room's places and the view.

        Raises:
            EnvironmentFailure: the task is of another world.
        """
        engine, state = self._live()
        game, self._marked = self._games.game(task)
        if (game.receptacles, game.items) != (engine.game.receptacles, engine.game.items):
            raise EnvironmentFailure(f"task {task.id} is of another world than the live one: call reset(task)")
        engine = Engine(game)
        self._playing, self._plan, self._renderer = (engine, state), None, None
        return self._first(engine.again(state))

    def step(self, action: str) -> Transition:
        """Carry out one command."""
        engine, state = self._live()
        text = engine.step(state, action, self._commands)
        self._plan = self._plan[1:] if self._plan and self._plan[0] == action else None
        progress = engine.progress(state)
        success = progress == 1.0
        observation = self._observe(text)
        if self._notes_places:
            self._notes |= changed_notes(self._notes, action, text)
            observation = self._noting(observation, places_in_front(action, text))
        return Transition(observation, progress, success, done=success)

    def expert(self) -> list[str] | None:
        """Return near-shortest commands from the current state to success; None if there are none."""
        if self._plan is None:
            self._plan = plan(*self._live())
        return self._plan and list(self._plan)

    def close(self) -> None:
        """Drop the episode; a later reset is allowed."""
        self._playing = self._renderer = None

    # State behind the text -----------------------------------------------------------------------------------

    @property
    def game(self) -> Game:
        return self._live()[0].game

    @property
    def state(self) -> State:
        """Return the live state; copy it before changing it."""
        return self._live()[1]

    @property
    def marked_receptacle(self) -> str | None:
        """Return the receptacle of the marked item, which the picture marks; None while the agent holds the item."""
        marked = self._marked_index()
        return None if marked is None else self.game.receptacles[marked].name

    def image(self) -> "Image":
        """Draw the current view."""
        from envs.household.render import Renderer

        engine, state = self._live()
        self._renderer = self._renderer or Renderer(engine)
        return self._renderer.draw(state, self._marked_index())

    def _live(self) -> tuple[Engine, State]:
        if self._playing is None:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        return self._playing

    def _marked_index(self) -> int | None:
        return None if self._marked is None else next(iter(self.game.places(self._marked, self.state)), None)

    def _first(self, text: str) -> Observation:
        if not self._notes_places:
            return self._observe(text)
        self._notes |= place_notes(text)
        self._shown = {}
        return self._noting(self._observe(text), in_front=())

    def _noting(self, observation: Observation, in_front: Collection[str]) -> Observation:
        """Give the agent the notes that have changed with the observation."""
        shown = shown_notes(self._notes, in_front)
        changed = {key: value for key, value in shown.items() if value != self._shown.get(key)}
        self._shown = shown
        return replace(observation, beliefs=tuple(changed.items()))

    def _observe(self, text: str) -> Observation:
        engine, state = self._live()
        self._commands = engine.commands(state)
        return Observation(text, self.image() if self._images else None, tuple(sorted(self._commands)))


class HouseholdEnvironment(EngineEnvironment):
    """Generated homes; the arguments are those of `HouseholdSettings`.

    Every name S in `scenes` has a split S to train or evaluate on and a split S + "_experience" that fills a memory.
    """

    def __init__(
        self,
        seed: int = 0,
        scenes: Mapping[str, int] = DEFAULT_SCENES,
        images: bool = True,
        visual_share: float = 0.5,
        fixed_objects: int = 6,
        wandering_objects: int = 3,
        kinds: Sequence[str] = DEFAULT_KINDS,
        remembered_share: float = 0.0,
        sequences: Mapping[str, Any] | None = None,
        notes_places: bool = False,
    ) -> None:
        shares = visual_share, remembered_share
        games = Generator(seed, scenes, *shares, fixed_objects, wandering_objects, tuple(kinds))
        super().__init__(games, images, seed, sequences, notes_places)


def pickup_views(actions: Sequence[str]) -> Sequence[int]:
    """Return the steps that took something, whose views show its place; without any, the last step."""
    return [t for t, action in enumerate(actions) if action.startswith("take ")] or last_view(actions)


class HouseholdSettings(EnvSettings):
    """Settings of generated homes."""

    name: Literal["household"] = "household"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name of the environment."""
    scenes: dict[str, NonNegativeInt] = Field(default={"train": 64, "valid": 48, "test": 48})
    """Number of scenes by split."""
    visual_share: float = Field(default=0.5, ge=0, le=1)
    """Share of tasks that only the view decides."""
    remembered_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks that only a picture in memory decides."""
    kinds: tuple[str, ...] | None = None
    """Task types; null: the four that fetch one thing."""
    fixed_objects: int = Field(default=6, ge=1)
    """Things per home whose place is the same in every episode."""
    wandering_objects: int = Field(default=3, ge=0)
    """Things per home whose place differs in each episode."""
    notes_places: bool = False
    """The environment notes the first place of each kind, the first of each that was not searched yet, and what is in
    hand."""
    sequences: SequenceSettings = SequenceSettings()
    """Consecutive tasks in one home, for memory.protocol living."""


def _construct(settings: HouseholdSettings) -> WorkerSpec:
    homes = {"scenes", "visual_share", "remembered_share", "kinds", "fixed_objects", "wandering_objects"}
    arguments = settings.model_dump(include={"seed", "images", "sequences", "notes_places", *homes}, exclude_none=True)
    return WorkerSpec(f"{__name__}:HouseholdEnvironment", arguments)


def play_a_step() -> str:
    """Start an episode in a generated scene and make one step."""
    env = HouseholdEnvironment(scenes={"train": 1})
    task = env.tasks("train")[0]
    commands = env.reset(task).admissible
    if not commands:
        raise RuntimeError("no admissible commands after reset")
    env.step(commands[0])
    return f"reset and step in {task.scene}"


HOUSEHOLD = EnvSpec(
    "household",
    HouseholdSettings,
    _construct,
    splits=lambda _: Splits("test", ("test",), experience=lambda split: f"{split}_experience", related="scene"),
    isolation={"scene": "disjoint"},
    sources=("envs.household",),
    probes=lambda: [Probe("built-in engine", play_a_step, "make test ARGS=tests/envs")],
    refusals=(REFUSED,),
    instructions=INSTRUCTIONS,
    views=pickup_views,
    reader=HouseholdReader(),
)
