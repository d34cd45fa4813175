"""Real ALFWorld games: `game.tw-pddl` files and the folder they come in.

Of a game file only the problem (places, things, goal) and the phrases of its grammar are read: the rules are the same
in every release and live in `engine.py`. Names are given out as alfworld's demangler does, so that "cabinet 3" here is
"cabinet 3" there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from envs.base import EnvironmentFailure, Task
from envs.household.world import (
    CLEAN,
    COOL,
    HEAT,
    KINDS,
    LOOK,
    NOWHERE,
    SIMPLE,
    TWO,
    Game,
    Goal,
    Item,
    Receptacle,
    State,
    Wording,
)

SPLITS = ("train", "valid_seen", "valid_unseen")
FOLDER = "json_2.1.1"

_HOW_TO_GET = (
    f"Get them with `pip install alfworld && alfworld-download`, then give the folder that holds {FOLDER}/ "
    "as data_root or in the environment variable ALFWORLD_DATA."
)


class AlfworldGames:
    """The games of an ALFWORLD_DATA folder, with the interface of `generate.Generator`."""

    def __init__(self, data_root: str | os.PathLike[str] | None = None) -> None:
        root = data_root or os.environ.get("ALFWORLD_DATA")
        self._root = Path(root).expanduser() if root else None
        self._tasks: dict[str, list[Task]] = {}

    def splits(self) -> list[str]:
        """Every name that `tasks` takes: ALFWorld's own splits, then the other folders beside them."""
        root = self._root / FOLDER if self._root else None
        found = sorted(path.name for path in root.iterdir() if path.is_dir()) if root and root.is_dir() else []
        return [*SPLITS, *(name for name in found if name not in SPLITS)]

    def tasks(self, split: str) -> list[Task]:
        """The games of a split that alfworld itself would play, in an order that is always the same and has nothing to
        do with their kinds: the first n are a fair sample (by path, they would all be of one kind).

        Raises:
            ValueError: for a split that is neither ALFWorld's nor a folder of games (as an export makes).
            FileNotFoundError: for one of ALFWorld's that is not installed.
        """
        if split not in (names := self.splits()):
            raise ValueError(f"no split {split!r}; there are {', '.join(names)}")
        if split not in self._tasks:
            self._tasks[split] = self._collect(split)
        return list(self._tasks[split])

    def game(self, task: Task) -> tuple[Game, None]:
        """The game of a task (nothing is marked in real games)."""
        path = self.path(task)
        try:
            return load_game(json.loads(path.read_text(encoding="utf-8"))), None
        except (OSError, ValueError, KeyError) as error:
            raise EnvironmentFailure(f"cannot play {path}: {error}") from error

    def path(self, task: Task) -> Path:
        """The game file of a task."""
        if "path" not in task.data:
            raise EnvironmentFailure(f"task {task.id} is not of a real game: its data has no path")
        return self._folder() / task.data["path"]

    def _folder(self) -> Path:
        if self._root is None:
            raise FileNotFoundError(f"no folder with ALFWorld games was given. {_HOW_TO_GET}")
        return self._root / FOLDER

    def _collect(self, split: str) -> list[Task]:
        folder = self._folder()
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"there is no folder {folder / split}. {_HOW_TO_GET}")
        paths = (path.relative_to(folder).as_posix() for path in (folder / split).glob("*/*/game.tw-pddl"))
        tasks = [task for path in sorted(paths, key=_shuffled) if (task := _task(split, folder, path)) is not None]
        if not tasks:
            raise FileNotFoundError(f"{folder / split} holds no playable game (game.tw-pddl). {_HOW_TO_GET}")
        return tasks


def _shuffled(path: str) -> bytes:
    return hashlib.blake2b(path.encode()).digest()


def _task(split: str, folder: Path, relative: str) -> Task | None:
    """The task of one game file; None for the games alfworld leaves out."""
    if "movable" in relative or "Sliced" in relative:
        return None
    path = folder / relative
    about_path = path.with_name("traj_data.json")
    if not about_path.is_file():
        return None
    about = json.loads(about_path.read_text(encoding="utf-8"))
    content = path.read_bytes()
    data = json.loads(content)
    if about.get("task_type") not in KINDS or not data.get("solvable"):
        return None
    id_, scene = relative.removesuffix("/game.tw-pddl"), _scene(about, path)
    return Task(
        id=id_,
        goal=task_sentence(data["grammar"]),
        scene=scene,
        split=split,
        kind=about["task_type"],
        data={"path": relative, "sha256": hashlib.sha256(content).hexdigest()},
        isolation={"gamefile": (id_.partition("/")[2],), "scene": (_scene_key(about) or scene,)},
    )


def _scene_key(about: Mapping[str, object]) -> str:
    """What tells an exported home from all others: its label, "home 17", comes again in every split."""
    scene = about.get("scene")
    return str(scene.get("key", "")) if isinstance(scene, Mapping) else ""


def _scene(about: Mapping[str, object], path: Path) -> str:
    scene = about.get("scene")
    if isinstance(scene, Mapping):
        if scene.get("floor_plan"):
            return str(scene["floor_plan"])
        if scene.get("scene_num") is not None:
            return f"FloorPlan{scene['scene_num']}"
    return f"FloorPlan{path.parent.parent.name.rsplit('-', 1)[-1]}"


