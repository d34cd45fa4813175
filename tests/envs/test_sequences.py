"""Tasks one after another in one world: what is asked, what stays as it is, and who cannot play them."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_sequences
from agent.expert import ExpertExecutor
from agent.records import Episode
from configs.evaluation import EvalConfig
from configs.load import load_config
from envs.alfworld.environment import TextWorldEnvironment
from envs.alfworld.export import export_split
from envs.base import EnvironmentFailure, PersistentEnvironment, TaskSequence, is_persistent
from envs.household.environment import EngineEnvironment, HouseholdEnvironment
from envs.household.sequences import DRIFT, FAVOURITES, LENGTHS, WORLD
from envs.household.vocabulary import ITEM_TYPES, TRAITS
from envs.manifest import Manifest
from envs.pool import EnvironmentPool
from envs.registry import Environments, settings_of
from envs.spec import WorkerSpec
from runtime.errors import StopReason
from tests.fakes import CountingEnv, spec

FEW = {"simple": 2, "composite": 3, "complex": 3}
ARGUMENTS = {"images": False, "fixed_objects": 20, "scenes": {"test": 6}, "sequences": FEW}
HOME = HouseholdEnvironment(**ARGUMENTS)


def long(stream: str, length: int, **more) -> list[TaskSequence]:
    asked = {"tasks": "R", "stream": stream, "worlds": 2, "length": length}
    home = {"images": False, "fixed_objects": 40, "wandering_objects": 0, "visual_share": 0.0, "scenes": {"test": 2}}
    return HouseholdEnvironment(**{**home, "sequences": asked, **more}).sequences("test")


def lived(env: EngineEnvironment, sequence: TaskSequence) -> int:
    """Play a sequence by the expert; how many tasks were solved. No task is won before its first step."""
    won = 0
    for number, task in enumerate(sequence.tasks):
        if number:
            before = env.state.copy()
            seen = env.proceed(task)
            assert env.state == before
            assert f"a {env.game.receptacles[0].name}" in seen.text.split(".")[0]
            faced = [r.name for r in env.game.receptacles if r.location == env.state.location]
            assert all(name in seen.text.split("You are facing")[1] for name in faced)
        else:
            env.reset(task)
        plan = env.expert()
        assert plan, task
        won += [env.step(command) for command in plan][-1].success
    return won


def test_every_goal_is_solvable_when_its_turn_comes() -> None:
    assert isinstance(HOME, PersistentEnvironment) and is_persistent(HOME) is HOME
    sequences = HOME.sequences("test")
    assert [s.family for s in sequences] == ["simple"] * 2 + ["composite"] * 3 + ["complex"] * 3
    assert all(lived(HOME, sequence) == len(sequence.tasks) for sequence in sequences)


def test_long_sequences_stay_solvable() -> None:
    [sequence, _] = long("uniform", 60)
    env = HouseholdEnvironment(
        images=False, fixed_objects=40, wandering_objects=0, visual_share=0.0, scenes={"test": 2}
    )
    assert lived(env, sequence) == len(sequence.tasks) == 60


def things(sequence: TaskSequence) -> list[str]:
    return [task.data["item"] for task in sequence.tasks]


def test_the_three_classes() -> None:
    for seed in range(5):
        env = HouseholdEnvironment(**{**ARGUMENTS, "seed": seed})
        for sequence in env.sequences("test"):
            least, most = LENGTHS[sequence.family]
            asked = things(sequence)
            assert least <= len(asked) <= most
            named = [t.goal for t in sequence.tasks if not any(n == t.data["item"] for n in re.findall(r"\w+", t.goal))]
            assert len(named) == (sequence.family == "complex")
            if sequence.family == "simple":
                assert len(set(asked)) == len(asked)
            elif sequence.family == "composite":
                assert 1 < len(set(asked)) < len(asked)


def test_what_is_not_named_can_be_told_by_what_was_done_to_it() -> None:
    for sequence in HOME.sequences("test")[-3:]:
        env = HouseholdEnvironment(**ARGUMENTS)
        for number, task in enumerate(sequence.tasks):
            env.proceed(task) if number else env.reset(task)
            if vague := re.fullmatch(r"put the (hot|cool|clean|moved) ([a-z ]+) in \w+", task.goal):
                condition, words = vague.groups()
                traits = {i.type: TRAITS[i.type] for i in env.game.items if i.type in TRAITS}
                alike = {thing for thing, (colour, group) in traits.items() if words in (group, f"{colour} {group}")}
                touched = {earlier.data["item"] for earlier in sequence.tasks[:number]}
                assert len(alike) > 1 and alike & touched == {task.data["item"]}
                mine = sum(1 << i for i, each in enumerate(env.game.items) if each.type == task.data["item"])
                assert condition == "moved" or getattr(env.state, condition) & mine
            for command in env.expert() or ():
                env.step(command)


def test_streams_of_things() -> None:
    count = lambda asked: {item: asked.count(item) for item in set(asked)}
    uniform, skewed, drifting = (things(long(stream, 400)[0]) for stream in ("uniform", "skewed", "drifting"))
    assert max(count(uniform).values()) < 30 and max(count(skewed), key=count(skewed).__getitem__) == "mug"
    for start in range(0, 400, DRIFT):
        most = sorted(count(drifting[start : start + DRIFT]).values(), reverse=True)
        assert sum(most[:FAVOURITES]) > DRIFT / 2  # of about 25 things that can be asked for
    early, late = (set(sorted(c, key=c.__getitem__)[-5:]) for c in map(count, (drifting[:DRIFT], drifting[-DRIFT:])))
    assert early != late


def test_sequences_follow_from_the_settings_alone() -> None:
    again = HouseholdEnvironment(**ARGUMENTS)
    assert again.sequences("test") == HOME.sequences("test")
    assert HouseholdEnvironment(**{**ARGUMENTS, "seed": 1}).sequences("test") != HOME.sequences("test")
    ids = [task.id for sequence in HOME.sequences("test") for task in sequence.tasks]
    assert len(set(ids)) == len(ids)
    for sequence in HOME.sequences("test"):
        assert len({str(task.isolation["scene"]) for task in sequence.tasks}) == 1
    assert {t.name for t in ITEM_TYPES.values()} >= set(TRAITS)


HOUSEHOLD_L = {  # seed -> start of the manifest hash of the sequences of configs/eval/karma.yaml
    0: "85179bd77dc09d27",
    1: "7416731913dc702b",
    2: "0f2868976831c458",
    3: "ec2f658a983bef52",
    4: "bcd6719cf160ffad",
}


@pytest.mark.parametrize("seed", HOUSEHOLD_L)
def test_the_sequences_that_were_measured_are_those_of_their_manifests(seed: int) -> None:
    env = load_config(EvalConfig, "eval/karma", [f"env.seed={seed}"]).env
    with Environments(env) as envs:
        sequences = envs.sequences("test")
    assert Counter(s.family for s in sequences) == {"simple": 15, "composite": 15, "complex": 18}
    tasks = [task for sequence in sequences for task in sequence.tasks]
    assert Manifest.of("household", tasks).sha256.startswith(HOUSEHOLD_L[seed])


def test_a_world_says_where_its_places_stand() -> None:
    [sequence, *_] = HOME.sequences("test")
    HOME.reset(sequence.tasks[0])
    receptacles = HOME.game.receptacles
    assert sequence.plan.things == {r.name: r.position for r in receptacles}
    positions = [at for at in sequence.plan.things.values() if at is not None]
    assert len(set(positions)) == len(receptacles) == len(sequence.plan.reachable)
    assert all(0 <= x <= 6 and 0 <= z <= 6 for x, _, z in positions)
    assert {s.scene: s.plan for s in HouseholdEnvironment(**ARGUMENTS).sequences("test")}[sequence.scene] == (
        sequence.plan
    )


def test_a_task_of_another_world_needs_a_reset() -> None:
    one, other = HOME.sequences("test")[:2]
    HOME.reset(one.tasks[0])
    with pytest.raises(EnvironmentFailure, match="is of another world than the live one"):
        HOME.proceed(other.tasks[0])


def test_who_cannot_go_on_in_one_world_says_so() -> None:
    with pytest.raises(EnvironmentFailure, match="starts every task in a new world"):
        is_persistent(CountingEnv())
    with pytest.raises(EnvironmentFailure, match=r"set env\.engine=native"):
        TextWorldEnvironment("nowhere").sequences("train")
    with EnvironmentPool(WorkerSpec("tests.envs.hosted_examples:Countdown"), 1) as pool, closing(pool.lease()) as env:
        with pytest.raises(EnvironmentFailure, match="Countdown starts every task in a new world"):
            env.sequences("test")
        env.reset(replace(HOME.sequences("test")[0].tasks[0], id="2"))
        with pytest.raises(EnvironmentFailure, match="starts every task in a new world"):
            env.proceed(HOME.sequences("test")[0].tasks[0])


def test_real_games_go_on_with_other_goals(tmp_path: Path) -> None:
    """Exported homes are files as ALFWorld's are, and read as these."""
    from envs.alfworld.environment import AlfworldEnvironment

    export_split(HouseholdEnvironment(scenes={"train": 2}, images=False), "train", tmp_path, limit=4)
    env = AlfworldEnvironment(tmp_path, images=False, sequences={"simple": 1, "composite": 1, "complex": 0})
    sequences = env.sequences("train")
    assert [lived(env, sequence) for sequence in sequences] == [len(sequence.tasks) for sequence in sequences]
    assert all(task.data["path"] and task.data[WORLD] == s.id for s in sequences for task in s.tasks)


