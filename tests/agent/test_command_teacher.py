"""The teacher of subgoals and commands: what it says follows from goal, M, b_t, o_t and past commands alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.command_teacher import CommandTeacher, Teaching, load_teacher
from agent.deliveries import Delivery, find
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode, EpisodeContext
from compiler.brief_state import Belief, BriefState, Create, Delete, apply_ops
from compiler.language import Emission
from compiler.records import CompileRequest
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import collect_experience, open_experience_bank
from data_gen.recall_mix import RecallMix
from data_gen.tasks import episode_specs, select_tasks
from envs.alfworld.environment import AlfworldEnvironment
from envs.base import Environment
from envs.command_reader import CommandReader
from envs.household.command_reader import AlfworldReader, HouseholdReader
from envs.household.environment import HouseholdEnvironment
from envs.household.errands import Errand, place_notes, read_errand
from envs.household.world import KINDS
from envs.registry import Environments
from envs.scienceworld.command_reader import ScienceWorldReader
from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from tests.fakes import Obedient

TEACHER = CommandTeacher(reader=AlfworldReader())
GOAL = "in FloorPlan1: put a cool mug in cabinet"
ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 2, a cabinet 1, a countertop 1, "
    "a fridge 1, and a shelf 1."
)


def remembered(scene: str, *actions: str, goal: str = "cool some mug and put it in cabinet") -> MemoryEntry:
    return MemoryEntry(f"{scene}{actions}", "", Provenance("", scene, goal, "train", True, actions))


COOLED = remembered(
    "FloorPlan2",
    "go to shelf 9",
    "take mug 3 from shelf 9",
    "go to fridge 1",
    "cool mug 3 with fridge 1",
    "go to cabinet 4",
    "open cabinet 4",
    "move mug 3 to cabinet 4",
)
HEATED = remembered("FloorPlan1", "take mug 1 from shelf 1", "heat mug 1 with microwave 1", "move mug 1 to cabinet 1")


class Talk:
    """A conversation with the teacher: commands and answers go in, emissions come out."""

    def __init__(self, *memory: MemoryEntry, teacher: CommandTeacher = TEACHER, goal: str = GOAL) -> None:
        self.teacher, self.goal, self.memory = teacher, goal, memory
        self.state, self.history = BriefState(goal), tuple[str, ...]()

    def hear(self, answer: str, *command: str) -> Emission:
        self.history += command
        asked = CompileRequest(self.goal, self.memory, self.state, answer, history=self.history)
        said = self.teacher.emission(asked)
        self.state, errors = apply_ops(said.ops, self.state)
        assert not errors
        return said


def test_every_step_of_an_errand_follows_from_memory_and_views() -> None:
    talk = Talk(COOLED)
    first = talk.hear(ROOM)
    assert (first.guidance, first.reason) == ("go to shelf 1", "the mug was in shelf before")
    assert talk.state.current == "find mug" and talk.state.pending == ("cool mug", "put mug in cabinet")
    assert talk.state.belief("mug") == "shelf"  # the kind of place where M's entry found one
    assert talk.state.belief("example") == "FloorPlan2"  # whose routine is followed
    assert talk.state.belief("places") == "cabinet 2, countertop 1, fridge 1, shelf 1"  # the first of each kind
    assert talk.state.belief("unsearched") == "countertop 1, fridge 1, shelf 1, cabinet 2, cabinet 1"  # few first
    lacks = talk.hear("You arrive at shelf 1. On the shelf 1, you see nothing.", "go to shelf 1")
    assert (lacks.guidance, lacks.reason) == ("go to countertop 1", "the mug was not seen so far")
    assert lacks.ops == (Delete("unsearched", "shelf 1"),)
    seen = talk.hear("You arrive at countertop 1. On the countertop 1, you see a mug 2.", "go to countertop 1")
    assert seen.guidance == "take mug 2 from countertop 1" and seen.reason == "the mug 2 is in view"
    taken = talk.hear("You pick up the mug 2 from the countertop 1.", "take mug 2 from countertop 1")
    assert taken.guidance == "go to fridge 1"
    assert taken.reason == "in FloorPlan2 after take came cool: for fridge, here is countertop 1"
    there = talk.hear("You arrive at fridge 1. The fridge 1 is closed.", "go to fridge 1")
    assert there.guidance == "cool mug 2 with fridge 1"
    assert talk.hear("You cool the mug 2 using the fridge 1.", "cool mug 2 with fridge 1").guidance == "go to cabinet 2"
    closed = talk.hear("You arrive at cabinet 2. The cabinet 2 is closed.", "go to cabinet 2")
    assert (closed.guidance, closed.reason) == ("open cabinet 2", "it is closed")
    opened = talk.hear("You open the cabinet 2. The cabinet 2 is open. In it, you see nothing.", "open cabinet 2")
    assert opened.guidance == "move mug 2 to cabinet 2"
    assert talk.state.completed == ("take mug 2 from countertop 1", "cool mug 2 with fridge 1")


def test_what_is_due_comes_behind_the_notes_it_follows_from() -> None:
    asked = CompileRequest(GOAL, (COOLED,), BriefState(GOAL), ROOM)
    lines = TEACHER.compile([asked], [EpisodeContext(None)])[0].text.splitlines()
    assert lines[0].startswith("+ plan: find mug") and lines[-1] == "> the mug was in shelf before | go to shelf 1"


def test_places_that_the_brief_state_begins_with_are_not_noted_again() -> None:
    noted, begun = Talk(COOLED), Talk(COOLED)
    begun.state = BriefState(GOAL, beliefs=tuple(Belief(*each) for each in place_notes(ROOM)))
    assert [op.key for op in begun.hear(ROOM).ops if isinstance(op, Create)] == ["plan", "mug", "example"]
    noted.hear(ROOM)
    assert begun.state == noted.state


def test_the_second_of_two_things_goes_where_the_first_was_put() -> None:
    two = remembered("FloorPlan2", "take mug 1 from shelf 1", "move mug 1 to desk 1", goal="put two mug in desk")
    talk = Talk(two, goal="in FloorPlan1: put two mug in cabinet")
    talk.hear(ROOM)
    talk.hear("You pick up the mug 2 from the shelf 1.", "take mug 2 from shelf 1")
    talk.hear("You move the mug 2 to the cabinet 1.", "move mug 2 to cabinet 1")
    assert talk.state.belief("cabinet") == "cabinet 1"
    assert talk.hear("You pick up the mug 1 from the shelf 1.", "take mug 1 from shelf 1").guidance == "go to cabinet 1"


def test_another_example_is_noted_where_memory_no_longer_holds_the_first() -> None:
    talk = Talk(COOLED)
    talk.hear(ROOM)
    talk.memory = (replace(COOLED, provenance=replace(COOLED.provenance, scene="FloorPlan7")),)
    taken = talk.hear("You pick up the mug 2 from the shelf 1.", "take mug 2 from shelf 1")
    assert (
        taken.reason == "in FloorPlan7 after take came cool: for fridge, here is shelf 1"
        and talk.state.belief("example") == "FloorPlan7"
    )


def test_an_example_that_shows_every_step_comes_before_one_that_does_not() -> None:
    cooled_only = remembered("FloorPlan3", "take mug 1 from shelf 9", "cool mug 1 with fridge 1", goal="cool mug")
    talk = Talk(cooled_only, COOLED)
    talk.hear(ROOM)
    assert talk.state.belief("example") == COOLED.provenance.scene


def test_a_lamp_that_was_seen_here_is_used_although_the_last_answer_does_not_show_it() -> None:
    lit = remembered("FloorPlan2", "take cd 1 from desk 1", "use desklamp 1", goal="examine the cd with the desklamp")
    talk = Talk(lit, goal="in FloorPlan1: look at cd under the desklamp")
    assert talk.hear(f"{ROOM[:-1].replace('shelf 1', 'desk 1')}.").guidance == "go to desk 1"
    talk.hear("You arrive at desk 1. On the desk 1, you see a cd 3, and a desklamp 1.", "go to desk 1")
    taken = "You pick up the cd 3 from the desk 1."
    assert talk.hear(taken, "take cd 3 from desk 1").guidance == "use desklamp 1"
    assert talk.hear("Nothing happens.", "use desklamp 1").guidance == "go to desk 1"


def test_subgoals_say_what_is_to_be_done_with_the_names_at_hand() -> None:
    talk = Talk(COOLED, teacher=replace(TEACHER, level="subgoal"))
    assert talk.hear(ROOM).guidance == "find mug in shelf 1"
    seen = "You arrive at countertop 1. On the countertop 1, you see a mug 2."
    assert talk.hear(seen, "go to countertop 1").guidance == "find mug"
    assert talk.hear("You pick up the mug 2 from the countertop 1.", "take mug 2 from countertop 1").guidance == (
        "cool mug 2"
    )


FAILED = replace(COOLED, provenance=replace(COOLED.provenance, success=False))


@pytest.mark.parametrize("memory", [(), (HEATED,), (FAILED,)])
def test_it_is_silent_without_successful_entries_of_the_kind_and_keeps_the_notes(memory) -> None:
    talk = Talk(*memory)
    said = talk.hear(ROOM)
    assert not said.guidance and talk.state.current == "find mug" and talk.state.belief("example") == "none"


def test_where_a_command_did_nothing_it_goes_another_way() -> None:
    talk = Talk(COOLED)
    talk.hear(ROOM)
    assert talk.hear("Nothing happens.", "go to shelf 1").guidance == "examine shelf 1"  # the agent is there already
    assert talk.hear("Nothing happens.", "examine shelf 1").guidance == "go to countertop 1"
    talk.hear("You pick up the mug 2 from the countertop 1.", "take mug 2 from countertop 1")
    talk.hear("You cool the mug 2 using the fridge 1.", "cool mug 2 with fridge 1")
    assert talk.hear("Nothing happens.", "move mug 2 to cabinet 2").guidance == "open cabinet 2"
    assert talk.hear("Nothing happens.", "open cabinet 2").guidance == "go to cabinet 2"


def test_a_thing_put_down_in_the_wrong_place_is_fetched_from_there() -> None:
    talk = Talk(COOLED)
    talk.hear(ROOM)
    talk.hear("You pick up the mug 2 from the countertop 1.", "take mug 2 from countertop 1")
    put = talk.hear("You move the mug 2 to the shelf 1.", "move mug 2 to shelf 1")
    assert talk.state.current == "find mug" and talk.state.belief("mug") == "shelf 1, shelf"
    assert put.guidance == "examine shelf 1"  # the answer does not show what is there
    assert talk.hear("You arrive at fridge 1. The fridge 1 is closed.", "go to fridge 1").guidance == "open fridge 1"
    emptied = "You open the fridge 1. The fridge 1 is open. In it, you see nothing."
    assert talk.hear(emptied, "open fridge 1").guidance == "go to shelf 1"


def test_other_things_are_put_down_before_the_sought_one_is_taken() -> None:
    talk = Talk(COOLED)
    talk.hear(ROOM)
    assert talk.hear("You pick up the pen 1 from the shelf 1.", "take pen 1 from shelf 1").guidance == (
        "move pen 1 to shelf 1"
    )


def test_silence_where_the_agent_is_on_its_way_depends_on_seed_task_and_step_alone() -> None:
    quiet = replace(TEACHER, silence=1.0)
    talk = Talk(COOLED, teacher=quiet)
    assert talk.hear(ROOM).guidance == "go to shelf 1"  # a way is always shown
    assert not talk.hear("You arrive at shelf 1. On the shelf 1, you see a mug 1.", "go to shelf 1").guidance
    some, view = replace(TEACHER, silence=0.5), "You arrive at shelf 1. On the shelf 1, you see a mug 1."
    asked = CompileRequest(GOAL, (COOLED,), Talk().state, view, history=("go to shelf 1",))
    said = {id: some.emission(asked, id).guidance for id in map(str, range(40))}
    assert len(set(said.values())) == 2 and said == {id: some.emission(asked, id).guidance for id in said}


# -- whole episodes ----------------------------------------------------------------------------------------------------


def play(env: Environment, specs: list[EpisodeSpec], teacher: CommandTeacher, steps: int = 50) -> list[Episode]:
    delivery = Delivery("teacher", "compiled", teacher, soft=False)
    return run_episodes(lambda: env, specs, delivery, Obedient(), EpisodeLimits(steps), concurrency=1)


class Blindfolded(HouseholdEnvironment):
    """Homes whose expert cannot be asked."""

    def expert(self) -> list[str] | None:
        raise AssertionError("the teacher asked the expert")


@pytest.mark.seconds
@pytest.mark.parametrize("own", [True, False])
def test_generated_homes_are_solved_without_the_expert(own: bool, tmp_path: Path) -> None:
    settings = {"scenes": {"train": 8}, "images": False, "kinds": KINDS}
    env, homes = HouseholdEnvironment(**settings), HouseholdReader()
    bank = MemoryBank(tmp_path / "bank")
    bank.write([])
    collect_experience(lambda: env, env.tasks("train_experience"), bank, CommandTeacher(reader=homes), round_size=1)
    specs = episode_specs(env.tasks("train")[:24], bank, 8, "task" if own else "scene")
    played = play(Blindfolded(**settings), specs, CommandTeacher(reader=homes))
    assert [step.op_errors for e in played for step in e.steps if step.op_errors] == []
    told = [e for e in played if any(step.guidance for step in e.steps)]
    assert len(told) >= 18 and all(e.success for e in told) and not any(e.error for e in played)


@pytest.mark.slow
def test_an_obedient_executor_solves_real_games_in_homes_that_memory_does_not_know(
    shared_data: Path, tmp_path: Path
) -> None:
    root = f"env.data_root={shared_data / 'alfworld'}"
    bank_of_others = ["split=valid_seen", "memory.experience_split=valid_seen", "memory.isolation=scene"]
    config = load_config(EvalConfig, "eval/alfworld", [root, "compiler.checkpoint=null", *bank_of_others])
    with Environments(config.env) as envs:
        tasks, experience = select_tasks(config, envs, "valid_seen")
        bank = open_experience_bank(config, envs, experience, tmp_path / "run")
        specs = episode_specs(tasks, bank, 4, config.memory.isolation)
        delivery = Delivery("teacher", "compiled", TEACHER, soft=False)
        played = run_episodes(envs.lease, specs, delivery, Obedient(), EpisodeLimits(50))
    told = [episode for episode in played if any(step.guidance for step in episode.steps)]
    assert len(played) == 140 and len(told) >= 110 and not any(episode.error for episode in played)
    assert all(episode.success for episode in told)
    assert sum(len(episode.steps) <= 20 for episode in told) >= 0.9 * len(told)


def test_plans_change_nothing(shared_data: Path) -> None:
    env = AlfworldEnvironment(shared_data / "alfworld", images=False)
    game = env.tasks("valid_seen")[0]
    env.reset(game)
    plan = env.expert()
    asked = [
        CompileRequest(GOAL, (COOLED,), BriefState(GOAL), ROOM),
        CompileRequest(GOAL, (COOLED,), None, "On the shelf 1, you see a mug 1.", history=("go to shelf 1",)),
    ]
    said = [TEACHER.compile(asked, [EpisodeContext(each)] * 2) for each in (None, plan, ["take mug 1 from safe 9"])]
    assert [[c.emission for c in some] for some in said] == [[c.emission for c in said[0]]] * 3
    assert said[0][1].emission.guidance == "take mug 1 from shelf 1" and not said[0][1].emission.ops


def test_beside_a_brief_state_only_the_last_command_is_read() -> None:
    talk = Talk(COOLED)
    talk.hear(ROOM)
    asked = CompileRequest(GOAL, (COOLED,), talk.state, "Nothing happens.", history=("go to shelf 1",))
    longer = replace(asked, history=("take mug 3 from desk 1", "inventory", "go to shelf 1"))
    assert TEACHER.emission(asked) == TEACHER.emission(longer) != TEACHER.emission(replace(asked, history=("look",)))


# -- recipes, controls and settings ------------------------------------------------------------------------------------


def test_recipes_go_on_as_most_past_episodes_did() -> None:
    teacher = CommandTeacher(reader=CommandReader())
    past = tuple(remembered("", "press button 1", "pull lever", "leave", goal=GOAL) for _ in range(2))
    say = lambda view, *done: teacher.emission(CompileRequest(GOAL, past, None, view, history=done))
    assert say("a machine") == Emission("press button 1", "it began with press button 1")
    assert say("it hums", "press button 1") == Emission("pull lever", "after press button 1 came pull lever")
    assert say("done", "press button 1", "pull lever", "leave").guidance == ""
    once = CompileRequest(GOAL, past[:1], None, "a machine")
    assert teacher.emission(once).guidance == ""  # one entry alone may name what is not here
    assert teacher.emission(replace(once, observation="a button 1 to press")).guidance == "press button 1"


def test_in_scienceworld_it_shows_the_way_to_the_next_step_with_the_things_of_the_goal() -> None:
    did = ("go to hallway", "go to kitchen", "pick up water", "use thermometer in inventory on water")
    past = tuple(remembered("", *did, goal="Your task is to boil water.") for _ in range(2))
    goal = "Your task is to boil ice cream."
    teacher = CommandTeacher(reader=ScienceWorldReader())
    say = lambda view, *done: teacher.emission(CompileRequest(goal, past, BriefState(goal), view, history=done))
    assert say("This room is called the workshop.").guidance == "go to hallway"
    assert say("You move to the hallway.", "go to hallway").guidance == "go to kitchen"
    arrived = say("This room is called the kitchen. You see ice cream.", "go to kitchen")
    assert (arrived.guidance, arrived.reason) == ("pick up ice cream", "it began with pick up ice cream")
    taken = say("You move the ice cream to the inventory.", "pick up ice cream")
    assert taken.guidance == "use thermometer on ice cream"


def test_a_kind_of_place_without_a_door_is_noted_and_own_places_where_scenes_differ() -> None:
    def found(scene: str, place: str) -> MemoryEntry:
        return remembered(scene, f"take mug 1 from {place}", "cool mug 1 with fridge 1", "move mug 1 to cabinet 4")

    places = {"FloorPlan3": "cabinet 9", "FloorPlan4": "shelf 7", "FloorPlan5": "shelf 2", "FloorPlan1": "fridge 1"}
    memory = [found(scene, place) for scene, place in places.items()]
    for reader, noted in ((AlfworldReader(), "shelf"), (HouseholdReader(), "fridge 1")):
        talk = Talk(*memory, teacher=replace(TEACHER, reader=reader))
        talk.hear(ROOM)
        assert talk.state.belief("mug") == noted


def test_controls_name_no_places_or_those_of_random_entries() -> None:
    blind = Talk(COOLED, teacher=replace(TEACHER, entry="none"))
    assert blind.hear(ROOM).reason == "the mug was not seen so far"
    pen = remembered("FloorPlan3", "take pen 1 from cabinet 1", "cool pen 1 with fridge 1", "move pen 1 to shelf 1")
    wrong = Talk(pen, teacher=replace(TEACHER, entry="random")).hear(ROOM)
    assert (wrong.guidance, wrong.reason) == ("go to cabinet 2", "the mug was in cabinet before")


def test_a_level_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="environment scienceworld supports place, command"):
        EvalConfig(env={"name": "scienceworld"}, teacher_level="subgoal")
    with pytest.raises(ValueError, match="environment scienceworld supports"):
        CollectConfig(env={"name": "scienceworld"}, teacher_level="subgoal")
    with pytest.raises(ValueError, match="CommandReader supports place, command"):
        load_teacher(CommandReader(), Teaching("subgoal"))
    with pytest.raises(ValueError, match="gated_teacher"):
        CollectConfig(teacher_level="command", gated_teacher=0.5)


def test_deliveries_take_the_level_of_the_settings() -> None:
    reader = AlfworldReader()
    create = lambda name, level: find(name).create(None, 0, reader, teaching=Teaching(level)).compiler
    asked = {"expert_compiler": "place", "expert_random_entry": "subgoal", "expert_no_places": "place"}
    levels = {name: getattr(create(name, level), "level", "place") for name, level in asked.items()}
    assert levels == {"expert_compiler": "place", "expert_random_entry": "subgoal", "expert_no_places": "command"}


@pytest.mark.parametrize(
    ("goal", "errand"),
    [
        ("in home 1: put two creditcard in dresser", Errand("put", "creditcard", "dresser", 2)),
        ("find two knife and put them in drawer", Errand("put", "knife", "drawer", 2)),
        ("put some mug on desk", Errand("put", "mug", "desk")),
        ("put a hot mug in cabinet", Errand("heat", "mug", "cabinet")),
        ("clean some fork and put it in drawer", Errand("clean", "fork", "drawer")),
        ("examine the cd with the desklamp", Errand("look", "cd", "desklamp")),
        ("do something nice", None),
    ],
)
def test_goals_in_alfworlds_words(goal: str, errand: Errand | None) -> None:
    assert read_errand(goal) == errand


def test_what_an_episode_recalls_depends_on_seed_and_task_alone(tmp_path: Path) -> None:
    env = HouseholdEnvironment(scenes={"train": 8}, images=False, kinds=KINDS)
    bank = MemoryBank(tmp_path / "bank")
    bank.write([])
    collect_experience(
        lambda: env, env.tasks("train_experience"), bank, CommandTeacher(reader=HouseholdReader()), round_size=1
    )
    tasks, memory = env.tasks("train"), CollectConfig().memory
    mix = RecallMix(own_scene=0.5, nothing=0.1, other_kinds=0.2, seed=3, reader=HouseholdReader())
    specs = {spec.task.id: spec for spec in mix.specs(tasks, bank, memory)}
    again = mix.specs(tasks[5:], bank, memory)
    assert [specs[spec.task.id].memory for spec in again] == [spec.memory for spec in again]
    of = lambda recall: [spec for spec in specs.values() if spec.recall == recall]
    share = {recall: len(of(recall)) / len(tasks) for recall in ("nothing", "other kinds", "other scenes", "all")}
    assert all(abs(share[name] - p) < 0.12 for name, p in (("nothing", 0.1), ("other kinds", 0.2), ("all", 0.35)))
    assert all(spec.memory == () for spec in of("nothing"))
    assert all(e.provenance.scene != s.task.scene for s in of("other scenes") for e in s.memory)
    assert any(e.provenance.scene == s.task.scene for s in of("all") for e in s.memory)
    for spec in of("other kinds"):
        assert spec.memory and not Talk(*spec.memory, goal=spec.goal).hear(ROOM).guidance
