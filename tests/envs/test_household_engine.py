"""The household's rules, words and planner, on a kitchen small enough to check by hand and on generated homes."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiler.brief_state import BriefState
from envs.base import Environment, EnvironmentFailure, Task
from envs.household.engine import NOTHING_HAPPENS, Engine
from envs.household.environment import HouseholdEnvironment
from envs.household.errands import kind_of
from envs.household.expert import plan
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
)

APPLE, LAMP, KNIFE, MUG2, MUG1 = range(5)
CABINET, COUNTER, FRIDGE, MICROWAVE, SINK, TABLE = range(6)


def kitchen(goal: Goal) -> Game:
    """Six receptacles in a row, the agent in the middle of the room."""
    receptacles = tuple(
        Receptacle(f"{kind} 1", kind, kind in ("cabinet", "fridge", "microwave"), at)
        for at, kind in enumerate(("cabinet", "countertop", "fridge", "microwave", "sinkbasin", "sidetable"))
    )
    items = (
        Item("apple 1", "apple", cleanable=True, heatable=True, coolable=True, sliceable=True),
        Item("desklamp 1", "desklamp", pickupable=False, toggleable=True),
        Item("knife 1", "knife", cleanable=True),
        Item("mug 2", "mug", cleanable=True, heatable=True, coolable=True, inside=()),
        Item("mug 1", "mug", cleanable=True, heatable=True, coolable=True, inside=(KNIFE,)),
    )
    places = {APPLE: COUNTER, LAMP: TABLE, KNIFE: COUNTER, MUG2: CABINET, MUG1: SINK}
    start = State.empty(location=6, receptacles=6, locations=7)
    for item, place in places.items():
        start.contents[place] |= 1 << item
        start.standing[place] |= 1 << item
    fits = {(r.type, i.type) for r in receptacles for i in items if (r.type, i.type) != ("cabinet", "apple")}
    return Game(receptacles, items, start, goal, "a task", frozenset(fits))


def play(engine: Engine, state: State, script: list[tuple[str, str]]) -> None:
    for command, answer in script:
        assert engine.step(state, command) == answer, command


def test_says_what_alfworld_says() -> None:
    engine = Engine(kitchen(Goal(SIMPLE, "mug", "fridge")))
    state = engine.reset()
    assert engine.intro() == (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a fridge 1, "
        "a microwave 1, a sinkbasin 1, and a sidetable 1."
    )
    play(
        engine,
        state,
        [
            ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
            ("inventory", "You are not carrying anything."),
            (
                "go to countertop 1",
                "You arrive at countertop 1. On the countertop 1, you see a apple 1, and a knife 1.",
            ),
            ("look", "You are facing the countertop 1. Next to it, you see nothing."),
            ("go to countertop 1", NOTHING_HAPPENS),
            ("examine apple 1", NOTHING_HAPPENS),  # only what is in hand can be examined
            ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
            ("inventory", "You are carrying: a knife 1."),
            ("take apple 1 from countertop 1", NOTHING_HAPPENS),
            ("slice apple 1 with knife 1", "You sliced the apple 1 with the knife 1."),
            ("  move knife 1 to countertop 1 ", "You move the knife 1 to the countertop 1."),
            ("take apple 1 from countertop 1", "You pick up the apple 1 from the countertop 1."),
            ("examine apple 1", "This is a sliced apple 1."),
            ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
            ("heat apple 1 with microwave 1", "You heat the apple 1 using the microwave 1."),
            ("examine apple 1", "This is a hot sliced apple 1."),
            ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
            ("move apple 1 to fridge 1", NOTHING_HAPPENS),
            ("cool apple 1 with fridge 1", "You cool the apple 1 using the fridge 1."),
            ("examine apple 1", "This is a cool sliced apple 1."),
            ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see nothing."),
            ("move apple 1 to fridge 1", "You move the apple 1 to the fridge 1."),
            ("examine fridge 1", "The fridge 1 is open. In it, you see a apple 1."),
            ("close fridge 1", "You close the fridge 1."),
            ("examine fridge 1", "The fridge 1 is closed."),
            ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see a mug 1."),
            ("take mug 1 from sinkbasin 1", "You pick up the mug 1 from the sinkbasin 1."),
            ("clean mug 1 with sinkbasin 1", "You clean the mug 1 using the sinkbasin 1."),
            ("examine mug 1", "This is a normal mug 1. In it, you see a knife 1."),
            ("go to sidetable 1", "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1."),
            ("take desklamp 1 from sidetable 1", NOTHING_HAPPENS),
            ("use desklamp 1", "You turn on the desklamp 1."),
            ("use desklamp 1", "You turn on the desklamp 1."),
            ("dance", NOTHING_HAPPENS),
            ("", NOTHING_HAPPENS),
        ],
    )
    assert engine.step(state, "help").startswith("Available commands:\n  look: ")


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ("", "There's nothing special about apple 1."),
        ("hot", "This is a hot apple 1."),
        ("cool", "This is a cold apple 1."),
        ("clean", "This is a clean apple 1."),
        ("sliced", "This is a sliced apple 1."),
        ("hot clean", "This is a hot and clean apple 1."),
        ("cool clean", "This is a cool and clean apple 1."),
        ("clean sliced", "This is a clean sliced apple 1."),
        ("cool sliced", "This is a cool sliced apple 1."),
        ("hot clean sliced", "This is a hot and clean sliced apple 1."),
        ("cool clean sliced", "This is a cool and clean sliced apple 1."),
    ],
)
def test_describes_every_condition(conditions: str, sentence: str) -> None:
    engine = Engine(kitchen(Goal(SIMPLE, "apple", "fridge")))
    state = engine.reset()
    engine.step(state, "go to countertop 1")
    engine.step(state, "take apple 1 from countertop 1")
    for condition in conditions.split():
        setattr(state, condition, 1 << APPLE)
    assert engine.step(state, "examine apple 1") == sentence


def test_quirks_of_textworld_are_kept() -> None:
    """A thing whose recorded place is not its receptacle's shows up "next to" it once it has been taken there."""
    game = kitchen(Goal(SIMPLE, "mug", "fridge"))
    game.start.standing[SINK] &= ~(1 << MUG1)
    game.start.standing[TABLE] |= 1 << MUG1
    game.start.contents[TABLE] |= 1 << MUG1  # and it is in two places at once
    engine = Engine(game)
    state = engine.reset()
    play(
        engine,
        state,
        [
            ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see a mug 1."),
            ("take mug 1 from sinkbasin 1", "You pick up the mug 1 from the sinkbasin 1."),
            ("move mug 1 to sinkbasin 1", "You move the mug 1 to the sinkbasin 1."),
            ("go to sidetable 1", "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1, and a mug 1."),
            ("take mug 1 from sidetable 1", "You pick up the mug 1 from the sidetable 1."),
            ("look", "You are facing the sidetable 1. Next to it, you see nothing."),
            ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see a mug 1."),
            ("move mug 1 to sinkbasin 1", "You move the mug 1 to the sinkbasin 1."),
            ("take mug 1 from sinkbasin 1", "You pick up the mug 1 from the sinkbasin 1."),
        ],
    )
    state.standing[SINK] |= 1 << MUG1
    assert engine.step(state, "look") == "You are facing the sinkbasin 1. Next to it, you see a mug 1."