@pytest.mark.alfworld
def test_worlds_of_real_games_stay_solvable_and_have_ai2_thors_coordinates(shared_data: Path) -> None:
    from envs.alfworld.environment import AlfworldEnvironment

    env = AlfworldEnvironment(
        shared_data / "alfworld", images=False, sequences={"simple": 2, "composite": 3, "complex": 3}
    )
    placed = places = 0
    for sequence in env.sequences("valid_seen"):
        assert lived(env, sequence) == len(sequence.tasks)
        placed += sum(at is not None for at in sequence.plan.things.values())
        places += len(sequence.plan.things)
        assert sequence.plan.reachable and all((4 * x).is_integer() for x, _, _ in sequence.plan.reachable)
    assert placed > 0.95 * places


@pytest.mark.alfworld
def test_a_long_sequence_in_a_real_games_world_stays_solvable(shared_data: Path) -> None:
    from envs.alfworld.environment import AlfworldEnvironment

    env = AlfworldEnvironment(
        shared_data / "alfworld", images=False, sequences={"tasks": "R", "worlds": 1, "length": 60, "stream": "skewed"}
    )
    [sequence] = env.sequences("valid_seen")
    assert lived(env, sequence) == 60


# -- the loop ---------------------------------------------------------------------------------------------------------


def specs_of(sequences: list[TaskSequence]) -> list[list[EpisodeSpec]]:
    return [[EpisodeSpec(task) for task in sequence.tasks] for sequence in sequences]


