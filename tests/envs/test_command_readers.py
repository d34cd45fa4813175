"""What readers say is held, here and where equals the true state of the environment, along random walks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.base import Task
from envs.command_reader import AgentState, CommandReader, PlaceView, Reading, StepEffect
from envs.household.environment import EngineEnvironment, HouseholdEnvironment
from envs.registry import BUILT_IN, find
from envs.spec import EnvSpec
from memory.protocol import Record
from tests.walks import INVALID, Truth, Walk, standin_walks, walk


def mistakes(reader: CommandReader, walks: Sequence[Walk]) -> tuple[int, int]:
    """Return the number of steps after which a reader's state differs from the truth, and of compared places."""
    wrong = compared = 0
    for walked in walks:
        for (_, _, state), true in zip(reader.follow(walked.first, walked.records), walked.truths, strict=True):
            known = {thing: place for thing, place in state.where.items() if thing in true.where}
            right = (state.at in true.at or not true.at) and state.held == true.held
            wrong += not (right and all(place in true.where[thing] for thing, place in known.items()))
            wrong += any(thing in true.held for thing in state.where)
            compared += len(known)
    return wrong, compared


def shuffled(walks: Sequence[Walk]) -> list[Walk]:
    """Move every answer to the next step."""
    move = lambda r: [
        replace(a, feedback=b.feedback, refused=b.refused) for a, b in zip(r, [*r[1:], r[0]], strict=True)
    ]
    return [replace(walked, records=move(walked.records)) for walked in walks]


def other_readers(name: str) -> Iterator[CommandReader]:
    """Yield the readers of environments with other words."""
    mine = find(name).reader
    for other in (find(each).reader for each in BUILT_IN):
        if not isinstance(other, type(mine)) and not isinstance(mine, type(other)):
            yield other


def assert_true(name: str, walks: Sequence[Walk], compared: int) -> None:
    wrong, places = mistakes(find(name).reader, walks)
    assert wrong == 0 and places > compared
    for reader in other_readers(name):
        assert mistakes(reader, walks)[0] > 50
    assert mistakes(find(name).reader, shuffled(walks))[0] > 50


def assert_invalid_commands_change_nothing(name: str, walks: Sequence[Walk]) -> None:
    tried = 0
    for walked in walks:
        before = AgentState().after(find(name).reader.look(walked.first))
        for record, reading, state in find(name).reader.follow(walked.first, walked.records):
            if record.action in INVALID:
                assert record.refused and reading == Reading() and state == before, record
            before, tried = state, tried + (record.action in INVALID)
    assert tried > 30


# household and ALFWorld -----------------------------------------------------------------------------------------------


def engine_truth(env: EngineEnvironment) -> Truth:
    game, state = env.game, env.state
    held = (game.items[state.held].name,) if state.held >= 0 else ()
    where = {item.name: [game.receptacles[r].name for r in game.places(n, state)] for n, item in enumerate(game.items)}
    return Truth(frozenset({"", *(r.name for r in game.receptacles if r.location == state.location)}), held, where)


def engine_walk(env: EngineEnvironment, task: Task, spec: EnvSpec, steps: int) -> Walk:
    rng, now = random.Random(task.id), [env.reset(task)]

    def step(command: str) -> str:
        now.append(env.step(command).observation)
        return now[-1].text

    def commands() -> Sequence[str]:
        offered = now[-1].admissible or ()
        doing = [c for c in offered if not c.startswith(("go to", "look", "help", "examine"))]
        return doing if doing and rng.random() < 0.6 else offered

    return walk(Walk(task, now[0].text), step, commands, lambda: engine_truth(env), spec.refusals, rng, steps)


def test_the_state_of_generated_homes() -> None:
    env = HouseholdEnvironment(scenes={"train": 6}, images=False)
    walks = [engine_walk(env, task, find("household"), 100) for task in env.tasks("train")[::4][:8]]
    assert_true("household", walks, 3_000)
    assert_invalid_commands_change_nothing("household", walks)


@pytest.mark.alfworld
def test_the_state_of_real_games(shared_data: Path) -> None:
    from envs.alfworld.environment import AlfworldEnvironment

    env: EngineEnvironment = AlfworldEnvironment(shared_data / "alfworld", images=False)
    walks = [engine_walk(env, task, find("alfworld"), 100) for task in env.tasks("valid_seen")[:8]]
    assert_true("alfworld", walks, 3_000)
    assert_invalid_commands_change_nothing("alfworld", walks)


