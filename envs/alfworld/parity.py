"""Both engines side by side: the same games and commands, every answer compared, and both timed.

A walk is a game's stored walkthrough (or the expert's plan), then random commands from wherever that ends: possible
ones, with the verb drawn first so that heating or slicing are not drowned by the many ways to walk, and impossible or
nonsensical ones. After every command text, admissible commands, `won` and all changing facts must be equal.
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

from envs.alfworld.environment import NO_TEXTWORLD, Fact, Seen, TextWorldGame
from envs.alfworld.games import load_game, opening
from envs.base import EnvironmentFailure, Task
from envs.household.engine import Command, Engine
from envs.household.environment import EngineEnvironment, Games
from envs.household.expert import plan
from envs.household.world import APPLIANCES, NOWHERE, Game, bits

T = TypeVar("T")
_APPLIANCES = frozenset(kind for kinds in APPLIANCES.values() for kind in kinds)
# How often a verb is drawn, against 2 for those that change something (all but walking and looking).
_WEIGHT = {"go": 2.5, "look": 0.7, "examine": 0.7, "inventory": 0.2, "help": 0.05, "close": 1.0}
IMPOSSIBLE = 0.15  # share of a random walk's commands that are not in the list
GARBAGE = (
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
    """One game in the native engine, showing what `TextWorldGame` shows."""

    def __init__(self, game: Game) -> None:
        self.game, self._engine = game, Engine(game)
        self._state = self._engine.reset()
        self._commands: dict[str, Command] = {}

    def reset(self) -> Seen:
        self._state = self._engine.reset()
        return self._seen(opening(self._engine))

    def step(self, command: str) -> Seen:
        return self._seen(self._engine.step(self._state, command, self._commands))

    def plan(self) -> list[str] | None:
        return plan(self._engine, self._state)

    def _seen(self, text: str) -> Seen:
        self._commands = self._engine.commands(self._state)
        return Seen(text, tuple(sorted(self._commands)), self._engine.won(self._state), self._facts())

    def _facts(self) -> frozenset[Fact]:
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
class Compared:
    """What was compared, over one game or many. `different` counts steps, of which one may show several differences."""

    steps: int = 0
    different: int = 0
    differences: list[str] = field(default_factory=list)  # ready to print
    games: Counter[str] = field(default_factory=Counter)  # by "split/task type"
    verbs: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Compared") -> None:
        self.steps += other.steps
        self.different += other.different
        self.differences += other.differences
        self.games += other.games
        self.verbs += other.verbs


def find_games(root: Path) -> list[Path]:
    """Find all `game.tw-pddl` below a folder, sorted by path; FileNotFoundError where there is none."""
    games = sorted(root.rglob("game.tw-pddl"), key=lambda path: path.as_posix())
    if not games:
        raise FileNotFoundError(
            f"no game.tw-pddl below {root}: give an ALFWORLD_DATA folder, or one that "
            "`memcompiler env export` has written"
        )
    return games


def kind_of(path: Path) -> str:
    """Return split and task type of a game, "train/pick_heat_then_place_in_recep", from its folders."""
    folders = path.parts
    return f"{folders[-4] if len(folders) > 3 else '.'}/{path.parent.parent.name.split('-')[0]}"


def choose_games(games: Sequence[Path], number: int, seed: int) -> list[Path]:
    """Choose games in a seeded order in which every split and task type comes up in turn; repeated when too few."""
    groups: dict[str, list[Path]] = {}
    for path in games:
        groups.setdefault(kind_of(path), []).append(path)
    for name, group in sorted(groups.items()):
        random.Random(f"{seed} {name}").shuffle(group)
    turns = zip_longest(*(group for _, group in sorted(groups.items())))
    return list(islice(cycle(path for turn in turns for path in turn if path is not None), number))


def compare(
    games: Sequence[Path], steps: int, seed: int, per_game: int = 400, jobs: int = 1, plain: bool = False
) -> Iterator[Compared]:
    """Compare `steps` steps, `per_game` in each game but the last; yields game by game, in order.

    Args:
        jobs: processes.
        plain: TextWorld untouched instead of `quickened`, ten times slower.
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
def quickened() -> Iterator[None]:
    """TextWorld with its parsers memoised and its contexts copied flat (nothing in it changes what they hold)."""
    try:
        from textworld.envs.pddl import textgen
        from textworld.logic import Rule
    except ImportError as error:
        raise EnvironmentFailure(f"{NO_TEXTWORLD} ({error})") from error
    kept: Any = (textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query)
    parse = functools.lru_cache(maxsize=None)(kept[0])
    textgen._parse_and_convert = lambda *words, **named: copy.deepcopy(parse(*words, **named))
    textgen.copy_context = lambda context: {
        **context,
        "variables": dict(context["variables"]),
        "mapping": dict(context["mapping"]),
    }
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(kept[2])
    try:
        yield
    finally:
        textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query = kept


