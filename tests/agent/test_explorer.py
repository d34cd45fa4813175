"""The explorer: it solves the expert's tasks, and where things are hidden changes nothing until it sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor
from agent.explorer import ExplorerExecutor
from agent.records import Episode, EpisodeContext
from envs.alfworld.environment import AlfworldEnvironment
from envs.base import Task
from envs.household.engine import Engine
from envs.household.environment import EngineEnvironment, Games, HouseholdEnvironment
from envs.household.world import KINDS, NOWHERE, Game
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Executor

HOMES = HouseholdEnvironment(scenes={"train": 8}, images=False, kinds=KINDS)


def play(env: EngineEnvironment, tasks: list[Task], actor: Executor) -> list[Episode]:
    specs, limits = [EpisodeSpec(task) for task in tasks], EpisodeLimits(120)
    return run_episodes(lambda: env, specs, Delivery("expert", "none"), actor, limits, concurrency=1)


@dataclass
class Hidden:
    """Games in which the first thing of the goal's kind is at another place."""

    games: Games
    place: int

    def tasks(self, split: str) -> list[Task]:
        return self.games.tasks(split)

    def game(self, task: Task) -> tuple[Game, int | None]:
        game, marked = self.games.game(task)
        return hide(game, self.place), marked

    def worlds(self, split: str) -> list[Task]:
        return self.games.worlds(split)


def hide(game: Game, place: int) -> Game:
    item, start = sought(game), game.start.copy()
    bit, [source] = 1 << item, game.places(item, start)
    start.contents[source] &= ~bit
    start.standing[game.receptacles[source].location] &= ~bit
    start.contents[place] |= bit
    start.standing[game.receptacles[place].location] |= bit
    return replace(game, start=start)


def sought(game: Game) -> int:
    return next(n for n, item in enumerate(game.items) if item.type == game.goal.item_type)


def other_places(game: Game) -> Iterator[int]:
    """Yield the places that may hold the thing and that do not solve the task."""
    engine, item = Engine(game), sought(game)
    if len(game.places(item, game.start)) != 1:
        return
    for place, receptacle in enumerate(game.receptacles):
        if receptacle.location != NOWHERE and engine.fits(item, place):
            moved = hide(game, place)
            if engine.progress(moved.start) < 1:
                yield place


def differs_unseen(one: Episode, other: Episode) -> bool:
    """Return whether two episodes take different commands after the same views."""
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if mine.observation != theirs.observation:
            return False
        if mine.action != theirs.action:
            return True
    return False


@pytest.mark.seconds
def test_the_path_does_not_depend_on_a_place_that_no_view_has_shown() -> None:
    tasks, compared, cheats = HOMES.tasks("train")[::3], 0, 0
    for task in tasks:
        game, _ = HOMES._games.game(task)
        for actor in (ExplorerExecutor(), ExpertExecutor()):
            [here] = play(HOMES, [task], actor)
            for place in other_places(game):
                [there] = play(EngineEnvironment(Hidden(HOMES._games, place), images=False), [task], actor)
                leaks = differs_unseen(here, there)
                assert not leaks or isinstance(actor, ExpertExecutor), (task.id, place)
                compared, cheats = compared + 1, cheats + leaks
    assert compared > 200 and cheats > 50  # the expert's path does depend on it
    assert {task.kind for task in tasks} == set(KINDS)


def test_it_solves_what_the_expert_solves_with_dead_ends_and_searches_no_place_twice() -> None:
    tasks = HOMES.tasks("train")[::2]
    mine, theirs = play(HOMES, tasks, ExplorerExecutor(3)), play(HOMES, tasks, ExpertExecutor())
    assert all(episode.success for episode in mine)
    steps = [sum(len(episode.steps) for episode in played) for played in (mine, theirs)]
    assert 1.5 < steps[0] / steps[1] < 6
    for episode in mine:
        left = [a.action for a, b in pairwise(episode.steps) if a.action[:5] == b.action[:5] == "go to"]
        assert len(set(left)) == len(left)
    again, other = play(HOMES, tasks, ExplorerExecutor(3)), play(HOMES, tasks, ExplorerExecutor(4))
    actions = [[[step.action for step in episode.steps] for episode in played] for played in (mine, again, other)]
    assert actions[0] == actions[1] != actions[2]


@pytest.mark.seconds
def test_it_solves_real_games(shared_data: Path) -> None:
    env = AlfworldEnvironment(shared_data / "alfworld", images=False)
    episodes = play(env, env.tasks("valid_seen")[::5], ExplorerExecutor())
    assert len(episodes) == 28 and all(episode.success for episode in episodes)


def test_a_task_that_is_played_twice_at_a_time_is_refused() -> None:
    actor, view = ExplorerExecutor(), "Looking quickly around you, you see a desk 1."
    request = ExecutorRequest("put a mug in desk", MemoryBlock(), (), view, ("go to desk 1", "look"))
    context = EpisodeContext(["go to desk 1", "take mug 1 from desk 1"], "t")
    assert [actor.act([request], [context])[0].action for _ in range(2)] == ["go to desk 1"] * 2
    actor.act([later := replace(request, history=("go to desk 1",))], [context])
    with pytest.raises(ValueError, match="task t is played twice at a time"):
        actor.act([later], [context])