# EmbodiedBench --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", ["eb_alfred", "eb_habitat"])
def test_the_state_of_embodiedbench(benchmark: str) -> None:
    walks = standin_walks(benchmark, episodes=14, steps=50)
    assert sum(len(true.held) for walked in walks for true in walked.truths) > 50  # things are taken
    assert_true(benchmark, walks, 200)
    assert_invalid_commands_change_nothing(benchmark, walks)


def test_of_several_things_the_one_that_was_found_is_taken() -> None:
    reader, done = find("eb_alfred").reader, "Last action executed successfully."
    steps = [Record(t, "", a, done) for t, a in enumerate(("Find a Mug_2.", "pick up the Mug", "find a Safe"))]
    *_, (_, _, state) = reader.follow("", steps)
    assert state == AgentState("Safe", ("Mug_2",))
    put = reader.read(state, Record(3, "", "put down the object in hand", done))
    assert put.effect == StepEffect("put", "Mug_2", "Safe") and put.held == ()
    assert reader.read(state, Record(3, "", "drop the object in hand", done)).effect == StepEffect("put", "Mug_2")
    moved = Record(3, "", "Move forward by 0.25", done)
    assert reader.read(state, moved) == Reading() and reader.intent(moved.action) is None
    hidden = (
        "Last action is invalid. Pen is not visible because it is in Drawer_3. Go there to pick the object instead."
    )
    told = reader.read(state, Record(3, "", "pick up the Pen", hidden, True))
    assert told == Reading(views=(PlaceView("Drawer_3", ("Pen",), complete=False),))


@pytest.mark.parametrize(
    ("name", "goal", "named"),
    [
        ("eb_alfred", "Put two rolls of toilet paper on the back of a toilet.", {"ToiletPaper"}),
        ("eb_alfred", "Set plate with a butter knife in it on the kitchen table", {"Plate", "ButterKnife"}),
        ("eb_alfred", "Turn on the light.", set()),
        ("eb_habitat", "Find a toy airplane and move it to the right counter.", {"toy airplane"}),
        ("eb_habitat", "Bring the plates to the sofa.", {"plate"}),
        ("scienceworld", "Your task is to measure the melting point of tin, which is located ...", {"tin"}),
        ("scienceworld", "Your task is to find a(n) animal. First, focus on the thing.", {"animal"}),
    ],
)
def test_the_things_of_a_goal(name: str, goal: str, named: set[str]) -> None:
    assert find(name).reader.goal_things(goal) == named


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_reader_reads_views_or_says_that_it_does_not(name: str) -> None:
    reads = {"household", "alfworld", "scienceworld", "eb_alfred", "eb_habitat"}
    assert find(name).reader.reads_views == (name in reads)


