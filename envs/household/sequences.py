"""Sequences of tasks in one home that is never reset (KARMA, Section 4.1 and Appendix C; own task sets).

    L   short sequences: *simple* (goals on different things), *composite* (most goals on a thing that an earlier goal
        moved or treated) and *complex* (composite, with one thing described only by colour, group and treatment)
    R   long random sequences, whose things are drawn `uniform`, `skewed` (in proportion to ALFWorld's train goals) or
        `drifting` (favourites that change every hundred tasks)

The expert plays each goal when it is drawn, so every goal is solvable for an agent that solved the earlier ones.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from envs.base import Task, TaskSequence
from envs.household.engine import Engine
from envs.household.expert import plan
from envs.household.vocabulary import GOAL_COUNTS, PHRASES, TRAITS
from envs.household.world import APPLIANCES, KINDS, LOOK, NOWHERE, SIMPLE, TREATMENTS, TWO, Game, Goal, State
from runtime.settings import Settings

FAVOURITES, FAVOURED, DRIFT = 8, 10.0, 100  # favourite things, their weight, and the tasks before they change
RELATED = 0.7  # share of a composite sequence's goals on a thing that was moved or treated
LENGTHS = {"simple": (2, 4), "composite": (4, 6), "complex": (3, 6)}
TRIES = 200  # maximum draws of a goal, and of a sequence
WORLD = "world"  # key of the sequence in a task's data

Stream = Literal["uniform", "skewed", "drifting"]


class SequenceSettings(Settings):
    """Settings of the task sequences that `sequences(split)` lists."""

    tasks: Literal["L", "R"] = "L"
    """L: short sequences of three classes; R: long random ones."""
    simple: int = Field(default=15, ge=0)
    """Simple sequences of L; the paper has 15."""
    composite: int = Field(default=15, ge=0)
    """Composite sequences of L; the paper has 15."""
    complex: int = Field(default=18, ge=0)
    """Complex sequences of L; the paper has 18."""
    stream: Stream = "uniform"
    """How R draws things: uniform, skewed (in proportion to ALFWorld's train goals) or drifting (favourites that change
    every hundred tasks)."""
    worlds: int = Field(default=20, ge=1)
    """Number of sequences of R."""
    length: int = Field(default=400, ge=1)
    """Tasks per sequence of R."""


@dataclass(frozen=True, slots=True)
class WordedGoal:
    """A goal and its wording."""

    goal: Goal
    words: str


def with_goal(game: Game, task: Task) -> Game:
    """Return the game with the goal of a sequence's task; return it unchanged for other tasks."""
    if WORLD not in task.data:
        return game
    goal = Goal(task.kind, task.data["item"], task.data["receptacle"], task.data["lamp"])
    return replace(game, goal=goal, task=task.goal)


def sequences(
    worlds: Sequence[Task], game_of: Callable[[Task], Game], settings: SequenceSettings, seed: int, split: str
) -> list[TaskSequence]:
    """Draw a split's sequences, each in the world of one of the tasks `worlds`.

    Raises:
        ValueError: no world of the split has enough goals.
    """
    if settings.tasks == "R":
        families = [settings.stream] * settings.worlds
    else:
        families = [name for name in LENGTHS for _ in range(getattr(settings, name))]
    drawn = list[TaskSequence]()
    for number, family in enumerate(families, 1):
        name = f"{split}/{settings.tasks}-{family}/{number}"
        draws = (
            _sequence(
                worlds[(number + again) % len(worlds)],
                game_of,
                settings=settings,
                family=family,
                name=name,
                seed=f"{seed}/{name}/{again}",
            )
            for again in range(TRIES)
        )
        found = next(filter(None, draws), None)
        if found is None:
            raise ValueError(f"no world of {split} has enough goals for a sequence {family!r}: raise fixed_objects")
        drawn.append(found)
    return drawn


def _sequence(
    world: Task, game_of: Callable[[Task], Game], settings: SequenceSettings, family: str, name: str, seed: str
) -> TaskSequence | None:
    """Draw one sequence in a world; None if the world has too few goals."""
    living, rng = replace(world, data={**world.data, WORLD: name, **_EMPTY}), random.Random(seed)
    live = _World(game := game_of(living))
    if family in LENGTHS:
        goals, least = list(_short(live, rng, family)), LENGTHS[family][0]
        varied = family != "composite" or len({each.goal.item_type for each in goals}) > 1
        whole = len(goals) >= least and varied and (family != "complex" or any(map(_is_vague, goals)))
    else:
        goals = list(_long(live, rng, settings))
        whole = len(goals) == settings.length
    tasks = tuple(_task(living, name, number=n, worded=each, family=family) for n, each in enumerate(goals, 1))
    return (
        TaskSequence(name, world.scene, split=world.split, family=family, tasks=tasks, plan=game.plan)
        if whole
        else None
    )


_EMPTY: Mapping[str, str] = {"item": "", "receptacle": "", "lamp": ""}


def _task(world: Task, name: str, number: int, worded: WordedGoal, family: str) -> Task:
    goal = worded.goal
    data = {**world.data, "item": goal.item_type, "receptacle": goal.receptacle_type, "lamp": goal.lamp_type}
    return replace(world, id=f"{name}/{number}", goal=worded.words, kind=goal.kind, family=family, data=data)


