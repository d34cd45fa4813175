"""ScienceWorld's commands as the teacher reads them, and what it says of other variations' episodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from compiler.brief_state import BriefState, Create
from compiler.language import Emission, Kind
from compiler.records import CompileRequest
from data_gen.experience import collect_experience
from data_gen.rows import episode_rows
from data_gen.tasks import episode_specs
from envs.command_reader import Fact
from envs.scienceworld.command_reader import ScienceWorldReader, destination, rest_of_path, straighten
from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from tests.memory.entries import by_id

READER = ScienceWorldReader()
BOIL = (
    "open door to kitchen",
    "go to kitchen",
    "look around",
    "pick up thermometer",
    "open cupboard",
    "pick up metal pot",
    "focus on water",
    "wait1",
    "go to hallway",
    "go to foundry",
    "activate blast furnace",
)


def test_steps_rooms_and_milestones_are_read_off_a_path() -> None:
    assert READER.facts(BOIL) == [
        Fact("pick up thermometer", "kitchen"),
        Fact("open cupboard", "kitchen"),
        Fact("pick up metal pot", "kitchen"),
        Fact("focus on", "kitchen"),
        Fact("activate blast furnace", "foundry"),
    ]
    assert destination(BOIL) == (2, "kitchen") and destination(BOIL[2:]) == (0, "")
    assert READER.need(BOIL) == Fact("pick up thermometer", "kitchen") and READER.need(BOIL[3:]) is None
    assert READER.need(BOIL[8:]) == Fact("activate blast furnace", "foundry")
    shown = frozenset({"pick up thermometer", "activate blast furnace"})
    left = ["pick up thermometer", "focus on water", "activate blast furnace"]
    assert READER.subgoals(BOIL, "boil water; focus on it", shown) == left  # of the pot, neither goal nor memory tells
    assert READER.searched((*BOIL[:3], "go to hallway", "look around")) == {"kitchen", "hallway"}
    assert READER.searched(BOIL) == frozenset()


def test_a_path_is_straightened_where_nothing_is_done_on_the_way() -> None:
    to = lambda room: (f"open door to {room}", f"go to {room}")
    searched = (
        *to("kitchen"),
        "look around",
        "open fridge",
        *to("bathroom"),
        "look around",
        *to("kitchen"),
        "look around",
        *to("hallway"),
        "look around",
        *to("bedroom"),
        *to("hallway"),
        *to("workshop"),
        "look around",
        "pick up lead",
        "wait1",
        *to("hallway"),
        *to("workshop"),
        "examine lead",
        *to("hallway"),
        "focus on lead",
    )
    assert straighten(searched, "hallway") == [
        *to("kitchen"),
        "look around",
        "open fridge",
        *to("hallway"),
        *to("workshop"),
        "look around",
        "pick up lead",
        "wait1",
        *to("hallway"),
        "focus on lead",
    ]
    assert straighten(BOIL, "hallway") == list(BOIL) and straighten((), "hallway") == []
    assert straighten((*to("kitchen"), *to("hallway"), "look around"), "hallway") == ["look around"]


@pytest.mark.parametrize(
    ("done", "rooms", "left"),
    [
        ((), ("hallway",), BOIL),
        (BOIL[:2], ("hallway", "hallway", "kitchen"), BOIL[2:]),
        (("look around",), ("hallway", "hallway"), BOIL),
        (("teleport to bedroom",), ("hallway", "bedroom"), ("teleport to kitchen", *BOIL[2:])),
        (("teleport to kitchen",), ("hallway", "kitchen"), BOIL[2:]),
        (("teleport to kitchen", "look around"), ("hallway", "kitchen", "kitchen"), BOIL[3:]),
        (
            (*BOIL[:4], "teleport to bedroom"),
            ("hallway", *["kitchen"] * 4, "bedroom"),
            ("teleport to kitchen", *BOIL[4:]),
        ),
        (("pick up orange",), ("hallway", "hallway"), None),
    ],
)
def test_who_only_walked_and_looked_is_led_on(done, rooms, left) -> None:
    rooms = ("hallway", "hallway", *rooms[2:]) if done[:2] == BOIL[:2] else rooms
    found = rest_of_path(BOIL, done, rooms)
    assert found == (None if left is None else list(left))


def entry(name: str, *actions: str, goal: str = "boil ice") -> MemoryEntry:
    return MemoryEntry(name, "", Provenance(name, "", f"Your task is to {goal}.", "train", True, actions))


def said(memory: tuple[MemoryEntry, ...], plan: tuple[str, ...], *history: str, view: str = "") -> Emission:
    request = CompileRequest("Your task is to boil water.", memory, None, view, None, history)
    return ExpertTeacher(reader=READER).emission(request, plan)


def test_it_names_the_room_that_most_variations_of_the_type_name() -> None:
    kitchen, shop = entry("1", *BOIL), entry("2", "go to workshop", "pick up thermometer")
    other = entry("3", "go to outside", "pick up thermometer", goal="find an animal and move it to the red box")
    assert said((shop, kitchen, entry("4", *BOIL)), BOIL).guidance == "go to kitchen"
    assert said((other,), BOIL).kind is Kind.NOACTION
    assert said((entry("5", "go to bathroom", "pick up soap"),), BOIL).guidance == "go to bathroom"  # of its kind
    assert said((kitchen,), BOIL[2:], *BOIL[:2]).kind is Kind.NOACTION


def test_it_gives_the_next_step_in_the_words_of_this_variation() -> None:
    past = entry("1", "go to kitchen", "pick up pan", "focus on ice")
    done, plan = ("go to kitchen", "pick up pan"), ("focus on water",)
    assert said((past,), plan, *done) == Emission("focus on water", "after pick up pan came focus on ice")
    assert said((past,), ("focus on mercury",), *done).guidance == ""  # of mercury neither goal nor view tells
    assert said((past,), ("focus on mercury",), *done, view="a cup of mercury").guidance == "focus on mercury"


def test_a_room_that_lacks_the_thing_is_noted_and_that_memory_knows_no_more_is_said() -> None:
    state = BriefState("boil").apply(Create("plan", "pick up thermometer"))
    view, memory = "This room is called the kitchen. In it, you see: a sink", (entry("1", *BOIL),)
    plan, history = ("go to workshop", "pick up thermometer"), ("go to kitchen", "look around")
    request = CompileRequest("Your task is to boil water.", memory, state, view, None, history)
    told = ExpertTeacher(reader=READER).emission(request, plan)
    assert told.guidance == "search elsewhere"
    assert (
        Create("kitchen", "no thermometer") in told.ops and Create("thermometer", "not where memory says") in told.ops
    )


# With the simulator --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def env() -> Iterator:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    from envs.scienceworld.environment import ScienceWorldEnvironment

    made = ScienceWorldEnvironment(kinds=["find-animal", "lifespan-shortest-lived"])
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.scienceworld
def test_rows_of_a_small_collection_hold_all_four_emission_kinds(env, tmp_path) -> None:
    bank, teacher = MemoryBank(tmp_path / "bank"), ExpertTeacher(reader=READER)
    tasks = env.tasks("train")
    chosen = [[task for task in tasks if task.kind == kind] for kind in ("find-animal", "lifespan-shortest-lived")]
    collect_experience(lambda: env, [task for of in chosen for task in of[:2]], bank, teacher, round_size=1)
    specs = episode_specs([task for of in chosen for task in of[2:4]], bank, 4)
    delivery = Delivery("teacher", "compiled", teacher, soft=False)
    episodes = run_episodes(lambda: env, specs, delivery, ExpertExecutor(), EpisodeLimits(40), 1)
    assert all(episode.success for episode in episodes)
    assert [step.op_errors for e in episodes for step in e.steps if step.op_errors] == []
    assert {row.kind for e, s in zip(episodes, specs, strict=True) for row in episode_rows(e, by_id(s.memory))} == set(
        Kind
    )


@pytest.mark.slow
@pytest.mark.scienceworld
def test_the_expert_leads_back_who_has_strayed(env) -> None:
    [task, *_] = env.tasks("train")
    env.reset(task)
    gold = env.expert()
    assert gold[:1] == ["open door to greenhouse"] or gold[:1] == ["open door to kitchen"]
    env.step("teleport to bedroom")
    back = env.expert()
    assert back[0].startswith("teleport to ") and back[1] in gold
    assert [env.step(command) for command in back][-1].success
    env.reset(task)
    env.step("pick up orange")
    assert env.expert() is None
