"""Episodes on disk: appended one by one, whole after a kill, complete or no result."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.runs import EpisodeRecord
from runtime.store import RecordError
from tests.fakes import one_step_episode as episode

TASKS = ["t0", "t1"]


def test_what_was_appended_comes_back_in_the_order_of_the_tasks(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path, {"memory": "four"})
    assert record.played() == {}
    for each in (episode("t1"), episode("t0", text="\ud800 \u2028"), episode("t0", "static"), episode("t1", "static")):
        record.append(each)
    assert record.played() == {"none": ["t1", "t0"], "static": ["t0", "t1"]}
    found = record.episodes(["none", "static"], TASKS)
    assert [e.task_id for e in found["none"]] == TASKS
    assert found["none"][0].steps[0].executor_text == "\ud800 \u2028"
    assert '"cell": {"memory": "four"}' in record.lines.path.read_text().splitlines()[0]


def test_a_torn_line_is_dropped_and_whole_ones_stay(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path)
    record.append(episode("t0"))
    whole = record.lines.path.read_bytes()
    record.append(episode("t1"))
    torn = record.lines.path.read_bytes()
    for cut in (len(whole) + 1, len(whole) + 40, len(torn) - 1):
        record.lines.path.write_bytes(torn[:cut])
        assert record.played() == {"none": ["t0"]}
        record.lines.truncate()
        assert record.lines.path.read_bytes() == whole
    record.append(episode("t1"))
    assert record.lines.path.read_bytes() == torn


def test_rows_can_be_dropped(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path)
    assert not record.lines.path.exists()
    for name in ("none", "static"):
        record.append(episode("t0", name))
    record.lines.keep(lambda row: row["delivery"] != "none")
    assert record.played() == {"static": ["t0"]}


def test_a_missing_episode_or_one_too_many_is_no_result(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path)
    with pytest.raises(RecordError, match="t0 under none, 0 times"):
        record.episodes(["none"], TASKS)
    record.append(episode("t0"))
    with pytest.raises(RecordError, match="t1 under none, 0 times"):
        record.episodes(["none"], TASKS)
    record.append(episode("t1"))
    assert len(record.episodes(["none"], TASKS)["none"]) == 2
    record.append(episode("t1"))
    with pytest.raises(RecordError, match="t1 under none, 2 times"):
        record.episodes(["none"], TASKS)


def test_a_stranger_s_episode_is_no_result(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path)
    for task in (*TASKS, "t9"):
        record.append(episode(task))
    with pytest.raises(RecordError, match="t9 under none, 1 times"):
        record.episodes(["none"], TASKS)


def test_a_damaged_file_is_not_taken_for_one_that_was_cut_short(tmp_path: Path) -> None:
    record = EpisodeRecord(tmp_path)
    record.lines.path.write_text('{"delivery": "none"}\n{"torn')
    with pytest.raises(RecordError, match="line 1"):
        record.played()