@dataclass
class _World:
    """A world that the expert changes goal by goal."""

    game: Game
    state: State = field(init=False)
    touched: list[str] = field(default_factory=list)  # moved or treated item types, the latest last

    def __post_init__(self) -> None:
        self.state = self.game.start.copy()

    def take(self, goal: Goal) -> bool:
        """Play the expert to a goal; return False, without effect, if it holds already or cannot be reached."""
        engine = Engine(replace(self.game, goal=goal))
        if not (commands := plan(engine, self.state)):
            return False
        for command in commands:
            engine.step(self.state, command)
        self.touched = [*(item for item in self.touched if item != goal.item_type), goal.item_type]
        return True

    def goals(self, item: str) -> list[Goal]:
        """List the possible goals for an item type, at kinds of places that hold none of it now."""
        game, mine = self.game, [i for i in self.game.items if i.type == item and i.pickupable]
        lying = {game.receptacles[r].type for i in mine for r in game.places(game.items.index(i), self.state)}
        kinds = {r.type for r in game.receptacles if r.location != NOWHERE and (r.type, item) in game.can_contain}
        lamps = {i.type for i in game.items if i.toggleable and "lamp" in i.type}
        found = [Goal(LOOK, item, lamp_type=lamp) for lamp in sorted(lamps)]
        for place in sorted(kinds - lying):
            found += [Goal(kind, item, place) for kind in KINDS if kind != LOOK and self._suits(kind, mine, place)]
        return found

    def _suits(self, kind: str, items: Sequence, place: str) -> bool:
        if kind == TWO:
            return len(items) > 1
        if kind not in TREATMENTS:
            return bool(items)
        return any(getattr(i, f"{TREATMENTS[kind]}able") for i in items) and place not in APPLIANCES[TREATMENTS[kind]]

    def vague(self, item: str) -> str:
        """Describe an item type by colour, group and treatment; "" unless only the treatment makes this unique."""
        if item not in TRAITS or item not in self.touched:
            return ""
        types = {i.type for i in self.game.items}
        for words in (TRAITS[item], TRAITS[item][1:]):
            fitting = [t for t in types if t in TRAITS and TRAITS[t][-len(words) :] == words]
            done = [t for t in fitting if t in self.touched]
            if len(fitting) > 1 and done == [item]:
                return " ".join(filter(None, (self._condition(item), *words)))
        return ""

    def _condition(self, item: str) -> str:
        """Return an item's treatment as an adjective; "moved" if it has none."""
        mine = sum(1 << i for i, each in enumerate(self.game.items) if each.type == item)
        masks = {"hot": self.state.hot, "cool": self.state.cool, "clean": self.state.clean}
        return next((name for name, mask in masks.items() if mask & mine), "moved")


def _types(game: Game) -> list[str]:
    """List the types of portable things, in a fixed order."""
    return sorted({item.type for item in game.items if item.pickupable and item.inside is None})


def _worded(goal: Goal, rng: random.Random) -> WordedGoal:
    words = rng.choice(PHRASES[goal.kind]).format(item=goal.item_type, place=goal.receptacle_type)
    return WordedGoal(goal, words.replace("desklamp", goal.lamp_type) if goal.lamp_type else words)


def _short(live: _World, rng: random.Random, family: str) -> Iterator[WordedGoal]:
    """Draw a sequence of L, goal by goal, until no goal suits."""
    types, least, named = _types(live.game), LENGTHS[family][0], False
    share = {"simple": 0.0, "composite": RELATED, "complex": RELATED / 2}[family]
    for number in range(rng.randint(*LENGTHS[family])):
        vague = None
        if family == "complex" and number >= least - 1 and not named:
            vague = _vague_goal(live, rng)
        drawn = vague or _goal(live, rng, types, again=number > 0 and rng.random() < share)
        if drawn is None:
            return
        named = named or vague is not None
        yield drawn


def _is_vague(worded: WordedGoal) -> bool:
    return worded.words.startswith("put the ")


def _goal(live: _World, rng: random.Random, types: Sequence[str], again: bool) -> WordedGoal | None:
    """Draw a goal on a thing touched before (`again`) or on another one, and reach it."""
    pool = live.touched if again else [item for item in types if item not in live.touched]
    for _ in range(TRIES if pool else 0):
        goals = live.goals(rng.choice(pool))
        if goals and live.take(goal := rng.choice(goals)):
            return _worded(goal, rng)
    return None


def _vague_goal(live: _World, rng: random.Random) -> WordedGoal | None:
    """Draw a goal on a thing described by its treatment instead of its name, and reach it."""
    for item in rng.sample(live.touched, len(live.touched)):
        name, goals = live.vague(item), [goal for goal in live.goals(item) if goal.kind == SIMPLE]
        if name and goals and live.take(goal := rng.choice(goals)):
            return WordedGoal(goal, f"put the {name} in {goal.receptacle_type}")
    return None


def _long(live: _World, rng: random.Random, settings: SequenceSettings) -> Iterator[WordedGoal]:
    """Draw a sequence of R, goal by goal."""
    types = _types(live.game)
    weights = {item: float(GOAL_COUNTS.get(item, 1)) if settings.stream == "skewed" else 1.0 for item in types}
    for number in range(settings.length):
        if settings.stream == "drifting" and number % DRIFT == 0:
            favourites = rng.sample(types, min(FAVOURITES, len(types)))
            weights = {item: FAVOURED if item in favourites else 1.0 for item in types}
        for _ in range(TRIES):
            goals = live.goals(rng.choices(types, [weights[item] for item in types])[0])
            if goals and live.take(goal := rng.choice(goals)):
                yield _worded(goal, rng)
                break
        else:
            return