def test_the_reader_of_the_guide_follows_a_pantry(repository: Path) -> None:
    page = (repository / "docs" / "guides" / "own-environment.md").read_text(encoding="utf-8")
    [block] = re.findall(r"## Reader.*?```python\n(.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {}
    exec(compile(block, "own-environment.md", "exec"), given)
    first = "You are in the middle of a room. Looking quickly around you, you see a shelf 1, and a shelf 2."
    seen = (
        "On the shelf 1, you see nothing.",
        "On the shelf 2, you see a mug 1.",
        "You take the mug.",
        "Nothing happens.",
    )
    commands = ("go to shelf 1", "go to shelf 2", "take mug 1 from shelf 2", "go to shelf 9")
    steps = [Record(t, "", c, s, s == seen[-1]) for t, (c, s) in enumerate(zip(commands, seen, strict=True))]
    states = [state for _, _, state in given["PantryReader"]().follow(first, steps)]
    assert given["PantryReader"]().look(first).places == ("shelf 1", "shelf 2")
    taken = AgentState("shelf 2", ("mug 1",))
    assert states == [AgentState("shelf 1"), AgentState("shelf 2", (), {"mug 1": "shelf 2"}), taken, taken]


# ScienceWorld ---------------------------------------------------------------------------------------------------------

KITCHEN = """This room is called the kitchen. In it, you see: 
	the agent
	a substance called air
	a counter. On the counter is: a bowl (containing a red apple, an orange), a drawer.
	a fridge. The fridge door is closed. 
	a sink, which is turned off. In the sink is: nothing.
	a toilet. In the toilet is: A drain, which is open, a substance called water.
You also see:
	A door to the hallway (that is open)
In your inventory, you see:
	a metal pot (containing a substance called water)
	an orange"""


def test_a_room_of_scienceworld() -> None:
    seen = find("scienceworld").reader.look(KITCHEN)
    assert (seen.at, seen.held, seen.places) == ("kitchen", ("metal pot", "orange"), ("hallway",))
    assert {view.at: view.seen for view in seen.views} == {
        "kitchen": ("air", "counter", "fridge", "sink", "toilet"),
        "counter": ("bowl", "drawer"),
        "bowl": ("red apple", "orange"),
        "sink": (),
        "toilet": ("drain", "water"),
    }
    elsewhere = find("scienceworld").reader.look(KITCHEN.replace("\tthe agent\n", "").partition("In your")[0])
    assert elsewhere.at is None and elsewhere.held is None  # a look through a door
    carried = "In your inventory, you see:\n\ta table. On the table is: \n\ta glass cup (containing nothing)"
    assert find("scienceworld").reader.look(carried).held is None  # what is on it looks like what is carried


VERBS = ("pick", "put", "move", "open", "close", "go", "teleport", "look", "inventory", "activate", "eat", "pour")


def scienceworld_mistakes(reader: CommandReader, walks: Sequence[tuple[Walk, list[tuple[str, str]]]]) -> int:
    """Return the number of steps after which the state differs from the simulator's own room and inventory."""
    wrong = 0
    for walked, answers in walks:
        followed = reader.follow(walked.first, walked.records)
        for (record, _, state), (room, carried) in zip(followed, answers, strict=True):
            lines = [line.replace("its terminal", " its terminal") for line in carried.splitlines()]
            words = [set(re.findall(r"[\w-]+", line)) for line in lines if line.strip() != "nothing"]
            loaded = any(line.rstrip().endswith(":") for line in lines)  # also lists what is on a carried thing
            right = loaded or len(state.held) == len(words)
            right = right and all(any(set(thing.split()) <= line for line in words) for thing in state.held)
            right = right and f"called the {state.at}." in room.splitlines()[0]
            if record.action == "look around" and not record.refused:
                lines = [line for line in room.splitlines() if line.startswith("\t")]
                at = {
                    thing: place for thing, place in state.where.items() if place == state.at or f"{place} is:" in room
                }
                right = right and bool(at) and all(
                    any(thing in line and (place == state.at or place in line) for line in lines)
                    for thing, place in at.items()
                )  # fmt: skip
            wrong += not right
    return wrong


@pytest.mark.scienceworld
@pytest.mark.slow
def test_the_state_of_scienceworld() -> None:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    from envs.scienceworld.environment import ScienceWorldEnvironment

    kinds = ("boil", "grow-plant", "chemistry-mix", "find-animal", "use-thermometer")
    env, walks = ScienceWorldEnvironment(kinds=kinds), []
    for kind in kinds:
        task, rng, answers = next(t for t in env.tasks("test") if t.kind == kind), random.Random(kind), []
        start = Walk(task, env.reset(task).text)
        simulator = env._caught_up(env._playing())

        def commands(simulator: Any = simulator, rng: random.Random = rng) -> Sequence[str]:
            by_verb: dict[str, list[str]] = {}
            for command in simulator.valid():
                verb, _, rest = command.partition(" ")
                if verb.isdigit() or (verb in VERBS and not re.search("agent|inventory|bee", rest)):
                    by_verb.setdefault(verb, []).append(command)
            return by_verb[rng.choice(sorted(by_verb))]

        def step(command: str) -> str:
            return env.step(command).observation.text

        def truth(simulator: Any = simulator, answers: list[tuple[str, str]] = answers) -> Truth:
            room, _, carried = simulator.look().partition("In your inventory, you see:\n")
            answers.append((room, carried))
            return Truth(frozenset(), (), {})

        walks.append((walk(start, step, commands, truth, find("scienceworld").refusals, rng, 60), answers))
    env.close()
    assert scienceworld_mistakes(find("scienceworld").reader, walks) == 0
    assert scienceworld_mistakes(find("household").reader, walks) > 50
    moved = [(played, answers) for played, (_, answers) in zip(shuffled([w for w, _ in walks]), walks, strict=True)]
    assert scienceworld_mistakes(find("scienceworld").reader, moved) > 50
    assert_invalid_commands_change_nothing("scienceworld", [walked for walked, _ in walks])
