"""Which tasks there are: the simulator's own splits, and task files as AgentBoard and AgentSquare write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.base import Task
from envs.scienceworld.simulator import Simulator, require_package

FILE_SPLIT = "agentsquare"
OFFICIAL = ("train", "dev", "test")  # the simulator's own: 3,592, 1,796 and 1,819 variations

# A repetition without end of something that repeats without end takes a time exponential in the text's length.
RUNAWAY = re.compile(r"\([^()]*[*+}][^()]*\)\s*(?:[*+]|\{\d*,\})")


def kinds() -> list[str]:
    """List the names of the 30 task types, sorted."""
    require_package()
    from scienceworld.constants import ID2TASK

    return sorted(ID2TASK.values())


def official_tasks(simulator: Simulator, split: str) -> list[Task]:
    """List all variations of an official split, by task type and number. Ends the simulator's episode."""
    found = []
    for kind in kinds():
        numbers = simulator.variations(kind, split)
        goals = simulator.descriptions(kind, numbers)
        found += [make_task(kind, i, goal, split) for i, goal in zip(numbers, goals, strict=True)]
    return found


def file_tasks(path: Path) -> list[Task]:
    """Read the tasks of a JSONL file, in its order: goal, subgoals (regular expressions), difficulty and variation.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no such task, or a task listed twice; the message names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no ScienceWorld task file {path}: give an AgentSquare test.jsonl as tasks_file")
    tasks: dict[str, Task] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _file_task(json.loads(line))
            if task.id in tasks:
                raise ValueError(f"{task.id} is listed twice")
        except (ValueError, KeyError, TypeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}, line {number}: {what}") from None
        tasks[task.id] = task
    return list(tasks.values())


def _file_task(row: Mapping[str, object]) -> Task:
    where, subgoals = row["additional_info"], row["subgoals"]
    if not isinstance(where, Mapping) or not isinstance(subgoals, list) or not subgoals:
        raise ValueError("additional_info must be an object and subgoals a list that is not empty")
    kind = str(where["env_name"])
    if kind not in kinds():
        raise ValueError(f"unknown task type {kind!r}")
    patterns(subgoals)
    data = {"difficulty": str(row.get("difficulty", "")), "subgoals": json.dumps(subgoals)}
    return make_task(kind, int(where["var"]), str(row["goal"]), FILE_SPLIT, data)


def patterns(subgoals: Sequence[object]) -> list[re.Pattern[str]]:
    """Compile the subgoals; ValueError where one is no regular expression, or one that may take forever."""
    compiled = []
    for text in subgoals:
        if not isinstance(text, str):
            raise ValueError(f"subgoal {text!r} is not a text")
        if RUNAWAY.search(text):
            raise ValueError(f"subgoal {text!r} repeats a repetition, which may take forever: write it without")
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ValueError(f"subgoal {text!r} is no regular expression: {error}") from None
    return compiled


def make_task(kind: str, variation: int, goal: str, split: str, data: Mapping[str, str] | None = None) -> Task:
    """Make a task of a variation. No scene: all variations share one house, so its name would tell nothing apart."""
    return Task(
        id=f"{kind}/{variation}", goal=goal, scene="", split=split, kind=kind,
        data={"task": kind, "variation": str(variation), **(data or {})},
        isolation={"variation": (f"{kind}#{variation}",)},
    )  # fmt: skip
