"""Leakage: hand-made overlaps, the paper's rules, and the commands that refuse to go on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from configs.collect import CollectConfig, LeakageConfig, MemoryConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import SftConfig
from data_gen import leakage
from data_gen.isolation import LeakageError, audit_bank, check
from data_gen.tasks import select_tasks
from envs.alfworld.environment import AlfworldSettings
from envs.base import Task
from envs.household.environment import HouseholdEnvironment
from envs.manifest import Manifest
from envs.registry import Environments
from envs.scienceworld.environment import make_task
from memcompiler.data import run_leakage
from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from memory.protocol import Isolation


def listed(benchmark: str, split: str, *isolations: dict[str, tuple[str, ...]]) -> Manifest:
    tasks = [Task(f"{split}/{i}", f"goal {i}", "", split, "", isolation=d) for i, d in enumerate(isolations)]
    return Manifest.of(benchmark, tasks)


def game(name: str, scene: str) -> dict[str, tuple[str, ...]]:
    return {"gamefile": (name,), "scene": (scene,)}


def test_counts_and_examples_of_an_overlap():
    train = listed("alfworld", "train", game("t1", "FloorPlan1"), game("t2", "FloorPlan2"), game("t3", "FloorPlan3"))
    seen = listed(
        "alfworld", "valid_seen", game("v1", "FloorPlan2"), game("v2", "FloorPlan2"), game("v3", "FloorPlan9")
    )
    verdict = check(train, seen)
    files, scenes = verdict.overlaps
    assert (files.dimension, files.shared, files.clean) == ("gamefile", 0, True)
    assert (scenes.train, scenes.evaluation, scenes.shared, scenes.tasks) == (3, 2, 1, 2)
    assert scenes.examples == ("FloorPlan2",) and not verdict.clean
    assert "1 shared scene (FloorPlan2)" in verdict.summary
    said = json.loads(json.dumps(verdict.to_json()))
    assert said["clean"] is False and said["train_sha256"] == train.sha256
    assert verdict.table().row_count == 2
    assert check(train, listed("alfworld", "valid_unseen", game("u", "FloorPlan10"))).clean


def test_a_dimension_that_one_side_lacks_is_no_pass():
    whole, part = listed("alfworld", "train", game("t", "1")), listed("alfworld", "v", {"gamefile": ("v",)})
    for pair in ((whole, part), (part, whole)):
        with pytest.raises(LeakageError, match="do not name their scene"):
            check(*pair)
    more = listed("alfworld", "v", {**game("v", "2"), "author": ("me",)})
    with pytest.raises(LeakageError, match="author"):
        check(whole, more)
    with pytest.raises(LeakageError, match="1 of 2 tasks"):
        check(whole, listed("alfworld", "v", game("v", "2"), {"gamefile": ("w",)}))
    with pytest.raises(LeakageError, match=r"no task of .* has a value for scene"):
        check(whole, listed("alfworld", "v", {"gamefile": ("v",), "scene": ()}))


def test_lists_that_cannot_be_compared():
    with pytest.raises(LeakageError, match="alfworld with tasks of household"):
        check(listed("alfworld", "a", game("t", "1")), listed("household", "b", {"scene": ("1",)}))
    with pytest.raises(LeakageError, match=r"Task\.isolation"):
        check(listed("mine", "a", {}), listed("mine", "b", {}))
    assert not check(listed("mine", "a", {"episode": ("1",)}), listed("mine", "b", {"episode": ("1",)})).clean


def test_habitat_needs_new_objects_but_may_share_others():
    def habitat(split, objects, template, scene):
        return listed("eb_habitat", split, {"object": objects, "template": (template,), "scene": (scene,)})

    train = habitat("train", ("apple", "ball"), "move a <object> to the <place>", "v3_sc0")
    assert check(train, habitat("base", ("apple", "mug"), "<object>, please", "v3_sc3")).clean
    known = check(train, habitat("base", ("apple",), "<object>, please", "v3_sc3"))
    assert not known.clean and "no object that training lacks" in known.summary
    assert [o.dimension for o in check(train, habitat("base", ("mug",), "x", "v3_sc0")).overlaps if not o.clean] == [
        "scene"
    ]


def test_generated_homes_of_training_and_test_are_others():
    env = HouseholdEnvironment(
        scenes={"train": 70, "test": 70}, images=False
    )  # labels "home 1" to "home 64" come again
    train, test = (Manifest.of("household", env.tasks(split)) for split in ("train", "test"))
    verdict = check(train, test)
    assert verdict.clean and {o.dimension: o.train for o in verdict.overlaps}["scene"] == 70
    experience = Manifest.of("household", env.tasks("test_experience"))
    assert not check(experience, test).clean  # the same homes
    other_seed = HouseholdEnvironment(seed=1, scenes={"test": 70}, images=False)
    assert check(test, Manifest.of("household", other_seed.tasks("test"))).clean


GRAMMAR = (
    'grammar :: """\n{\n    "task": [\n        {"rhs": "Your task is to: look at mug under the desklamp."}\n    ]\n}"""'
)


def fake_alfworld(root: Path, games: dict[str, list[str]]) -> str:
    """A folder that lists as ALFWorld's do; nobody plays these games."""
    for split, plans in games.items():
        for n, plan in enumerate(plans):
            folder = (
                root / "json_2.1.1" / split / f"look_at_obj_in_light-Mug-None-DeskLamp-{plan}" / f"trial_{split}_{n}"
            )
            folder.mkdir(parents=True)
            about = {"task_type": "look_at_obj_in_light", "scene": {"floor_plan": f"FloorPlan{plan}"}}
            (folder / "traj_data.json").write_text(json.dumps(about))
            content = {"solvable": True, "grammar": f"{GRAMMAR} {n}", "pddl_problem": ""}
            (folder / "game.tw-pddl").write_text(json.dumps(content))
    return str(root)


