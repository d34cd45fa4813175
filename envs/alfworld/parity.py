"""Compare the native engine with TextWorld on the same games and commands, and time both.

A walk is a game's stored walkthrough (or the expert's plan), then random possible and impossible commands. After every
command, text, admissible commands, `won` and all changing facts must be equal.
"""

import copy
import functools
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import mean
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

from envs.alfworld.environment import NO_TEXTWORLD, EngineOutput, StateFact, TextWorldGame
from envs.alfworld.games import load_game, opening
from envs.base import EnvironmentFailure, Task
from envs.household.engine import Command, Engine
from envs.household.environment import EngineEnvironment, Games
from envs.household.expert import plan
from envs.household.world import APPLIANCES, NOWHERE, Game, bits

T = TypeVar("T")
_APPLIANCES = frozenset(kind for kinds in APPLIANCES.values() for kind in kinds)
# Weights of drawn verbs; 2 for all others, which change the state.
_WEIGHT = {"go": 2.5, "look": 0.7, "examine": 0.7, "inventory": 0.2, "help": 0.05, "close": 1.0}
IMPOSSIBLE = 0.15  # share of a random walk's commands that are not admissible
NONSENSE = (
    "",
    "   ",
    "look around",
    "LOOK",
    "take",
    "go to",
    "go to nowhere 1",
    "help me",
    "open door 1",
    "examine",
    "use",
    "inventory 1",
    "put {o} in/on {r}",
    "%s",
    "наверх",
    "take a from b",
    "slice",
    "move",
    "x" * 300,
)


class NativeGame:
    """One game in the native engine, with the interface of `TextWorldGame`."""

    def __init__(self, game: Game) -> None:
        self.game, self._engine = game, Engine(game)
        self._state = self._engine.reset()
        self._commands: dict[str, Command] = {}

    def reset(self) -> EngineOutput:
        self._state = self._engine.reset()
        return self._seen(opening(self._engine))

    def step(self, command: str) -> EngineOutput:
        return self._seen(self._engine.step(self._state, command, self._commands))

    def plan(self) -> list[str] | None:
        return plan(self._engine, self._state)

    def _seen(self, text: str) -> EngineOutput:
        self._commands = self._engine.commands(self._state)
        return EngineOutput(text, tuple(sorted(self._commands)), self._engine.won(self._state), self._facts())

    def _facts(self) -> frozenset[StateFact]:
        state, items, places = self._state, self.game.items, self.game.receptacles
        facts = {
            ("in", items[i].name, place.name)
            for place, mask in zip(places, state.contents, strict=True)
            for i in bits(mask)
        }
        for name in ("hot", "cool", "clean", "sliced"):
            facts |= {(name, items[i].name) for i in bits(getattr(state, name))}
        facts |= {("on", items[i].name) for i in bits(state.toggled)}
        facts |= {("open", places[r].name) for r in bits(state.opened)}
        if state.held != NOWHERE:
            facts.add(("holds", items[state.held].name))
        return frozenset(facts)


@dataclass
class ParityReport:
    """The comparison of one or several games; `different` counts steps with any difference."""

    steps: int = 0
    different: int = 0
    differences: list[str] = field(default_factory=list)  # ready to print
    games: Counter[str] = field(default_factory=Counter)  # by "split/task type"
    verbs: Counter[str] = field(default_factory=Counter)

    def add(self, other: "ParityReport") -> None:
        self.steps += other.steps
        self.different += other.different
        self.differences += other.differences
        self.games += other.games
        self.verbs += other.verbs


def find_games(root: Path) -> list[Path]:
    """Find all `game.tw-pddl` below a folder, sorted by path. Raises: FileNotFoundError, if there are none."""
    games = sorted(root.rglob("game.tw-pddl"), key=lambda path: path.as_posix())
    if not games:
        raise FileNotFoundError(
            f"no game.tw-pddl below {root}: name an ALFWORLD_DATA folder, or one that `memcompiler env export` wrote"
        )
    return games


