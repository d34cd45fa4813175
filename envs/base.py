"""The contract between agents and environments: small records and one protocol.

Every observation has text (`Observation.text`), may have a picture (`Observation.image`) and may list the commands that
are possible now (`Observation.admissible`). Environments know nothing about models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from runtime.errors import EnvironmentFailure as EnvironmentFailure  # for environments of other packages
from runtime.parsing import without_newlines

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Task:
    """One goal in one scene. `id` is unique in its environment and split, and stable across runs."""

    id: str
    goal: str
    scene: str  # label of the place whose layout persists across episodes, e.g. "home 17" or "FloorPlan405"; "" if none
    split: str
    kind: str  # task type, e.g. "pick_heat_then_place_in_recep"
    family: str = ""  # source of the deciding fact: "text" of memory, "visual" (the view), "remembered" (a picture in
    # memory), "" (real data)
    data: Mapping[str, str] = field(default_factory=dict)  # arguments of the environment (path, seeds)
    # Labels that training and evaluation must not share, by dimension (paper C.1), e.g. {"scene": ("FloorPlan10",)}
    isolation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Replace newlines in goal and scene, which prompts, memory and Brief State hold in one line."""
        object.__setattr__(self, "goal", without_newlines(self.goal))
        object.__setattr__(self, "scene", without_newlines(self.scene))


def task_from_json(fields: Mapping[str, Any]) -> Task:
    """Build a task from its JSON fields."""
    return Task(**{**fields, "isolation": {name: tuple(labels) for name, labels in fields["isolation"].items()}})


Position = tuple[float, float, float]  # x, y (up) and z, in metres


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """The fixed layout of a world: positions of things (None: unknown) and positions that an agent can reach."""

    things: Mapping[str, Position | None] = field(default_factory=dict)
    reachable: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskSequence:
    """Consecutive tasks in one world that is never reset, all with the world's isolation labels. `id` is unique in its
    environment and split."""

    id: str
    scene: str
    split: str
    family: str
    tasks: tuple[Task, ...]
    plan: FloorPlan = FloorPlan()


def sequence_from_json(fields: Mapping[str, Any]) -> TaskSequence:
    """Build a sequence from its JSON fields."""
    plan = fields.get("plan") or {"things": {}, "reachable": ()}
    things = {name: at and _position(at) for name, at in plan["things"].items()}
    found = FloorPlan(things, tuple(map(_position, plan["reachable"])))
    return TaskSequence(**{**fields, "tasks": tuple(map(task_from_json, fields["tasks"])), "plan": found})


def _position(at: Sequence[float]) -> Position:
    x, y, z = at
    return x, y, z


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees.

    Args:
        admissible: the commands that are possible now; None: the benchmark lists no commands.
        beliefs: keys and values that the environment notes in the Brief State; "" removes a key.
    """

    text: str
    image: "Image | None" = None
    admissible: tuple[str, ...] | None = None
    beliefs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of one step."""

    observation: Observation
    progress: float  # share of goal conditions met, in [0, 1]
    success: bool
    done: bool
    truncated: bool = False  # ended by a limit of the environment


@runtime_checkable
class Environment(Protocol):
    """An environment with one live episode at a time, which `reset` starts."""

    @property
    def name(self) -> str: ...

    def tasks(self, split: str) -> list[Task]:
        """List a split's tasks, in an order that does not depend on the file system.

        Raises:
            ValueError: the split is unknown; the message names the known ones.
        """
        ...

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Transition: ...

    def expert(self) -> list[str] | None:
        """Return near-shortest commands from the current state to success; None without a plan or an expert."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PersistentEnvironment(Environment, Protocol):
    """An environment in which one task can follow another in the same world."""

    def sequences(self, split: str) -> Sequence[TaskSequence]:
        """List a split's sequences, the same at every call. Raises: ValueError, if the split is unknown."""
        ...

    def proceed(self, task: Task) -> Observation:
        """Start another task in the live world without changing its state, and list the room's places as `reset` does.

        Raises:
            EnvironmentFailure: the task is of another world.
        """
        ...


def is_persistent(env: Environment) -> PersistentEnvironment:
    """Return the environment if its worlds persist across tasks. Raises: EnvironmentFailure, if they do not."""
    if isinstance(env, PersistentEnvironment):
        return env
    raise EnvironmentFailure(
        f"{env.name} starts every task in a new world: play sequences of tasks in household, or in alfworld with its "
        "native engine"
    )
