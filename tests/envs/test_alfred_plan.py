"""EB-ALFRED's expert: demonstrations in the benchmark's skills, played in a toy world, also after other commands."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.language import Kind
from configs.collect import CollectConfig
from data_gen.rows import load_rows
from envs.embodiedbench import hosted, tasks
from envs.embodiedbench.alfred_plan import DROP, PUT, Plan, interactions
from memcompiler.collection import run_collect

STANDIN, WORLD = (Path(__file__).parent / name for name in ("embodiedbench_standin", "alfred_world"))
DATA = Path("embodiedbench", "envs", "eb_alfred", "data")
CLOSED = ("Fridge", "Microwave", "Cabinet", "Drawer", "Safe")


def act(kind: str, thing: str, place: str = "") -> dict[str, Any]:
    """Create one action of a demonstration, on ids as ALFRED writes them."""
    ids = {"objectId": object_id(thing), **({"receptacleObjectId": object_id(place)} if place else {})}
    return {"api_action": {"action": kind, **ids}}


def object_id(thing: str) -> str:
    kind, _, number = thing.partition("_")
    return f"{kind}|+00.0{number or 1}|+00.90|-01.20" + ("|SinkBasin" if kind == "Sink" else "")


def plan_of(*actions: dict[str, Any]) -> Plan:
    """Create the plan of a demonstration in a scene with two CDs and two cabinets."""
    names = {object_id(name): name for name in ("CD", "CD_2", "Cabinet", "Cabinet_2")}
    return Plan(interactions({"plan": {"low_actions": actions}}, lambda id: names.get(id, id.split("|")[0])))


def after(plan: Plan, *skills: str) -> list[str] | None:
    for skill in skills:
        plan.note(skill)
    return plan.left()


HEAT = [
    *(act("OpenObject", "Cabinet_2"), act("PickupObject", "Mug"), act("CloseObject", "Cabinet_2")),
    *(act("OpenObject", "Microwave"), act("PutObject", "Mug", "Microwave"), act("CloseObject", "Microwave")),
    *(act("ToggleObjectOn", "Microwave"), act("ToggleObjectOff", "Microwave"), act("OpenObject", "Microwave")),
    *(act("PickupObject", "Mug"), act("CloseObject", "Microwave"), act("PutObject", "Mug", "Sink")),
]
HEATED = [
    *("find a Cabinet_2", "open the Cabinet_2", "find a Mug", "pick up the Mug", "close the Cabinet_2"),
    *("find a Microwave", "open the Microwave", PUT, "close the Microwave"),
    *("turn on the Microwave", "turn off the Microwave", "open the Microwave"),
    *("find a Mug", "pick up the Mug", "close the Microwave", "find a Sink", PUT),
]
CUT = [
    *(act("PickupObject", "Knife"), act("SliceObject", "Apple"), act("PutObject", "Knife", "Sink")),
    *(act("PickupObject", "Apple"), act("PutObject", "Apple", "Sink")),
]
SLICED = ["find a Knife", "pick up the Knife", "find a Apple", "slice the Apple"]
PLACED = ["find a Sink", PUT, "find a Apple", "pick up the Apple", "find a Sink", PUT]
LIGHT = [act("PickupObject", "CD_2"), act("ToggleObjectOn", "DeskLamp")]
LIT = ["find a CD_2", "pick up the CD", "find a DeskLamp", "turn on the DeskLamp"]


def test_a_demonstration_is_written_in_the_skills_of_the_benchmark():
    plan = plan_of({"api_action": {"action": "MoveAhead"}}, *HEAT)
    assert plan.left() == HEATED
    for done, skill in enumerate(HEATED):
        assert plan.left() == HEATED[done:]
        plan.note(skill)
    assert plan.left() is None  # nothing is left to say if this was not the goal
    assert plan_of(*LIGHT).left() == LIT
    assert plan_of().left() is None and plan_of({"api_action": {"action": "MoveAhead"}}).left() is None


@pytest.mark.parametrize(
    ("demonstration", "done", "left"),
    [
        # the robot stands elsewhere
        (HEAT, ["find a Fridge"], HEATED),
        (HEAT, [*HEATED[:4], "find a Fridge"], ["find a Cabinet_2", *HEATED[4:]]),
        (HEAT, [*HEATED[:7], "find a Sink"], [*HEATED[5:6], *HEATED[7:]]),
        # the wrong thing in hand is dropped; the right one is picked up again
        (LIGHT, ["find a CD", "pick up the CD"], [DROP, *LIT]),
        (LIGHT, [*LIT[:2], "find a Desk", PUT], LIT),
        (LIGHT, [*LIT[:2], DROP], LIT[1:]),
        (CUT, ["find a Apple", "pick up the Apple", "find a Sink", PUT], [*SLICED, *PLACED]),
        # what was opened or switched beside the plan is reset
        (HEAT, ["find a Microwave", "open the Microwave"], ["close the Microwave", *HEATED]),
        (HEAT, [*HEATED[:2], "close the Cabinet_2"], HEATED[1:]),
        (LIGHT, [*LIT[2:]], ["turn off the DeskLamp", *LIT]),
        # the thing is picked up again after it was put down for good
        (CUT, [*SLICED, *PLACED[:4], "find a Desk", PUT], PLACED[2:]),
    ],
)  # fmt: skip
def test_what_is_left_after_a_command_beside_the_plan(demonstration, done, left):
    assert after(plan_of(*demonstration), *done) == left


def test_after_a_command_that_did_not_work_the_thing_is_found_again():
    plan = plan_of(*HEAT)
    for skill in HEATED[:4]:
        plan.note(skill)
    plan.note("close the Cabinet_2", worked=False)
    assert plan.left() == ["find a Cabinet_2", *HEATED[4:]]


def test_a_thing_that_is_needed_whole_cannot_be_sliced_and_one_that_is_sliced_is_not_sliced_again():
    whole = [act("PickupObject", "Knife"), act("PutObject", "Knife", "Sink"), act("PickupObject", "Apple")]
    assert after(plan_of(*whole), *SLICED) is None
    assert after(plan_of(*CUT), *SLICED, DROP) == [*SLICED[:2], *PLACED]


# --- the official tasks, with the demonstrations of their ground-truth steps ---


@pytest.fixture(scope="module")
def official(shared_data) -> list[dict[str, Any]]:
    folder = shared_data / "embodiedbench" / "eb_alfred"
    names = [name for name in tasks.SPLITS["eb_alfred"] if name != "train"]
    return [
        {**entry, "split": name} for name in names for entry in json.loads((folder / f"{name}.json").read_text("utf-8"))
    ]


WORDS = {
    **{"find": "", "pick up": "PickupObject", "put down": "PutObject", "slice": "SliceObject", "open": "OpenObject"},
    **{"close": "CloseObject", "turn on": "ToggleObjectOn", "turn off": "ToggleObjectOff"},
}


def demonstration(entry: dict[str, Any], skills: list[str]) -> list[dict[str, Any]]:
    """Turn ground-truth steps into a demonstration; they leave out the tap, doors, and some finds and names."""
    names = {skill.split()[-1].lower(): skill.split()[-1] for skill in skills}
    kind, wanted, movable, target, _ = entry["full_scene_name"].split("/")[0].split("-")
    wanted, target = wanted.replace("Sliced", ""), target.replace("Basin", "")
    actions, held, near, taken, opened, count = list[dict[str, Any]](), "", "", "", set[str](), 0
    where = dict[str, str]()
    for step in entry["NL Steps"]:
        verb = next(verb for verb in WORDS if step.startswith(verb))
        thing = names.get(step.removeprefix(verb).split(" ")[-1].lower().replace("basin", ""), "")
        if verb == "find":
            near = thing or near
        elif verb == "put down":
            place = near if near != held and f"pick up the {near}" not in skills else "CounterTop"
            place = {wanted: movable, movable: target}.get(held, place) if movable != "None" else place
            put, door = act("PutObject", held, place), place in CLOSED and place not in opened
            actions += [act("OpenObject", place), put, act("CloseObject", place)] if door else [put]
            cut = not entry["full_scene_name"].count("Sliced-") or act("SliceObject", wanted) in actions
            if place == "Sink" and "clean" in kind and held == wanted and cut:
                actions += [act("ToggleObjectOn", "Faucet"), act("ToggleObjectOff", "Faucet")]
            where[held] = place
            held, taken = "", held
        elif thing not in opened or verb != "open":
            count += (verb, thing) == ("pick up", wanted)
            thing = taken if verb == "pick up" and actions[-1:] == [act("ToggleObjectOff", "Faucet")] else thing
            thing = f"{thing}_2" if kind.startswith("pick_two") and thing == wanted and count == 2 else thing or taken
            if verb == "slice" and where.get(thing) in CLOSED and where[thing] not in opened:
                opened = opened | {where[thing]}
                actions.append(act("OpenObject", where[thing]))
            actions.append(act(WORDS[verb], thing))
            held = thing if verb == "pick up" else held
            opened = opened | {thing} if verb == "open" else opened - {thing}
    return actions


@pytest.fixture(scope="module")
def bench(official, tmp_path_factory) -> Iterator[hosted.HostedEmbodiedBench]:
    """The stand-in with the official tasks, their demonstrations, and a world for all seven kinds of tasks."""
    home = tmp_path_factory.mktemp("checkout")
    shutil.copytree(STANDIN, home, dirs_exist_ok=True)
    shutil.copytree(WORLD, home / DATA.parent, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path.cwd())
        patch.setattr(sys, "path", list(sys.path))
        host = hosted.host("eb_alfred", home=str(home), resolution=1)
        skills, splits = host.load().SKILLS, dict[str, list[dict[str, Any]]]()
        for entry in official:
            name, repeat = entry["full_scene_name"], entry["repeat_idx"]
            pair = {"task": name, "repeat_idx": repeat, "instruction": entry["task description"]}
            splits.setdefault(entry["split"], []).append(pair)
            file = home / DATA / "json_2.1.0" / name / "pp" / f"ann_{repeat}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            said = {"anns": [{"task_desc": entry["task description"]}] * (repeat + 1)}
            plan = {"low_actions": demonstration(entry, skills)}
            file.write_text(json.dumps({"plan": plan, "turk_annotations": said}), "utf-8")
        (home / DATA / "splits" / "splits.json").write_text(json.dumps(splits), "utf-8")
        yield host
        host.close()
        for module in [module for module in sys.modules if module.split(".")[0] == "embodiedbench"]:
            del sys.modules[module]


def test_the_demonstrations_of_all_300_official_tasks_are_skills_and_solve_them_in_the_toy_world(bench):
    played = [task for split in tasks.SPLITS["eb_alfred"][:-1] for task in bench.tasks(split)]
    assert len(played) == 300
    for task in played:
        bench.reset(task)
        left = bench.expert()
        assert left and set(left) <= set(bench.env.language_skill_set), task["id"]
        made = {"success": False}
        for command in left:
            if not made["success"]:
                assert command == bench.expert()[0]
                made = bench.step(command)
                assert "executed successfully" in made["observation"]["text"], (task["id"], command, left)
        assert made["success"], (task["id"], left)


def test_the_expert_solves_the_tasks_after_commands_beside_its_plan(bench):
    chance = random.Random(0)
    for task in bench.tasks("long_horizon") + bench.tasks("base"):
        bench.reset(task)
        bench.env._max_episode_steps = bench.env._max_invalid_actions = 200
        made, strayed = {"success": False, "done": False}, 0
        while not made["done"] and (left := bench.expert()) is not None:
            stray = strayed < 8 and chance.random() < 0.3
            strayed += stray
            things = {word for skill in left for word in skill.split() if word[0].isupper()}
            near = [s for s in bench.env.language_skill_set if s.split()[-1] in things or s in (PUT, DROP)]
            made = bench.step(chance.choice(near) if stray else left[0])
        assert made["success"], task["id"]


@pytest.mark.slow
def test_a_collection_with_the_expert_gives_rows_with_guidance(bench, tmp_path, monkeypatch):
    """Two official tasks are held out; the others are training tasks."""
    home = tmp_path / "checkout"
    shutil.copytree(bench.home, home)
    splits = json.loads((home / DATA / "splits" / "splits.json").read_text("utf-8"))
    short = {name: entries[:2] for name, entries in splits.items()}
    (home / DATA / "splits" / "splits.json").write_text(json.dumps(short), "utf-8")
    monkeypatch.setenv("EMBODIEDBENCH_PYTHON", sys.executable)
    asked = {
        "env": {"name": "eb_alfred", "home": str(home), "resolution": 64},
        "memory": {"k": 4},
        "limit": 6,
        "max_steps": 30,
        "noise": 0.0,
    }
    run_collect(CollectConfig.model_validate(asked), tmp_path / "run")
    counts = json.loads((tmp_path / "run" / "collect.json").read_text())
    assert counts["successes"] == 6 and counts["bank_entries"] > 200
    rows = load_rows(tmp_path / "run" / "rows")
    assert {row.kind for row in rows} >= {Kind.HYBRID, Kind.NOACTION}  # a plan's first command, at the least
