"""Real ALFWorld games: `game.tw-pddl` files and their folder.

A game file supplies the problem (places, things, goal) and the phrases of its grammar; `engine.py` implements the
rules, which are the same in every release.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from envs.base import EnvironmentFailure, Position, Task
from envs.household import world
from envs.household.engine import Engine
from envs.household.sequences import with_goal
from envs.household.world import KINDS, LOOK, NOWHERE, Game, Goal, Item, Receptacle, State, Wording
from runtime.parsing import parse_json
from runtime.startup import expand_home

SPLITS = ("train", "valid_seen", "valid_unseen")
FOLDER = "json_2.1.1"
GAME_FILE = "game.tw-pddl"
BANNER = "-= Welcome to TextWorld, ALFRED! =-"

# How commands and answers are worded: as each game's file says, or in all games as in alfworld 0.4, or as before it.
WordingName = Literal["game", "current", "before_0_4"]
WORDINGS: Mapping[WordingName, Wording] = {"current": Wording(), "before_0_4": world.BEFORE_0_4}

Shuffle = Callable[[list[str]], None]  # of identifiers, in place

_HOW_TO_GET = (
    "Get them with `pip install alfworld && alfworld-download`, then set data_root or ALFWORLD_DATA to the folder "
    f"that holds {FOLDER}/."
)

_REMEDY = "move its folder away, or get the games anew (`alfworld-download --force`)"


class AlfworldGames:
    """The games of an ALFWORLD_DATA folder, with the interface of `generate.Generator`."""

    def __init__(self, data_root: str | os.PathLike[str] | None = None, wording: WordingName = "game") -> None:
        self._wording: WordingName = checked_wording(wording)
        root = data_root or os.environ.get("ALFWORLD_DATA")
        self._root = Path(expand_home(os.fspath(root))) / FOLDER if root else None
        self._tasks: dict[str, list[Task]] = {}

    def tasks(self, split: str) -> list[Task]:
        """List the games of a split that alfworld plays, in a fixed pseudo-random order: the first n are a fair sample.

        Raises:
            ValueError: the split is neither ALFWorld's nor a folder of exported games.
            FileNotFoundError: the split is not installed.
        """
        found = sorted(path.name for path in self._root.glob("*") if path.is_dir()) if self._root else []
        if split not in (names := dict.fromkeys([*SPLITS, *found])):
            raise ValueError(f"no split {split!r}; there are {', '.join(names)}")
        if split not in self._tasks:
            self._tasks[split] = self._collect(split)
        return list(self._tasks[split])

    def game(self, task: Task) -> tuple[Game, None]:
        """Read the game of a task; real games mark no item."""
        return with_goal(read_game(self.path(task), self._wording), task), None

    def worlds(self, split: str) -> list[Task]:
        """Return the split's tasks, since each game is a world."""
        return self.tasks(split)

    def path(self, task: Task) -> Path:
        """Return the game file of a task."""
        if "path" not in task.data:
            raise EnvironmentFailure(f"task {task.id} is no task of a real game: its data has no path")
        return self._folder() / task.data["path"]

    def _folder(self) -> Path:
        if self._root is None:
            raise FileNotFoundError(f"no folder with ALFWorld games was given. {_HOW_TO_GET}")
        return self._root

    def _collect(self, split: str) -> list[Task]:
        folder = self._folder()
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"there is no folder {folder / split}. {_HOW_TO_GET}")
        paths = (path.relative_to(folder).as_posix() for path in (folder / split).glob("*/*/game.tw-pddl"))
        shuffled = sorted(paths, key=lambda path: hashlib.blake2b(path.encode()).digest())
        tasks = [task for path in shuffled if (task := _task(split, folder, path)) is not None]
        if not tasks:
            raise FileNotFoundError(f"{folder / split} holds no playable game (game.tw-pddl). {_HOW_TO_GET}")
        return tasks


def _task(split: str, folder: Path, relative: str) -> Task | None:
    """Return the task of a game file; None for games that alfworld omits."""
    path = folder / relative
    if (trial := read_trial(path.parent)) is None:
        return None
    about, content, data = trial
    about_scene = about.get("scene")
    about_scene = about_scene if isinstance(about_scene, dict) else {}
    id_, number = relative.removesuffix("/game.tw-pddl"), about_scene.get("scene_num")
    if number is None:
        number = path.parent.parent.name.rsplit("-", 1)[-1]
    scene = str(about_scene.get("floor_plan") or f"FloorPlan{number}")
    # The key identifies an exported home: labels such as "home 17" repeat in every split.
    isolation = {"gamefile": (id_.partition("/")[2],), "scene": (str(about_scene.get("key") or scene),)}
    return Task(
        id_,
        task_sentence(data["grammar"]),
        scene=scene,
        split=split,
        kind=about["task_type"],
        data={"path": relative, "sha256": hashlib.sha256(content).hexdigest()},
        isolation=isolation,
    )