GAMES = {"train": ["301", "302", "303"], "valid_seen": ["302"], "valid_unseen": ["308"]}


def alfworld(root: Path, games=GAMES, **held_out) -> CollectConfig:
    env = AlfworldSettings(data_root=fake_alfworld(root, games), images=False)
    return CollectConfig(env=env, leakage=LeakageConfig(**held_out))


def guarded(config: CollectConfig, out: Path) -> leakage.LeakageAudit:
    return select_isolated_tasks(config, out)[2]


def select_isolated_tasks(config: CollectConfig, out: Path) -> tuple[list[Task], list[Task], leakage.LeakageAudit]:
    with Environments(config.env) as envs:
        run = RunFolder.create(out, config, on_exists="resume")
        return leakage.isolate_training_tasks(config, *select_tasks(config, envs, config.split), envs=envs, run=run)


def test_seen_scenes_leak_and_unseen_ones_do_not(tmp_path):
    config = alfworld(tmp_path / "games")
    assert guarded(config, tmp_path / "run").clean is True
    written = json.loads((tmp_path / "run" / "leakage.json").read_text())
    assert written["clean"] is True and written["verdict"]["evaluation"] == "valid_unseen"
    assert len(Manifest.read(tmp_path / "run" / "manifest.json").tasks) == 3
    seen = config.model_copy(update={"leakage": LeakageConfig(held_out=("valid_seen", "valid_unseen"))})
    with pytest.raises(ConfigError, match=r"1 shared scene \(FloorPlan302\)"):
        guarded(seen, tmp_path / "refused")
    assert json.loads((tmp_path / "refused" / "leakage.json").read_text())["clean"] is False


def test_what_is_shared_can_be_left_out_instead(tmp_path):
    """The paper's way with EB-ALFRED and ScienceWorld: training is what remains."""
    config = alfworld(tmp_path / "games", held_out=("valid_seen",), drop=True)
    tasks, experience, audit = select_isolated_tasks(config, tmp_path / "run")
    assert [task.scene for task in tasks] == ["FloorPlan301", "FloorPlan303"]
    assert (audit.dropped, len(experience), audit.clean) == (1 + 1, 2, True)  # a task, and its experience
    assert "2 tasks left out" in audit.summary
    assert json.loads((tmp_path / "run" / "leakage.json").read_text())["dropped"] == 2


