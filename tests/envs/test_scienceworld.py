"""ScienceWorld: its tasks and splits, gold paths to success, the task file's scoring, and a Java that never leaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
pytest.importorskip("py4j", reason="needs the extra scienceworld")

import envs.scienceworld.simulator as simulator_module
from envs.base import Environment, EnvironmentFailure, Task
from envs.scienceworld.agentsquare import VARIATIONS
from envs.scienceworld.command_reader import DOORS, next_room
from envs.scienceworld.environment import NAMES, PRESETS, ScienceWorldEnvironment, all_kinds, file_tasks, make_task
from envs.scienceworld.simulator import java_path
from envs.scienceworld.view_parser import parse_doors

pytestmark = [pytest.mark.scienceworld, pytest.mark.seconds]

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY.parent / "shared" / "data" / "scienceworld" / "agentsquare_sample.jsonl"
SIZES = {"train": 3592, "dev": 1796, "test": 1819}


@pytest.fixture(scope="module")
def env() -> Iterator[ScienceWorldEnvironment]:
    """One Java for nearly all tests; those that break it get their own."""
    made = ScienceWorldEnvironment(tasks_file=str(SAMPLE))
    yield made
    made.close()


def task_of(kind: str, variation: int = 0) -> Task:
    return make_task(kind, variation, "do it", "train")


def row(**changes: object) -> str:
    made = {"goal": "g", "subgoals": ["You move"], "additional_info": {"env_name": "boil", "var": 1}, **changes}
    return json.dumps(made)


def java_children(pid: int) -> list[int]:
    """Live Java processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            if name == "java" and int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> bool:
    for _ in range(300):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


# Tasks ------------------------------------------------------------------------------------------------------------


def test_is_an_environment(env: ScienceWorldEnvironment) -> None:
    assert isinstance(env, Environment) and env.name == "scienceworld"


@pytest.mark.slow
def test_official_splits(env: ScienceWorldEnvironment) -> None:
    """Counts as published, all types everywhere, no variation in two splits, sorted, and as a load describes them."""
    listed = {split: env.tasks(split) for split in SIZES}
    assert {split: len(tasks) for split, tasks in listed.items()} == SIZES
    labels = Counter(label for tasks in listed.values() for task in tasks for label in task.isolation["variation"])
    assert len(labels) == sum(SIZES.values()) and set(labels.values()) == {1}
    for split, tasks in listed.items():
        assert len({task.kind for task in tasks}) == 30
        order = [(task.kind, int(task.data["variation"])) for task in tasks]
        assert order == sorted(order) and env.tasks(split) == tasks
        assert all(task.id == f"{kind}/{i}" for task, (kind, i) in zip(tasks, order, strict=True))
    simulator = env._simulator()
    goals = {task.id: task.goal for tasks in listed.values() for task in tasks}
    assert sorted(simulator._server.getTaskNames()) == all_kinds()
    for kind in all_kinds():
        for variation in range(4 if kind.startswith("inclined-plane") else 2):
            simulator.load(kind, variation, "easy")
            assert simulator._server.getTaskDescription() == goals[f"{kind}/{variation}"]
        for split, tasks in listed.items():
            official = getattr(simulator._server, f"getVariations{split.capitalize()}")
            assert list(official()) == [int(task.data["variation"]) for task in tasks if task.kind == kind]


def test_the_simulator_knows_our_simplifications(env: ScienceWorldEnvironment) -> None:
    simulator = env._simulator()
    assert set(simulator._server.getPossibleSimplifications().split(", ")) == set(NAMES)
    simulator.load("boil", 0, "easy")
    assert set(simulator._server.getSimplificationsUsed().split(", ")) == set(PRESETS["easy"].split(","))
    assert "noElectricalAction" not in env._simplified("power-component")


# Episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["find-plant", "lifespan-longest-lived", "chemistry-mix", "use-thermometer", "power-component"]
)
def test_gold_paths_succeed(env: ScienceWorldEnvironment, kind: str) -> None:
    """The expert wins, progress never falls, and the same commands bring the same answers after a reset."""
    walks = []
    for _ in range(2):
        texts, progress = [env.reset(task_of(kind, 1)).text], [0.0]
        path = env.expert()
        assert path
        for i, command in enumerate(path):
            assert env.expert() == path[i:]
            transition = env.step(command)
            texts.append(transition.observation.text)
            progress.append(transition.progress)
            assert transition.done == transition.success == (i == len(path) - 1)
        assert progress == sorted(progress) and progress[-1] == 1.0
        walks.append((path, texts, progress))
    assert walks[0] == walks[1]


def test_two_processes_give_the_same_answers(env: ScienceWorldEnvironment) -> None:
    """Thermometer readings, for one, depend on the order in which the simulator visits objects. One follows the expert,
    whose walk has been walked already, and leaves it; the other is never asked for an expert."""
    task, other = task_of("freeze", 1), ScienceWorldEnvironment()
    try:
        assert other.reset(task) == env.reset(task)
        path = env.expert()
        assert path and len(path) > 16
        for command in (*path[:12], "look around", *path[12:15], "inventory", *path[15:]):
            assert other.step(command) == env.step(command)
    finally:
        other.close()


def test_the_house_has_the_doors_that_the_reader_knows(env: ScienceWorldEnvironment) -> None:
    env.reset(env.tasks("dev")[0])
    for room, doors in DOORS.items():
        env.step(f"teleport to {room}")
        assert set(parse_doors(env.step("look around").observation.text)) == set(doors)
    assert next_room("workshop", "foundry") == "hallway" and next_room("kitchen", "foundry") == "outside"
    assert next_room("here", "foundry") == next_room("outside", "foundry") == "foundry"


