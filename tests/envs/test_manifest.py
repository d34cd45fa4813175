"""Manifests: what changes the hash, what does not, and files that are not whole."""

import json

import pytest

from envs.base import Task
from envs.manifest import Manifest, ManifestError


def task(id: str, scene: str = "home 1", goal: str = "find a mug", split: str = "train", **data: str) -> Task:
    return Task(id, goal, scene, split, "find", data=data, isolation={"scene": (scene,)})


TASKS = [task("b", "home 2"), task("a"), task("a", split="valid")]


def test_written_and_read_again_is_the_same(tmp_path):
    manifest = Manifest.of("household", TASKS)
    manifest.write(tmp_path / "m.json")
    again = Manifest.read(tmp_path / "m.json")
    assert again == manifest and again.sha256 == manifest.sha256
    assert [(t.id, t.split) for t in again.tasks] == [("a", "train"), ("a", "valid"), ("b", "train")]
    assert again.split == "train+valid" and again.ids == {"a", "b"}
    assert "find a mug" not in (tmp_path / "m.json").read_text()  # no text of a benchmark goes into it
    assert json.loads((tmp_path / "m.json").read_text())["tasks"][2]["isolation"] == {"scene": ["home 2"]}


def test_the_bytes_do_not_depend_on_the_order_of_tasks_and_values(tmp_path):
    both = [Task("t", "g", "", "train", "", isolation={"x": x, "a": ("1",)}) for x in (("2", "1"), ("1", "2", "2"))]
    Manifest.of("b", [both[0], *TASKS]).write(tmp_path / "1.json")
    Manifest.of("b", [*reversed(TASKS), both[1], both[1]]).write(tmp_path / "2.json")
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


@pytest.mark.parametrize(
    "other",
    [task("c"), task("a", "home 9"), task("a", goal="find a cup"), task("a", split="test"), task("a", sha256="0")],
    ids=["id", "isolation", "goal", "split", "content"],
)
def test_everything_that_makes_a_task_is_in_the_hash(other):
    assert Manifest.of("b", [other]).sha256 != Manifest.of("b", [task("a")]).sha256


def test_tasks_that_cannot_be_listed():
    with pytest.raises(ManifestError, match="no tasks"):
        Manifest.of("b", [])
    with pytest.raises(ManifestError, match=r"two different tasks.*'a'"):
        Manifest.of("b", [task("a"), task("a", goal="find a cup")])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 9}', "\xff", '{"format": 1, "benchmark": "b", "tasks": [1]}']
)
def test_files_that_are_no_manifest(tmp_path, text):
    (tmp_path / "m.json").write_text(text, encoding="latin-1")
    with pytest.raises(ManifestError, match=r"m\.json"):
        Manifest.read(tmp_path / "m.json")
    with pytest.raises(ManifestError, match="memcompiler collect"):
        Manifest.read(tmp_path / "none.json")


def test_a_file_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "m.json"
    Manifest.of("b", TASKS).write(path)
    path.write_text(path.read_text().replace("home 2", "home 3"))
    with pytest.raises(ManifestError, match="changed"):
        Manifest.read(path)
