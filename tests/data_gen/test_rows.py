"""Rows on disk: pictures keep their bytes, older folders load, several folders are one collection."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from datasets import Dataset, Image, load_from_disk

from agent.deliveries import Delivery, recorded_step
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import executor_request
from data_gen.rows import episode_rows, load_rows, row_folders, save_rows
from envs.household.command_reader import HouseholdReader
from envs.household.environment import HouseholdEnvironment
from executor.hf import FrozenExecutor
from executor.records import ExecutorView
from memory.entry import MemoryEntry, Provenance
from tests import tiny_models
from tests.data_gen.made_rows import row
from tests.memory.entries import by_id

ROWS = [row(i) for i in range(4)]


def test_rows_come_back_as_they_were_and_pictures_are_an_image_feature(tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "rows")
    assert load_rows(tmp_path / "rows") == ROWS
    stored = load_from_disk(str(tmp_path / "rows"))
    assert isinstance(stored.features["image"], Image)
    assert stored[2]["image"].getpixel((0, 0)) == (2, 10, 200) and stored[1]["image"] is None


@pytest.mark.parametrize("pictures", [True, False])
def test_rows_of_an_older_version_load(pictures: bool, tmp_path: Path) -> None:
    """Plain bytes (or, without any picture, a column of nothing), and neither success nor steps."""
    rows = ROWS if pictures else [replace(row, image=None) for row in ROWS]
    old = [{k: v for k, v in asdict(row).items() if k not in ("success", "steps")} for row in rows]
    Dataset.from_list(old).save_to_disk(str(tmp_path / "rows"))
    assert not isinstance(load_from_disk(str(tmp_path / "rows")).features["image"], Image)
    assert load_rows(tmp_path / "rows") == [replace(row, steps=0) for row in rows]


def test_several_folders_and_patterns(tmp_path: Path) -> None:
    for i, name in enumerate(("b", "a", "c")):
        save_rows([ROWS[i]], tmp_path / name / "rows")
    pattern = str(tmp_path / "*" / "rows")
    assert load_rows(pattern) == [ROWS[1], ROWS[0], ROWS[2]]
    assert load_rows([tmp_path / "c" / "rows", str(tmp_path / "[ab]" / "rows")]) == [ROWS[2], ROWS[1], ROWS[0]]
    assert row_folders([pattern, tmp_path / "a" / "rows"]) == row_folders(pattern)  # none twice


def test_what_holds_no_rows_is_refused_by_name(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "x"}]).save_to_disk(str(tmp_path / "else"))
    with pytest.raises(ValueError, match=r"not of SFT rows: it lacks action, .*task_id"):
        load_rows(tmp_path / "else")
    for nothing in (tmp_path, str(tmp_path / "*" / "rows"), [tmp_path / "else", tmp_path / "gone"], ""):
        with pytest.raises(FileNotFoundError, match="memcompiler collect"):
            load_rows(nothing)
    with pytest.raises(FileNotFoundError, match="no SFT rows are named"):
        load_rows([])


def test_rows_say_how_their_episode_went() -> None:
    env = HouseholdEnvironment(scenes={"train": 1})
    specs = [EpisodeSpec(task) for task in env.tasks("train")[:3]]
    delivery = Delivery("teacher", "compiled", ExpertTeacher(reader=HouseholdReader()), soft=False)
    play = lambda steps: run_episodes(
        lambda: HouseholdEnvironment(scenes={"train": 1}), specs, delivery, ExpertExecutor(), EpisodeLimits(steps)
    )
    for episode in play(30):
        assert episode.success
        assert [(r.t, r.success, r.steps) for r in episode_rows(episode, {})] == [
            (t, True, len(episode.steps)) for t in range(len(episode.steps))
        ]
    short = play(2)[0]
    assert [(r.success, r.steps) for r in episode_rows(short, {})] == [(False, 2)] * 2
    short.steps[1].emission_kind = ""  # the compiler failed here
    assert [r.t for r in episode_rows(short, {})] == [0]


def test_rows_say_whether_memory_held_entries_of_the_own_scene_and_read_them_back(tmp_path: Path) -> None:
    env = HouseholdEnvironment(scenes={"train": 1})
    task = env.tasks("train")[0]
    own, other = (
        MemoryEntry(scene, "", Provenance("", scene, "", "train", success=True)) for scene in (task.scene, "home 99")
    )
    delivery = Delivery("teacher", "compiled", ExpertTeacher(reader=HouseholdReader()), soft=False)
    rows = []
    for memory in ((own, other), (other,), ()):
        [episode] = run_episodes(
            lambda: env, [EpisodeSpec(task, memory)], delivery, ExpertExecutor(), EpisodeLimits(1), concurrency=1
        )
        rows += episode_rows(episode, by_id(memory))
    assert [row.own_scene for row in rows] == [True, False, False]
    save_rows([replace(row, teacher_level="command") for row in rows], tmp_path / "rows")
    assert [(row.own_scene, row.teacher_level) for row in load_rows(tmp_path / "rows")] == [
        (True, "command"),
        (False, "command"),
        (False, "command"),
    ]


def test_rows_keep_the_commands_where_executors_are_shown_them(tmp_path: Path) -> None:
    env = HouseholdEnvironment(scenes={"train": 1})
    delivery = Delivery("expert_compiler", "compiled", ExpertTeacher(reader=HouseholdReader()), soft=False)
    specs = [EpisodeSpec(env.tasks("train")[0])]
    [episode] = run_episodes(lambda: env, specs, delivery, ExpertExecutor(), EpisodeLimits(4), concurrency=1)
    assert {row.commands for row in episode_rows(episode, {})} == {()}
    save_rows(episode_rows(episode, {}, commands=True), tmp_path / "rows")
    executor = FrozenExecutor(tiny_models.lm_backbone(), "generate", "Answer.", reads=ExecutorView(commands=True))
    for t, kept in enumerate(load_rows(tmp_path / "rows")):
        assert kept.commands == episode.steps[t].admissible and kept.commands
        again = executor.encode(executor_request(recorded_step(episode, t), executor))
        assert executor.encode(executor_request(kept.step_input(), executor)).ids == again.ids
        assert kept.commands[0] in executor.tokenizer.decode(again.ids).split("The commands:\n")[1]


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"])
@pytest.mark.parametrize("damage", [b"", b"[1", b"\xff" * 64])
def test_damaged_rows_are_named(name: str, damage: bytes, tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "rows")
    (tmp_path / "rows" / name).write_bytes(damage)
    with pytest.raises(ValueError, match=r"rows in .* are damaged"):
        load_rows(tmp_path / "rows")


def test_damaged_arrow_data_does_not_end_the_process(tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "rows")
    (tmp_path / "rows" / "SHA256SUMS").unlink()  # as rows of an earlier version
    path = tmp_path / "rows" / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    for at in range(64, len(data), 97):
        path.write_bytes(data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :])
        with contextlib.suppress(ValueError):
            load_rows(tmp_path / "rows")
