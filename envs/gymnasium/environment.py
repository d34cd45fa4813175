"""Adapter of text-based Gymnasium environments (extra `gym`); settings and spec.

Observations are strings, or dicts with the text under one key and possibly a picture under another. Actions are strings
(a Text space) or named actions of a Discrete space. A task is one seed; equal seed and options give the same episode,
so training and evaluation must not share them.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, NonNegativeInt, model_validator

from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.spec import EnvSettings, EnvSpec, Probe, Splits, WorkerSpec, imported_version
from runtime.parsing import without_newlines
from runtime.settings import Settings

if TYPE_CHECKING:
    import gymnasium
    from PIL.Image import Image


def _name_of_action(name: str) -> str:
    if not name or name != without_newlines(name).strip():
        raise ValueError(f"an action's name must be one line without surrounding white space, received {name!r}")
    return name


Command = Annotated[str, AfterValidator(_name_of_action)]


class GymnasiumSplit(Settings):
    """One task per seed, each reset with the same options."""

    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Seeds, each of which is one task."""
    options: dict[str, JsonValue] = Field(default={})
    """Options of `reset`, equal for all seeds."""


class GymnasiumKeys(Settings):
    """Keys under which an environment returns each value; null: it does not return the value."""

    text: str = "text"
    """Text, in a dict observation."""
    image: str | None = None
    """Picture, in a dict observation: uint8, (height, width, 3) or (height, width)."""
    goal: str | None = None
    """Goal, in a dict observation or in info; read by one reset per task."""
    admissible: str | None = None
    """Admissible actions, in info or a dict observation: names, or a 0/1 mask over a Discrete space."""
    progress: str | None = None
    """Share of goal conditions met, in info of every step."""
    success: str | None = None
    """Success, in info of every step; null: an episode succeeds if it terminates with a positive reward."""


class GymnasiumConfig(Settings):
    """Any text environment that `gymnasium.make` knows (extra `gym`)."""

    id: str = Field(min_length=1)
    """Name for `gymnasium.make`."""
    splits: dict[str, GymnasiumSplit] = Field(min_length=1)
    """Splits by name; the first is the evaluation split."""
    goal: str = ""
    """Goal of every task; unused if `keys.goal` is set."""
    actions: tuple[Annotated[str, AfterValidator(_name_of_action)], ...] = ()
    """Names of a Discrete space's actions, in the order of their numbers."""
    keys: GymnasiumKeys = GymnasiumKeys()
    """Keys of the values that the environment returns."""