def test_commands_at_a_closed_place_and_with_full_hands() -> None:
    engine = Engine(kitchen(Goal(SIMPLE, "mug", "fridge")))
    state = engine.reset()
    engine.step(state, "go to cabinet 1")
    elsewhere = {f"go to {name} 1" for name in ("countertop", "fridge", "microwave", "sinkbasin", "sidetable")}
    always = {"look", "inventory", "help", "examine cabinet 1"}
    assert set(engine.commands(state)) == elsewhere | always | {"open cabinet 1"}
    engine.step(state, "open cabinet 1")
    assert set(engine.commands(state)) == elsewhere | always | {"close cabinet 1", "take mug 2 from cabinet 1"}
    engine.step(state, "take mug 2 from cabinet 1")
    in_hand = {"close cabinet 1", "examine mug 2", "move mug 2 to cabinet 1"}
    assert set(engine.commands(state)) == elsewhere | always | in_hand


@pytest.mark.parametrize(
    ("goal", "script"),
    [
        (
            Goal(SIMPLE, "knife", "cabinet"),
            [
                ("go to countertop 1", 0),
                ("take knife 1 from countertop 1", 0),
                ("go to cabinet 1", 0),
                ("open cabinet 1", 0),
                ("move knife 1 to cabinet 1", 1),
            ],
        ),
        (
            Goal(HEAT, "apple", "sidetable"),
            [
                ("go to countertop 1", 0),
                ("take apple 1 from countertop 1", 0),
                ("go to microwave 1", 0),
                ("heat apple 1 with microwave 1", 0.5),
                ("go to sidetable 1", 0.5),
                ("move apple 1 to sidetable 1", 1),
            ],
        ),
        (
            Goal(CLEAN, "mug", "sinkbasin"),
            [
                ("go to sinkbasin 1", 0.5),
                ("take mug 1 from sinkbasin 1", 0),
                ("clean mug 1 with sinkbasin 1", 0.5),
                ("move mug 1 to sinkbasin 1", 1),
            ],
        ),
        (
            Goal(TWO, "mug", "sinkbasin"),
            [
                ("go to cabinet 1", 0.5),
                ("open cabinet 1", 0.5),
                ("take mug 2 from cabinet 1", 0.5),
                ("go to sinkbasin 1", 0.5),
                ("move mug 2 to sinkbasin 1", 1),
            ],
        ),
        (
            Goal(LOOK, "knife", lamp_type="desklamp"),
            [
                ("go to sidetable 1", 0),
                ("use desklamp 1", 0.5),
                ("go to countertop 1", 0),
                ("take knife 1 from countertop 1", 0.5),
                ("go to sidetable 1", 1),
            ],
        ),
    ],
)
def test_progress_counts_the_conditions_met(goal: Goal, script: list[tuple[str, float]]) -> None:
    engine = Engine(kitchen(goal))
    state = engine.reset()
    for command, progress in script:
        assert engine.step(state, command) != NOTHING_HAPPENS
        assert engine.progress(state) == progress, command
    assert engine.won(state)