def played(make_env, sequences: list[list[EpisodeSpec]], steps: int = 40, **more) -> list[list[Episode]]:
    return run_sequences(make_env, sequences, Delivery("none", "none"), ExpertExecutor(), EpisodeLimits(steps), **more)


def told(episodes: list[list[Episode]]) -> list[list[dict]]:
    """What does not depend on the clock."""
    timeless = lambda episode: replace(episode, steps=[replace(step, seconds={}) for step in episode.steps])
    return [[timeless(episode).to_json() for episode in life] for life in episodes]


def test_sequences_are_the_same_alone_beside_others_and_in_workers() -> None:
    specs, noted = specs_of(HOME.sequences("test")), list[Episode]()
    make = lambda: HouseholdEnvironment(**ARGUMENTS)
    beside = played(make, specs, on_episode=noted.append)
    assert all(episode.success for life in beside for episode in life)
    assert sorted(e.task_id for e in noted) == sorted(e.task_id for life in beside for e in life)
    assert told(played(make, specs, concurrency=1)) == told(beside)
    settings = settings_of({"name": "household", "workers": 2, **ARGUMENTS})
    with Environments(settings) as envs:
        assert envs.sequences("test") == HOME.sequences("test")
        assert told(played(envs.lease, specs[:3])) == told(beside)[:3]


def test_a_sequence_is_the_same_alone_and_beside_16_others() -> None:
    many = HouseholdEnvironment(**{**ARGUMENTS, "sequences": {"simple": 17, "composite": 0, "complex": 0}})
    specs = specs_of(many.sequences("test"))
    make = lambda: HouseholdEnvironment(**ARGUMENTS)
    assert told(played(make, specs))[8] == told(played(make, specs[8:9]))[0]


def test_a_failed_task_does_not_end_its_sequence() -> None:
    specs = specs_of(HOME.sequences("test")[2:3])
    [life] = played(lambda: HouseholdEnvironment(**ARGUMENTS), specs, steps=2)
    assert len(life) == len(specs[0]) and life[0].stop_reason == StopReason.STEP_LIMIT
    assert life[1].steps[0].observation.startswith("Looking quickly around you") and "facing" in (
        life[1].steps[0].observation
    )


def test_a_world_that_breaks_takes_the_rest_of_its_sequence_with_it() -> None:
    class Living(CountingEnv):
        def proceed(self, task):
            return self.reset(task)

        def sequences(self, split):
            return []

    broken, whole = [spec(2), spec(2, "broken"), spec(2), spec(2)], [spec(2), spec(2)]
    first, second = played(Living, [broken, whole])
    assert [str(e.stop_reason) for e in first] == ["success", *["environment_failure"] * 3]
    assert first[1].error == "the simulator is gone" and not first[3].steps
    assert first[2].error == first[3].error and str(first[2].error).endswith(f"{first[1].task_id}: {first[1].error}")
    assert [e.stop_reason for e in second] == [StopReason.SUCCESS] * 2
    [[one, other]] = played(CountingEnv, [whole])
    assert one.success and "starts every task in a new world" in str(other.error)