def read_trial(folder: Path, kinds: Collection[str] = KINDS) -> tuple[dict[str, Any], bytes, dict[str, Any]] | None:
    """Read the folder of a game; return traj_data.json, and game.tw-pddl as bytes and parsed.

    Returns None for folders that alfworld omits: movable receptacles, slices, other task types, no solvable game.

    Raises:
        ValueError: a file is broken, or the game is not ALFWorld's.
    """
    game, about_file = folder / GAME_FILE, folder / "traj_data.json"
    named = "/".join(folder.parts[-2:])  # task and trial
    if "movable" in named or "Sliced" in named or not (game.is_file() and about_file.is_file()):
        return None
    about = _read_object(about_file, about_file.read_bytes())
    if about.get("task_type") not in kinds:
        return None
    data = _read_object(game, content := game.read_bytes())
    if not data.get("solvable"):
        return None
    if missing := {"pddl_problem", "grammar"} - data.keys():
        raise ValueError(f"{game} is not an ALFWorld game (it has no {', '.join(sorted(missing))}): {_REMEDY}")
    return about, content, data


def _read_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises: ValueError, which names a remedy."""
    try:
        found = parse_json(content)
    except ValueError as error:  # neither UTF-8 nor JSON
        raise ValueError(f"{path} is broken ({error}): {_REMEDY}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} instead of a JSON object: {_REMEDY}")
    return found


# One game ------------------------------------------------------------------------------------------------------


def read_game(path: Path, wording: WordingName = "game", shuffle: Shuffle | None = None) -> Game:
    """Read a game file. Raises: EnvironmentFailure, if it cannot be played."""
    try:
        game = load_game(parse_json(path.read_text(encoding="utf-8")), shuffle)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EnvironmentFailure(f"cannot play {path}: {error}") from error
    return replace(game, wording=WORDINGS.get(wording, game.wording))


def checked_wording(wording: str) -> WordingName:
    """Return the name of a wording. Raises: ValueError, if there is none of that name."""
    for known in get_args(WordingName):
        if wording == known:
            return known
    raise ValueError(f"no wording {wording!r}; there are {', '.join(get_args(WordingName))}")


def load_game(data: Mapping[str, str], shuffle: Shuffle | None = None) -> Game:
    """Build a `Game` from a game file's content.

    Args:
        shuffle: reassigns the numbers in things' names, as alfworld's domain randomization does.

    Raises:
        ValueError: problem or goal are not ALFWorld's.
    """
    # PDDL ignores case; alfworld's planner converts everything to lower case.
    found, goal = _read_problem(data["pddl_problem"].lower())
    facts = _Facts(found, shuffle)
    fitting = facts.of("cancontain")
    return Game(
        _receptacles(facts),
        _items(facts),
        start=_start(facts),
        goal=_read_goal(goal),
        task=task_sentence(data["grammar"]),
        can_contain=frozenset((place.removesuffix("type"), item.removesuffix("type")) for place, item in fitting),
        wording=_read_wording(data["grammar"]),
        locations=tuple(facts.names[location] for location in facts.locations),
        reachable=tuple(filter(None, map(_stand, facts.locations))),
    )


def _read_problem(problem: str) -> tuple[dict[str, list[tuple[str, ...]]], str]:
    """Return the initial facts by predicate, and the text of the goal."""
    start, middle = problem.find("(:init"), problem.find("(:goal")
    if start < 0 or middle < start:
        raise ValueError("the PDDL problem has no (:init ...) followed by a (:goal ...)")
    facts: dict[str, list[tuple[str, ...]]] = {}
    for predicate, arguments in re.findall(r"\(([\w=-]+)\s+([^()]*)\)", problem[start + len("(:init") : middle]):
        facts.setdefault(predicate, []).append(tuple(arguments.split()))
    return facts, problem[middle:]


_PLACED = (  # the goal of four kinds
    "(exists (?o - object ?r - receptacle) (and {treated}(objecttype ?o {item}type) "
    "(receptacletype ?r {place}type) (inreceptacle ?o ?r)))"
)
GOALS = {  # as PDDL
    world.SIMPLE: _PLACED.replace("{treated}", ""),
    world.CLEAN: _PLACED.replace("{treated}", "(cleanable ?o) (isclean ?o) "),
    world.HEAT: _PLACED.replace("{treated}", "(heatable ?o) (ishot ?o) "),
    world.COOL: _PLACED.replace("{treated}", "(coolable ?o) (iscool ?o) "),
    world.TWO: "(exists (?one - object ?other - object ?r - receptacle) (and (not (= ?one ?other)) "
    "(objecttype ?one {item}type) (objecttype ?other {item}type) (receptacletype ?r {place}type) "
    "(inreceptacle ?one ?r) (inreceptacle ?other ?r)))",
    LOOK: "(exists (?a - agent ?l - location ?r - receptacle ?lamp - object ?o - object) (and "
    "(objecttype ?o {item}type) (holds ?a ?o) (objecttype ?lamp {lamp}type) (toggleable ?lamp) "
    "(istoggled ?lamp) (inreceptacle ?lamp ?r) (receptacleatlocation ?r ?l) (atlocation ?a ?l)))",
}


def _read_goal(goal: str) -> Goal:
    """Parse the goal; its predicates identify its kind."""
    kind = next((kind for kind, formula in GOALS.items() if _predicates(formula) == _predicates(goal)), None)
    types = {
        variable: name.removesuffix("type") for variable, name in re.findall(r"\(objecttype\s+(\?\w+)\s+(\w+)\)", goal)
    }
    if kind is None or not types:
        raise ValueError(f"the goal is none of ALFWorld's six task types: {' '.join(goal.split())}")
    if kind == LOOK:
        held = re.search(r"\(holds\s+\?\w+\s+(\?\w+)\)", goal)
        lamp = re.search(r"\(istoggled\s+(\?\w+)\)", goal)
        if held and lamp and held[1] in types and lamp[1] in types:
            return Goal(kind, types[held[1]], lamp_type=types[lamp[1]])
        raise ValueError(f"the goal names no object and lamp: {' '.join(goal.split())}")
    places = set(re.findall(r"\(receptacletype\s+\?\w+\s+(\w+)\)", goal))
    if len(places) != 1 or len(set(types.values())) != 1:
        raise ValueError(f"the goal names more than one kind of object or place: {' '.join(goal.split())}")
    return Goal(kind, next(iter(types.values())), places.pop().removesuffix("type"))


def _predicates(formula: str) -> set[str]:
    return set(re.findall(r"\((=|[\w-]+)", formula)) - {"and", "exists"}


class _Facts:
    """The facts of a problem, by predicate, and its entities with their numbers."""

    def __init__(self, facts: Mapping[str, Sequence[tuple[str, ...]]], shuffle: Shuffle | None) -> None:
        self._facts = facts
        self.names = demangled((argument for group in facts.values() for fact in group for argument in fact), shuffle)
        # Numbers follow raw identifiers, as TextWorld sorts facts.
        self.items = self._numbered(("objecttype", 0), ("inreceptacle", 0), ("objectatlocation", 0))
        self.places = self._numbered(("receptacletype", 0), ("inreceptacle", 1))
        self.locations = self._numbered(("receptacleatlocation", 1), ("objectatlocation", 1), ("atlocation", 1))

    def _numbered(self, *columns: tuple[str, int]) -> dict[str, int]:
        ids = {fact[position] for predicate, position in columns for fact in self.of(predicate)}
        return {id_: number for number, id_ in enumerate(sorted(ids))}

    def of(self, predicate: str) -> Sequence[tuple[str, ...]]:
        return self._facts.get(predicate, ())

    def having(self, predicate: str) -> set[str]:
        return {fact[0] for fact in self.of(predicate)}

    def types(self, predicate: str) -> dict[str, str]:
        return {id_: kind.removesuffix("type") for id_, kind in self.of(predicate)}

    def mask(self, predicate: str, index: Mapping[str, int]) -> int:
        return sum(1 << index[id_] for id_ in self.having(predicate) if id_ in index)


def _receptacles(facts: _Facts) -> tuple[Receptacle, ...]:
    types, openable = facts.types("receptacletype"), facts.having("openable")
    where = {place: facts.locations[at] for place, at in facts.of("receptacleatlocation")}
    return tuple(
        Receptacle(
            facts.names[id_],
            types.get(id_, ""),
            openable=id_ in openable,
            location=where.get(id_, NOWHERE),
            position=_position(id_),
        )
        for id_ in facts.places
    )


_COORDINATES = re.compile(r"\w+?_bar_" + "_bar_".join([r"_?(plus|minus)_(\d+)_dot_(\d+)"] * 3))
_STAND = re.compile(r"loc_bar_(_minus_|_?)(\d+)_bar_(_minus_|_?)(\d+)_bar_\d+_bar_.+")
_STEP = 0.25  # metres per unit of AI2-THOR's grid of agent positions


def _position(id_: str) -> Position | None:
    """Parse AI2-THOR's coordinates (metres) from an identifier; None without any."""
    if (found := _COORDINATES.match(id_)) is None:
        return None
    signs, whole, part = found.groups()[::3], found.groups()[1::3], found.groups()[2::3]
    x, y, z = (float(f"{'-' * (s == 'minus')}{w}.{p}") for s, w, p in zip(signs, whole, part, strict=True))
    return x, y, z