# One game ------------------------------------------------------------------------------------------------------


def load_game(data: Mapping[str, str]) -> Game:
    """Build a `Game` from the content of a game file.

    Raises:
        ValueError: if the problem or its goal is not one of ALFWorld's.
    """
    # PDDL does not tell upper from lower case, and the planner below alfworld makes everything lower case.
    facts, goal = _read_problem(data["pddl_problem"].lower())
    return _Builder(facts).game(_read_goal(goal), task_sentence(data["grammar"]), _read_wording(data))


def _read_problem(problem: str) -> tuple[dict[str, list[tuple[str, ...]]], str]:
    """The initial facts by predicate, and the text of the goal."""
    start, middle = problem.find("(:init"), problem.find("(:goal")
    if start < 0 or middle < start:
        raise ValueError("the PDDL problem has no (:init ...) followed by a (:goal ...)")
    facts: dict[str, list[tuple[str, ...]]] = {}
    for predicate, arguments in re.findall(r"\(([\w=-]+)\s+([^()]*)\)", problem[start + len("(:init") : middle]):
        facts.setdefault(predicate, []).append(tuple(arguments.split()))
    return facts, problem[middle:]


_GOAL_PREDICATES = {
    SIMPLE: {"inreceptacle", "objecttype", "receptacletype"},
    CLEAN: {"cleanable", "objecttype", "receptacletype", "isclean", "inreceptacle"},
    HEAT: {"heatable", "objecttype", "receptacletype", "ishot", "inreceptacle"},
    COOL: {"coolable", "objecttype", "receptacletype", "iscool", "inreceptacle"},
    TWO: {"objecttype", "receptacletype", "inreceptacle", "not", "="},
    LOOK: {"objecttype", "toggleable", "istoggled", "receptacleatlocation", "atlocation", "inreceptacle", "holds"},
}


def _read_goal(goal: str) -> Goal:
    """Recognise the goal by the predicates it is made of."""
    used = set(re.findall(r"\((=|[\w-]+)", goal)) - {"and", "exists"}
    kind = next((kind for kind, predicates in _GOAL_PREDICATES.items() if predicates == used), None)
    types = {variable: name.removesuffix("type")
             for variable, name in re.findall(r"\(objecttype\s+(\?\w+)\s+(\w+)\)", goal)}  # fmt: skip
    if kind is None or not types:
        raise ValueError(f"goal is none of ALFWorld's six task types: {' '.join(goal.split())}")
    if kind == LOOK:
        held = re.search(r"\(holds\s+\?\w+\s+(\?\w+)\)", goal)
        lamp = re.search(r"\(istoggled\s+(\?\w+)\)", goal)
        if held and lamp and held[1] in types and lamp[1] in types:
            return Goal(kind, types[held[1]], lamp_type=types[lamp[1]])
        raise ValueError(f"goal names no object and lamp: {' '.join(goal.split())}")
    places = set(re.findall(r"\(receptacletype\s+\?\w+\s+(\w+)\)", goal))
    if len(places) != 1 or len(set(types.values())) != 1:
        raise ValueError(f"goal names more than one kind of object or place: {' '.join(goal.split())}")
    return Goal(kind, next(iter(types.values())), places.pop().removesuffix("type"))


