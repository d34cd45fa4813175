"""Runs side by side: paired on the tasks that they share, honest about what is not the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agent.records import Episode
from eval.compare import differences, differing, dotted, read_runs, shared, unique_names, write_comparison
from eval.metrics import results
from eval.replays import Replays
from memcompiler.cli import app
from runtime.errors import StopReason
from tests.eval.pages import HOSTILE, Page, episode, hostile_episode

META = {
    "environment": "household",
    "split": "test",
    "seed": 0,
    "scene_seed": 3,
    "tasks_sha256": "a" * 64,
    "max_steps": 12,
    "environment_version": {"packages": {}, "engine_sha256": "e" * 64},
    "compiler_hash": "c" * 64,
}
SETTINGS = {"compiler": {"model": "m", "checkpoint": "sft", "lora": {"targets": ["q", "v"]}}, "seed": 0}


def played(successes: str, delivery: str = "compiled", **changes: Any) -> list[Episode]:
    """One episode per character: "1" solves its task t0, t1, ..., "0" does not, "-" was not played."""
    return [episode(f"t{i}", delivery, c == "1", **changes) for i, c in enumerate(successes) if c != "-"]


def run(folder: Path, episodes: Sequence[Episode], settings: Mapping[str, Any] = SETTINGS, **meta: Any) -> Path:
    folder.mkdir(parents=True)
    per_delivery: dict[str, list[Episode]] = {}
    for each in episodes:
        per_delivery.setdefault(each.delivery, []).append(each)
    (folder / "results.json").write_text(json.dumps(results(per_delivery, META | meta)), encoding="utf-8")
    rows = "".join(json.dumps(each.to_json(images=True)) + "\n" for each in episodes)
    (folder / "episodes.jsonl").write_text(rows, encoding="utf-8")
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
    return folder


def matrix(folder: Path, groups: Mapping[str, Sequence[Episode]]) -> Path:
    """A matrix over `executor`, as `memcompiler eval` lays it out."""
    cells, pooled = {}, {}
    for group, episodes in groups.items():
        run(folder / "cells" / group, episodes)
        cells[group] = {"path": f"cells/{group}", "group": group, **META}
        pooled |= {f"{group}/{episodes[0].delivery}": episodes}
    whole = results(pooled, {k: META[k] for k in ("environment", "split", "seed")} | {"complete": True, "cells": cells})
    (folder / "results.json").write_text(json.dumps(whole), encoding="utf-8")
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump({**SETTINGS, "matrix": {"executor": ["a", "b"]}}))
    return folder


def page_of(*folders: Path, **options: Any) -> Page:
    return Page(write_comparison(folders, **options).read_text(encoding="utf-8"))


def compared(*folders: Path) -> dict[str, tuple[str, float, int, int, int]]:
    """Column of a run -> the column it is compared with, points, wins, losses, tasks."""
    runs = read_runs(folders)
    common = shared({each.name: list(each.source(False)) for each in runs})
    return {
        pair.a: (pair.b, 100 * pair.all["mean"], pair.all["wins"], pair.all["losses"], pair.all["n"])
        for pair in differences(runs, common)
    }


def text_of(page: Page) -> str:
    return " ".join(page.text.split())


# Numbers


def test_differences_are_paired_over_shared_tasks(tmp_path: Path) -> None:
    first = run(tmp_path / "first", [*played("0011-"), *played("0000-", "none")])
    second = run(tmp_path / "second", [*played("1110-"), *played("01--1", "none")])
    # compiled: +1 +1 0 -1 over 4 tasks; none: 0 and +1 over the two tasks that both played
    expected = {
        "second/none": ("first/none", 50.0, 1, 0, 2),
        "second/compiled": ("first/compiled", 25.0, 2, 1, 4),
    }
    assert compared(first, second) == expected
    page = page_of(first, second)
    assert "second/compiled, text + soft against first/compiled, text + soft: +25.0 points" in text_of(page)
    assert "better 2, worse 1, equal 1" in text_of(page)
    assert json.loads(page.inside["script"][0])["second/compiled"]["n"] == 4


def test_every_run_is_compared_with_the_first(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, played(wins)) for name, wins in (("a", "00"), ("b", "10"), ("c", "11"))]
    assert {name: row[:2] for name, row in compared(*runs).items()} == {
        "b/compiled": ("a/compiled", 50.0),
        "c/compiled": ("a/compiled", 100.0),
    }


def test_an_episode_that_broke_is_no_success(tmp_path: Path) -> None:
    broken = played("11")
    broken[0].stop_reason = StopReason.EXECUTOR_FAILURE
    pair = compared(run(tmp_path / "a", played("11")), run(tmp_path / "b", broken))
    assert pair["b/compiled"] == ("a/compiled", -50.0, 0, 1, 2)


def test_the_table_has_a_row_per_run_under_each_delivery(tmp_path: Path) -> None:
    page = page_of(run(tmp_path / "a", played("1000")), run(tmp_path / "b", [*played("11"), *played("0", "none")]))
    text = text_of(page)
    # 1 of 4: Wilson [4.6, 69.9]; 2 of 2: [34.2, 100]; 0 of 1: [0, 79.3]
    for cells in ("a 25.0 [4.6, 69.9]", "b 100.0 [34.2, 100.0]", "no memory b 0.0 [0.0, 79.3]"):
        assert cells in text
    shown = json.loads(page.inside["script"][-2])["deliveries"]
    assert [one["name"] for one in shown] == ["b/none", "a/compiled", "b/compiled"]


# A matrix


def test_a_matrix_against_a_plain_run_and_another_matrix(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", played("00"))
    one = matrix(tmp_path / "one", {"executor=a": played("01"), "executor=b": played("11")})
    two = matrix(tmp_path / "two", {"executor=a": played("11"), "executor=b": played("10")})
    against_plain = compared(plain, one)
    assert against_plain["one/executor=a/compiled"] == ("plain/compiled", 50.0, 1, 0, 2)
    assert against_plain["one/executor=b/compiled"] == ("plain/compiled", 100.0, 2, 0, 2)
    assert compared(one, two)["two/executor=b/compiled"] == ("one/executor=b/compiled", -50.0, 0, 1, 2)
    assert compared(one, plain) == {}  # which of the two executors would it be?
    text = text_of(page_of(one, plain))
    assert "Only one of plain and one has compiled, executor=a/compiled, executor=b/compiled." in text


# What is not the same


def test_settings_that_differ_are_listed_by_dotted_key(tmp_path: Path) -> None:
    assert dotted({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": "{}", "d": "[1]"}
    assert differing([{"a": 1, "b": 0.5, "c": None}, {"a": 1, "b": 0.25}]) == {
        "b": ["0.5", "0.25"],
        "c": ["null", None],
    }
    assert differing([{"a": True}, {"a": 1}]) == {"a": ["true", "1"]}
    changed = {"compiler": {**SETTINGS["compiler"], "checkpoint": "grpo"}, "seed": 0, "extra": True}  # type: ignore[dict-item]
    folders = (run(tmp_path / "a", played("0")), run(tmp_path / "b", played("1"), changed, compiler_hash="d" * 64))
    text = text_of(page_of(*folders))
    assert "compiler.checkpoint sftgrpo" in text and "extra –true" in text
    assert "compiler_hash cccccccccccc…dddddddddddd…" in text
    assert "compiler.model mm" not in text and "Limits of the comparison" not in text


@pytest.mark.parametrize(
    ("meta", "warning"),
    [
        ({"split": "valid"}, "b has another split than a: valid, not test."),
        ({"tasks_sha256": "b" * 64}, "b has another list of tasks than a: bbbbbbbbbbbb…, not aaaaaaaaaaaa…."),
        (
            {"environment_version": {"packages": {"alfworld": "0.5"}, "engine_sha256": "e" * 64}},
            "b has another version of the environment than a:",
        ),
        ({"max_steps": 30}, "b has another step limit than a: 30, not 12."),
        ({"scene_seed": 4}, "b shares no task with a"),
    ],
)
def test_what_speaks_against_comparing_is_said(tmp_path: Path, meta: dict[str, Any], warning: str) -> None:
    page = page_of(run(tmp_path / "a", played("01")), run(tmp_path / "b", played("10"), **meta))
    assert warning in text_of(page)


def test_same_ids_with_other_goals_are_other_tasks(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", played("01")), run(tmp_path / "b", played("10", goal="another"))
    assert compared(first, second) == {}
    page = page_of(first, second)
    assert "2 tasks of b have an id of a and another goal" in text_of(page)
    assert "The runs share no task" in page.text and not page.episodes


def test_tasks_that_only_one_played_are_counted_and_not_replayed(tmp_path: Path) -> None:
    page = page_of(run(tmp_path / "a", played("0101")), run(tmp_path / "b", played("-11")))
    assert "b shares 2 tasks with a, of its 2 and the other's 4" in text_of(page)
    assert sorted({view["delivery"] for view in page.episodes}) == ["a/compiled", "b/compiled"]
    assert len(page.episodes) == 2 * 2


# Replays


def test_replays_of_one_task_stand_side_by_side(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, played(wins)) for name, wins in (("a", "0011"), ("b", "0101"), ("c", "1111"))]
    page = page_of(*folders)
    shown = page.episodes
    assert [view["delivery"] for view in shown] == ["a/compiled", "b/compiled", "c/compiled"] * 4
    ended = [view["outcome"] == "success" for view in shown]
    # sorted by how b and a ended: a win, a loss, both failed, both solved
    assert [(b, a) for a, b in zip(ended[::3], ended[1::3], strict=True)] == [
        (True, False),
        (False, True),
        (False, False),
        (True, True),
    ]
    assert {view["task"]["kind"] for view in shown} == {"pick"}


def test_any_task_can_be_asked_for(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, played("01" * 8)) for name in ("a", "b")]
    page = page_of(*folders, replays=Replays(only=("3/t9",)))
    assert [view["task"]["goal"] for view in page.episodes] == ["goal of t9"] * 2
    with pytest.raises(ValueError, match="no replay of task 't9'; ids like it: 3/t9"):
        write_comparison(folders, replays=Replays(only=("t9",)))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    settings = {"compiler": {HOSTILE.replace("\x00", "").replace("\ud800", ""): "</td><script>alert(3)</script>"}}
    hostile = run(tmp_path / name, [hostile_episode("compiled", True)], settings, split=HOSTILE)
    plain = run(tmp_path / "plain", [hostile_episode("compiled", False)])
    harmless = [run(tmp_path / "a", played("01")), run(tmp_path / "b", played("1"), {"seed": 1}, split="valid")]
    page, clean = page_of(hostile, plain), page_of(*harmless)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in clean.tags}
    assert len(page.inside["script"]) == 3 and page.inside["script"][2] == clean.inside["script"][2]
    assert not {"onerror"} & {key for _, attrs in page.tags for key in attrs}
    assert all(value.startswith(("data:", "#")) for key in ("src", "href") for value in page.attributes(key))
    assert name in page.text and "</td><script>alert(3)</script>" in page.text
    assert "49" not in page.text  # {{ 7 * 7 }} was not evaluated


# Names and errors


def test_names_are_as_long_as_they_must_be() -> None:
    assert unique_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert unique_names([Path("/x/one/eval"), Path("/x/two/eval"), Path("/x/c")]) == ["one/eval", "two/eval", "c"]
    assert unique_names([Path("/a/x"), Path("/b/a/x")]) == ["a/x", "b/a/x"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    whole, empty, partial = run(tmp_path / "whole", played("1")), tmp_path / "empty", tmp_path / "partial"
    empty.mkdir()
    partial.mkdir()
    (partial / "results.json").write_text('{"complete": false, "missing": ["executor=b"], "cells": {}}')
    with pytest.raises(ValueError, match=r"empty/results\.json does not exist: evaluate first"):
        write_comparison([whole, empty])
    with pytest.raises(ValueError, match=r"executor=b are missing: continue with --on-exists resume"):
        write_comparison([whole, partial])
    with pytest.raises(ValueError, match="two runs or more, each named once"):
        write_comparison([whole, whole / ".." / "whole"])
    (tmp_path / "outer" / "eval").mkdir(parents=True)
    (whole / "results.json").rename(tmp_path / "outer" / "results.json")
    (tmp_path / "outer" / "eval" / "results.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"episodes\.jsonl is missing: .* runs inside: eval"):
        write_comparison([tmp_path / "outer", partial])
    assert not list(tmp_path.rglob("*.html"))


# The command


def test_report_compares_what_it_is_given(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name / "eval", played(wins)) for name, wins in (("a", "001"), ("b", "011")))
    done = CliRunner().invoke(app, ["report", str(first), str(second)])
    assert done.exit_code == 0 and done.output.strip() == str(first / "compare.html")
    assert "a/eval" in (first / "compare.html").read_text() and not (second / "compare.html").exists()
    out = tmp_path / "pages" / "one.html"
    done = CliRunner().invoke(app, ["report", str(first), "--out", str(out), "--task", "t2"])
    assert done.exit_code == 0 and len({view["task"]["id"] for view in Page(out.read_text()).episodes}) == 1
    failed = CliRunner().invoke(app, ["report", str(first), str(tmp_path)])
    assert failed.exit_code == 1 and "results.json does not exist" in failed.output
