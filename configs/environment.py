"""Settings of the environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from runtime.settings import Settings

EMBODIED_BENCHES = ("eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation")


class GymnasiumSplit(Settings):
    """One task per seed."""

    seeds: tuple[int, ...] = Field(min_length=1)
    options: dict[str, Any] = Field(default={})  # for `reset`


class GymnasiumKeys(Settings):
    """Where the environment says what (in a dict observation or in info); null where it does not."""

    text: str = "text"
    image: str | None = None
    goal: str | None = None
    admissible: str | None = None
    progress: str | None = None
    success: str | None = None


class GymnasiumConfig(Settings):
    """Any text environment that `gymnasium.make` knows (extra `gym`)."""

    id: str
    splits: dict[str, GymnasiumSplit] = Field(min_length=1)
    goal: str = ""  # of every task, unless keys.goal says where each has its own
    actions: tuple[str, ...] = ()  # names of a Discrete space's actions
    keys: GymnasiumKeys = GymnasiumKeys()


class EnvConfig(Settings):
    """Which environment. `env: alfworld` is short for `env: {name: alfworld}`. docs/environments.md says what each
    needs; a setting of another environment is an error."""

    name: Literal[
        "household", "alfworld", "scienceworld", "eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation",
        "gymnasium",
    ] = "household"  # fmt: skip
    workers: int | None = Field(default=None, ge=0)  # processes that play; 0: this one (default: by environment)
    images: bool = True
    data_root: str | None = None  # alfworld: folder of json_2.1.1 (default: $ALFWORLD_DATA); EmbodiedBench: task files
    seed: int = 0  # household: another seed is another set of scenes
    # household: number of scenes by split
    scenes: dict[str, int] = Field(default={"train": 64, "valid": 48, "test": 48})
    visual_share: float = Field(default=0.5, ge=0, le=1)  # household: share of tasks that only the picture decides
    kinds: tuple[str, ...] | None = None  # household: task types (default: the four that fetch one thing)
    engine: Literal["native", "textworld"] = "native"  # alfworld: who plays the games
    simplifications: str = "easy"  # scienceworld: easy | agentboard | none, or the simulator's own names
    admissible: Literal["none", "templates", "valid"] = "none"  # scienceworld: which commands are listed
    tasks_file: str | None = None  # scienceworld: an AgentSquare task file, for split agentsquare
    step_limit: int = Field(default=100, ge=1)  # scienceworld: the simulator's own limit
    python: str | None = None  # EmbodiedBench: its interpreter (default: $EMBODIEDBENCH_PYTHON and the like)
    home: str | None = None  # EmbodiedBench: its checkout (default: $EMBODIEDBENCH_HOME)
    resolution: int = Field(default=500, ge=64)  # EmbodiedBench: side of the picture, pixels
    gymnasium: GymnasiumConfig | None = None

    @model_validator(mode="after")
    def _belong(self) -> EnvConfig:
        strangers = [
            f"{key} (of {', '.join(names)})"
            for key, names in _OF_ENVIRONMENT.items()
            if key in self.model_fields_set and self.name not in names and getattr(self, key) != _default(self, key)
        ]
        if strangers:
            raise ValueError(f"environment {self.name} has no setting {'; '.join(strangers)}")
        if self.name == "gymnasium" and self.gymnasium is None:
            raise ValueError("environment gymnasium needs the block `gymnasium`: id, splits, goal, actions, keys")
        if self.name in EMBODIED_BENCHES and self.workers == 0:
            raise ValueError(f"{self.name} plays in a Python of its own: workers must be at least 1")
        return self


# Settings that only some environments have.
_OF_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "data_root": ("alfworld", *EMBODIED_BENCHES),
    **dict.fromkeys(("scenes", "visual_share", "kinds"), ("household",)),
    "engine": ("alfworld",),
    **dict.fromkeys(("simplifications", "admissible", "tasks_file", "step_limit"), ("scienceworld",)),
    **dict.fromkeys(("python", "home", "resolution"), EMBODIED_BENCHES),
    "gymnasium": ("gymnasium",),
}


def _default(settings: Settings, key: str) -> object:
    return type(settings).model_fields[key].default