@pytest.mark.parametrize(
    ("goal", "length"),
    [
        (Goal(SIMPLE, "knife", "cabinet"), 5),
        (Goal(HEAT, "apple", "sidetable"), 6),
        (Goal(CLEAN, "mug", "sinkbasin"), 4),
        (Goal(COOL, "mug", "fridge"), 6),
        (Goal(TWO, "mug", "countertop"), 9),
        (Goal(LOOK, "mug", lamp_type="desklamp"), 4),
    ],
)
def test_expert_is_as_short_as_can_be_here(goal: Goal, length: int) -> None:
    engine = Engine(kitchen(goal))
    commands = plan(engine, engine.reset())
    assert commands is not None and len(commands) == length, commands


def test_expert_picks_up_where_one_stands() -> None:
    engine = Engine(kitchen(Goal(HEAT, "mug", "countertop")))
    state = engine.reset()
    for command in (
        "go to sinkbasin 1",
        "take mug 1 from sinkbasin 1",
        "go to microwave 1",
        "heat mug 1 with microwave 1",
    ):
        engine.step(state, command)
    assert plan(engine, state) == ["go to countertop 1", "move mug 1 to countertop 1"]
    engine.step(state, "open microwave 1")
    engine.step(state, "move mug 1 to microwave 1")
    engine.step(state, "go to countertop 1")
    engine.step(state, "take knife 1 from countertop 1")  # another thing in hand, put back where it costs one command
    assert plan(engine, state) == [
        "move knife 1 to countertop 1",
        "go to microwave 1",
        "take mug 1 from microwave 1",
        "go to countertop 1",
        "move mug 1 to countertop 1",
    ]
    engine.step(state, "move knife 1 to countertop 1")
    for command in plan(engine, state) or []:
        engine.step(state, command)
    assert plan(engine, state) == []


def test_expert_knows_when_there_is_no_way() -> None:
    for goal in (
        Goal(SIMPLE, "mug", "sofa"),
        Goal(SIMPLE, "egg", "fridge"),
        Goal(HEAT, "knife", "cabinet"),
        Goal(LOOK, "mug", lamp_type="floorlamp"),
        Goal(SIMPLE, "apple", "cabinet"),
    ):
        engine = Engine(kitchen(goal))
        assert plan(engine, engine.reset()) is None


def test_unknown_task_type_is_refused() -> None:
    with pytest.raises(ValueError, match="pick_and_place_simple"):
        Goal("pick_and_juggle", "mug")


# Generated homes -----------------------------------------------------------------------------------------------

ENVIRONMENT = HouseholdEnvironment(scenes={"walk": 12}, images=False, kinds=KINDS)
TASKS = ENVIRONMENT.tasks("walk")


