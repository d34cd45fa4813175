"""The family `remembered`: only a picture of an earlier episode shows the place; texts and the current view do not."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from configs.collect import CollectConfig
from data_gen.experience import add_rationales, collect_experience, episode_traces, view_selection
from data_gen.tasks import episode_specs
from envs.base import Task
from envs.household.command_reader import first_taken
from envs.household.environment import HouseholdEnvironment, HouseholdSettings
from envs.household.generate import Generator, Home, _fitting
from envs.household.render import CELL, GRID, MARK, RECEPTACLE_NAMES
from envs.registry import command_reader_for
from memory.bank import MemoryBank
from memory.entry import MemoryEntry
from memory.trajectory import entry_of_trace

SETTINGS = {"scenes": {"train": 6, "test": 3}, "visual_share": 0.3, "remembered_share": 0.3}
TEACHER = ExpertTeacher(reader=command_reader_for(HouseholdSettings()))
VIEWS = view_selection(CollectConfig.model_validate({"env": {"name": "household"}}))


def environment(**changes: Any) -> HouseholdEnvironment:
    return HouseholdEnvironment(**{**SETTINGS, **changes})


def generator(env: HouseholdEnvironment) -> Generator:
    assert isinstance(env._games, Generator)
    return env._games


def moved(env: HouseholdEnvironment) -> HouseholdEnvironment:
    """The same homes, but that what was seen in each lies in another of the places that may hold it."""
    homes = generator(env)._homes
    for key, home in list(homes.items()):
        item, place = home.seen or ("", 0)
        others = [other for other in _fitting(home.receptacles, item) if other != place]
        homes[key] = replace(home, seen=(item, others[len(others) // 2]))
    return env


def remembered(env: HouseholdEnvironment, split: str = "train") -> list[Task]:
    return [task for task in env.tasks(split) if task.family == "remembered"]


def experience(env: HouseholdEnvironment) -> list[MemoryEntry]:
    specs = [EpisodeSpec(task) for task in env.tasks("train_experience")]
    episodes = run_episodes(lambda: env, specs, Delivery("expert", "none"), ExpertExecutor(), EpisodeLimits(50), 1)
    add_rationales(episodes, TEACHER)
    return [entry_of_trace(trace) for [trace] in episode_traces(episodes, VIEWS)]


def marked_places(picture: Any) -> set[str]:
    """The names of the receptacles whose cells wear the mark."""
    rows, columns = np.nonzero((np.asarray(picture) == MARK).all(-1))
    return {RECEPTACLE_NAMES[cell] for cell in set((rows // CELL * GRID + columns // CELL).tolist())}


def home_of(env: HouseholdEnvironment, task: Task) -> Home:
    return generator(env)._home(0, task.data["layout"], int(task.data["scene"]))


def test_families_come_in_their_shares() -> None:
    families = lambda **shares: Counter(task.family for task in environment(**shares).tasks("test"))
    assert families() == {"text": 18, "visual": 12, "remembered": 12}  # a home: 6 at a share of 0.4, so 4.5 at 0.3
    assert families(visual_share=0.0, remembered_share=1.0) == {"remembered": 18}
    assert families(visual_share=0.7, remembered_share=0.3) == {"visual": 12, "remembered": 6}


def test_without_the_family_tasks_and_games_are_what_they_were() -> None:
    """The hash is of the commit before there was such a family."""
    env = HouseholdEnvironment(scenes={"train": 4, "test": 3}, visual_share=0.7)
    tasks = [task for split in ("train", "train_experience", "test") for task in env.tasks(split)]
    told = [(task, env.reset(task).text, env.image().tobytes(), env.expert()) for task in tasks]
    assert hashlib.sha256(repr(told).encode()).hexdigest()[:16] == "e82ee65f51623cd0"
    with_family = environment(visual_share=0.7, remembered_share=0.0).tasks("train_experience")
    assert [task.id for task in with_family] == [task.id for task in environment().tasks("train_experience")]


def test_it_stays_in_the_home_is_asked_for_and_never_touched_before() -> None:
    env = environment()
    places: dict[str, set[str]] = {}
    for task in [*env.tasks("train"), *env.tasks("train_experience")]:
        env.reset(task)
        item, place = home_of(env, task).seen or ("", 0)
        name = next(i.name for i in env.game.items if i.type == item)
        held_by = [
            r.name
            for r, mask in zip(env.game.receptacles, env.state.contents, strict=True)
            if mask >> [i.name for i in env.game.items].index(name) & 1
        ]
        assert held_by == [env.game.receptacles[place].name]
        places.setdefault(task.scene, set()).update(held_by)
        assert (task.data["item"] == item) == (task.family == "remembered")
        plan = env.expert()
        assert plan and (first_taken(plan) or ("",))[0] == task.data["item"]
        if task.family == "remembered":
            assert first_taken(plan) == (item, held_by[0])
    assert all(len(found) == 1 for found in places.values())


def test_earlier_views_mark_its_place_and_todays_do_not() -> None:
    env = environment()
    for task in remembered(env):
        assert marked_places(env.reset(task).image) == set() and env.marked_receptacle is None
        for action in env.expert() or []:
            assert marked_places(env.step(action).observation.image) == set()
    seen = {task.scene: home_of(env, task) for task in env.tasks("train")}
    entries = experience(env)
    assert len(entries) == 36
    for entry in entries:
        home = seen[entry.provenance.scene]
        place = home.receptacles[(home.seen or ("", 0))[1]].name
        assert [marked_places(picture) for picture in map(_opened, entry.images)] == [{place}]


def _opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def test_no_text_of_memory_depends_on_its_place_and_no_text_or_view_of_today() -> None:
    """Where it lies elsewhere, all that text-only deliveries and the current view show stays the same to the byte."""
    env, other = environment(), environment()
    tasks, entries = remembered(env), experience(env)
    other.tasks("train")  # its homes are made
    elsewhere = experience(moved(other))
    assert [entry.text for entry in entries] == [entry.text for entry in elsewhere]
    assert [entry.id for entry in entries] == [entry.id for entry in elsewhere]
    assert all(a.images != b.images for a, b in zip(entries, elsewhere, strict=True))
    for task in tasks:
        first, second = env.reset(task), other.reset(task)
        assert first.text == second.text and np.array_equal(np.asarray(first.image), np.asarray(second.image))
        item = task.data["item"]
        mine = [entry for entry in entries if entry.provenance.scene == task.scene]
        assert len(mine) == 6 and not any(f"{item} " in entry.text for entry in mine)


def test_its_place_is_a_choice_among_many() -> None:
    """It is uniform over the places that may hold it, of which there are four at least and six or seven on average."""
    env = HouseholdEnvironment(scenes={"train": 400}, visual_share=0.0, remembered_share=1.0)
    chances, ranks = [], []
    for task in env.tasks("train")[::6]:
        home = home_of(env, task)
        item, place = home.seen or ("", 0)
        possible = _fitting(home.receptacles, item)
        chances.append(1 / len(possible))
        ranks.append(possible.index(place) / (len(possible) - 1))
    assert max(chances) <= 0.25 and sum(chances) / len(chances) < 0.2
    assert sum(ranks) / len(ranks) == pytest.approx(0.5, abs=0.06)  # of 400, 3 standard errors


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EpisodeSpec]:
    env, bank = environment(), MemoryBank(tmp_path_factory.mktemp("bank") / "bank")
    collect_experience(environment, env.tasks("train_experience"), bank, TEACHER, VIEWS)
    return episode_specs(remembered(env), bank, 1)


def test_the_scene_alone_retrieves_an_entry_whose_picture_tells(specs: list[EpisodeSpec]) -> None:
    env = environment()
    for spec in specs:
        [entry] = spec.memory
        env.reset(spec.task)
        assert entry.provenance.scene == spec.task.scene
        fact = first_taken(env.expert() or [])
        assert fact and marked_places(_opened(entry.images[0])) == {fact[1]}


def test_the_expert_as_compiler_knows_of_no_place(specs: list[EpisodeSpec]) -> None:
    delivery = Delivery("expert_compiler", "compiled", TEACHER, soft=False)
    episodes: list[Episode] = run_episodes(environment, specs, delivery, ExpertExecutor(), EpisodeLimits(20), 1)
    assert [step.guidance for episode in episodes for step in episode.steps if step.guidance] == []
