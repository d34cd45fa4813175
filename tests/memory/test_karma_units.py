"""KARMA's memories: what is written, recalled and kept, against the engine's own state where that is the judge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from envs.base import FloorPlan, Task, TaskSequence
from envs.household.command_reader import HouseholdReader
from envs.household.engine import Engine
from envs.household.environment import EngineEnvironment, HouseholdEnvironment
from envs.household.world import Game, State
from envs.pool import EnvironmentPool
from envs.spec import WorkerSpec
from memory.karma.graph import SceneGraph, build_graph, read_graph
from memory.karma.recall import distances, nearest
from memory.karma.settings import KarmaSettings
from memory.karma.system import HomeMemory, Karma, KarmaWorldSession, object_of
from memory.karma.units import HAND, ObjectUnit, ShortTerm, read_states, read_unit
from memory.protocol import Query, Record, SupportsWorldSessions, Trace, open_world_session
from memory.registry import MemoryTools

READER = HouseholdReader()
TOOLS = MemoryTools(reader=READER)
FEW = {"simple": 1, "composite": 1, "complex": 1}
HOMES = {"images": False, "fixed_objects": 20, "visual_share": 0.0, "scenes": {"test": 4}, "sequences": FEW}
TASK = Task("t", "put a clean apple in fridge", "home 1", "test", "put")
MASKS = {"heated": "hot", "cooled": "cool", "cleaned": "clean", "sliced": "sliced", "on": "toggled"}


def step(action: str, feedback: str, t: int = 0) -> Record:
    return Record(t, "", action, feedback)


def took(thing: str, place: str) -> Record:
    return step(f"take {thing} from {place}", f"You pick up the {thing} from the {place}.")


def put(thing: str, place: str) -> Record:
    return step(f"move {thing} to {place}", f"You move the {thing} to the {place}.")


def short(records: list[Record], named: str = "", **settings: object) -> ShortTerm:
    memory = ShortTerm(KarmaSettings.model_validate(settings), READER)
    for record in records:
        memory.observe(record, "t", frozenset(named.split()))
    return memory


# recall ---------------------------------------------------------------------------------------------------------------


def test_the_nearest_units_come_first() -> None:
    vectors = {"q": (1, 0), "a 1": (0.8, 0.6), "b 1": (0, 1), "c 1": (-1, 0)}
    embed = lambda texts: np.array([vectors["q" if text == "q" else f"{text[0]} 1"] for text in texts], float)
    units = [ObjectUnit(id, "shelf 1", version=n) for n, id in enumerate(("c 1", "a 1", "b 1"), start=1)]
    far = distances("q", ["a is in shelf 1", "b is in shelf 1", "c is in shelf 1"], embed)
    assert far == pytest.approx([0.2, 1, 2])
    assert [unit.id for unit in nearest("q", units, 2, embed)] == ["a 1", "b 1"]


def test_of_units_that_are_as_near_the_one_written_last_comes_first() -> None:
    units = [ObjectUnit(f"mug {n}", "shelf 1", version=v) for n, v in ((1, 5), (2, 9), (3, 7))]
    assert [unit.id for unit in nearest("put a mug in desk", units, 3)] == ["mug 2", "mug 3", "mug 1"]


def test_words_of_an_instruction_find_the_thing_that_it_names() -> None:
    units = [
        ObjectUnit("plate 1", "cabinet 2", ("cleaned",), version=3),
        ObjectUnit("mug 1", "cabinet 4", version=1),
        ObjectUnit("egg 1", "fridge 1", version=2),
    ]
    assert nearest("put a clean mug in cabinet", units, 1)[0].id == "mug 1"


# units ----------------------------------------------------------------------------------------------------------------


def test_a_second_write_leaves_one_unit_with_the_new_facts_only() -> None:
    memory = short(
        [
            took("apple 1", "fridge 1"),
            put("apple 1", "sinkbasin 1"),
            took("apple 1", "sinkbasin 1"),
            step("clean apple 1 with sinkbasin 1", "You clean the apple 1 using the sinkbasin 1."),
            put("apple 1", "countertop 1"),
        ]
    )
    assert [unit.text for unit in memory.held()] == ["apple 1 is in countertop 1; apple 1 is cleaned"]


def test_states_are_a_set_in_which_hot_and_cool_exclude_each_other() -> None:
    treat = lambda verb, place: step("", f"You {verb} the egg 1 using the {place} 1.")
    memory = short([took("egg 1", "desk 1"), treat("heat", "microwave"), treat("clean", "sinkbasin")])
    assert memory.held()[0].states == ("heated", "cleaned") and memory.held()[0].place == HAND
    memory.observe(treat("cool", "fridge"), "t", frozenset())
    assert memory.held()[0].states == ("cleaned", "cooled")
    sliced = step("slice egg 1 with knife 1", "You sliced the egg 1 with the knife 1.")
    assert short([sliced]).held()[0].text == "egg 1 is sliced"


def test_what_is_written_of_a_view_is_a_switch() -> None:
    view = step("go to desk 1", "You arrive at desk 1. On the desk 1, you see a pen 1, and a mug 2.")
    assert [unit.id for unit in short([view], "put a mug in shelf").held()] == ["mug 2"]
    assert short([view], "put a mug in shelf", write="used").held() == []
    assert [unit.id for unit in short([view], write="all_seen").held()] == ["pen 1", "mug 2"]


def test_a_unit_that_a_view_contradicts_is_dropped_unless_nothing_feeds_back() -> None:
    told = [took("mug 1", "shelf 1"), put("mug 1", "desk 1")]
    gone = step("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    assert short([*told, gone]).held() == [] and len(short([*told, gone], feedback=False).held()) == 1


def test_refused_actions_tell_nothing() -> None:
    memory = ShortTerm(KarmaSettings(), READER)
    memory.observe(
        Record(0, "", "take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1.", True), "t", frozenset()
    )
    assert memory.held() == []


def test_units_are_read_back_and_other_text_is_not() -> None:
    unit = ObjectUnit("apple 1", "fridge 1", ("cooled", "cleaned"))
    assert read_unit(unit.text) == unit and read_unit("lamp 1 is on") == ObjectUnit("lamp 1", "", ("on",))
    for text in ("", "go to shelf 1", "apple 1 is in fridge 1; pear 1 is hot", "apple 1 is in {0} fridge"):
        assert read_unit(text) is None


def test_a_models_states_are_read_line_by_line_and_unknown_words_left_out() -> None:
    answer = "Here you are:\n- Apple 1: cleaned, shiny\npear 1: none\n`mug 2`: hot\nmug 1: used up"
    assert read_states(answer, ["apple 1", "pear 1", "mug 1"]) == {
        "apple 1": ("cleaned",),
        "pear 1": (),
        "mug 1": ("used up",),
    }


def test_a_model_says_the_states_of_what_was_used_when_a_task_is_over() -> None:
    asked = []

    def ask(messages, role, most):
        asked.append(messages[1]["content"])
        return "apple 1: dirty" if len(asked) == 1 else "who knows"

    home = HomeMemory("w", "home 1", KarmaSettings(states="vlm"), MemoryTools(ask=ask), READER)
    life = KarmaWorldSession(home)
    session = life.session(Query(TASK))
    session.recall("")
    records = (took("apple 1", "fridge 1"), put("apple 1", "desk 1"))
    for record in records:
        session.observe(record)
    life.end(Trace(TASK, records, True))
    assert "apple 1" in asked[0] and home.short.held()[0].text == "apple 1 is in desk 1; apple 1 is dirty"
    assert life.failures["states"] == 0
    life.end(Trace(TASK, records, True))
    assert life.failures == {"states": 1} and home.short.held()[0].text.endswith("apple 1 is dirty")


def test_a_model_that_sees_is_shown_the_views_of_the_task() -> None:
    asked = []

    def ask(messages, role, most):
        asked.append(messages[1]["content"])
        return "apple 1: sliced"

    for part, shown in ((lambda part: {"part": part}, True), (None, False)):
        home = HomeMemory("w", "home 1", KarmaSettings(states="vlm"), MemoryTools(ask=ask, message_part=part), READER)
        life = KarmaWorldSession(home)
        session = life.session(Query(TASK))
        session.recall("")
        session.observe(took("apple 1", "fridge 1"))
        life.end(Trace(TASK, (took("apple 1", "fridge 1"),), True, views=(b"png",)))
        assert home.short.held()[0].states == ("sliced",)
        if shown:
            text, picture = asked[-1]
            assert "apple 1" in text["part"] and picture == {"part": b"png"}
        else:
            assert "apple 1" in asked[-1]


# the scene graph ------------------------------------------------------------------------------------------------------

PLAN = FloorPlan(
    {"bed 1": (0.2, 0.0, 0.1), "desk 1": (5.9, 1.0, 0.4), "sofa 1": (3.1, 0.0, 5.5), "cart 1": None},
    ((0.0, 0.0, 0.0), (6.0, 0.0, 0.0), (3.0, 0.0, 6.0), (3.0, 0.0, 0.5)),
)


def test_areas_are_the_squares_in_which_one_can_stand() -> None:
    graph = build_graph(PLAN)
    assert [(a.name, a.position, a.contains, a.adjacent) for a in graph.areas] == [
        ("area 1", (1.0, 0.0, 1.0), ("bed 1",), ("area 2",)),
        ("area 2", (3.0, 0.0, 1.0), (), ("area 1", "area 4")),
        ("area 3", (3.0, 0.0, 5.0), ("sofa 1",), ()),
        ("area 4", (5.0, 0.0, 1.0), ("desk 1",), ("area 2",)),
        ("elsewhere", None, ("cart 1",), ()),
    ]
    assert graph.hops("area 1") == {"area 1": 0, "area 2": 1, "area 4": 2} and graph.hops("elsewhere") == {}
    assert graph.area_of("sofa 1") == "area 3" and graph.area_of("lamp 1") == ""


@pytest.mark.parametrize("plan", [PLAN, FloorPlan(), FloorPlan({"bed 1": (1.0, 0.0, 1.0)})])
def test_a_graphs_areas_come_back_from_a_prompt(plan: FloorPlan) -> None:
    graph = build_graph(plan)
    assert read_graph(f"memory:\n{graph.text}\n\nmug 1 is in desk 1").areas == graph.areas


def home_sequences() -> Iterator[TaskSequence]:
    for seed in range(3):
        yield from HouseholdEnvironment(**HOMES, seed=seed).sequences("test")


def test_every_place_of_a_home_is_in_one_area_and_long_term_memory_never_changes() -> None:
    env = HouseholdEnvironment(**HOMES)
    for sequence in env.sequences("test"):
        life = Karma("nowhere", tools=TOOLS).life(sequence)
        texts, graph = set(), life.home.graph
        assert len(graph.areas) > 4
        for number, task in enumerate(sequence.tasks):
            seen = env.proceed(task) if number else env.reset(task)
            named = seen.text
            session = life.session(Query(task))
            texts.add(session.recall(seen.text).entries[0].text)
            lists = [thing for area in graph.areas for thing in area.contains]
            assert sorted(lists) == sorted(r.name for r in env.game.receptacles)
            assert all(f"a {thing}" in named for thing in lists)
            for command in env.expert() or ():
                session.observe(Record(0, "", command, env.step(command).observation.text))
        assert len(texts) == 1 and next(iter(texts)).startswith("Areas of this home:")


# the whole system -----------------------------------------------------------------------------------------------------


def test_short_term_memory_lasts_from_task_to_task_of_one_world_and_no_longer() -> None:
    [sequence, *_] = home_sequences()
    memory = Karma("nowhere", tools=TOOLS)
    assert isinstance(memory, SupportsWorldSessions)
    life = open_world_session(sequence, memory)
    session = life.session(Query(TASK))
    assert [entry.provenance.source for entry in session.recall("").entries] == ["karma/long"]
    session.observe(took("apple 1", "fridge 1"))
    session.observe(put("apple 1", "desk 1"))
    life.end(Trace(TASK, (), True))
    entries = life.session(Query(TASK)).recall("").entries
    assert [entry.text for entry in entries[1:]] == [
        "apple 1 is in desk 1",
        "The task before was: put a clean apple in fridge (done)",
    ]
    assert object_of(entries[1].id) == "apple 1" and object_of(entries[0].id) == ""
    assert len(open_world_session(sequence, memory).session(Query(TASK)).recall("").entries) == 1


def test_a_recall_counts_as_one_use_however_often_a_task_asks() -> None:
    [sequence, *_] = home_sequences()
    life = Karma("nowhere", tools=TOOLS).life(sequence)
    session = life.session(Query(TASK))
    session.observe(put("apple 1", "desk 1"))
    counts = life.home.short.units.frequencies  # type: ignore[attr-defined]
    for _ in range(5):
        session.recall("")
    assert counts.estimate("apple 1") == 2


def test_each_memory_can_be_left_out() -> None:
    [sequence, *_] = home_sequences()
    for settings, sources in (
        ({"long": False}, ["karma/short"]),
        ({"short": False}, ["karma/long"]),
    ):
        life = Karma("nowhere", KarmaSettings.model_validate(settings), tools=TOOLS).life(sequence)
        session = life.session(Query(TASK))
        session.observe(put("apple 1", "desk 1"))
        assert [e.provenance.source for e in life.session(Query(TASK)).recall("").entries] == sources


def test_episodes_that_start_afresh_teach_where_things_lie_at_first(tmp_path: Path) -> None:
    memory = Karma(tmp_path, tools=TOOLS)
    treated = step("", "You clean the mug 1 using the sinkbasin 1.")
    records = (took("mug 1", "shelf 2"), treated, put("mug 1", "desk 1"))
    task = Task("one", "put a clean mug in desk", "home 1", "train", "put")
    memory.commit([[Trace(task, records, True)]])
    other = Task("two", "put a mug in shelf", "home 1", "train", "put")
    [recalled] = memory.recall([Query(other)])
    assert [e.text for e in recalled.entries] == ["mug 1 is in shelf 2"]
    session = memory.session(Query(other), recalled)
    session.observe(took("mug 1", "shelf 2"))
    assert session.recall("").entries[0].text == "mug 1 is in hand"
    assert memory.recall([Query(other)]) == [recalled] and memory.tables()[0].rows[0][1:3] == ("mug 1", "shelf 2")


# truth ----------------------------------------------------------------------------------------------------------------


def places(game: Game, state: State, index: int) -> list[str]:
    return [HAND] if state.held == index else [game.receptacles[r].name for r in game.places(index, state)]


def check(memory: ShortTerm, game: Game, state: State) -> int:
    """Compare every unit with the state; return how many there were."""
    names = {item.name: n for n, item in enumerate(game.items)}
    units = memory.held()
    for unit in units:
        index = names[unit.id]
        assert not unit.place or unit.place in places(game, state, index), unit
        for said in unit.states:
            assert getattr(state, MASKS[said]) >> index & 1, unit
    return len(units)


def walk(game: Game, state: State, memory: ShortTerm, steps: int, rng: random.Random) -> int:
    """Do whatever is possible, told by texts alone; return how many units were compared."""
    engine, compared, named = Engine(game), 0, set[str]()
    exempt = {n for n in range(len(game.items)) if len(game.places(n, state)) > 1}
    assert not exempt, "choose a game whose things each start in one place"
    for t in range(steps):
        commands = engine.commands(state)
        doing = [c for c in commands if not c.startswith(("go to", "look", "inventory", "help", "examine", "close"))]
        command = rng.choice(sorted(doing) if doing and rng.random() < 0.6 else sorted(commands))
        feedback = engine.step(state, command, commands)
        named.update(feedback.replace(".", " ").replace(",", " ").split())
        memory.observe(Record(t, "", command, feedback), "t", frozenset())
        compared += check(memory, game, state)
    assert all(unit.type in named for unit in memory.held())
    return compared


@pytest.mark.parametrize("policy", ["wtinylfu", "fifo", "unlimited"])
@pytest.mark.parametrize("write", ["used", "all_seen"])
def test_units_agree_with_the_engine_in_random_walks_of_10_000_steps(policy: str, write: str) -> None:
    env = HouseholdEnvironment(
        **{**HOMES, "kinds": ["pick_two_obj_and_place", "look_at_obj_in_light", "pick_and_place_simple"]}
    )
    compared = 0
    for number, sequence in enumerate(env.sequences("test")[:2]):
        env.reset(sequence.tasks[0])
        memory = ShortTerm(KarmaSettings.model_validate({"policy": policy, "write": write}), READER)
        compared += walk(env.game, env.state, memory, 5_000, random.Random(number))
    assert compared > 40_000


@pytest.mark.alfworld
def test_units_agree_with_the_engine_in_real_games(shared_data: Path) -> None:
    from envs.alfworld.environment import AlfworldEnvironment

    env: EngineEnvironment = AlfworldEnvironment(shared_data / "alfworld", images=False)
    walked = 0
    for task in env.tasks("valid_seen"):
        env.reset(task)
        if any(len(env.game.places(n, env.state)) > 1 for n in range(len(env.game.items))):
            continue
        walked += 1
        walk(env.game, env.state, ShortTerm(KarmaSettings(write="all_seen"), READER), 2_000, random.Random(walked))
        if walked == 5:
            return
    pytest.fail("no five games whose things each start in one place")


def test_memory_needs_no_more_than_what_a_worker_says() -> None:
    env = HouseholdEnvironment(**HOMES)
    arguments = {**HOMES, "sequences": FEW}
    [sequence, *_] = env.sequences("test")
    with (
        EnvironmentPool(WorkerSpec("envs.household.environment:HouseholdEnvironment", arguments), 1) as pool,
        closing(pool.lease()) as lease,
    ):
        assert not hasattr(lease, "state") and lease.sequences("test")[0] == sequence
        life, memory = Karma("nowhere", tools=TOOLS).life(sequence), SceneGraph()
        for number, task in enumerate(sequence.tasks):
            ours, theirs = (e.proceed(task) if number else e.reset(task) for e in (env, lease))
            assert ours.text == theirs.text
            session = life.session(Query(task))
            memory = session.recall(theirs.text)
            for t, command in enumerate(env.expert() or ()):
                env.step(command)
                session.observe(Record(t, "", command, lease.step(command).observation.text))
            assert check(life.home.short, env.game, env.state)
    assert memory