def test_who_follows_the_expert_costs_the_simulator_nothing(
    env: ScienceWorldEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(task_of("find-plant", 4))
    path = env.expert()
    assert path
    with monkeypatch.context() as patch:
        patch.setattr(env._simulator(), "step", lambda action: pytest.fail(f"the simulator is asked for {action}"))
        assert [env.step(command) for command in path][-1].success
    env.step("look around")  # from where the path has led


def test_the_expert_goes_straight(env: ScienceWorldEnvironment) -> None:
    """Where the gold path looks for the lead in six rooms, in an order of its own, the expert knows the room."""
    task = task_of("boil", 21)
    env.reset(task)
    path, gold = env.expert(), env._load(task, gold=True).gold()
    assert path and len(path) < len(gold) - 20 and set(path) <= set(gold)
    before = path[path.index("pick up lead") - 5 : path.index("pick up lead")]
    assert before == ["open door to hallway", "go to hallway", "open door to workshop", "go to workshop", "look around"]
    assert [env.step(command) for command in path][-1].success


def test_answers_agree_with_the_packages_own_wrapper(
    env: ScienceWorldEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same words and scores as `scienceworld.ScienceWorldEnv` (whose reset takes one look around first)."""
    from scienceworld import ScienceWorldEnv

    monkeypatch.setenv("PATH", f"{Path(java_path()).parent}{os.pathsep}{os.environ['PATH']}")
    theirs = ScienceWorldEnv()
    try:
        theirs.load("find-plant", 3, "easy")
        text, _ = theirs.reset()
        first = env.reset(task_of("find-plant", 3)).text
        env.step("look around")
        assert first == f"{text}\n{theirs.inventory().strip()}"
        for command in ("go to greenhouse", "teleport to outside", "focus on picture", "xyzzy"):
            text, _, over, info = theirs.step(command)
            transition = env.step(command)
            assert transition.observation.text == text
            assert transition.done == over and transition.progress == max(info["score"], 0) / 100
            if over:
                break
    finally:
        java = theirs._gateway.java_process
        assert java
        theirs.close()
        java.kill()
        java.wait()


def test_off_the_gold_path_there_is_no_expert(env: ScienceWorldEnvironment) -> None:
    env.reset(task_of("find-plant", 2))
    env.step("wait1")
    first = env.step("inventory").observation.text
    assert env.expert() is None
    assert env.step("inventory").observation.text == first  # planning has put the world back


def test_a_fatal_mistake_ends_the_episode_with_its_progress(env: ScienceWorldEnvironment) -> None:
    env.reset(task_of("find-plant", 1))
    path = env.expert()
    assert path
    focus = next(i for i, command in enumerate(path) if command.startswith("focus"))
    before = [env.step(command).progress for command in path[:focus]][-1]
    transition = env.step("focus on agent")
    assert transition.done and not transition.success and transition.progress == before > 0


def test_step_limit_and_words_it_does_not_know() -> None:
    env = ScienceWorldEnvironment(step_limit=2)
    try:
        with pytest.raises(EnvironmentFailure, match=r"call reset\(task\) first"):
            env.step("look around")
        assert env.reset(task_of("boil")).admissible is None
        transition = env.step("xyzzy")
        assert "No known action" in transition.observation.text and not transition.done
        assert env.step("look around").done
        env._admissible = "valid"
        valid = env.reset(task_of("boil")).admissible
        assert (
            valid is not None and len(valid) > 50 and "close door to kitchen" in valid and list(valid) == sorted(valid)
        )
    finally:
        env.close()


def test_listing_does_not_disturb_an_episode(env: ScienceWorldEnvironment) -> None:
    env.reset(task_of("boil"))
    env.step("teleport to kitchen")
    seen = env.step("look around").observation.text
    env._listed.pop("dev", None)
    with pytest.MonkeyPatch.context() as patch:  # two types instead of thirty
        patch.setattr(env, "_kinds", ["boil", "inclined-plane-determine-angle"])
        assert len(env.tasks("dev")) == 7 + 42
        patch.setattr(env, "_in_turn", True)
        in_turn = env._list("dev")
        assert [task.kind for task in in_turn[:14]] == env._kinds * 7 and len({task.id for task in in_turn}) == 7 + 42
        assert {task.kind for task in in_turn[14:]} == {env._kinds[1]}
    env._listed.pop("dev")
    assert env.step("look around").observation.text == seen


# The task file ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SAMPLE.is_file(), reason="needs ../shared/data/scienceworld")
def test_sample_file(env: ScienceWorldEnvironment) -> None:
    tasks = env.tasks("agentsquare")
    assert len(tasks) == 30 and len({task.id for task in tasks}) == 30
    assert tasks[0].id == "lifespan-longest-lived/5" and tasks[0].data["difficulty"] == "easy"
    assert tasks[0].goal.startswith("Your task is to find the animal with the longest life span.")
    simulator = env._simulator()
    train = {f"{kind}#{i}" for kind in all_kinds() for i in simulator.variations(kind, "train")}
    assert sum(task.isolation["variation"][0] in train for task in tasks) == 30  # all: training must leave them out


def test_the_variations_that_agentsquare_evaluates_are_real(env: ScienceWorldEnvironment) -> None:
    """90 of 16 types, none of the simulator's test split; each starts, and its goal is the one of its number."""
    tasks, simulator = env.tasks("agentsquare_variations"), env._simulator()
    assert len({task.id for task in tasks}) == 90 and len({task.kind for task in tasks}) == 16
    official = {(kind, i): split for kind in VARIATIONS for split in SIZES for i in simulator.variations(kind, split)}
    listed = Counter(official[task.kind, int(task.data["variation"])] for task in tasks)
    assert listed == {"train": 88, "dev": 2}
    for task in tasks[::9]:
        assert task.goal and env.reset(task).text
        assert simulator._call(simulator._server.getTaskDescription).strip() == task.goal
    if SAMPLE.is_file():
        assert {task.id for task in env.tasks("agentsquare")} <= {task.id for task in tasks}


@pytest.mark.skipif(not SAMPLE.is_file(), reason="needs ../shared/data/scienceworld")
def test_subgoals_by_hand(env: ScienceWorldEnvironment) -> None:
    """Subgoals of lifespan-longest-lived-then-shortest-lived/5: move outside, crocodile egg, baby mouse."""
    task = next(t for t in env.tasks("agentsquare") if t.id == "lifespan-longest-lived-then-shortest-lived/5")
    env.reset(task)
    assert env.step("teleport to outside").progress == 0  # "You teleport to the outside." is not "You move to"
    env.step("teleport to kitchen")
    assert env.step("go to outside").progress == pytest.approx(1 / 3)
    assert env.step("focus on crocodile egg").progress == pytest.approx(2 / 3)
    assert env.step("look around").progress == pytest.approx(2 / 3)
    last = env.step("focus on baby mouse")
    assert last.progress == 1 and last.success and last.done
    env.reset(task)  # a fatal focus for the simulator, not for the file
    wrong = env.step("focus on picture")
    assert wrong.progress == 0 and not wrong.done
    assert env.step("inventory").progress == 0


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    for bad, message in {
        "{": r"line 2: Expecting",
        row(subgoals=["(a"]): r"line 2: subgoal '\(a' is no regular expression",
        row(subgoals=["(a+)+b"]): r"line 2: subgoal '\(a\+\)\+b' nests repetitions",
        row(subgoals=[]): r"line 2: .*subgoals a list that is not empty",
        row(subgoals=[3]): r"line 2: subgoal 3 is not a text",
        row(additional_info={"env_name": "bake", "var": 1}): r"line 2: unknown task type 'bake'",
        row(additional_info={"env_name": "boil"}): r"line 2: no field 'var'",
        row(): r"line 2: boil/1 is listed twice",
        "[]": r"line 2: ",
    }.items():
        path.write_text(f"{row()}\n{bad}\n")
        with pytest.raises(ValueError, match=message):
            file_tasks(path)
    path.write_text(f"{row()}\n\n")
    assert [task.id for task in file_tasks(path)] == ["boil/1"]


def test_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown simplification 'esay': use one of easy, agentboard, none"):
        ScienceWorldEnvironment(simplifications="esay")
    with pytest.raises(ValueError, match="unknown admissible 'all'"):
        ScienceWorldEnvironment(admissible="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        ScienceWorldEnvironment(step_limit=0)
    with pytest.raises(ValueError, match=r"no split 'valid': there are train, .*, agentsquare"):
        ScienceWorldEnvironment().tasks("valid")
    with pytest.raises(FileNotFoundError, match=r"needs tasks_file.*'agentsquare_variations' has the same"):
        ScienceWorldEnvironment().tasks("agentsquare")
    with pytest.raises(FileNotFoundError, match="no ScienceWorld task file"):
        ScienceWorldEnvironment(tasks_file=str(tmp_path / "nothing.jsonl")).tasks("agentsquare")
    monkeypatch.setattr(simulator_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="uv sync --extra scienceworld"):
        ScienceWorldEnvironment()
    monkeypatch.setattr(simulator_module.shutil, "which", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="needs Java"):
        java_path()


# The process ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dead_or_stopped_java_fails_the_episode_only() -> None:
    env = ScienceWorldEnvironment(timeout=15)
    try:
        for number, message in ((signal.SIGKILL, "its process is gone"), (signal.SIGSTOP, "no answer within 15 s")):
            env.reset(task_of("boil"))
            pid = env.java_pid
            assert pid
            os.kill(pid, number)
            with pytest.raises(EnvironmentFailure, match=f"{message}.*the next reset starts another"):
                env.step("look around")
            assert not alive(pid) and env.java_pid is None
        with pytest.raises(EnvironmentFailure, match="cannot load boil#999"):
            env.reset(task_of("boil", 999))
        with pytest.raises(EnvironmentFailure, match="no live episode"):
            env.step("look around")
        assert "hallway" in env.reset(task_of("boil")).text
        assert env.java_pid in java_children(os.getpid())
        pid = env.java_pid
    finally:
        env.close()
    assert pid and not alive(pid) and pid not in java_children(os.getpid())
    env.close()


@pytest.mark.parametrize("end", ["exit", "interrupt", "kill"])
def test_java_never_outlives_its_program(end: str) -> None:
    program = """if True:
        import sys, time
        from envs.scienceworld.environment import ScienceWorldEnvironment, make_task
        env = ScienceWorldEnvironment()
        env.reset(make_task("boil", 0, "", "train"))
        print(env.java_pid, flush=True)
        if sys.argv[1] != "exit":
            time.sleep(300)
    """
    command = [sys.executable, "-c", program, end]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout
        java = int(process.stdout.readline())
        if end != "exit":
            assert alive(java)
            process.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        process.wait(60)
    assert wait_until_gone(java)
