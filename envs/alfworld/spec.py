"""ALFWorld's settings and what the system knows of it."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Literal

from envs.household.spec import INSTRUCTIONS, REFUSED
from envs.probe import Missing, Probe, imports, sync
from envs.spec import EnvSettings, EnvSpec, Splits
from envs.worker_process import WorkerSpec

TEXTWORLD_WORKERS = 4  # it takes seconds to start and 50 ms a step


class AlfworldSettings(EnvSettings):
    name: Literal["alfworld"] = "alfworld"  # pyright: ignore[reportIncompatibleVariableOverride]
    data_root: str | None = None  # folder of json_2.1.1 (default: $ALFWORLD_DATA)
    engine: Literal["native", "textworld"] = "native"  # who plays the games


def _construct(settings: AlfworldSettings) -> WorkerSpec:
    root = str(Path(settings.data_root).expanduser().resolve()) if settings.data_root else None
    name = "TextWorldEnvironment" if settings.engine == "textworld" else "AlfworldEnvironment"
    return WorkerSpec(f"envs.alfworld.environment:{name}", {"data_root": root, "images": settings.images})


def find_games() -> str:
    """Look for real games below $ALFWORLD_DATA; the household engine plays them without the alfworld package."""
    named = os.environ.get("ALFWORLD_DATA")
    folder = Path(named) if named else _default_games()
    splits = [split.name for split in sorted((folder / "json_2.1.1").glob("*")) if _holds_game(split)]
    if not named:
        raise Missing("ALFWORLD_DATA is not set" + (" (games are in the default folder)" if splits else ""))
    if not folder.is_dir():
        raise Missing("ALFWORLD_DATA names a folder that does not exist")
    if not splits:
        raise Missing("no game.tw-pddl below $ALFWORLD_DATA/json_2.1.1")
    return f"splits: {', '.join(splits)}"


def fetch_games() -> str:
    """Return the command that downloads the games, or that names the folder where they are."""
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder and (_default_games() / "json_2.1.1").is_dir():
        return 'export ALFWORLD_DATA="$HOME/.cache/alfworld"'
    target = shlex.quote(folder) if folder else '"$HOME/.cache/alfworld"'
    export = "" if folder else f" && export ALFWORLD_DATA={target}"
    return f"{sync('alfworld')} && .venv/bin/alfworld-download --data-dir {target}{export}"


def _default_games() -> Path:
    return Path.home() / ".cache" / "alfworld"  # where alfworld-download puts them


def _holds_game(split: Path) -> bool:
    return any("game.tw-pddl" in files for _, _, files in os.walk(split))


ALFWORLD = EnvSpec(
    "alfworld", AlfworldSettings, _construct,
    splits=lambda _: Splits("valid_seen", held_out=("valid_unseen",)),
    workers=lambda settings: TEXTWORLD_WORKERS if settings.engine == "textworld" else 0,
    isolation={"gamefile": "disjoint", "scene": "disjoint"},
    packages=("alfworld", "textworld"),
    sources=("envs.household", "envs.alfworld"),
    extra="alfworld",
    probes=lambda: [
        Probe("ALFWorld games", find_games, fetch_games(), core=False),
        Probe("alfworld", partial(imports, "textworld", "alfworld"), core=False),
    ],
    refusals=(REFUSED,),
    instructions=INSTRUCTIONS,
)  # fmt: skip