class _Builder:
    """Numbers the entities of a problem and turns its facts into a `Game`."""

    def __init__(self, facts: dict[str, list[tuple[str, ...]]]) -> None:
        self._facts = facts
        self._names = demangled(argument for group in facts.values() for fact in group for argument in fact)
        # TextWorld lists facts sorted by raw identifier: so are our numbers.
        self._items = _index(self._column("objecttype", 0) | self._column("inreceptacle", 0)
                             | self._column("objectatlocation", 0))  # fmt: skip
        self._places = _index(self._column("receptacletype", 0) | self._column("inreceptacle", 1))
        self._locations = _index(self._column("receptacleatlocation", 1) | self._column("objectatlocation", 1)
                                 | self._column("atlocation", 1))  # fmt: skip

    def game(self, goal: Goal, task: str, wording: Wording) -> Game:
        return Game(
            receptacles=self._receptacles(),
            items=self._things(),
            start=self._start(),
            goal=goal,
            task=task,
            can_contain=frozenset(
                (place.removesuffix("type"), item.removesuffix("type"))
                for place, item in self._facts.get("cancontain", ())
            ),
            wording=wording,
            locations=tuple(self._names[location] for location in self._locations),
        )

    def _column(self, predicate: str, position: int) -> set[str]:
        return {fact[position] for fact in self._facts.get(predicate, ())}

    def _receptacles(self) -> tuple[Receptacle, ...]:
        types = {place: kind.removesuffix("type") for place, kind in self._facts.get("receptacletype", ())}
        openable = self._column("openable", 0)
        where = {place: self._locations[at] for place, at in self._facts.get("receptacleatlocation", ())}
        return tuple(
            Receptacle(self._names[id_], types.get(id_, ""), id_ in openable, where.get(id_, NOWHERE))
            for id_ in self._places
        )

    def _things(self) -> tuple[Item, ...]:
        types = {item: kind.removesuffix("type") for item, kind in self._facts.get("objecttype", ())}
        flags = {name: self._column(name, 0) for name in
                 ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")}  # fmt: skip
        inside: dict[str, list[int]] = {item: [] for item in self._column("isreceptacleobject", 0)}
        for inner, outer in self._facts.get("inreceptacleobject", ()):
            if outer in inside and inner in self._items:
                inside[outer].append(self._items[inner])
        return tuple(
            Item(
                self._names[id_],
                types.get(id_, ""),
                **{name: id_ in having for name, having in flags.items()},
                inside=tuple(sorted(set(inside[id_]))) if id_ in inside else None,
            )
            for id_ in self._items
        )

    def _start(self) -> State:
        agent = self._facts.get("atlocation", ())
        if len(agent) != 1:
            raise ValueError(f"the agent is at {len(agent)} places at the start instead of one")
        state = State(self._locations[agent[0][1]], len(self._places), len(self._locations))
        for item, place in self._facts.get("inreceptacle", ()):
            state.contents[self._places[place]] |= 1 << self._items[item]
        for item, location in self._facts.get("objectatlocation", ()):
            state.standing[self._locations[location]] |= 1 << self._items[item]
        for _, item in self._facts.get("holds", ()):
            state.held = self._items[item]
        state.opened = _mask(self._column("opened", 0), self._places)
        state.hot = _mask(self._column("ishot", 0), self._items)
        state.cool = _mask(self._column("iscool", 0), self._items)
        state.clean = _mask(self._column("isclean", 0), self._items)
        state.sliced = _mask(self._column("issliced", 0), self._items)
        state.toggled = _mask(self._column("istoggled", 0), self._items)
        return state


def _index(ids: set[str]) -> dict[str, int]:
    return {id_: position for position, id_ in enumerate(sorted(ids))}


def _mask(ids: set[str], index: Mapping[str, int]) -> int:
    return sum(1 << index[id_] for id_ in ids if id_ in index)


def demangled(ids: Iterable[str]) -> dict[str, str]:
    """Readable names for raw identifiers: "mug_bar__plus_01..." becomes "mug 2".

    Within a kind of thing the numbers fall in the order of the identifiers, as alfworld gives them out: the first one
    gets the highest.
    """
    kinds = {id_: _kind(id_) for id_ in sorted(set(ids))}
    left = Counter(kind for kind in kinds.values() if kind)
    names: dict[str, str] = {}
    for id_, kind in kinds.items():
        if kind:
            names[id_] = f"{kind} {left[kind]}"
            left[kind] -= 1
        else:
            names[id_] = id_
    return names


def _kind(id_: str) -> str:
    """The part of an identifier that names the kind of thing; "" for one that is not numbered."""
    kind, bar, _ = id_.partition("_bar_")
    if not bar:
        return ""
    return kind + "basin" if "basin" in id_ else kind


# The grammar ---------------------------------------------------------------------------------------------------


def task_sentence(grammar: str) -> str:
    """The goal in words, e.g. "put a hot mug in cabinet", without its full stop."""
    sentence = _rule(grammar, "task", default="").replace('"', "")  # TextWorld loses quotation marks
    return sentence.removeprefix("Your task is to: ").strip().removesuffix(".")


def _read_wording(data: Mapping[str, str]) -> Wording:
    """The phrases in which releases of ALFWorld differ (0.3 says "put ... in/on" and "You arrive at loc 4.")."""
    grammar, standard = data["grammar"], Wording()
    put = re.search(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"', grammar)
    arrive = _rule(grammar, "GotoLocation.feedback", default="").partition(" #")[0]
    return Wording(
        put=put[1] if put else standard.put,
        put_feedback=_slots(_rule(grammar, "PutObject.feedback", default=standard.put_feedback)),
        arrive=_slots(arrive) if arrive else standard.arrive,
        help=_read_help(grammar),
    )


def _read_help(grammar: str) -> str:
    """The answer to "help"; "" where the game has no such command (before 0.4)."""
    action = re.search(r'action\s+help\s*\{.*?feedback\s*::\s*"([^"]*)"', grammar, re.DOTALL)
    if action is None:
        return ""
    text = action[1]
    if re.fullmatch(r"#[\w.]+#", text):
        text = _rule(grammar, text.strip("#"), default="")
    return text.lstrip()  # the grammar's parser skips white space in front


def _rule(grammar: str, symbol: str, default: str) -> str:
    """The text of a symbol's first production."""
    found = re.search(rf'"{re.escape(symbol)}"\s*:\s*\[\s*\{{\s*"rhs"\s*:\s*("(?:[^"\\]|\\.)*")', grammar)
    return json.loads(found[1]) if found else default


def _slots(text: str) -> str:
    """ "{r.name}" as "{r}": the engine fills in names only; "lend" is where a walk ends."""
    return re.sub(r"\{(o|r)\.name\}", r"{\1}", text).replace("{lend.name}", "{l}")