def _stand(id_: str) -> Position | None:
    """Parse the agent's position from a location's identifier; None without any."""
    if (found := _STAND.fullmatch(id_)) is None:
        return None
    x, z = (float(f"{'-' * bool(s.strip('_'))}{n}") * _STEP for s, n in (found.group(1, 2), found.group(3, 4)))
    return x, 0.0, z


def _items(facts: _Facts) -> tuple[Item, ...]:
    types = facts.types("objecttype")
    flags = {name: facts.having(name) for name in world.FLAGS}
    inside: dict[str, set[int]] = {item: set() for item in facts.having("isreceptacleobject")}
    for inner, outer in facts.of("inreceptacleobject"):
        if outer in inside and inner in facts.items:
            inside[outer].add(facts.items[inner])
    return tuple(
        Item(
            facts.names[id_],
            types.get(id_, ""),
            **{name: id_ in having for name, having in flags.items()},
            inside=tuple(sorted(inside[id_])) if id_ in inside else None,
        )
        for id_ in facts.items
    )


def _start(facts: _Facts) -> State:
    agent = facts.of("atlocation")
    if len(agent) != 1:
        raise ValueError(f"the agent starts at {len(agent)} places instead of one")
    state = State.empty(facts.locations[agent[0][1]], len(facts.places), len(facts.locations))
    for item, place in facts.of("inreceptacle"):
        state.contents[facts.places[place]] |= 1 << facts.items[item]
    for item, location in facts.of("objectatlocation"):
        state.standing[facts.locations[location]] |= 1 << facts.items[item]
    for _, item in facts.of("holds"):
        state.held = facts.items[item]
    state.opened = facts.mask("opened", facts.places)
    for predicate, condition in world.CONDITIONS.items():
        setattr(state, condition, facts.mask(predicate, facts.items))
    return state


