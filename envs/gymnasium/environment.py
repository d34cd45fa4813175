"""Any Gymnasium environment that speaks text, as an `Environment` (extra `gym`); its settings and spec.

Observations are strings, or dicts in which one key holds the text (and another, if there is one, a picture). Actions
are strings (a Text space) or a Discrete space whose actions have names. A task is one seed: the same seed and options
are the same episode, so that is what training and evaluation must not share.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.spec import EnvSettings, EnvSpec, Probe, Splits, WorkerSpec, imports
from runtime.settings import Settings

if TYPE_CHECKING:
    import gymnasium
    from PIL.Image import Image


class GymnasiumSplit(Settings):
    """One task per seed, each reset with the same options."""

    seeds: tuple[int, ...] = Field(min_length=1)
    options: dict[str, Any] = Field(default={})  # for `reset`


class GymnasiumKeys(Settings):
    """Where an environment says what; null where it does not."""

    text: str = "text"  # in a dict observation
    image: str | None = None  # in a dict observation: uint8, (height, width, 3) or (height, width)
    goal: str | None = None  # in a dict observation or in info; read once per task by a reset
    admissible: str | None = None  # in info: names, or a 0/1 mask over a Discrete space (in a dict observation too)
    progress: str | None = None  # in info: share of goal conditions met
    success: str | None = None  # in info; without it, success is to terminate with a positive reward


class GymnasiumConfig(Settings):
    """Any text environment that `gymnasium.make` knows (extra `gym`)."""

    id: str
    splits: dict[str, GymnasiumSplit] = Field(min_length=1)
    goal: str = ""  # of every task, unless keys.goal says where each has its own
    actions: tuple[str, ...] = ()  # names of a Discrete space's actions, in the order of their numbers
    keys: GymnasiumKeys = GymnasiumKeys()


class GymnasiumTextEnvironment:
    """A Gymnasium text environment behind the contract of `envs.base.Environment`.

    An action without meaning here never reaches the environment: the answer says so, and the episode goes on. Whatever
    the environment itself raises is an `EnvironmentFailure`.

    Args:
        config: `GymnasiumConfig`, or its fields as JSON values.
        make: makes the environment, where `gymnasium.make` does not know its id.

    Raises:
        ValueError: no goal.
    """

    def __init__(
        self, config: GymnasiumConfig | Mapping[str, Any], make: "Callable[[], gymnasium.Env] | None" = None
    ) -> None:
        self._config, self._make = GymnasiumConfig.model_validate(config), make
        self.name, self._keys, self._actions = self._config.id, self._config.keys, self._config.actions
        if not self._config.goal and self._keys.goal is None:
            raise ValueError("an agent needs a goal: give goal, or name the key that holds it (keys.goal)")
        self._env: gymnasium.Env | None = None
        self._live: Transition | None = None

    def tasks(self, split: str) -> list[Task]:
        """List one task per seed, in the order of the seeds; ValueError for no such split, or a seed named twice."""
        if (episodes := self._config.splits.get(split)) is None:
            raise ValueError(f"no split {split!r}; there are {', '.join(self._config.splits)}")
        if len(set(episodes.seeds)) < len(episodes.seeds):
            raise ValueError(f"split {split!r} names a seed twice")
        options = json.dumps(episodes.options, sort_keys=True)
        return [self._task(split, seed, options) for seed in episodes.seeds]

    def reset(self, task: Task) -> Observation:
        """Start the task's episode."""
        observation, info = self._reset(int(task.data["seed"]), task.data["options"])
        self._live = Transition(self._observe(observation, info), 0.0, False, False)
        return self._live.observation

    def step(self, action: str) -> Transition:
        """Carry out one action, by its text or its name."""
        if self._live is None or self._live.done:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        env = self._opened()
        if self._actions:
            meant = self._actions.index(action) if action in self._actions else None
        else:
            meant = action if env.action_space.contains(action) else None
        if meant is None:
            told = replace(self._live.observation, text=f"{action!r} is not an action here.")
            self._live = replace(self._live, observation=told)
            return self._live
        with _failures(self.name):
            observation, reward, terminated, truncated, info = env.step(meant)
        keys = self._keys
        success = bool(info.get(keys.success)) if keys.success else bool(terminated and float(reward) > 0)
        progress = min(max(float(info.get(keys.progress, 0.0)), 0.0), 1.0) if keys.progress else 0.0
        done = bool(terminated or truncated or success)
        self._live = Transition(self._observe(observation, info), 1.0 if success else progress, success, done)
        return self._live

    def expert(self) -> list[str] | None:
        return None  # Gymnasium has no notion of one

    def close(self) -> None:
        """Close the environment; `reset` makes a new one."""
        env, self._env, self._live = self._env, None, None
        if env is not None:
            with _failures(self.name):
                env.close()

    def _opened(self) -> "gymnasium.Env":
        """Make the environment at first use, and check that its actions are text or a Discrete space with names."""
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
            if n is not None and (len(self._actions) != n or len(set(self._actions)) != n):
                raise EnvironmentFailure(
                    f"{self.name} has {n} actions: give {n} different names (actions=...), not {len(self._actions)}"
                )
            self._env = env
        return self._env

    def _task(self, split: str, seed: int, options: str) -> Task:
        goal = self._config.goal
        if self._keys.goal is not None:
            observation, info = self._reset(seed, options)
            goal = str(self._find(self._keys.goal, observation, info))
            self._live = None
        return Task(
            f"{split}/{seed}", goal, "", split, self.name, data={"seed": str(seed), "options": options},
            isolation={"episode": (f"{seed} {options}",)},
        )  # fmt: skip

    def _reset(self, seed: int, options: str) -> tuple[Any, Mapping[str, Any]]:
        env = self._opened()
        with _failures(self.name):
            return env.reset(seed=seed, options=json.loads(options) or None)

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        keys = self._keys
        text = observation if isinstance(observation, str) else self._find(keys.text, observation)
        if not isinstance(text, str):
            told = f"the observation's {keys.text!r} is a {type(text).__name__}, not text"
            raise EnvironmentFailure(f"{self.name}: {told}")
        image = None if keys.image is None else _picture(self._find(keys.image, observation))
        if keys.admissible is None:
            return Observation(text, image, self._actions or None)
        listed = list(self._find(keys.admissible, info, observation))
        if not all(isinstance(name, str) for name in listed):  # a mask
            listed = [name for name, possible in zip(self._actions, listed, strict=True) if possible]
        return Observation(text, image, tuple(listed))

    def _find(self, key: str, *places: Any) -> Any:
        for place in places:
            if isinstance(place, Mapping) and key in place:
                return place[key]
        kinds = " and ".join(type(place).__name__ for place in places)
        raise EnvironmentFailure(f"{self.name}: no {key!r} in what it returned ({kinds}); set keys")


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Fail the episode, never the run, by whatever somebody else's environment raises."""
    try:
        yield
    except Exception as error:
        raise EnvironmentFailure(f"{name}: {type(error).__name__}: {error}") from error


def _picture(pixels: Any) -> "Image":
    import numpy as np
    from PIL import Image

    try:
        return Image.fromarray(np.asarray(pixels, dtype=np.uint8)).convert("RGB")
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"not a picture of shape (height, width, 3): {error}") from error


class GymnasiumSettings(EnvSettings):
    name: Literal["gymnasium"] = "gymnasium"  # pyright: ignore[reportIncompatibleVariableOverride]
    gymnasium: GymnasiumConfig

    @model_validator(mode="before")
    @classmethod
    def _has_its_block(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("gymnasium") is None:
            raise ValueError("environment gymnasium needs the block `gymnasium`: id, splits, goal, actions, keys")
        return value


GYMNASIUM = EnvSpec(
    "gymnasium", GymnasiumSettings,
    lambda settings: WorkerSpec(
        f"{__name__}:GymnasiumTextEnvironment", {"config": settings.gymnasium.model_dump(mode="json")}
    ),
    splits=lambda settings: Splits(evaluation=next(iter(settings.gymnasium.splits))),
    expert=False,
    packages=("gymnasium",),
    extra="gym",
    probes=lambda: [Probe("gymnasium", partial(imports, "gymnasium"), core=False)],
)  # fmt: skip
