"""The two episodes and the query by which memories of short items are checked by hand."""

from __future__ import annotations

from dataclasses import replace

from envs.base import Task
from envs.command_reader import CommandReader
from envs.household.command_reader import AlfworldReader
from memory.protocol import Record, Trace

SCENE = "FloorPlan1"
HEAT, CLEAN = "pick_heat_then_place_in_recep", "pick_clean_then_place_in_recep"
READER: CommandReader = AlfworldReader()


def episode(task: Task, commands: str, success: bool = True) -> Trace:
    """Return an attempt whose answers are those of ALFWorld."""
    actions = commands.split("; ")
    records = [Record(t, "", action, answer(action)) for t, action in enumerate(actions)]
    return Trace(task, tuple(records), success)


def answer(command: str) -> str:
    """Return ALFWorld's answer to a command that succeeds."""
    verb, _, rest = command.partition(" ")
    match verb:
        case "go":
            return f"You arrive at {rest.removeprefix('to ')}."
        case "take":
            return f"You pick up the {rest.replace(' from ', ' from the ')}."
        case "move":
            return f"You move the {rest.replace(' to ', ' to the ')}."
    return f"You {verb} the {rest.replace(' with ', ' using the ')}."


def task(name: str, goal: str, kind: str = HEAT, scene: str = SCENE) -> Task:
    return Task(name, goal, scene, "train", kind)


E1 = episode(
    task("t1", "put a hot mug in cabinet"),
    "go to countertop 2; take mug 1 from countertop 2; go to microwave 1; heat mug 1 with microwave 1; "
    "go to cabinet 3; move mug 1 to cabinet 3",
)
E2 = episode(
    task("t2", "put a clean mug in coffeemachine", CLEAN),
    "go to shelf 1; take mug 1 from shelf 1; go to sinkbasin 1; clean mug 1 with sinkbasin 1; "
    "go to coffeemachine 1; move mug 1 to coffeemachine 1",
)
T3 = task("t3", "put a hot mug in coffeemachine")


def like(trace: Trace, name: str, success: bool = True, scene: str = SCENE) -> Trace:
    """Return an episode with the same commands under another task."""
    return replace(trace, task=replace(trace.task, id=name, scene=scene), success=success)