def demangled(ids: Iterable[str], shuffle: Shuffle | None = None) -> dict[str, str]:
    """Return readable names of raw identifiers, such as "mug 2" for "mug_bar__plus_01...".

    As in alfworld, numbers of a kind descend in the order of the identifiers, which `shuffle` may change.
    """
    names, of_kind = {}, Counter[str]()
    ordered = sorted(set(ids))
    if shuffle is not None:
        shuffle(ordered)
    for id_ in reversed(ordered):
        kind, bar, _ = id_.partition("_bar_")
        kind += "basin" * ("basin" in id_)
        of_kind[kind] += bool(bar)
        names[id_] = f"{kind} {of_kind[kind]}" if bar else id_  # names without a bar have no number
    return names


def opening(engine: Engine) -> str:
    """Return TextWorld's opening of a game: banner, room and task."""
    return f"{BANNER}\n\n{engine.intro()}\n\nYour task is to: {engine.game.task}."


# The grammar ---------------------------------------------------------------------------------------------------


def task_sentence(grammar: str) -> str:
    """Return the goal's sentence without its full stop, e.g. "put a hot mug in cabinet"."""
    sentence = _rule(grammar, "task", default="").replace('"', "")  # TextWorld loses quotation marks
    return sentence.removeprefix("Your task is to: ").strip().removesuffix(".")


def _read_wording(grammar: str) -> Wording:
    """Read the phrases in which ALFWorld's releases differ (0.3 has "put ... in/on" and "You arrive at loc 4.")."""
    standard = Wording()
    put = re.search(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"', grammar)
    arrive = _rule(grammar, "GotoLocation.feedback", default="").partition(" #")[0]
    return Wording(
        put=put[1] if put else standard.put,
        put_feedback=_slots(_rule(grammar, "PutObject.feedback", default=standard.put_feedback)),
        arrive=_slots(arrive) if arrive else standard.arrive,
        help=_read_help(grammar),
    )


def _read_help(grammar: str) -> str:
    """Read the answer to "help"; "" if the game lacks the command (before 0.4)."""
    action = re.search(r'action\s+help\s*\{.*?feedback\s*::\s*"([^"]*)"', grammar, re.DOTALL)
    text = action[1] if action else ""
    if re.fullmatch(r"#[\w.]+#", text):
        text = _rule(grammar, text.strip("#"), default="")
    return text.lstrip()  # the grammar's parser skips white space in front


def _rule(grammar: str, symbol: str, default: str) -> str:
    """Read the text of a symbol's first production."""
    found = re.search(rf'"{re.escape(symbol)}"\s*:\s*\[\s*\{{\s*"rhs"\s*:\s*("(?:[^"\\]|\\.)*")', grammar)
    return json.loads(found[1]) if found else default


def _slots(text: str) -> str:
    """Replace "{r.name}" by "{r}", and "{lend.name}", where a walk ends, by "{l}"."""
    return re.sub(r"\{(o|r)\.name\}", r"{\1}", text).replace("{lend.name}", "{l}")
