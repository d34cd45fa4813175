"""The household's settings and what the system knows of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envs.probe import Probe
from envs.spec import EnvSettings, EnvSpec, Splits
from envs.worker_process import WorkerSpec

INSTRUCTIONS = """You are an agent in a household. Each turn you see where you are and what is there. Answer with \
exactly one command and nothing else, for example: go to shelf 1, open drawer 2, take mug 1 from shelf 1, move mug 1 \
to desk 1, heat mug 1 with microwave 1, clean mug 1 with sinkbasin 1, cool mug 1 with fridge 1, use desklamp 1."""
REFUSED = "Nothing happens"


class HouseholdSettings(EnvSettings):
    name: Literal["household"] = "household"  # pyright: ignore[reportIncompatibleVariableOverride]
    scenes: dict[str, int] = Field(default={"train": 64, "valid": 48, "test": 48})  # number of scenes by split
    visual_share: float = Field(default=0.5, ge=0, le=1)  # share of tasks that only the picture decides
    kinds: tuple[str, ...] | None = None  # task types (default: the four that fetch one thing)


def _construct(settings: HouseholdSettings) -> WorkerSpec:
    arguments = settings.model_dump(include={"seed", "scenes", "images", "visual_share"})
    if settings.kinds is not None:
        arguments["kinds"] = list(settings.kinds)
    return WorkerSpec("envs.household.environment:HouseholdEnvironment", arguments)


def play_a_step() -> str:
    """Start an episode in a generated scene and make one step."""
    from envs.household.environment import HouseholdEnvironment

    env = HouseholdEnvironment(scenes={"train": 1})
    task = env.tasks("train")[0]
    commands = env.reset(task).admissible
    if not commands:
        raise RuntimeError("no admissible commands after reset")
    env.step(commands[0])
    return f"reset and step in {task.scene}"


HOUSEHOLD = EnvSpec(
    "household", HouseholdSettings, _construct,
    splits=lambda _: Splits("test", held_out=("test",), experience=lambda split: f"{split}_experience"),
    isolation={"scene": "disjoint"},
    sources=("envs.household",),
    probes=lambda: [Probe("built-in engine", play_a_step, "make test ARGS=tests/envs")],
    refusals=(REFUSED,),
    instructions=INSTRUCTIONS,
)  # fmt: skip
