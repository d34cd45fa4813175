"""EmbodiedBench's adapter over a stand-in with the same call surface: in process, in a worker, and the official files.

EMBODIEDBENCH_STANDIN_PYTHON names another interpreter (with numpy and Pillow) for the worker tests, e.g. a Python 3.9.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from envs.base import Environment, EnvironmentFailure, Task, task_from_json
from envs.embodiedbench import hosted, spec
from envs.embodiedbench import tasks as task_files
from envs.embodiedbench.hosted import HostedEmbodiedBench
from envs.pool import EnvironmentPool
from envs.registry import Environments, settings_of

STANDIN = Path(__file__).parent / "embodiedbench_standin"
PYTHON = os.environ.get("EMBODIEDBENCH_STANDIN_PYTHON", sys.executable)
SOLUTION = {
    "eb_alfred": ["find a Mug", "pick up the Mug", "find a Shelf", "put down the object in hand"],
    "eb_habitat": ["navigate to the table 1", "pick up the ball", "navigate to the sofa", "place at the sofa"],
    "eb_navigation": ["Move forward by 0.25", "Move forward by 0.25"],
    "eb_manipulation": ["[40, 50, 17, 0, 60, 90, 1]"],
}


@pytest.fixture
def host(monkeypatch) -> Iterator:
    """Hosted objects in this process, whose traces (folder, import path, modules) are removed afterwards."""
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DISPLAY", raising=False)
    made = []

    def make(benchmark: str, home: Path = STANDIN, **arguments) -> HostedEmbodiedBench:
        made.append(hosted.host(benchmark, home=str(home), resolution=8, **arguments))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
    for name in [name for name in sys.modules if name.split(".")[0] == "embodiedbench"]:
        del sys.modules[name]


# --- hosted, in this process ---


@pytest.mark.parametrize("benchmark", SOLUTION)
def test_an_episode_is_solved_by_text(host, benchmark):
    bench = host(benchmark)
    task = bench.tasks("base")[0]
    if benchmark == "eb_habitat":
        task = next(task for task in bench.tasks("base") if task["goal"] == "Something round belongs on the sofa.")
    seen = bench.reset(task)
    assert seen["text"].startswith(hosted.START)
    assert (seen["admissible"] is None) == (benchmark == "eb_manipulation")
    *before, last = SOLUTION[benchmark]
    for action in before:
        made = bench.step(action)
        assert not made["done"] and not made["success"] and made["progress"] < 1
        assert "executed successfully" in made["observation"]["text"]
    made = bench.step(last)
    assert made["success"] and made["done"] and made["progress"] == 1.0
    with pytest.raises(RuntimeError, match="call reset first"):
        bench.step(last)


@pytest.mark.parametrize("benchmark", SOLUTION)
def test_pictures_are_three_channels_of_bytes_whatever_the_sensor_gives(host, benchmark):
    bench = host(benchmark)
    seen = bench.reset(bench.tasks("base")[0])
    assert (seen["image"].size, seen["image"].mode) == ((8, 8), "RGB")
    shade = {"eb_alfred": 0, "eb_habitat": 127, "eb_navigation": 200, "eb_manipulation": 30}[benchmark]
    assert seen["image"].getpixel((3, 3)) == (shade, shade, shade)


@pytest.mark.parametrize("benchmark", SOLUTION)
def test_what_is_no_skill_is_an_invalid_action_and_ten_end_the_episode(host, benchmark):
    bench = host(benchmark)
    bench.reset(bench.tasks("base")[1])
    for count in range(1, 11):
        made = bench.step("fly to the moon")
        assert made["observation"]["text"].startswith("Last action is invalid. 'fly to the moon' is not")
        assert made["observation"]["image"] is not None
        assert made["done"] == (count == 10)
    assert bench.env._current_step == 0 and not made["success"]


def test_simulator_and_adapter_count_the_same_invalid_actions(host):
    bench = host("eb_alfred")
    bench.reset(bench.tasks("base")[0])
    outcomes = [bench.step("open the Fridge" if i % 2 else "nonsense") for i in range(10)]
    assert [made["done"] for made in outcomes] == [False] * 9 + [True]
    assert bench.env._current_step == 5
    assert "Object cannot be opened." in outcomes[1]["observation"]["text"]


def test_only_actions_in_a_row_count_where_the_simulator_does_not(host):
    bench = host("eb_navigation")
    bench.reset(bench.tasks("base")[0])
    done = [bench.step(action)["done"] for action in ["x"] * 9 + ["Tilt the camera upward by 30 degrees"] + ["x"] * 9]
    assert not any(done) and bench.env._current_step == 1


def test_partial_progress_and_the_step_limit_are_the_simulators(host):
    bench = host("eb_alfred")
    bench.reset(bench.tasks("base")[0])
    bench.step("find a Mug")
    assert bench.step("pick up the Mug")["progress"] == 0.5
    outcomes = [bench.step("find a Shelf") for _ in range(28)]
    assert [made["done"] for made in outcomes] == [False] * 27 + [True]
    assert not outcomes[-1]["success"]


def test_any_order_of_tasks_and_splits_starts_the_task_that_was_asked_for(host):
    bench = host("eb_habitat")
    base = bench.tasks("base")
    for task in [*reversed(base), *bench.tasks("train_validation"), base[1]]:
        bench.reset(task)
        mark = task_files.fingerprint(hosted._record(bench.env.core.current_episode))
        assert mark == task["data"]["fingerprint"]
    assert len({task["id"] for task in base}) == 4  # two of them share instruction and scene
    assert [task["scene"][-2:] for task in base] == ["02", "02", "05", "00"]  # the file's order, not the simulator's
    bench = host("eb_alfred")
    first = None
    for split in ("long_horizon", "base", "train"):
        for task in reversed(bench.tasks(split)):
            bench.reset(task)
            first = first or bench.env
            assert bench.env.episode_language_instruction == task["data"]["instruction"]
    assert bench.env is first  # one simulator for all splits


def test_a_task_that_the_simulator_does_not_have_is_an_error_not_another_episode(host):
    bench = host("eb_habitat")
    task = bench.tasks("base")[0]
    with pytest.raises(RuntimeError, match="no episode"):
        bench.reset({**task, "data": {**task["data"], "fingerprint": "0"}})
    with pytest.raises(RuntimeError, match="versions of the task files"):
        bench.reset({**task, "goal": "something else"})
    with pytest.raises(FileNotFoundError, match=r"complex_instruction\.pickle"):
        bench.reset({**task, "data": {**task["data"], "eval_set": "complex_instruction"}})


def test_skills_change_by_episode_and_are_found_by_plain_words_or_number(host):
    skills = ["find a ButterKnife", "pick up the ButterKnife", "Rotate to the left by 90 degrees.", "find a Shelf_2"]
    for said, index in {
        "find a ButterKnife": 0,
        "Find an butter knife!": 0,
        " pick up butterknife": 1,
        "3": 3,
        "find Shelf_2": 3,
        "rotate to the left by 90 degrees": 2,
        "4": None,
        "-1": None,
        "": None,
        "the": None,
        "find a Shelf": None,
    }.items():
        assert hosted.skill_index(said, skills) == index, said
    bench = host("eb_alfred")
    assert "find a Shelf_2" in bench.reset(bench.tasks("base")[0])["admissible"]


def test_manipulation_takes_seven_numbers_and_tells_where_objects_are(host):
    bench = host("eb_manipulation")
    tasks = bench.tasks("base")
    assert [task["id"] for task in tasks] == [
        "base-pick_cube_shape-variation0-episode0",
        "base-stack_cubes_color-variation2-episode0",
    ]
    assert bench.reset(tasks[0])["text"].endswith("\nObjects at [x, y, z]: object 1: [40, 50, 17].")
    for said in (
        "[1, 2, 3]",
        "1,2,3,4,5,6,7",
        "[101, 0, 0, 0, 0, 0, 1]",
        "[0, 0, 0, 121, 0, 0, 0]",
        "[-1,0,0,0,0,0,1]",
    ):
        assert "seven whole numbers" in bench.step(said)["observation"]["text"], said
    assert "Last action is valid." in bench.step("action: 1, 2, 3, 4, 5, 6, 0.")["observation"]["text"]


def test_the_display_reaches_the_simulator(host, monkeypatch):
    bench = host("eb_alfred")
    task = bench.tasks("base")[0]
    bench.reset(task)
    assert bench.env.display == "1"
    bench.close()
    monkeypatch.setenv("DISPLAY", "localhost:7.0")
    bench.reset(task)
    assert bench.env.display == "7"


def test_a_missing_installation_says_what_to_do(host, tmp_path):
    with pytest.raises(ValueError, match="there are: eb_alfred, eb_habitat"):
        host("eb_kitchen")
    with pytest.raises(FileNotFoundError, match="set home to a checkout"):
        host("eb_alfred", home=tmp_path)
    (tmp_path / "embodiedbench").mkdir()
    (tmp_path / "embodiedbench" / "__init__.py").touch()
    bench = host("eb_navigation", home=tmp_path, data_root=str(STANDIN))
    with pytest.raises(ImportError, match=r"cannot import embodiedbench\.envs.*memcompiler doctor"):
        bench.reset(bench.tasks("base")[0])
    with pytest.raises(FileNotFoundError, match=r"holds none of: eb_alfred/splits\.json"):
        host("eb_alfred", home=tmp_path).tasks("base")


# --- the adapter, through a worker ---


@pytest.fixture
def standin(monkeypatch):
    for place in spec.INSTALLATIONS.values():
        monkeypatch.setenv(place.variable, PYTHON)
    monkeypatch.setenv("EMBODIEDBENCH_HOME", str(STANDIN))
    opened: list[Environments] = []

    def make(benchmark: str) -> Environments:
        opened.append(environments(benchmark, resolution=64))
        return opened[-1]

    yield make
    for envs in opened:
        envs.close()


def environments(benchmark: str, **settings) -> Environments:
    return Environments(settings_of({"name": benchmark, **settings}))


@pytest.mark.parametrize("benchmark", SOLUTION)
def test_an_episode_in_a_worker(standin, benchmark):
    bench = standin(benchmark)
    tasks = bench.tasks("base")
    assert all(isinstance(task, Task) for task in tasks)
    task = next(task for task in tasks if task.goal.startswith(("Something round", "Put the mug", "navigate", "Pick")))
    with EnvironmentPool(spec.construct(bench.settings), 1, spec.LIMITS) as pool:
        with closing(pool.lease()) as env:
            assert isinstance(env, Environment) and env.tasks("base") == tasks
            seen = env.reset(task)
            assert seen.image is not None and seen.image.size == (64, 64)
            assert env.expert() == (SOLUTION[benchmark] if benchmark == "eb_alfred" else None)
            for action in ["dance", *SOLUTION[benchmark]]:
                made = env.step(action)
            assert made.success and made.progress == 1.0
        assert pool.name == benchmark
        assert pool.counters.lost == 0


def test_errors_of_the_hosted_side_arrive_as_failures_of_the_episode(standin):
    with closing(standin("eb_alfred").lease()) as env:
        with pytest.raises(ValueError, match="has no split 'test'"):
            env.tasks("test")
        with pytest.raises(FileNotFoundError, match="eb_navigation/common_sense"):
            standin("eb_navigation").tasks("common_sense")
        with pytest.raises(EnvironmentFailure, match=r"ann_9\.json"):
            env.reset(task_from_json(task_files.alfred_task("a-Mug-None-Shelf-4/t", 9, "Do it.", "base")))


def test_without_an_interpreter_the_error_names_the_variable(monkeypatch):
    for place in spec.INSTALLATIONS.values():
        monkeypatch.delenv(place.variable, raising=False)
    monkeypatch.delenv("EMBODIEDBENCH_HOME", raising=False)
    with pytest.raises(FileNotFoundError, match=r"EMBODIEDBENCH_MAN_PYTHON is not set.*embench_man"):
        environments("eb_manipulation").lease()
    with pytest.raises(FileNotFoundError, match="cannot list eb_alfred base: no data_root given; EMBODIEDBENCH_PYTHON"):
        environments("eb_alfred").tasks("base")
    with pytest.raises(FileNotFoundError, match="is not executable"):
        environments("eb_alfred", python="no-such-python").lease()
    with pytest.raises(ValueError, match=r"no environment 'eb_kitchen'.*there are .*eb_alfred"):
        environments("eb_kitchen")


def test_what_the_simulators_look_for_in_their_environment(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("COPPELIASIM_ROOT", "/sim")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    assert spec.worker_variables("eb_alfred") == {"DISPLAY": ":1"}
    monkeypatch.setenv("DISPLAY", ":5")
    assert spec.worker_variables("eb_manipulation") == {
        "DISPLAY": ":5",
        "LD_LIBRARY_PATH": "/sim:/lib",
        "QT_QPA_PLATFORM_PLUGIN_PATH": "/sim",
    }


# --- task files ---


def test_alfred_train_is_every_annotation_but_the_test_pairs(tmp_path):
    checkout = task_files.list_tasks("eb_alfred", "train", str(STANDIN))
    assert [(task["id"], task["goal"]) for task in checkout] == [
        ("pick_and_place_simple-Mug-None-Shelf-4/trial_T1#1", "Store the mug on a shelf.")
    ]
    data = STANDIN / "embodiedbench" / "envs" / "eb_alfred" / "data"
    shutil.copytree(data, tmp_path / "eb_alfred")
    (tmp_path / "eb_alfred" / "splits" / "splits.json").rename(tmp_path / "eb_alfred" / "splits.json")
    assert task_files.list_tasks("eb_alfred", "train", str(tmp_path)) == checkout
    shutil.rmtree(tmp_path / "eb_alfred" / "json_2.1.0")
    with pytest.raises(task_files.NoTaskFile, match=r"json_2\.1\.0"):
        task_files.list_tasks("eb_alfred", "train", str(tmp_path))


@pytest.mark.parametrize(
    ("instruction", "objects", "template"),
    [
        ("Move a ball to the sofa.", ["ball"], "move a <object> to the <place>"),
        ("Move an orange to the right counter.", ["orange"], "move a <object> to the <place>"),
        ("Arrange all toy airplanes on the TV stand!", ["toy airplane"], "arrange all <object> on the <place>"),
        ("Bring a purple fruit to the brown table.", ["plum"], "bring a purple fruit to the <place>"),
        ("Close cabinet 7, please", [], "close <place> please"),
    ],
)
def test_instructions_of_one_template_are_alike(instruction, objects, template):
    assert task_files.instruction_template(instruction, objects) == template


def test_objects_are_found_in_nested_goals():
    nested = {"sub_exprs": ["not_holding()", {"inputs": [{"name": "X", "expr_type": "lego"}], "sub_exprs": ["on(X)"]}]}
    named = {"target_receptacle_name": "receptacle_aabb_sink", "target_object_name": "plum"}
    assert task_files.object_categories({"goal_preds": nested, "sampled_entities": named}) == ["lego", "plum"]


@pytest.fixture(scope="module")
def official() -> str:
    folder = Path(__file__).parents[2].parent / "shared" / "data" / "embodiedbench"
    if not folder.is_dir():
        pytest.skip("needs EmbodiedBench's task files in ../shared/data, which are not in the repository")
    return str(folder)


def test_official_alfred_files(official):
    splits = [split for split in task_files.SPLITS["eb_alfred"] if split != "train"]
    listed = {split: task_files.list_tasks("eb_alfred", split, official) for split in splits}
    assert {split: len(tasks) for split, tasks in listed.items()} == dict.fromkeys(splits, 50)
    pairs = {task["isolation"]["episode"][0] for tasks in listed.values() for task in tasks}
    assert len(pairs) == 213  # paper C.1
    assert all(len({task["id"] for task in tasks}) == 50 for tasks in listed.values())
    first = listed["base"][0]
    assert (first["scene"], first["kind"]) == ("FloorPlan4", "pick_clean_then_place_in_recep")
    assert first["isolation"] == {"episode": [first["data"]["task"] + "#2"]}


def test_official_habitat_files(official):
    listed = {
        split: task_files.list_tasks("eb_habitat", split, official)
        for split in task_files.SPLITS["eb_habitat"]
        if split != "train"
    }
    assert {split: len({task["id"] for task in tasks}) for split, tasks in listed.items()} == {
        **dict.fromkeys(listed, 50),
        "train_validation": 100,
    }

    def values(dimension: str, *splits: str) -> set[str]:
        return {value for split in splits for task in listed[split] for value in task["isolation"][dimension]}

    test = [split for split in listed if split != "train_validation"]
    assert values("scene", "train_validation") == {"v3_sc0"} and values("scene", *test) == {"v3_sc0", "v3_sc3"}
    assert values("object", *test) - values("object", "train_validation") == {"hammer", "lid", "mug", "spatula"}
    # The rewritten subsets share no template with the training instructions; "base" does.
    shared = {split for split in test if values("template", split) & values("template", "train_validation")}
    assert shared == {"base"}


# --- Python 3.9 ---


@pytest.mark.parametrize(
    "name",
    [
        "envs/__init__.py",
        "envs/embodiedbench/__init__.py",
        "envs/embodiedbench/alfred_plan.py",
        "envs/embodiedbench/hosted.py",
        "envs/embodiedbench/tasks.py",
        "envs/worker.py",
    ],
)
def test_what_runs_in_their_python_is_python_3_9_and_imports_nothing_of_ours_that_is_not(repository, name):
    tree = ast.parse((repository / name).read_text(encoding="utf-8"), feature_version=(3, 9))
    allowed = {"envs.embodiedbench", "numpy", "PIL"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom) and node.module != "envs.base"
        ):  # the worker asks for it only if it is there
            assert node.module in allowed or node.module.split(".")[0] in sys.stdlib_module_names, node.module
        if isinstance(node, ast.Import):
            assert all(a.name in allowed or a.name.split(".")[0] in sys.stdlib_module_names for a in node.names)
        if isinstance(node, ast.Call):
            assert not {word.arg for word in node.keywords} & {"strict", "slots", "kw_only"}  # new in 3.10