def test_the_variations_that_agentsquare_evaluates_count_as_held_out_unless_others_are_named(tmp_path):
    splits = {"train": (("boil", 4), ("boil", 5)), "test": (("boil", 20),), "agentsquare_variations": (("boil", 5),)}

    def tasks(split: str) -> list[Task]:
        return [make_task(kind, number, f"{kind} {number}", split) for kind, number in splits[split]]

    envs, config = (
        cast(Environments, SimpleNamespace(tasks=tasks)),
        CollectConfig.model_validate({"env": "scienceworld"}),
    )

    def isolated(name: str, **settings) -> tuple[list[Task], list[Task], leakage.LeakageAudit]:
        changed = config.model_copy(update={"leakage": LeakageConfig(**settings)})
        with RunFolder.create(tmp_path / name, changed) as run:
            return leakage.isolate_training_tasks(changed, tasks("train"), [], envs=envs, run=run)

    with pytest.raises(ConfigError, match=r"1 shared variation \(boil#5\).*leakage\.drop=true"):
        isolated("refused")
    left, _, audit = isolated("dropped", drop=True)
    assert [task.id for task in left] == ["boil/4"] and audit.clean and audit.dropped == 1
    left, _, audit = isolated("named", held_out=("test",))
    assert [task.id for task in left] == ["boil/4", "boil/5"] and audit.clean


def test_held_out_data_that_is_not_there(tmp_path):
    config = alfworld(tmp_path / "games", {"train": ["301"]})
    audit = guarded(config, tmp_path / "run")
    assert audit.clean is None and "valid_unseen" in audit.unchecked and "not checked" in audit.summary
    named = config.model_copy(update={"leakage": LeakageConfig(held_out=("valid_unseen",))})
    with pytest.raises(ConfigError, match=r"leakage\.held_out: valid_unseen"):
        guarded(named, tmp_path / "named")


def entry(id: str, task_id: str, split: str = "test") -> MemoryEntry:
    return MemoryEntry(id, "text", Provenance(task_id, "home 1", "put a mug in cabinet", split, True))


def test_a_bank_with_entries_of_held_out_tasks_is_refused(tmp_path):
    config = alfworld(tmp_path / "games")
    [unseen] = Environments(config.env).tasks("valid_unseen")
    MemoryBank(tmp_path / "bank").write([entry("1", "elsewhere"), entry("2", unseen.id), entry("3", unseen.id)])
    config = config.model_copy(update={"memory": MemoryConfig(bank=str(tmp_path / "bank"))})
    with pytest.raises(ConfigError, match="2 entries of 1 held-out tasks"):
        guarded(config, tmp_path / "run")


def test_the_bank_counts_where_its_entries_come_from(tmp_path):
    bank = MemoryBank(tmp_path / "bank")
    bank.write([entry("1", "a"), entry("2", "a"), entry("3", "b", "train")])
    assert bank.origins() == {("a", "test"): 2, ("b", "train"): 1}
    audit = audit_bank(bank.origins(), ["a", "c"])
    assert (audit.entries, audit.by_split, audit.own_entries, audit.own_tasks) == (3, {"test": 2, "train": 1}, 2, 1)


@pytest.fixture
def collected(tmp_path) -> Path:
    guarded(alfworld(tmp_path / "games"), tmp_path / "collect")
    return tmp_path / "collect"