def kind_of(path: Path) -> str:
    """Return split and task type of a game, "train/pick_heat_then_place_in_recep", from its folders."""
    folders = path.parts
    return f"{folders[-4] if len(folders) > 3 else '.'}/{path.parent.parent.name.split('-')[0]}"


def choose_games(games: Sequence[Path], number: int, seed: int) -> list[Path]:
    """Choose games in a seeded order in which splits and task types alternate; repeat them if there are too few."""
    groups: dict[str, list[Path]] = {}
    for path in games:
        groups.setdefault(kind_of(path), []).append(path)
    for name, group in sorted(groups.items()):
        random.Random(f"{seed} {name}").shuffle(group)
    turns = zip_longest(*(group for _, group in sorted(groups.items())))
    return list(islice(cycle(path for turn in turns for path in turn if path is not None), number))


def compare(
    games: Sequence[Path], steps: int, seed: int, per_game: int = 400, jobs: int = 1, plain: bool = False
) -> Iterator[ParityReport]:
    """Compare `steps` steps, `per_game` in each game except the last; yield a report per game, in order.

    Args:
        jobs: processes.
        plain: use TextWorld unchanged instead of `memoised_textworld`, ten times slower.
    """
    lengths = [min(per_game, steps - done) for done in range(0, steps, per_game)]
    chosen = choose_games(games, len(lengths), seed)
    walks = [(path, seed + turn, length) for turn, (path, length) in enumerate(zip(chosen, lengths, strict=True))]
    play = functools.partial(_compare_game, plain=plain)
    if jobs == 1:
        yield from map(play, walks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(play, walks)


@contextmanager
def memoised_textworld() -> Iterator[None]:
    """Memoise TextWorld's parsers and copy its contexts shallowly, for speed."""
    try:
        from textworld.envs.pddl import textgen
        from textworld.logic import Rule
    except ImportError as error:
        raise EnvironmentFailure(f"{NO_TEXTWORLD} ({error})") from error
    original: Any = (textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query)
    parse = functools.lru_cache(maxsize=None)(original[0])
    textgen._parse_and_convert = lambda *words, **named: copy.deepcopy(parse(*words, **named))
    textgen.copy_context = lambda context: {
        **context,
        "variables": dict(context["variables"]),
        "mapping": dict(context["mapping"]),
    }
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(original[2])
    try:
        yield
    finally:
        textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query = original


def _compare_game(walk: tuple[Path, int, int], plain: bool) -> ParityReport:
    with nullcontext() if plain else memoised_textworld():
        return compare_game(*walk)


def compare_game(path: Path, seed: int, steps: int) -> ParityReport:
    """Play `steps` commands in both engines."""
    content = json.loads(path.read_text(encoding="utf-8"))
    theirs, ours = TextWorldGame(path), NativeGame(load_game(content))
    name, draw = "/".join(path.parts[-4:-1]), random.Random(f"{seed} {path.name}")
    report = ParityReport(games=Counter([kind_of(path)]))
    report.differences += _differences(f"{name}, step 0, '(reset)'", theirs.reset(), seen := ours.reset())
    report.different += bool(report.differences)
    commands = _walk(ours.game, content.get("walkthrough") or ours.plan() or [], draw)
    command = next(commands)
    for step in range(1, steps + 1):
        possible = command.strip() in seen.admissible
        expected, seen = theirs.step(command), ours.step(command)
        found = _differences(f"{name}, step {step}, {command!r}", expected, seen)
        report.different += bool(found)
        report.differences += found
        report.verbs[command.split()[0] if possible else "(refused)"] += 1
        command = commands.send(expected.admissible)
    theirs.close()
    report.steps = steps
    return report


def _walk(game: Game, walkthrough: Sequence[str], draw: random.Random) -> Generator[str, tuple[str, ...], None]:
    """Yield the commands of a walk; `send` the admissible commands after each."""
    admissible: tuple[str, ...] = ("look",)
    for command in walkthrough:
        admissible = yield command
    while True:
        admissible = yield (_impossible(game, draw) if draw.random() < IMPOSSIBLE else _possible(admissible, draw))


def _possible(admissible: Sequence[str], draw: random.Random) -> str:
    by_verb: dict[str, list[str]] = {}
    for command in admissible:
        by_verb.setdefault(command.split()[0], []).append(command)
    verbs = sorted(by_verb)
    verb = draw.choices(verbs, [_WEIGHT.get(verb, 2.0) for verb in verbs])[0]
    commands = by_verb[verb]
    if verb == "go" and draw.random() < 0.4:  # to an appliance for the held item
        commands = [command for command in commands if command.split()[2] in _APPLIANCES] or commands
    command = draw.choice(commands)
    return f"  {command}\n" if draw.random() < 0.02 else command


def _impossible(game: Game, draw: random.Random) -> str:
    """Draw a command that is rarely admissible: about random things, misspelt, or nonsense."""
    item, other = draw.choice(game.items).name, draw.choice(game.items).name
    place = draw.choice(game.receptacles).name
    formed = (
        f"take {item} from {place}",
        game.wording.put.format(o=item, r=place),
        f"open {place}",
        f"close {place}",
        f"go to {place}",
        f"heat {item} with {place}",
        f"cool {item} with {place}",
        f"clean {item} with {place}",
        f"slice {item} with {other}",
        f"use {item}",
        f"examine {item}",
        f"examine {place}",
        f"Go to {place}",
        f"go  to {place}",
        f"put {item} in {place}",
        f"take {item}",
    )
    return draw.choice(NONSENSE) if draw.random() < 0.2 else draw.choice(formed)


def _differences(where: str, theirs: EngineOutput, ours: EngineOutput) -> list[str]:
    """Describe the outputs in which the engines differ: text, admissible, won or facts."""
    found = []
    for what in ("text", "admissible", "won", "facts"):
        expected, got = getattr(theirs, what), getattr(ours, what)
        if expected != got:
            if what in ("admissible", "facts"):  # show only the set differences
                expected, got = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
            found.append(f"{where}: {what}\n  textworld: {expected!r}\n  native:    {got!r}")
    return found


# Timing ----------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Times of one engine, in seconds."""

    load: float  # read a game's file
    reset: float  # of a game in memory
    step: float  # including the list of admissible commands


def measure(paths: Sequence[Path], steps: int, seed: int) -> tuple[Timing, Timing]:
    """Time TextWorld and the native engine on the same commands, alternating by game; return the means."""
    theirs, ours = [], []
    for turn, path in enumerate(paths):
        commands, timing = _time_textworld(path, steps, random.Random(f"{seed} {turn}"))
        theirs.append(timing)
        ours.append(_time_native(path, commands))
    return Timing(*map(mean, zip(*theirs, strict=True))), Timing(*map(mean, zip(*ours, strict=True)))


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    started = perf_counter()
    made = call()
    return perf_counter() - started, made


def _load(path: Path) -> Game:
    return load_game(json.loads(path.read_text(encoding="utf-8")))


def _time_textworld(path: Path, steps: int, draw: random.Random) -> tuple[list[str], Timing]:
    load, game = _timed(lambda: TextWorldGame(path))
    reset, state = _timed(game._env.reset)
    commands, spent = [], 0.0
    for _ in range(steps):
        command = _possible(state["admissible_commands"], draw)
        commands.append(command)
        seconds, (state, _, _) = _timed(lambda command=command: game._env.step(command))
        spent += seconds
    game.close()
    return commands, Timing(load, reset, spent / steps)


def _time_native(path: Path, commands: Sequence[str], least: float = 0.2) -> Timing:
    """Time the environment class that agents use, for at least `least` seconds."""
    load, game = _timed(lambda: _load(path))
    env = EngineEnvironment(cast(Games, SimpleNamespace(game=lambda _: (game, None))), images=False)
    task = Task(path.parent.name, game.task, scene="", split="", kind=game.goal.kind)
    walks, resetting, stepping = 0, 0.0, 0.0
    while stepping < least:
        resetting += _timed(lambda: env.reset(task))[0]
        stepping += _timed(lambda: [env.step(command) for command in commands])[0]
        walks += 1
    return Timing(load, resetting / walks, stepping / (walks * len(commands)))


def by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
