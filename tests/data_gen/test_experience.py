"""What fills a bank: the rule of each environment, one bank for all who ask for the same, and what cannot be filled."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from agent.expert import ExpertTeacher
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.training import GrpoConfig
from data_gen.experience import collect_experience, experience_tasks, open_experience_bank
from data_gen.tasks import episode_specs, select_tasks
from envs.alfworld.export import export_split
from envs.base import Environment, Task
from envs.household.environment import HouseholdEnvironment
from envs.registry import Environments, find
from memcompiler.cli import app
from memory.bank import MemoryBank
from memory.entry import MemoryEntry

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"name": "household", "scenes": {"train": 3, "test": 2}, "images": False}
UNSEEN = HouseholdEnvironment(scenes={"train": 2, "valid_unseen": 1}, images=False)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ALFWorld games: 8 of train, 8 of valid_seen in its scenes, 3 of valid_unseen elsewhere."""
    pytest.importorskip("alfworld")
    folder = tmp_path_factory.mktemp("games")
    export_split(UNSEEN, "train", folder, 8)
    export_split(UNSEEN, "valid_unseen", folder, 3)
    shutil.copytree(folder / "json_2.1.1" / "train", folder / "json_2.1.1" / "valid_seen")
    for about in (folder / "json_2.1.1" / "valid_unseen").rglob("traj_data.json"):  # homes have the same labels in all
        about.write_text(about.read_text().replace('"home 1"', '"FloorPlan10"'))
    return folder


def alfworld(games: Path, **settings: Any) -> EvalConfig:
    return EvalConfig.model_validate({"env": {"name": "alfworld", "data_root": str(games)}, **settings})


def bank_of(config: EvalConfig | GrpoConfig | CollectConfig, split: str, out: Path) -> MemoryBank:
    out.mkdir(parents=True, exist_ok=True)
    with Environments(config.env) as envs:
        return open_experience_bank(config, envs, select_tasks(config, envs, split)[1], out)


# -- which tasks ------------------------------------------------------------------------------------------------------


def test_a_home_remembers_other_tasks_in_the_same_home() -> None:
    config = EvalConfig.model_validate({"env": HOMES, "limit": 1})
    with Environments(config.env) as envs:
        [task], experience = select_tasks(config, envs, "test")
        assert {other.scene for other in experience} == {task.scene}
        assert {other.split for other in experience} == {"test_experience"}


@pytest.mark.alfworld
def test_alfworld_remembers_all_of_train_in_scenes_seen_or_not(games: Path, tmp_path: Path) -> None:
    config, banks = alfworld(games), []
    for split in ("valid_seen", "valid_unseen"):
        bank = bank_of(config, split, tmp_path / split)
        with Environments(config.env) as envs:
            specs = episode_specs(envs.tasks(split), bank, 4)
        assert len(bank) == 8 and all(len(spec.memory) == 4 for spec in specs)
        assert {entry.provenance.split for spec in specs for entry in spec.memory} == {"train"}
        assert (split == "valid_seen") == any(e.provenance.scene == s.task.scene for s in specs for e in s.memory)
        banks.append(bank.path)
    assert banks[0] == banks[1]
    training = GrpoConfig.model_validate({"env": {"name": "alfworld", "data_root": str(games)}, "limit": 3})
    trained = bank_of(training, "train", tmp_path / "grpo")
    with Environments(training.env) as envs:
        specs = episode_specs(envs.tasks("train"), trained, 8)
    assert trained.path == banks[0] and all(
        spec.task.id not in {entry.provenance.task_id for entry in spec.memory} for spec in specs
    )


def science(played: Sequence[Task], train: Sequence[Task]) -> Environments:
    tasks = {"agentsquare": list(played), "train": list(train)}
    return cast(Environments, SimpleNamespace(spec=find("scienceworld"), tasks=lambda split: list(tasks[split])))


