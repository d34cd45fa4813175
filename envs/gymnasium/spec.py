"""Settings of Gymnasium's text environments and what the system knows of them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from envs.probe import Probe, imports
from envs.spec import EnvSettings, EnvSpec, Splits
from envs.worker_process import WorkerSpec
from runtime.settings import Settings


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
    lambda settings: WorkerSpec("envs.gymnasium.environment:from_settings", settings.gymnasium.model_dump(mode="json")),
    splits=lambda settings: Splits(evaluation=next(iter(settings.gymnasium.splits))),
    packages=("gymnasium",),
    extra="gym",
    probes=lambda: [Probe("gymnasium", partial(imports, "gymnasium"), core=False)],
)  # fmt: skip
