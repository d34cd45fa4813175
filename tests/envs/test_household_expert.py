"""The household's planner against an exact search: it wins from anywhere, and as fast as can be."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from envs.household import HouseholdEnvironment
from envs.household.engine import Command, Engine
from envs.household.expert import plan
from envs.household.world import (
    CLEAN,
    COOL,
    HEAT,
    KINDS,
    LOOK,
    NOWHERE,
    SIMPLE,
    TREATMENTS,
    TWO,
    Game,
    Goal,
    Item,
    Receptacle,
    State,
)

# The exact search ----------------------------------------------------------------------------------------------------


def shortest(engine: Engine, state: State, most: int) -> int | None:
    """Length of the shortest way to the goal, None when it takes more than `most` commands. Breadth first.

    What is left out cannot help: commands that only tell, shutting things, carrying what the goal does not ask for
    (other than putting it down), a treatment that is not asked for, and walking twice in a row.
    """
    if engine.won(state):
        return 0
    level = [(state, False)]
    seen: set[object] = set()
    for depth in range(1, most + 1):
        deeper: list[tuple[State, bool]] = []
        for at, walked in level:
            for text, command in engine.commands(at).items():
                if not helps(engine, at, command, walked):
                    continue
                then = at.copy()
                engine.step(then, text, {text: command})
                if engine.won(then):
                    return depth
                key = (position(engine, then), command[0] == "go to")
                if key not in seen and depth + missing(engine, then) <= most:
                    seen.add(key)
                    deeper.append((then, command[0] == "go to"))
        level = deeper
    return None


def helps(engine: Engine, state: State, command: Command, walked: bool) -> bool:
    verb, item, target = command
    match verb:
        case "go to":
            return not walked
        case "take":
            return bool(engine.candidates() >> item & 1)
        case "open":
            fits = state.held != NOWHERE and engine.fits(state.held, target)
            return fits or bool(state.contents[target] & engine.candidates())
        case "use":
            return bool(engine.lamps() >> item & 1)
        case "heat" | "cool" | "clean":
            return TREATMENTS.get(engine.game.goal.kind) == verb
        case _:
            return verb == "put"


def position(engine: Engine, state: State) -> object:
    """What matters of a state; not, for one, where a thing "next to it" is recorded to be."""
    return (state.location, state.held, state.opened, state.toggled, engine.treated(state), tuple(state.contents))


def missing(engine: Engine, state: State) -> int:
    """At least so many commands are still to come before the goal holds (never too many)."""
    kind, wanted = engine.game.goal.kind, engine.candidates()
    held = state.held != NOWHERE and bool(wanted >> state.held & 1)
    laid_aside = state.held != NOWHERE and not held
    if kind == LOOK:
        return (0 if held else 1 + laid_aside) + (not engine.lamps() & state.toggled)
    there = [mask & wanted for mask, place in zip(state.contents, engine.game.receptacles, strict=True)
             if place.type == engine.game.goal.receptacle_type]  # fmt: skip
    if kind == TWO:
        lacking = 2 - max((min(2, mask.bit_count()) for mask in there), default=0)
        return 2 * lacking - held + laid_aside
    treat = kind in TREATMENTS and not engine.treated(state) & wanted
    put = not any(there)
    return max(1, treat + put + (0 if held or not (treat or put) else 1 + laid_aside))


def exhaustive(engine: Engine, state: State, most: int) -> int | None:
    """The same without leaving any command out: for the smallest games only."""
    level, seen = [state], {position(engine, state)}
    for depth in range(most + 1):
        if any(engine.won(at) for at in level):
            return depth
        deeper: list[State] = []
        for at in level:
            for text in engine.commands(at):
                then = at.copy()
                engine.step(then, text)
                if position(engine, then) not in seen:
                    seen.add(position(engine, then))
                    deeper.append(then)
        level = deeper
    return None


def wander(engine: Engine, state: State, rng: random.Random) -> None:
    """Somewhere in the middle of an episode: steps towards the goal among steps that are not. Never won."""
    share = rng.choice((0.0, 0.3, 0.6))
    for _ in range(rng.choice((0, 5, 15, 40))):
        before = state.copy()
        towards = plan(engine, state) if rng.random() < share else None
        commands = list(engine.commands(state))
        moving = [command for command in commands if command.split()[0] not in ("go", "look", "help", "examine")]
        engine.step(state, towards[0] if towards else rng.choice(moving if rng.random() < 0.6 else commands))
        if engine.won(state):
            for name in State.__slots__:
                setattr(state, name, getattr(before, name))
            return


def excess(engine: Engine, state: State) -> int:
    """Commands of the plan over the fewest there can be; the plan is played and must win with its last command."""
    commands = plan(engine, state)
    assert commands is not None
    end = state.copy()
    for position_, command in enumerate(commands):
        assert command in engine.commands(end), command
        engine.step(end, command)
        assert engine.won(end) == (position_ == len(commands) - 1)
    best = shortest(engine, state, len(commands))
    assert best is not None  # the search knows at least this way
    return len(commands) - best


# On generated homes --------------------------------------------------------------------------------------------------


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
    places = (Receptacle("fridge 1", "fridge", True, 0), Receptacle("shelf 1", "shelf", False, 1),
              Receptacle("microwave 1", "microwave", True, 2))  # fmt: skip
    mugs = [Item(f"mug {number}", "mug", cleanable=True, heatable=True, coolable=True) for number in (2, 1)]
    lamps = [Item(f"desklamp {number}", "desklamp", pickupable=False, toggleable=True) for number in (2, 1)]
    things = [*mugs, *(lamps if goal.kind == LOOK else ()), *(Item(f"{kind} 1", kind) for kind in others)]
    where = {"mug 2": FRIDGE, "mug 1": SHELF, "desklamp 2": SHELF, "desklamp 1": MICROWAVE}
    start = State(location=3, receptacles=3, locations=4)
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
        ["go to shelf 1", "take mug 1 from shelf 1", "go to microwave 1", "heat mug 1 with microwave 1",
         "go to fridge 1", "cool mug 1 with fridge 1", "open fridge 1", "move mug 1 to fridge 1", "close fridge 1"],
    ),
    "hot, but laid aside": (
        Goal(HEAT, "mug", "shelf"),
        ["go to shelf 1", "take mug 1 from shelf 1", "go to microwave 1", "heat mug 1 with microwave 1",
         "open microwave 1", "move mug 1 to microwave 1", "close microwave 1", "go to shelf 1",
         "take knife 1 from shelf 1"],
    ),
    "two, one placed already": (
        Goal(TWO, "mug", "microwave"),
        ["go to shelf 1", "take mug 1 from shelf 1", "go to microwave 1", "open microwave 1",
         "move mug 1 to microwave 1", "close microwave 1"],
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
}  # fmt: skip


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
        for command in (*reach(env.game, knife, state, take=True), *reach(env.game, targets[0], state, take=False),
                        f"slice {env.game.items[targets[0]].name} with {knives[0]}"):  # fmt: skip
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


@pytest.mark.parametrize("goal", [Goal(SIMPLE, "mug", "microwave"), Goal(TWO, "mug", "shelf"),
                                  Goal(LOOK, "mug", lamp_type="desklamp"), Goal(HEAT, "mug", "fridge")])  # fmt: skip
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
