"""ALFWorld's games, played by the household engine or, as a reference, by TextWorld; settings and spec."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import model_validator

from envs.alfworld.games import FOLDER, AlfworldGames, WordingName
from envs.alfworld.prompts import COMPILING, INSTRUCTIONS, before_0_4
from envs.base import EnvironmentFailure, Observation, Task, Transition
from envs.household.command_reader import AlfworldReader
from envs.household.environment import REFUSED, EngineEnvironment, pickup_views
from envs.household.sequences import SequenceSettings
from envs.spec import EnvSettings, EnvSpec, NotInstalled, Probe, Splits, WorkerSpec, imported_version, install_command
from runtime.settings import PathName
from runtime.startup import expand_home, home

NO_TEXTWORLD = "TextWorld is not installed: uv sync --extra alfworld"
TEXTWORLD_WORKERS = 4  # TextWorld takes seconds to start and 50 ms per step

# Predicate in TextWorld's state -> its name in `EngineOutput.facts`. Other predicates are constant or show in other
# fields.
CHANGING_PREDICATES = {
    "inreceptacle": "in",
    "holds": "holds",
    "opened": "open",
    "ishot": "hot",
    "iscool": "cool",
    "isclean": "clean",
    "issliced": "sliced",
    "istoggled": "on",
}

StateFact = tuple[str, ...]  # ("in", "mug 1", "cabinet 3"), ("hot", "mug 1")


class AlfworldEnvironment(EngineEnvironment):
    """Real games below `data_root` (default: $ALFWORLD_DATA) in the native engine."""

    name = "alfworld"

    def __init__(
        self,
        data_root: str | os.PathLike[str] | None = None,
        images: bool = True,
        seed: int = 0,
        sequences: Mapping[str, Any] | None = None,
        wording: WordingName = "game",
        notes_places: bool = False,
    ) -> None:
        self._folder = AlfworldGames(data_root, wording)
        super().__init__(self._folder, images, seed, sequences, notes_places)

    def game_file(self, task: Task) -> Path:
        return self._folder.path(task)


class TextWorldEnvironment(AlfworldEnvironment):
    """Real (or exported) games in TextWorld: seconds per reset and about 50 ms per step. Needs the extra `alfworld`.

    Texts, admissible commands and wins are TextWorld's; progress, picture and expert come from a native game that
    receives the same commands. An episode fails if the two disagree on a win.
    """

    _theirs: "TextWorldGame | None" = None

    def reset(self, task: Task) -> Observation:
        """Start the task's episode and describe the room, as the native engine does."""
        self.close()
        ours = super().reset(task)
        self._theirs = TextWorldGame(self.game_file(task))
        seen = self._theirs.reset()
        try:
            _, room, _ = seen.text.split("\n\n")  # a banner, the room, the task
        except ValueError:
            raise EnvironmentFailure(
                f"TextWorld's opening of {task.id} is not banner, room and task: {seen.text!r}"
            ) from None
        return replace(ours, text=room, admissible=seen.admissible)

    def sequences(self, split: str) -> NoReturn:
        """Raise EnvironmentFailure, since TextWorld plays one task per world."""
        raise EnvironmentFailure("TextWorld plays one task per world: for sequences, set env.engine=native")

    def proceed(self, task: Task) -> NoReturn:
        """Raise EnvironmentFailure, as `sequences`."""
        self.sequences(task.split)

    def step(self, action: str) -> Transition:
        """Carry out one command."""
        if self._theirs is None:
            raise EnvironmentFailure("no live episode: call reset(task) first")
        ours, seen = super().step(action), self._theirs.step(action)
        if seen.won != ours.success:
            raise EnvironmentFailure(
                f"after {action!r} TextWorld reports won={seen.won} and the native engine "
                f"{ours.success}: please report this game"
            )
        observation = replace(ours.observation, text=seen.text, admissible=seen.admissible)
        return Transition(observation, ours.progress, seen.won, done=seen.won)

    def close(self) -> None:
        """Drop the episode, here and in TextWorld."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
        super().close()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """An engine's output after a command."""

    text: str
    admissible: tuple[str, ...]
    won: bool
    facts: frozenset[StateFact]


class TextWorldGame:
    """One game in TextWorld, with alfworld's names of things. Raises: EnvironmentFailure, if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise EnvironmentFailure(f"{NO_TEXTWORLD} ({error})") from error
        self._env: Any = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True))))
        try:
            with _restored_argv():
                self._env.load(str(path))
        except Exception as error:  # TextWorld and its planner raise various exceptions
            raise EnvironmentFailure(f"TextWorld cannot load {path}: {type(error).__name__}: {error}") from error

    def reset(self) -> EngineOutput:
        """Start the game; the text has TextWorld's banner and the task sentence."""
        with _restored_argv():
            return self._seen(self._env.reset())

    def step(self, command: str) -> EngineOutput:
        return self._seen(self._env.step(command)[0])

    def close(self) -> None:
        self._env.close()

    def _seen(self, state: Mapping[str, Any]) -> EngineOutput:
        names = {id_: info.name for id_, info in state["_entity_infos"].items()}
        facts = frozenset(
            (name, *(names[a.name] for a in fact.arguments[-2 if fact.name == "inreceptacle" else -1 :]))
            for fact in state["_facts"]
            if (name := CHANGING_PREDICATES.get(fact.name))
        )
        return EngineOutput(state["feedback"], tuple(state["admissible_commands"]), bool(state["won"]), facts)


