"""Generated homes: what persists, what wanders, and which tasks are set in them."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict

import pytest

from envs.base import EnvironmentFailure, Task
from envs.household.environment import HouseholdEnvironment
from envs.household.render import RECEPTACLE_NAMES
from envs.household.world import CLEAN, COOL, HEAT, KINDS, LOOK, SIMPLE, TWO

SCENES = {"train": 8, "test": 5}


def environment(**settings: object) -> HouseholdEnvironment:
    return HouseholdEnvironment(**{"scenes": SCENES, "images": False, **settings})  # type: ignore[arg-type]


def start(env: HouseholdEnvironment, task: Task) -> dict[str, str]:
    """Where every item lies at the start of a task: item name -> receptacle name."""
    env.reset(task)
    game = env.game
    return {
        item.name: game.receptacles[place].name
        for index, item in enumerate(game.items)
        for place in game.places(index, env.state)
    }


def by_scene(tasks: list[Task]) -> dict[str, list[Task]]:
    grouped: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        grouped[task.scene].append(task)
    return grouped


def test_receptacle_names_fit_the_plan() -> None:
    assert len(RECEPTACLE_NAMES) == len(set(RECEPTACLE_NAMES)) <= 64
    numbers = defaultdict(list)
    for name in RECEPTACLE_NAMES:
        kind, number = name.split()
        numbers[kind].append(int(number))
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in numbers.values())


def test_homes_are_furnished_as_promised() -> None:
    env = environment()
    for task in env.tasks("train")[::5]:
        env.reset(task)
        names = [receptacle.name for receptacle in env.game.receptacles]
        assert 11 <= len(names) <= 14 and set(names) <= set(RECEPTACLE_NAMES)
        assert {"microwave 1", "fridge 1", "sinkbasin 1"} <= set(names)
        for kind, count in Counter(name.split()[0] for name in names).items():
            assert all(f"{kind} {number}" in names for number in range(1, count + 1))
        assert names == sorted(names, key=lambda name: (name.split()[0], -int(name.split()[1])))
        assert len({item.type for item in env.game.items}) == len(env.game.items) == 9
        fits = env.game.can_contain
        assert all((place.split()[0], item.split()[0]) in fits for item, place in start(env, task).items())


def test_fixed_items_stay_and_wandering_items_wander() -> None:
    env = environment()
    for split in SCENES:
        evaluation, experience = by_scene(env.tasks(split)), by_scene(env.tasks(f"{split}_experience"))
        assert set(evaluation) == set(experience) == {f"home {number}" for number in range(1, SCENES[split] + 1)}
        for scene, tasks in evaluation.items():
            fixed = {f"{task.data['item']} 1" for task in experience[scene]}
            starts = [start(env, task) for task in (*tasks, *experience[scene])]
            rooms = {tuple(sorted(r.name for r in _reset(env, task).game.receptacles)) for task in tasks}
            assert len(fixed) == 6 and len(rooms) == 1
            places = {item: {places[item] for places in starts} for item in starts[0]}
            assert all(len(places[item]) == 1 for item in fixed)
            assert all(len(places[item]) > 2 for item in set(places) - fixed)
            assert len({place.split()[0] for item in fixed for place in places[item]}) > 2


def _reset(env: HouseholdEnvironment, task: Task) -> HouseholdEnvironment:
    env.reset(task)
    return env


def test_families_and_their_shares() -> None:
    env = environment()
    tasks = env.tasks("test")
    assert Counter(task.family for task in tasks) == {"text": 30, "visual": 30}
    fixed = {(task.scene, task.data["item"]) for task in env.tasks("test_experience")}
    for task in tasks:
        assert ((task.scene, task.data["item"]) in fixed) == (task.family == "text")
        env.reset(task)
        assert (env.marked_receptacle is not None) == (task.family == "visual")
    assert {task.family for task in env.tasks("test_experience")} == {"text"}
    assert {task.family for task in environment(visual_share=0).tasks("test")} == {"text"}
    assert {task.family for task in environment(visual_share=1).tasks("test")} == {"visual"}
    assert Counter(t.family for t in environment(visual_share=0.25).tasks("test")) == {"text": 30, "visual": 10}


def test_the_same_item_is_asked_for_in_another_way_than_in_the_experience() -> None:
    env = environment()
    for split in SCENES:
        seen = {(t.scene, t.data["item"]): (t.kind, t.data["receptacle"]) for t in env.tasks(f"{split}_experience")}
        for task in env.tasks(split):
            if task.family == "text":
                assert seen[task.scene, task.data["item"]] != (task.kind, task.data["receptacle"])


def test_no_task_is_done_at_the_start_or_starts_at_its_destination() -> None:
    env = environment(kinds=KINDS)
    for task in env.tasks("train") + env.tasks("train_experience"):
        places = start(env, task)
        mine = [place for item, place in places.items() if item.split()[0] == task.data["item"]]
        assert len(mine) == (2 if task.kind == TWO else 1)
        assert all(place.split()[0] != task.data["receptacle"] for place in mine)
        assert 1 <= len(env.expert() or ()) <= 10


def test_tasks_are_well_formed() -> None:
    env = environment()
    for split in (*SCENES, "train_experience"):
        tasks = env.tasks(split)
        assert len({task.id for task in tasks}) == len(tasks)
        for task in tasks:
            assert task.split == split and task.id.startswith(f"{split}/home-")
            assert task.goal and not task.goal.endswith(".") and task.data["item"] in task.goal
            assert task.kind in (SIMPLE, CLEAN, HEAT, COOL)
            text = env.reset(task).text
            assert text.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
            assert "task" not in text and task.data["item"] not in text.replace("coffeemachine", "")
    scenes = [task.scene for task in env.tasks("train")]
    assert scenes != sorted(scenes)  # shuffled


def test_everything_is_the_same_the_next_time() -> None:
    one, other = environment(), environment()
    assert one.tasks("train") == other.tasks("train") == one.tasks("train")
    for task in one.tasks("train")[:20]:
        assert start(one, task) == start(other, task)
    # A task carries its seed: another process with another default builds the same home.
    task = one.tasks("train")[0]
    assert start(environment(seed=9, scenes={}), task) == start(one, task)


def test_splits_and_seeds_share_no_home() -> None:
    homes: dict[tuple[object, ...], str] = {}
    for seed in (0, 1):
        env = environment(seed=seed, scenes={"train": 20, "test": 20, "pretrain": 20})
        for split in ("train", "test", "pretrain"):
            for scene, tasks in by_scene(env.tasks(f"{split}_experience")).items():
                places = start(env, tasks[0])
                fixed = tuple(sorted((t.data["item"], places[f"{t.data['item']} 1"]) for t in tasks))
                home = (tuple(r.name for r in env.game.receptacles), fixed)
                assert home not in homes, (homes.get(home), scene)
                homes[home] = f"{seed}/{split}/{scene}"
    assert len(homes) == 120


def test_tasks_name_what_splits_must_not_share() -> None:
    def names(dimension: str, env: HouseholdEnvironment, split: str) -> set[str]:
        return {name for task in env.tasks(split) for name in task.isolation[dimension]}

    env = environment()
    for split in SCENES:
        assert names("scene", env, split) == names("scene", env, f"{split}_experience")  # by design
        assert len(names("scene", env, split)) == SCENES[split]
        assert len(names("task", env, split)) == len(env.tasks(split))
        assert not names("task", env, split) & names("task", env, f"{split}_experience")
    for dimension in ("scene", "task"):
        assert not names(dimension, env, "train") & names(dimension, env, "test")
        assert not names(dimension, env, "train") & names(dimension, environment(seed=1), "train")
    # The label that the agent sees comes round after 64 homes; the name does not.
    assert len(names("scene", environment(scenes={"big": 130}), "big")) == 130


def test_scene_labels_come_round_after_64() -> None:
    tasks = environment(scenes={"big": 130}).tasks("big_experience")
    assert len(tasks) == 780 == len({task.id for task in tasks})
    assert {task.scene for task in tasks} == {f"home {number}" for number in range(1, 65)}
    assert {task.scene for task in tasks if task.data["scene"] in ("0", "64", "128")} == {"home 1"}


@pytest.mark.parametrize("kinds", [(LOOK,), (TWO,), (HEAT,), (LOOK, TWO), KINDS])
def test_any_choice_of_task_types_can_be_won(kinds: tuple[str, ...]) -> None:
    share = 0.0 if kinds == (TWO,) else 0.5
    env = environment(scenes={"a": 4}, kinds=kinds, visual_share=share, fixed_objects=4)
    for task in env.tasks("a") + env.tasks("a_experience"):
        assert task.kind in kinds
        env.reset(task)
        commands = env.expert()
        assert commands and [env.step(command) for command in commands][-1].success


def test_a_visual_task_hides_its_item_from_the_text() -> None:
    """The opening text of a visual task is the same wherever the item lies."""
    env = environment()
    texts: dict[str, set[str]] = defaultdict(set)
    for task in env.tasks("test"):
        texts[task.scene].add(env.reset(task).text)
    assert all(len(found) == 1 for found in texts.values())


def test_environment_can_be_sent_to_another_process() -> None:
    env = environment()
    env.reset(env.tasks("test")[0])
    twin = pickle.loads(pickle.dumps(env))
    assert twin.tasks("test") == env.tasks("test") and twin.state == env.state
    assert pickle.loads(pickle.dumps(env.tasks("test"))) == env.tasks("test")


def test_mistakes_are_answered_clearly() -> None:
    env = environment()
    with pytest.raises(ValueError, match=r"no split 'tset'; there are train, train_experience, test, test_experience"):
        env.tasks("tset")
    with pytest.raises(EnvironmentFailure, match="no task of a generated home"):
        env.reset(Task("x", "put a mug in cabinet", "FloorPlan1", "train", SIMPLE))
    task = env.tasks("train")[0]
    with pytest.raises(EnvironmentFailure, match="which its home does not have"):
        env.reset(Task(task.id, task.goal, task.scene, task.split, task.kind, "", {**task.data, "item": "unicorn"}))
    for settings, message in [
        ({"visual_share": 2}, "from 0 to 1"),
        ({"remembered_share": -1}, "from 0 to 1"),
        ({"visual_share": 0.6, "remembered_share": 0.5}, "not sum to more than 1"),
        ({"kinds": (TWO,), "visual_share": 0, "remembered_share": 0.5}, "remembered_share to 0"),
        ({"wandering_objects": 0}, "visual_share to 0"),
        ({"kinds": (TWO,)}, "visual_share to 0"),
        ({"kinds": ("dance",)}, "unknown task types dance"),
        ({"kinds": ()}, "at least one task type"),
        ({"fixed_objects": 0}, "at least 1"),
        ({"scenes": {"a_experience": 1}}, "may not end in"),
    ]:
        with pytest.raises(ValueError, match=message):
            environment(**settings)
    with pytest.raises(ValueError, match="ask for fewer items"):
        environment(fixed_objects=44).tasks("train")