def test_scienceworld_remembers_variations_of_the_same_task_type_a_few_of_each() -> None:
    def tasks(kind: str, n: int, split: str) -> list[Task]:
        return [Task(f"{kind}/{i}", kind, "", split, kind) for i in range(n)]

    played = tasks("boil", 1, "agentsquare") + tasks("melt", 2, "agentsquare")
    train = tasks("boil", 14, "train") + tasks("grow-plant", 62, "train") + tasks("melt", 5, "train")
    config = EvalConfig.model_validate({"env": {"name": "scienceworld", "tasks_file": "tasks.jsonl"}})
    found = experience_tasks(config, science(played, train), "agentsquare", played)
    assert Counter(task.kind for task in found) == {"boil": 8, "melt": 3}
    assert [task.id for task in found[:4]] == ["boil/1", "melt/2", "boil/2", "melt/3"]  # none that is evaluated
    config = EvalConfig.model_validate({"env": config.env, "memory": {"experience_limit": 12}})
    found = experience_tasks(config, science(played, train), "agentsquare", played)
    assert Counter(task.kind for task in found) == {"boil": 9, "melt": 3}


@pytest.mark.slow
@pytest.mark.scienceworld
def test_scienceworld_s_own_expert_fills_a_bank(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld")
    env = {"name": "scienceworld", "kinds": ["find-animal"], "workers": 1}  # which is quick to plan
    asked = {"env": env, "limit": 1, "memory": {"experience_limit": 2}}
    bank = bank_of(EvalConfig.model_validate(asked), "test", tmp_path / "run")
    assert [(e.provenance.split, e.provenance.task_id.partition("/")[0]) for e in bank] == [
        ("train", "find-animal")
    ] * 2
    assert all(entry.provenance.success and len(entry.provenance.actions) > 3 for entry in bank)


@pytest.mark.parametrize(
    "name",
    [
        "eval/alfworld",
        "eval/paper",
        "eval/quickstart",
        "grpo/paper",
        "grpo/alfworld-smollm2",
        "collect/alfworld",
    ],
)
@pytest.mark.alfworld
def test_shipped_settings_need_the_games_and_nothing_else(name: str, games: Path, tmp_path: Path) -> None:
    schema = {"eval": EvalConfig, "grpo": GrpoConfig, "collect": CollectConfig}[name.partition("/")[0]]
    config = load_config(schema, name, ["env=alfworld", f"env.data_root={games}"])
    split = config.split if isinstance(config, GrpoConfig | CollectConfig) else "valid_unseen"
    assert len(bank_of(config, split, tmp_path / "run")) == 8


# -- one bank for all -------------------------------------------------------------------------------------------------


def test_a_bank_is_filled_once_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EvalConfig.model_validate({"env": HOMES})
    bank = bank_of(config, "test", tmp_path / "first")
    assert "experience: 10/10" in capsys.readouterr().out.replace(f"{len(bank)}/{len(bank)}", "10/10")
    version, whole = bank.snapshot(), json.loads((bank.path.parent / "experience.json").read_text())
    assert (whole["entries"], whole["lost"]) == (len(bank), []) and len(whole["tasks_sha256"]) == 64
    again = bank_of(config, "test", tmp_path / "second")
    assert again.path == bank.path and again.snapshot() == version
    assert f"{len(bank)} episodes are in" in capsys.readouterr().out
    link = tmp_path / "first" / "bank"
    assert link.is_symlink() and MemoryBank(link).entries() == bank.entries()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("first", "experience"):
        shutil.move(tmp_path / name, moved / name)
    assert len(MemoryBank(moved / "first" / "bank")) == whole["entries"]


def test_what_bears_on_an_entry_makes_another_bank(tmp_path: Path) -> None:
    def path(**settings: Any) -> Path:
        given = {"env": {**HOMES, **settings.pop("env", {})}, "memory": settings.pop("memory", {}), **settings}
        return bank_of(EvalConfig.model_validate(given), "test", tmp_path / "run").path

    first = path()
    same = [
        path(env={"workers": 0}),
        path(memory={"k": 1, "isolation": "scene"}),
        path(deliveries=("none",), seed=3, max_steps=2),
    ]
    others = [
        path(env={"seed": 1}),
        path(env={"images": True}),
        path(memory={"pictures": 0}),
        path(limit=1),
        path(memory={"experience_limit": 2}),
        path(memory={"experience_actor": "explorer"}),
        path(memory={"settings": {"text": "raw"}}),
        path(memory={"experience_folder": str(tmp_path / "mine")}),
    ]
    assert set(same) == {first} and len({first, *others}) == 9
    assert others[-1].is_relative_to(tmp_path / "mine") and others[-1].parent.name == first.parent.name


def test_an_explorer_fills_a_bank_with_longer_episodes_and_their_rationales(tmp_path: Path) -> None:
    def entries(actor: str) -> list[MemoryEntry]:
        memory = {"experience_actor": actor, "settings": {"text": "raw", "outcomes": "success"}}
        return bank_of(EvalConfig.model_validate({"env": HOMES, "memory": memory}), "test", tmp_path / actor).entries()

    mine, experts = entries("explorer"), entries("expert")
    assert {e.provenance.task_id for e in mine} == {e.provenance.task_id for e in experts}
    assert all(e.provenance.success and re.search(r"\nbecause in .* was in .*$", e.text) for e in mine)
    commands = [sum(len(e.provenance.actions) for e in of) for of in (mine, experts)]
    assert commands[0] > 1.5 * commands[1] and sum(e.text.count("\n> ") for e in mine) == commands[0]


@pytest.mark.alfworld
def test_games_that_were_moved_are_the_same_games(games: Path, tmp_path: Path) -> None:
    first = bank_of(alfworld(games), "valid_seen", tmp_path / "run").path
    shutil.copytree(games, tmp_path / "games")
    assert bank_of(alfworld(tmp_path / "games"), "valid_seen", tmp_path / "run").path == first
    [game, *_] = sorted((tmp_path / "games" / "json_2.1.1" / "train").rglob("game.tw-pddl"))
    game.write_text(game.read_text() + " ")
    assert bank_of(alfworld(tmp_path / "games"), "valid_seen", tmp_path / "run").path != first


FILL = """
import sys
from pathlib import Path
from configs.evaluation import EvalConfig
from data_gen.experience import open_experience_bank
from data_gen.tasks import select_tasks
from envs.registry import Environments
config = EvalConfig.model_validate({"env": {"name": "household", "scenes": {"test": 24}, "images": False}})
out = Path(sys.argv[1])
out.mkdir()
with Environments(config.env) as envs:
    bank = open_experience_bank(config, envs, select_tasks(config, envs, "test")[1], out)
print(len(bank), bank.snapshot(), bank.path)
"""


def filling(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FILL, str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.slow
def test_several_processes_and_one_that_is_killed_make_one_bank(tmp_path: Path) -> None:
    killed = filling(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and killed.poll() is None:  # after its first round, before its last
        [*banks] = (tmp_path / "experience").glob("*/bank/entries.lance/_versions/*")
        if len(banks) > 2:
            break
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert not list((tmp_path / "experience").glob("*/experience.json")), "it was through before it was killed"
    both = [filling(tmp_path / f"run-{i}") for i in range(2)]
    said = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert said[0][-1] == said[1][-1] and all(process.returncode == 0 for process in both)
    with Environments(EvalConfig.model_validate({"env": {"name": "household", "scenes": {"test": 24}}}).env) as envs:
        experience = envs.tasks("test_experience")
    [folder] = (tmp_path / "experience").iterdir()
    bank = MemoryBank(folder / "bank")
    assert bank.origins() == Counter((task.id, task.split) for task in experience)
    played = sum("episodes are in" not in " ".join(lines) for lines in said)
    assert played == 1  # the other one waited, and found it


# -- what cannot be filled --------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code in (1, 2) and "Traceback" not in result.output, result.output
    return " ".join(result.output.split())


def test_an_environment_without_an_expert_says_what_to_do(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    said = refused("eval", "env=eb_habitat", "deliveries=[none, static]", *out)
    assert "eb_habitat has no expert" in said and "teacher=endpoint" in said and "memory.k=0" in said
    assert "eb_habitat has none" in refused("eval", "env=eb_habitat", "deliveries=[expert_compiler]", *out)
    assert "teacher=endpoint actor=teacher" in refused("collect", "env=eb_habitat", *out)
    endpoint = ("teacher=endpoint", "api.model=m")
    assert "actor=executor" in refused("collect", "env=eb_habitat", "actor=expert", *endpoint, *out)
    assert not (tmp_path / "run" / "bank").exists()


def test_an_explorer_and_isolation_by_scene_are_refused_where_they_would_do_nothing() -> None:
    envs = science([Task("boil/0", "boil", "", "test", "boil")], [Task("boil/1", "boil", "", "train", "boil")])
    for memory, said in (
        ({"experience_actor": "explorer"}, "memory.experience_actor=explorer: the views of scienceworld do not list"),
        ({"isolation": "scene"}, "memory.isolation=scene: tasks of scienceworld have no scene"),
    ):
        config = EvalConfig.model_validate({"env": {"name": "scienceworld"}, "memory": memory})
        with pytest.raises(ConfigError, match=said):
            select_tasks(config, envs, "agentsquare")
    with pytest.raises(ConfigError, match=r"memory\.protocol living"):
        load_config(EvalConfig, None, ["memory.protocol=living", "memory.isolation=scene"])


def test_games_without_train_say_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "json_2.1.1" / "valid_seen"
    made = HouseholdEnvironment(scenes={"valid_seen": 1}, images=False)
    pytest.importorskip("alfworld")
    export_split(made, "valid_seen", tmp_path, 2)
    config = alfworld(tmp_path)
    with pytest.raises(ConfigError) as caught:
        bank_of(config, "valid_seen", tmp_path / "run")
    for words in ("no memory bank for alfworld valid_seen", "alfworld-download", "memory.bank=FOLDER", "memory.k=0"):
        assert words in str(caught.value)
    (folder.parent / "train").mkdir()
    with pytest.raises(ConfigError, match="holds no playable game"):
        bank_of(config, "valid_seen", tmp_path / "run")
    without = alfworld(tmp_path, memory={"k": 0})
    assert len(bank_of(without, "valid_seen", tmp_path / "run")) == 0


@pytest.mark.alfworld
def test_files_that_are_no_games_are_named(games: Path, tmp_path: Path) -> None:
    shutil.copytree(games, tmp_path / "games")
    files = sorted((tmp_path / "games" / "json_2.1.1" / "train").rglob("game.tw-pddl"))
    good = files[0].read_text()
    for content in ("", '{"pddl_problem": ', "[]", '{"solvable": true}'):
        files[0].write_text(content)
        with pytest.raises(ConfigError) as caught:
            bank_of(alfworld(tmp_path / "games"), "valid_seen", tmp_path / "run")
        assert str(files[0]) in str(caught.value) and "alfworld-download" in str(caught.value)
    foreign = json.dumps({**json.loads(good), "pddl_problem": "(define (problem chess) (:init) (:goal (won)))"})
    files[0].write_text(foreign)  # listed, and cannot be played: the others are experience enough
    bank = bank_of(alfworld(tmp_path / "games"), "valid_seen", tmp_path / "run")
    [lost] = json.loads((bank.path.parent / "experience.json").read_text())["lost"]
    assert len(bank) == 7 and files[0].parent.name in lost and "environment_failure" in lost
    for file in files[1:]:
        file.write_text(foreign)
    with pytest.raises(ConfigError, match=r"8 of 8 tasks of train .* cannot play .*run this again"):
        bank_of(alfworld(tmp_path / "games"), "valid_seen", tmp_path / "run")


class Lost(HouseholdEnvironment):
    """An environment whose expert never knows the way."""

    def expert(self) -> list[str] | None:
        return None


def test_an_expert_that_knows_no_way_leaves_nothing(tmp_path: Path) -> None:
    make: Callable[[], Environment] = lambda: Lost(scenes={"train": 1}, images=False)
    bank = MemoryBank(tmp_path / "bank")
    bank.write([])
    with pytest.raises(ConfigError, match="expert knows no way to the goal"):
        collect_experience(make, make().tasks("train"), bank, ExpertTeacher())
    assert len(bank) == 0