def _compare_game(walk: tuple[Path, int, int], plain: bool) -> Compared:
    with nullcontext() if plain else quickened():
        return compare_game(*walk)


def compare_game(path: Path, seed: int, steps: int) -> Compared:
    """Walk `steps` commands through both engines."""
    content = json.loads(path.read_text(encoding="utf-8"))
    theirs, ours = TextWorldGame(path), NativeGame(load_game(content))
    name, draw = "/".join(path.parts[-4:-1]), random.Random(f"{seed} {path.name}")
    compared = Compared(games=Counter([kind_of(path)]))
    compared.differences += _differences(f"{name}, step 0, '(reset)'", theirs.reset(), seen := ours.reset())
    compared.different += bool(compared.differences)
    commands = _walk(ours.game, content.get("walkthrough") or ours.plan() or [], draw)
    command = next(commands)
    for step in range(1, steps + 1):
        possible = command.strip() in seen.admissible
        expected, seen = theirs.step(command), ours.step(command)
        found = _differences(f"{name}, step {step}, {command!r}", expected, seen)
        compared.different += bool(found)
        compared.differences += found
        compared.verbs[command.split()[0] if possible else "(refused)"] += 1
        command = commands.send(expected.admissible)
    theirs.close()
    compared.steps = steps
    return compared


def _walk(game: Game, walkthrough: Sequence[str], draw: random.Random) -> Generator[str, tuple[str, ...], None]:
    """Yield the commands of one walk; `send` it the commands that are admissible after each."""
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
    if verb == "go" and draw.random() < 0.4:  # where something can be done to what is in hand
        commands = [command for command in commands if command.split()[2] in _APPLIANCES] or commands
    command = draw.choice(commands)
    return f"  {command}\n" if draw.random() < 0.02 else command


def _impossible(game: Game, draw: random.Random) -> str:
    """Draw a command that is rarely in the list: well formed about random things, misspelt, or nonsense."""
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
    return draw.choice(GARBAGE) if draw.random() < 0.2 else draw.choice(formed)


def _differences(where: str, theirs: Seen, ours: Seen) -> list[str]:
    """Describe the answers in which the engines differ: text, admissible, won or facts."""
    found = []
    for what in ("text", "admissible", "won", "facts"):
        expected, got = getattr(theirs, what), getattr(ours, what)
        if expected != got:
            if what in ("admissible", "facts"):  # only what one of them lacks
                expected, got = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
            found.append(f"{where}: {what}\n  textworld: {expected!r}\n  native:    {got!r}")
    return found


# Time ------------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Of one engine. Seconds."""

    load: float  # reading a game's file, per game
    reset: float  # once the file is read
    step: float  # with the list of admissible commands


def measure(paths: Sequence[Path], steps: int, seed: int) -> tuple[Timing, Timing]:
    """Time TextWorld as it is and the native engine, game by game in turn, on the same commands; returns the means."""
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
    """Time the very class that agents use, over and over for `least` seconds: one walk is too short."""
    load, game = _timed(lambda: _load(path))
    env = EngineEnvironment(cast(Games, SimpleNamespace(game=lambda _: (game, None))), images=False, image_size=64)
    task = Task(path.parent.name, game.task, "", "", game.goal.kind)
    walks, resetting, stepping = 0, 0.0, 0.0
    while stepping < least:
        resetting += _timed(lambda: env.reset(task))[0]
        stepping += _timed(lambda: [env.step(command) for command in commands])[0]
        walks += 1
    return Timing(load, resetting / walks, stepping / (walks * len(commands)))


def live_memory(paths: Sequence[Path]) -> float:
    """Return the MiB that these games take while all are played natively (allocations, as Python counts them)."""
    import tracemalloc

    tracemalloc.start()
    try:
        games = [NativeGame(_load(path)) for path in paths]
        for game in games:
            for command in game.reset().admissible:
                game.step(command)
        return tracemalloc.get_traced_memory()[0] / 2**20
    finally:
        tracemalloc.stop()


def by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