@contextmanager
def _restored_argv() -> Iterator[None]:
    """Restore sys.argv, into which TextWorld's planner writes its own command line."""
    saved = sys.argv[:]
    try:
        yield
    finally:
        sys.argv[:] = saved


class AlfworldSettings(EnvSettings):
    """Settings of real ALFWorld games."""

    name: Literal["alfworld"] = "alfworld"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name of the environment."""
    HOW = EnvSettings.HOW | {"data_root"}
    data_root: PathName | None = None
    """Folder that holds json_2.1.1; null: $ALFWORLD_DATA."""
    engine: Literal["native", "textworld"] = "native"
    """Engine that plays the games: the household engine, or TextWorld (extra `alfworld`)."""
    images: bool = False
    """Observations have floor plans, drawn by the household engine; the games have no view."""
    wording: WordingName = "game"
    """Words of commands and answers: each game's own, alfworld 0.4's (`move mug 1 to desk 1`), or those before 0.4
    (`put mug 1 in/on desk 1`), which older papers and few-shot examples have."""
    notes_places: bool = False
    """The environment notes the first place of each kind, the first of each that was not searched yet, and what is in
    hand."""
    sequences: SequenceSettings = SequenceSettings()
    """Consecutive tasks in one game's world, for memory.protocol living."""

    @model_validator(mode="after")
    def _only_natively_reworded(self) -> Self:
        if self.engine == "textworld" and self.wording != "game":
            raise ValueError(
                f"TextWorld plays games as their files say: env.wording={self.wording} needs engine=native"
            )
        return self


def _construct(settings: AlfworldSettings) -> WorkerSpec:
    root = str(Path(settings.data_root).resolve()) if settings.data_root else None
    name = "TextWorldEnvironment" if settings.engine == "textworld" else "AlfworldEnvironment"
    arguments = settings.model_dump(include={"images", "seed", "sequences", "wording", "notes_places"})
    return WorkerSpec(f"{__name__}:{name}", {"data_root": root, **arguments})


def _instructions(settings: AlfworldSettings, text: str) -> str:
    return before_0_4(text) if settings.wording == "before_0_4" else text


def find_games() -> str:
    """Find real games below $ALFWORLD_DATA; return their splits. Raises: NotInstalled."""
    named = os.environ.get("ALFWORLD_DATA")
    folder = Path(expand_home(named)) if named else _default_games()
    splits = [split.name for split in sorted((folder / FOLDER).glob("*")) if any(split.rglob("game.tw-pddl"))]
    if not named:
        raise NotInstalled("ALFWORLD_DATA is not set" + (" (games are in the default folder)" if splits else ""))
    if not folder.is_dir():
        raise NotInstalled("ALFWORLD_DATA names a folder that does not exist")
    if not splits:
        raise NotInstalled(f"no game.tw-pddl below $ALFWORLD_DATA/{FOLDER}")
    return f"splits: {', '.join(splits)}"


def fetch_games() -> str:
    """Return the command that downloads the games, or that sets ALFWORLD_DATA to downloaded ones."""
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder and (_default_games() / FOLDER).is_dir():
        return 'export ALFWORLD_DATA="$HOME/.cache/alfworld"'
    target = shlex.quote(os.path.expanduser(folder)) if folder else '"$HOME/.cache/alfworld"'
    export = "" if folder else f" && export ALFWORLD_DATA={target}"
    return f"{install_command('alfworld')} && .venv/bin/alfworld-download --data-dir {target}{export}"


def _default_games() -> Path:
    return home() / ".cache" / "alfworld"  # where alfworld-download puts them


ALFWORLD = EnvSpec(
    "alfworld",
    AlfworldSettings,
    _construct,
    splits=lambda _: Splits("valid_seen", held_out=("valid_unseen",)),  # experience: all of train
    workers=lambda settings: TEXTWORLD_WORKERS if settings.engine == "textworld" else 0,
    isolation={"gamefile": "disjoint", "scene": "disjoint"},
    packages=("alfworld", "textworld"),
    sources=("envs.household", "envs.alfworld"),
    extra="alfworld",
    probes=lambda: [
        Probe("ALFWorld games", find_games, fetch_games(), core=False),
        Probe("alfworld", partial(imported_version, "textworld", "alfworld"), core=False),
    ],
    refusals=(REFUSED,),
    instructions=INSTRUCTIONS,
    compiler_instructions=COMPILING,
    reworded=_instructions,
    views=pickup_views,
    reader=AlfworldReader(),
)