class GymnasiumTextEnvironment:
    """A text-based Gymnasium environment as an `envs.base.Environment`.

    The environment never receives an invalid action, which the answer reports. Exceptions of the environment become
    `EnvironmentFailure`.

    Args:
        config: `GymnasiumConfig`, or its fields as JSON values.
        make: factory of an environment that is not registered with Gymnasium.

    Raises:
        ValueError: the config has no goal.
    """

    def __init__(
        self, config: GymnasiumConfig | Mapping[str, Any], make: "Callable[[], gymnasium.Env] | None" = None
    ) -> None:
        self._config, self._make = GymnasiumConfig.model_validate(config), make
        self.name, self._keys, self._actions = self._config.id, self._config.keys, self._config.actions
        if not self._config.goal and self._keys.goal is None:
            raise ValueError("an agent needs a goal: set goal, or the key that holds it (keys.goal)")
        self._env: gymnasium.Env | None = None
        self._live: Transition | None = None

    def tasks(self, split: str) -> list[Task]:
        """List one task per seed, in order. Raises: ValueError, for an unknown split or a repeated seed."""
        if (episodes := self._config.splits.get(split)) is None:
            raise ValueError(f"no split {split!r}; there are {', '.join(self._config.splits)}")
        if len(set(episodes.seeds)) < len(episodes.seeds):
            raise ValueError(f"split {split!r} names a seed twice")
        options = json.dumps(episodes.options, sort_keys=True)
        return [self._task(split, seed, options) for seed in episodes.seeds]

    def reset(self, task: Task) -> Observation:
        """Start the task's episode."""
        observation, info = self._reset(int(task.data["seed"]), task.data["options"])
        self._live = Transition(self._observe(observation, info, done=False), 0.0, False, False)
        return self._live.observation

    def step(self, action: str) -> Transition:
        """Carry out one action, given as text or name."""
        if self._live is None or self._live.done:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        env = self._opened()
        space: Any = env.action_space
        if self._actions:
            meant = int(space.start) + self._actions.index(action) if action in self._actions else None
        else:
            meant = action if space.contains(action) else None
        if meant is None:
            refusal = replace(self._live.observation, text=f"{action!r} is not an action here.")
            self._live = replace(self._live, observation=refusal)
            return self._live
        with _failures(self.name):
            observation, reward, terminated, truncated, info = env.step(meant)
        keys, reward = self._keys, self._number("the reward", reward)
        terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        success = terminated and reward > 0
        if keys.success:
            success = self._flag(f"info[{keys.success!r}]", self._find("success", info))
        progress = 0.0
        if keys.progress:
            progress = self._number(f"info[{keys.progress!r}]", self._find("progress", info))
        done = terminated or truncated or success
        self._live = Transition(
            self._observe(observation, info, done),
            1.0 if success else min(max(progress, 0.0), 1.0),
            success,
            done,
            truncated=truncated and not terminated,
        )
        return self._live

    def expert(self) -> list[str] | None:
        return None  # Gymnasium has no experts

    def close(self) -> None:
        """Close the environment; `reset` creates another."""
        env, self._env, self._live = self._env, None, None
        if env is not None:
            with _failures(self.name):
                env.close()

    def _opened(self) -> "gymnasium.Env":
        """Create the environment at first use, and check its action space."""
        if self._env is None:
            try:
                import gymnasium
            except ImportError as error:
                raise EnvironmentFailure("gymnasium is missing: pip install 'memcompiler[gym]'") from error
            with _failures(self.name):
                env = self._make() if self._make else gymnasium.make(self.name)
            space = env.action_space
            n = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else None
            if n is None and not isinstance(space, gymnasium.spaces.Text):
                raise EnvironmentFailure(f"{self.name}: actions must be a Text or a Discrete space, not {space}")
            if n is None and self._actions:
                raise EnvironmentFailure(
                    f"{self.name} takes text: remove actions, which are names for a Discrete space"
                )
            if n is not None and (len(self._actions) != n or len(set(self._actions)) != n):
                raise EnvironmentFailure(
                    f"{self.name} has {n} actions: set actions to {n} different names, not {len(self._actions)}"
                )
            self._env = env
        return self._env

    def _task(self, split: str, seed: int, options: str) -> Task:
        goal = self._config.goal
        if self._keys.goal is not None:
            observation, info = self._reset(seed, options)
            goal = self._text("goal", self._find("goal", observation, info))
            self._live = None
        return Task(
            f"{split}/{seed}",
            goal,
            scene="",
            split=split,
            kind=self.name,
            data={"seed": str(seed), "options": options},
            isolation={"episode": (f"{seed} {options}",)},
        )

    def _reset(self, seed: int, options: str) -> tuple[Any, Mapping[str, Any]]:
        env = self._opened()
        with _failures(self.name):
            observation, info = env.reset(seed=seed, options=json.loads(options) or None)
        return observation, info

    def _observe(self, observation: Any, info: Any, done: bool) -> Observation:
        keys = self._keys
        text = observation if isinstance(observation, str) else self._text("text", self._find("text", observation))
        image = None if keys.image is None else _picture(self._find("image", observation))
        if keys.admissible is None:
            return Observation(text, image, self._actions or None)
        listed = self._admissible(self._find("admissible", info, observation))
        if not listed and not done:
            raise EnvironmentFailure(f"{self.name}: {keys.admissible!r} lists no action in an episode that is not over")
        return Observation(text, image, listed)

    def _admissible(self, found: Any) -> tuple[str, ...]:
        """Convert names, or a mask over the named actions, to names."""
        listed = list(map(_scalar, found)) if isinstance(found, Iterable) and not isinstance(found, str) else [None]
        if self._actions and listed and len(listed) == len(self._actions) and all(map(_is_flag, listed)):
            return tuple(name for name, possible in zip(self._actions, listed, strict=True) if possible)
        if all(map(self._is_name, listed)):
            return tuple(map(str, listed))
        mask = f", or 0 and 1 for each of {len(self._actions)} actions" if self._actions else ""
        raise EnvironmentFailure(
            f"{self.name}: {self._keys.admissible!r} must list names of actions{mask}: received {reprlib.repr(found)}"
        )

    def _find(self, setting: str, *places: Any) -> Any:
        """Return the value of `keys.SETTING` in the first place that has it."""
        key = getattr(self._keys, setting)
        for place in places:
            if isinstance(place, Mapping) and key in place:
                return place[key]
        there = " and ".join(
            f"a dict with {', '.join(map(repr, place)) or 'no keys'}"
            if isinstance(place, Mapping)
            else f"a {type(place).__name__}"
            for place in places
        )
        raise EnvironmentFailure(f"{self.name}: it returned no {key!r} ({there}): set keys.{setting}")

    def _text(self, setting: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        key = getattr(self._keys, setting)
        raise EnvironmentFailure(f"{self.name}: {key!r} (keys.{setting}) is a {type(value).__name__}, not text")

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return name in self._actions if self._actions else bool(name.strip()) and name == without_newlines(name)

    def _flag(self, what: str, value: Any) -> bool:
        if _is_flag(value := _scalar(value)):
            return bool(value)
        raise EnvironmentFailure(f"{self.name}: {what} must be true or false, received {reprlib.repr(value)}")

    def _number(self, what: str, value: Any) -> float:
        if isinstance(value := _scalar(value), int | float) and math.isfinite(value):
            return float(value)
        raise EnvironmentFailure(f"{self.name}: {what} must be a finite number, received {reprlib.repr(value)}")


def _scalar(value: Any) -> Any:
    """Convert a NumPy or similar scalar to a Python value; return other values unchanged."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return value.item()
    return value


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Convert exceptions of the environment to EnvironmentFailure."""
    try:
        yield
    except Exception as error:
        raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error


def _picture(pixels: Any) -> "Image":
    import numpy as np
    from PIL import Image

    try:
        values = np.asarray(pixels)
        if values.dtype.kind not in "ui" or (values.size and not 0 <= values.min() <= values.max() <= 255):
            raise ValueError(f"values of type {values.dtype} instead of integers from 0 to 255")
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"not a picture of shape (height, width, 3): {error}") from error


class GymnasiumSettings(EnvSettings):
    """Settings of a Gymnasium environment."""

    name: Literal["gymnasium"] = "gymnasium"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name of the environment."""
    gymnasium: GymnasiumConfig
    """The Gymnasium environment, its splits and its keys."""

    @model_validator(mode="before")
    @classmethod
    def _has_its_block(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("gymnasium") is None:
            raise ValueError("environment gymnasium needs the block `gymnasium`: id, splits, goal, actions, keys")
        return value


GYMNASIUM = EnvSpec(
    "gymnasium",
    GymnasiumSettings,
    lambda settings: WorkerSpec(
        f"{__name__}:GymnasiumTextEnvironment", {"config": settings.gymnasium.model_dump(mode="json")}
    ),
    splits=lambda settings: Splits(evaluation=next(iter(settings.gymnasium.splits))),
    expert=False,
    packages=("gymnasium",),
    extra="gym",
    probes=lambda: [Probe("gymnasium", partial(imported_version, "gymnasium"), core=False)],
)