def test_rows_need_a_clean_verdict_about_their_own_tasks(collected):
    ids = Manifest.read(collected / "manifest.json").ids
    assert leakage.check_rows(collected / "rows", ids, allow=False) == []
    with pytest.raises(ConfigError, match="1 tasks of the rows are not in"):
        leakage.check_rows(collected / "rows", [*ids, "stranger"], allow=False)
    (collected / "SHA256SUMS").unlink()  # the files are changed on purpose
    audit = json.loads((collected / "leakage.json").read_text())
    audit["verdict"]["overlaps"][1] |= {"clean": False, "shared": 2}
    (collected / "leakage.json").write_text(json.dumps({**audit, "clean": False}))
    with pytest.raises(ConfigError, match=r"they leak \(2 shared scene\).*allow_leakage=true"):
        leakage.check_rows(collected / "rows", ids, allow=False)
    (collected / "leakage.json").write_text(json.dumps({**audit, "train_sha256": "0"}))
    with pytest.raises(ConfigError, match="different tasks"):
        leakage.check_rows(collected / "rows", ids, allow=False)
    (collected / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no manifest"):
        leakage.check_rows(collected / "rows", ids, allow=False)


def test_what_was_allowed_is_recorded(collected, tmp_path):
    (collected / "leakage.json").unlink()
    problems = leakage.check_rows(collected / "rows", [], allow=True)
    run = RunFolder.create(tmp_path / "sft", SftConfig(), on_exists="raise")
    leakage.copy_rows_manifest(run, [collected / "rows"], problems)
    said = json.loads((tmp_path / "sft" / "environment.json").read_text())["leakage"]
    assert said["allowed"] is True and "no verdict" in said["problems"][0]
    assert Manifest.read(tmp_path / "sft" / "manifest.json") == Manifest.read(collected / "manifest.json")


def test_train_sft_refuses_rows_without_a_manifest(tmp_path):
    from data_gen.rows import SftRow, save_rows
    from training.sft import train_sft

    row = SftRow("t", "train", "", 0, "goal", (), (), "Goal: goal", "a room", None, (), "NOACTION", "look")
    save_rows([row], tmp_path / "collect" / "rows")
    with pytest.raises(ConfigError, match=r"no manifest .*manifest\.json"):
        train_sft(SftConfig(rows=str(tmp_path / "collect" / "rows")), tmp_path / "sft")
    assert not (tmp_path / "sft").exists()


def evaluated(tmp_path: Path, tasks: list[Task], isolation: Isolation = "task", **compiler: str) -> dict:
    from data_gen.tasks import episode_specs

    bank = MemoryBank(tmp_path / "bank")
    bank.write([entry("own", tasks[0].id), entry("other", "elsewhere", "train")])
    memory = {"isolation": isolation}
    config = EvalConfig.model_validate({"env": "alfworld", "compiler": compiler, "memory": memory})
    run = RunFolder.create(tmp_path / "eval", config, on_exists="overwrite")
    return leakage.record_evaluation(run, config, episode_specs(tasks, bank, 4, isolation), bank)


def test_an_evaluation_records_what_compiler_and_bank_know(collected, tmp_path):
    tasks = [Task("v", "put a mug in cabinet", "home 1", "valid_seen", "", isolation=game("v", "FloorPlan302"))]
    facts = evaluated(tmp_path, tasks, checkpoint=str(collected / "checkpoints" / "step-000001"))
    assert facts["clean"] is False
    assert {o["dimension"]: o["shared"] for o in facts["training"]["overlaps"]} == {"gamefile": 0, "scene": 1}
    assert facts["bank"] == {
        "entries": 2,
        "by_split": {"test": 1, "train": 1},
        "own_entries": 1,
        "own_tasks": 1,
        "isolation": "task",
        "retrieved": 1,
        "retrieved_own": 0,
        "retrieved_own_scene": 1,
    }
    assert json.loads((tmp_path / "eval" / "leakage.json").read_text()) == json.loads(json.dumps(facts))
    isolated = evaluated(tmp_path, tasks, "scene")["bank"]
    assert (isolated["isolation"], isolated["retrieved"], isolated["retrieved_own_scene"]) == ("scene", 0, 0)
    assert Manifest.read(tmp_path / "eval" / "manifest.json").ids == {"v"}
    assert evaluated(tmp_path, tasks)["unchecked"] == "no trained compiler"
    assert "unknown" in evaluated(tmp_path, tasks, checkpoint=str(tmp_path / "nowhere"))["unchecked"]


def test_the_command(tmp_path, capsys):
    train = listed("alfworld", "train", game("t", "FloorPlan1"))
    for name, scene in (("seen", "FloorPlan1"), ("unseen", "FloorPlan9")):
        listed("alfworld", name, game(name, scene)).write(tmp_path / f"{name}.json")
    train.write(tmp_path / "train.json")
    run_leakage(tmp_path / "train.json", tmp_path / "unseen.json", None)
    assert "isolated" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"1 shared scene \(FloorPlan1\)"):
        run_leakage(tmp_path / "train.json", tmp_path / "seen.json", None)
    assert "LEAK" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--train and --eval"):
        run_leakage(tmp_path / "train.json", None, None)
    config = alfworld(tmp_path / "games")
    run_leakage(None, None, config, tmp_path / "out")
    assert len(Manifest.read(tmp_path / "out" / "manifest.json").tasks) == 3
    only_train = alfworld(tmp_path / "few", {"train": ["301"]})
    with pytest.raises(ConfigError, match="nothing was checked"):
        run_leakage(None, None, only_train)
