"""The contract between the agent and every environment: four small records and one protocol.

An environment is text first (`Observation.text`), may show a picture (`Observation.image`) and may enumerate the
commands that are possible now (`Observation.admissible`). Nothing here knows about models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from runtime.errors import EnvironmentFailure as EnvironmentFailure  # what an environment of anyone's may raise
from runtime.told import without_newlines

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do in one scene. `id` is unique in its environment and split, and stable from run to run."""

    id: str
    goal: str
    scene: str  # label of the place whose layout persists over episodes, e.g. "home 17" or "FloorPlan405"; "" if none
    split: str
    kind: str  # task type, e.g. "pick_heat_then_place_in_recep"
    # Which fact decides the task: "text" (memory says it), "visual" (only the view shows it), "remembered" (only a
    # picture in memory does), "" (real data).
    family: str = ""
    data: Mapping[str, str] = field(default_factory=dict)  # what the environment needs to build it (path, seeds)
    # What training and evaluation must not share, by dimension (paper C.1), e.g. {"scene": ("FloorPlan10",)}
    isolation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make goal and scene single lines: prompts, memory and Brief State hold each of them in one line."""
        object.__setattr__(self, "goal", without_newlines(self.goal))
        object.__setattr__(self, "scene", without_newlines(self.scene))


def task_from_json(fields: Mapping[str, Any]) -> Task:
    """Return a task from its fields as JSON holds them."""
    return Task(**{**fields, "isolation": {name: tuple(labels) for name, labels in fields["isolation"].items()}})


Position = tuple[float, float, float]  # x, y (up) and z, in metres


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """What does not move in a world, for agents that are given it: where things stand (None: nobody knows), and where
    one can stand."""

    things: Mapping[str, Position | None] = field(default_factory=dict)
    reachable: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskSequence:
    """Tasks to do one after another in one world that is never reset; all of them isolated as the world is. `id` is
    unique in its environment and split; `family`: what kind of sequence it is."""

    id: str
    scene: str
    split: str
    family: str
    tasks: tuple[Task, ...]
    plan: FloorPlan = FloorPlan()


def sequence_from_json(fields: Mapping[str, Any]) -> TaskSequence:
    """Return a sequence from its fields as JSON holds them."""
    plan = fields.get("plan") or {"things": {}, "reachable": ()}
    things = {name: at and _position(at) for name, at in plan["things"].items()}
    found = FloorPlan(things, tuple(map(_position, plan["reachable"])))
    return TaskSequence(**{**fields, "tasks": tuple(map(task_from_json, fields["tasks"])), "plan": found})


def _position(at: Sequence[float]) -> Position:
    x, y, z = at
    return x, y, z


@dataclass(frozen=True, slots=True)
class Observation:
    text: str
    image: "Image | None" = None
    admissible: tuple[str, ...] | None = None  # None where the benchmark does not enumerate commands


@dataclass(frozen=True, slots=True)
class Transition:
    observation: Observation
    progress: float  # share of goal conditions met, in [0, 1]
    success: bool
    done: bool
    truncated: bool = False  # it is over by a limit of the environment's own, not by what was done


@runtime_checkable
class Environment(Protocol):
    """One live episode at a time. Stateless between episodes: `reset` starts afresh."""

    @property
    def name(self) -> str: ...

    def tasks(self, split: str) -> list[Task]:
        """List a split, in an order that does not depend on the file system.

        ValueError for a split that does not exist; the message names those that do.
        """
        ...

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Transition: ...

    def expert(self) -> list[str] | None:
        """Commands from the current state to success, near-shortest; None when there is no way or no expert."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class LivingEnvironment(Environment, Protocol):
    """An environment in which one task can follow another in the same world."""

    def sequences(self, split: str) -> Sequence[TaskSequence]:
        """List a split's sequences, always the same ones. Raises ValueError for a split that does not exist."""
        ...

    def proceed(self, task: Task) -> Observation:
        """Go on to another task where the last one left off: world, place and hand stay as they are. The text tells the
        room's places again, as `reset` does. Raises EnvironmentFailure for a task of another world."""
        ...


def living(env: Environment) -> LivingEnvironment:
    """Return an environment as one in which tasks can follow one another; EnvironmentFailure where they cannot."""
    if isinstance(env, LivingEnvironment):
        return env
    raise EnvironmentFailure(
        f"{env.name} starts every task in a world of its own: sequences of tasks in one world are "
        "played by household and, with its native engine, alfworld"
    )
