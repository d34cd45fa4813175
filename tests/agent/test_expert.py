"""The expert teacher over whole episodes: what it writes into the Brief State applies, lasts, and stays true."""

from pathlib import Path

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from compiler.brief_state import BriefState, Create, Delete, Fold, Update
from compiler.records import CompileRequest
from envs.alfworld.environment import AlfworldEnvironment
from envs.base import Environment, Task
from envs.household.environment import HouseholdEnvironment
from envs.household.world import KINDS


def played(env: Environment, tasks: list[Task], steps: int) -> list[Episode]:
    delivery = Delivery("teacher", "compiled", ExpertTeacher(), soft=False)
    specs = [EpisodeSpec(task) for task in tasks]
    return run_episodes(lambda: env, specs, delivery, ExpertExecutor(0.3), Limits(steps), concurrency=1)


def test_no_operation_fails_over_whole_household_episodes() -> None:
    env = HouseholdEnvironment(scenes={"train": 6}, images=False, kinds=KINDS)
    episodes = played(env, env.tasks("train"), 60)
    assert {episode.kind for episode in episodes} == set(KINDS) and all(episode.success for episode in episodes)
    assert [step.op_errors for e in episodes for step in e.steps if step.op_errors] == []
    assert any("note:" in e.steps[-1].brief_after and "done:" in e.steps[-1].brief_after for e in episodes)


def test_no_operation_fails_over_whole_alfworld_episodes(shared_data: Path) -> None:
    env = AlfworldEnvironment(shared_data / "alfworld", images=False)
    episodes = played(env, env.tasks("valid_seen")[::5], 60)
    assert len(episodes) == 28 and all(episode.success for episode in episodes)
    assert [step.op_errors for e in episodes for step in e.steps if step.op_errors] == []


def emission(state: BriefState, observation: str, *history: str, plan: tuple[str, ...]):
    request = CompileRequest("put two mugs in cabinet", (), state, observation, None, history, lambda: list(plan))
    return ExpertTeacher().emission(request).ops


MUG = ("go to desk 1", "take mug 2 from desk 1", "move mug 2 to cabinet 3")
STATE = BriefState("put two mugs in cabinet").apply(Create("plan", "find mug; put mug in cabinet"))


def test_what_a_place_lacks_is_written_once_and_beside_what_it_lacked_before() -> None:
    view = "On the shelf 1, you see a pen 1."
    assert emission(STATE, view, plan=MUG) == (Create("shelf 1", "no mug"),)
    assert emission(STATE.apply(Create("shelf 1", "no mug")), view, plan=MUG) == ()
    known = STATE.apply(Create("shelf 1", "no apple"))
    assert emission(known, view, plan=MUG) == (Update("shelf 1", "no apple, no mug"),)


def test_a_place_that_lacked_a_thing_does_so_no_longer_when_it_is_put_there() -> None:
    state = STATE.apply(Update("plan", "put mug in cabinet; find mug; put mug in cabinet"))
    state = state.apply(Create("cabinet 3", "no mug"))
    put = "move mug 1 to cabinet 3"
    ops = emission(state, "You move the mug 1 to the cabinet 3.", put, plan=MUG)
    assert ops == (Fold(put), Delete("cabinet 3"))
