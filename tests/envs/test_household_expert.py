"""The household's planner against an exact search: it wins from anywhere, and as fast as can be."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from envs.household.engine import Engine
from envs.household.environment import HouseholdEnvironment
from envs.household.expert import plan
from envs.household.world import (
    CLEAN,
    COOL,
    HEAT,
    KINDS,
    LOOK,
    SIMPLE,
    TWO,
    Game,
    Goal,
    Item,
    Receptacle,
    State,
)
from tests.envs.exact_search import excess, exhaustive, wander

# On generated homes --------------------------------------------------------------------------------------------------


def test_a_plan_that_is_followed_is_the_plan_that_would_be_made_anew() -> None:
    """An environment keeps its plan while the episode does; strayed from, it is made again."""
    env = HouseholdEnvironment(scenes={"walk": 3}, images=False, kinds=KINDS)
    compared = strayed = 0
    for task in env.tasks("walk"):
        rng, seen = random.Random(task.id), env.reset(task)
        for _ in range(20):
            said = env.expert()
            assert said == plan(Engine(env.game), env.state)
            compared += 1
            if not said:
                break
            off = rng.random() < 0.25
            strayed += off
            transition = env.step(rng.choice(seen.admissible or ()) if off else said[0])
            seen = transition.observation
            if transition.done:
                break
    assert compared > 100 and strayed > 20


@pytest.mark.parametrize("kind", KINDS)
def test_no_way_is_shorter_on_generated_homes(kind: str) -> None:
    env = HouseholdEnvironment(scenes={"walk": 12}, images=False, kinds=KINDS)
    tasks, rng = [task for task in env.tasks("walk") if task.kind == kind], random.Random(kind)
    counted: Counter[int] = Counter()
    for _ in range(80):
        env.reset(rng.choice(tasks))
        engine = Engine(env.game)
        state = engine.reset()
        wander(engine, state, rng)
        counted[excess(engine, state)] += 1
    assert counted == {0: 80}  # near-shortest is promised; here it is the shortest


# On a room small enough to search without leaving anything out -------------------------------------------------------

FRIDGE, SHELF, MICROWAVE = range(3)


def room(goal: Goal, *others: str) -> Game:
    """Two mugs, one of them shut away, and a lamp in two of three places; `others` are kinds of things on the shelf."""
    places = (
        Receptacle("fridge 1", "fridge", True, 0),
        Receptacle("shelf 1", "shelf", False, 1),
        Receptacle("microwave 1", "microwave", True, 2),
    )
    mugs = [Item(f"mug {number}", "mug", cleanable=True, heatable=True, coolable=True) for number in (2, 1)]
    lamps = [Item(f"desklamp {number}", "desklamp", pickupable=False, toggleable=True) for number in (2, 1)]
    things = [*mugs, *(lamps if goal.kind == LOOK else ()), *(Item(f"{kind} 1", kind) for kind in others)]
    where = {"mug 2": FRIDGE, "mug 1": SHELF, "desklamp 2": SHELF, "desklamp 1": MICROWAVE}
    start = State.empty(location=3, receptacles=3, locations=4)
    for index, item in enumerate(things):
        start.contents[where.get(item.name, SHELF)] |= 1 << index
    fits = {(place.type, kind) for place in places for kind in ("mug", "knife")}
    fits |= {("fridge", "book"), ("microwave", "book")}  # a brick may be put nowhere
    return Game(places, tuple(things), start, goal, "a task", frozenset(fits))


TRICKY = {
    "shut away": (Goal(SIMPLE, "mug", "microwave"), []),
    "another kind in hand": (Goal(SIMPLE, "mug", "microwave"), ["go to shelf 1", "take knife 1 from shelf 1"]),
    "another kind in hand, far away": (
        Goal(COOL, "mug", "shelf"),
        ["go to shelf 1", "take knife 1 from shelf 1", "go to microwave 1"],
    ),
    "another kind in hand, at a destination that must be opened anyway": (
        Goal(SIMPLE, "knife", "microwave"),
        ["go to fridge 1", "open fridge 1", "go to shelf 1", "take book 1 from shelf 1", "go to microwave 1"],
    ),
    "heated where it should be cool": (
        Goal(COOL, "mug", "shelf"),
        ["go to shelf 1", "take mug 1 from shelf 1", "go to microwave 1", "heat mug 1 with microwave 1"],
    ),
    "heated, cooled again, put away and shut in": (
        Goal(HEAT, "mug", "shelf"),
        [
            "go to shelf 1",
            "take mug 1 from shelf 1",
            "go to microwave 1",
            "heat mug 1 with microwave 1",
            "go to fridge 1",
            "cool mug 1 with fridge 1",
            "open fridge 1",
            "move mug 1 to fridge 1",
            "close fridge 1",
        ],
    ),
    "hot, but laid aside": (
        Goal(HEAT, "mug", "shelf"),
        [
            "go to shelf 1",
            "take mug 1 from shelf 1",
            "go to microwave 1",
            "heat mug 1 with microwave 1",
            "open microwave 1",
            "move mug 1 to microwave 1",
            "close microwave 1",
            "go to shelf 1",
            "take knife 1 from shelf 1",
        ],
    ),
    "two, one placed already": (
        Goal(TWO, "mug", "microwave"),
        [
            "go to shelf 1",
            "take mug 1 from shelf 1",
            "go to microwave 1",
            "open microwave 1",
            "move mug 1 to microwave 1",
            "close microwave 1",
        ],
    ),
    "two, one in hand": (Goal(TWO, "mug", "microwave"), ["go to shelf 1", "take mug 1 from shelf 1"]),
    "two, another kind in hand": (
        Goal(TWO, "mug", "fridge"),
        ["go to shelf 1", "take knife 1 from shelf 1", "go to fridge 1"],
    ),
    "two lamps, none on": (Goal(LOOK, "mug", lamp_type="desklamp"), []),
    "two lamps, the far one on": (
        Goal(LOOK, "mug", lamp_type="desklamp"),
        ["go to microwave 1", "use desklamp 1", "go to fridge 1", "open fridge 1", "take mug 2 from fridge 1"],
    ),
    "two lamps, another kind in hand": (
        Goal(LOOK, "mug", lamp_type="desklamp"),
        ["go to shelf 1", "use desklamp 2", "take knife 1 from shelf 1", "go to microwave 1"],
    ),
}


@pytest.mark.parametrize("name", TRICKY)
def test_no_way_is_shorter_from_a_tricky_place(name: str) -> None:
    goal, script = TRICKY[name]
    said = " ".join([goal.item_type, *script])
    engine = Engine(room(goal, *(kind for kind in ("knife", "book") if kind in said)))
    state = engine.reset()
    for command in script:
        assert command in engine.commands(state), command
        engine.step(state, command)
    assert excess(engine, state) == 0
    commands = plan(engine, state) or []
    assert exhaustive(engine, state, len(commands)) == len(commands) > 0


def test_a_sliced_apple_is_still_an_apple() -> None:
    env = HouseholdEnvironment(scenes={"walk": 40}, images=False, kinds=KINDS, seed=4)
    sliced = 0
    for task in env.tasks("walk"):
        env.reset(task)
        engine = Engine(env.game)
        knives = [item.name for item in env.game.items if item.type in ("knife", "butterknife")]
        targets = [i for i, item in enumerate(env.game.items) if item.sliceable and item.type == task.data["item"]]
        if not knives or not targets:
            continue
        state = engine.reset()
        knife = next(i for i, item in enumerate(env.game.items) if item.name == knives[0])
        for command in (
            *reach(env.game, knife, state, take=True),
            *reach(env.game, targets[0], state, take=False),
            f"slice {env.game.items[targets[0]].name} with {knives[0]}",
        ):
            engine.step(state, command)
        assert state.sliced == 1 << targets[0] and state.held == knife
        assert excess(engine, state) == 0
        sliced += 1
    assert sliced >= 5


def reach(game: Game, item: int, state: State, take: bool) -> list[str]:
    """Commands to stand where an item lies, with the place open, and have it in hand if asked."""
    place = game.receptacles[game.places(item, state)[0]]
    taking = [f"take {game.items[item].name} from {place.name}"] if take else []
    return [f"go to {place.name}", *([f"open {place.name}"] if place.openable else []), *taking]


@pytest.mark.parametrize(
    "goal",
    [
        Goal(SIMPLE, "mug", "microwave"),
        Goal(TWO, "mug", "shelf"),
        Goal(LOOK, "mug", lamp_type="desklamp"),
        Goal(HEAT, "mug", "fridge"),
    ],
)
def test_what_may_be_put_nowhere_is_a_dead_end(goal: Goal) -> None:
    engine = Engine(room(goal, "brick"))
    state = engine.reset()
    assert plan(engine, state)
    for command in ("go to shelf 1", "take brick 1 from shelf 1"):
        engine.step(state, command)
    assert plan(engine, state) is None and exhaustive(engine, state, 40) is None


def test_what_cannot_be_won_has_no_plan() -> None:
    for goal in (
        Goal(CLEAN, "mug", "shelf"),
        Goal(SIMPLE, "mug", "sofa"),
        Goal(TWO, "knife", "shelf"),
        Goal(LOOK, "mug", lamp_type="floorlamp"),
    ):
        engine = Engine(room(goal))
        assert plan(engine, engine.reset()) is None and exhaustive(engine, engine.reset(), 40) is None
