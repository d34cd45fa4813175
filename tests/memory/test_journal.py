"""A memory system's journal: idempotent, versioned, safe with several writers and with kills."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

from envs.base import Task
from memory.journal import FILE, Journal, Row
from memory.protocol import BankError, Record, Trace

HOSTILE = '{"key": "x"}\n\u2028\ud800 {} %s'


def row(i: int, text: str = "look") -> Row:
    task = Task(f"t{i}", text, "home 1", "train", "put", isolation={"scene": ("home 1",)})
    return Row(
        (Trace(task, (Record(0, text, text, text, True, 0.5),), False, 0, text, (b"\x89PNG", b""), ("e1",)),),
        {"a": text},
    )


def test_rows_come_back_in_order_and_twice_is_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "bank")
    assert list(journal) == [] and journal.append([]).added == 0
    written = journal.append([row(1), row(2), row(1)])
    assert (written.added, written.ignored) == (2, 1) and journal.append([row(2)]).ignored == 1
    assert list(journal) == list(Journal(tmp_path / "bank")) == [row(1), row(2)]


def test_a_version_sees_nothing_later_and_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([row(1), row(2)])
    view = Journal(tmp_path, until=1)
    assert list(view) == [row(1)] and len(view) == 1
    journal.append([row(3)])
    assert list(view) == [row(1)] and len(journal) == 3
    with pytest.raises(BankError, match="read-only"):
        view.append([row(4)])


def test_a_torn_line_costs_its_own_row_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([row(1), row(2)])
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-7])
    again = Journal(tmp_path)
    assert list(again) == [row(1)]
    assert again.append([row(2), row(3)]).added == 2 and list(again) == [row(1), row(2), row(3)]


def test_text_is_data(tmp_path: Path) -> None:
    Journal(tmp_path).append([row(1, HOSTILE)])
    assert list(Journal(tmp_path)) == [row(1, HOSTILE)]


def _writes(folder: Path, first: int) -> None:
    for i in range(first, first + 10):
        Journal(folder).append([row(i)])


def test_two_writers_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_writes, args=(tmp_path, i)) for i in (0, 5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(r.attempts[0].task.id for r in Journal(tmp_path)) == sorted(f"t{i}" for i in range(15))


@pytest.mark.parametrize("change", ['"goal": 3', '"goal": ["look"]', '"goal": null', '"strange": 1'])
def test_a_damaged_row_is_named_and_one_that_could_not_be_read_back_is_not_written(change: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([row(1), row(2)])
    path = tmp_path / FILE
    whole = path.read_text()
    path.write_text(re.sub(', "crc32": "[^"]*"', "", whole).replace('"goal": "look"', change, 1))
    with pytest.raises(BankError, match=rf"{FILE}, row 1 is not an episode"):
        list(Journal(tmp_path))
    path.write_text(whole)
    unreadable = Record(0, "", 3, "")  # type: ignore[arg-type]
    with pytest.raises(BankError, match="row 3 is not an episode"):
        journal.append([Row((Trace(Task("t3", "look", "", "train", "put"), (unreadable,), True),), {})])
    assert list(Journal(tmp_path)) == [row(1), row(2)]