def check_invariants(game: Game, state: State) -> None:
    """Everything is in exactly one place, and masks hold no bit that stands for nothing."""
    everything = (1 << len(game.items)) - 1
    seen = 1 << state.held if state.held != NOWHERE else 0
    for mask in state.contents:
        assert not mask & seen
        seen |= mask
    assert seen == everything
    assert not state.hot & state.cool
    openable = sum(1 << i for i, receptacle in enumerate(game.receptacles) if receptacle.openable)
    assert not state.opened & ~openable
    for mask in (state.hot, state.cool, state.clean, state.sliced, state.toggled):
        assert not mask & ~everything


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(task=st.sampled_from(TASKS), choices=st.lists(st.integers(0, 10**6), max_size=40), chosen=st.integers(0, 10**6))
def test_random_walks_keep_the_house_in_order(task: Task, choices: list[int], chosen: int) -> None:
    observation = ENVIRONMENT.reset(task)
    every_command = set(observation.admissible or ())
    for choice in choices:
        assert observation.admissible is not None and list(observation.admissible) == sorted(observation.admissible)
        transition = ENVIRONMENT.step(observation.admissible[choice % len(observation.admissible)])
        observation = transition.observation
        assert observation.text != NOTHING_HAPPENS
        assert 0 <= transition.progress <= 1
        assert transition.success == transition.done == (transition.progress == 1)
        assert observation.image is None
        check_invariants(ENVIRONMENT.game, ENVIRONMENT.state)
        every_command.update(observation.admissible or ())
    # Of all commands met on the way, the ones not listed now do nothing at all.
    impossible = sorted(every_command - set(observation.admissible or ()))
    if impossible:
        before = ENVIRONMENT.state.copy()
        transition = ENVIRONMENT.step(impossible[chosen % len(impossible)])
        assert transition.observation.text == NOTHING_HAPPENS
        assert transition.observation.admissible == observation.admissible
        assert ENVIRONMENT.state == before


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(task=st.sampled_from(TASKS), seed=st.integers(0, 10**6), length=st.integers(0, 60))
def test_expert_succeeds_from_anywhere(task: Task, seed: int, length: int) -> None:
    rng = random.Random(seed)
    observation = ENVIRONMENT.reset(task)
    for _ in range(length):
        observation = ENVIRONMENT.step(rng.choice(observation.admissible or ("look",))).observation
    commands = ENVIRONMENT.expert()
    assert commands is not None and len(commands) <= 14
    for position, command in enumerate(commands):
        transition = ENVIRONMENT.step(command)
        assert transition.observation.text != NOTHING_HAPPENS
        assert transition.success == (position == len(commands) - 1)
    assert ENVIRONMENT.expert() == []


def test_all_kinds_occur_in_what_is_walked() -> None:
    assert {task.kind for task in TASKS} == set(KINDS)


def test_a_copy_of_a_state_is_independent() -> None:
    ENVIRONMENT.reset(TASKS[0])
    state = ENVIRONMENT.state
    twin = state.copy()
    assert twin == state
    twin.contents[0] ^= 1
    assert twin != state


def test_protocol_and_life_cycle() -> None:
    environment = HouseholdEnvironment(scenes={"a": 1}, images=False)
    assert isinstance(environment, Environment) and environment.name == "household"
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.step("look")
    first = environment.reset(environment.tasks("a")[0])
    environment.step("go to fridge 1")
    environment.close()
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.expert()
    assert environment.reset(environment.tasks("a")[0]) == first


def test_it_notes_what_is_in_hand_and_the_next_of_each_kind_of_places_that_no_answer_has_shown() -> None:
    env = HouseholdEnvironment(scenes={"train": 4}, images=False, notes_places=True)
    for task in env.tasks("train"):
        first = env.reset(task)
        notes = BriefState(task.goal).noting(first.beliefs)
        unsearched = lambda notes: set(filter(None, (notes.belief("unsearched") or "").split(", ")))
        left = {receptacle.name for receptacle in env.game.receptacles}
        assert unsearched(notes) < left and set(map(kind_of, unsearched(notes))) == set(map(kind_of, left))
        for command in env.expert() or []:
            seen = env.step(command).observation
            notes = notes.noting(seen.beliefs)
            if "is closed" in seen.text:
                assert command.removeprefix("go to ") in unsearched(notes)  # it is in front of the agent
            carried = env.step("inventory").observation
            notes = notes.noting(carried.beliefs)
            held = notes.belief("holding")
            assert carried.text == (f"You are carrying: a {held}." if held else "You are not carrying anything.")
            left -= {
                name for name in left if re.search(rf"the {name}, you see|The {name} is open\. In it", seen.text, re.I)
            }
            assert unsearched(notes) <= left and Counter(map(kind_of, unsearched(notes))) == Counter(
                set(map(kind_of, left))
            )
