"""The one store of rows: whole after a kill at any byte, clear about damage, replaced whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.store import JsonLines, RecordError, atomic_file, write_atomically

ROWS = [{"i": i, "text": "\ud800 \u2028\n" * i} for i in range(4)]


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    return JsonLines(tmp_path / "rows.jsonl")


def test_rows_come_back_as_they_were_appended(lines: JsonLines) -> None:
    assert list(lines) == [] and not lines.path.exists()
    lines.append(ROWS[0])
    lines.append(*ROWS[1:])
    assert list(lines) == list(JsonLines(lines.path, needs=("i", "text"))) == ROWS


def test_a_row_that_was_cut_short_at_any_byte_is_never_read_and_goes_with_the_next(lines: JsonLines) -> None:
    lines.append(*ROWS[:2])
    whole = lines.path.read_bytes()
    lines.append(ROWS[2])
    torn = lines.path.read_bytes()
    for end in range(len(whole) + 1, len(torn)):
        lines.path.write_bytes(torn[:end])
        assert list(lines) == ROWS[:2]
        lines.append(ROWS[2])
        assert lines.path.read_bytes() == torn
    lines.path.write_bytes(torn[:-1])
    lines.append(ROWS[2], ROWS[3])
    assert list(lines) == ROWS


def test_the_first_rows_are_kept_and_a_torn_one_never_counts(lines: JsonLines) -> None:
    lines.truncate(3)
    lines.append(*ROWS)
    whole = lines.path.read_bytes()
    for n, kept in ((9, 4), (4, 4), (None, 4), (2, 2), (0, 0)):
        lines.path.write_bytes(whole + b'{"torn')
        lines.truncate(n)
        assert list(lines) == ROWS[:kept] and b"torn" not in lines.path.read_bytes()


def test_rows_that_are_not_wanted_go(lines: JsonLines) -> None:
    lines.keep(lambda row: False)
    assert not lines.path.exists()
    lines.append(*ROWS)
    untouched = lines.path.stat().st_ino
    lines.keep(lambda row: True)
    assert lines.path.stat().st_ino == untouched
    with lines.path.open("ab") as file:
        file.write(b'{"torn')
    lines.keep(lambda row: row["i"] % 2 == 0)
    lines.append(ROWS[3])
    assert list(lines) == [ROWS[0], ROWS[2], ROWS[3]]
    assert [path.name for path in lines.path.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"[1]", b'{"j": 0}', b""])
def test_damage_is_told_with_file_and_line(lines: JsonLines, damage: bytes) -> None:
    lines.append(ROWS[0])
    with lines.path.open("ab") as file:
        file.write(damage + b"\n")
    lines.append(ROWS[1])
    lines.required_keys = ("i",)
    with pytest.raises(RecordError, match=r"rows\.jsonl, line 2 is damaged .*start again"):
        list(lines)
    with pytest.raises(RecordError, match="line 2"):
        lines.keep(lambda row: True)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_atomically(path, json.dumps({"success": "ü"}))
    with pytest.raises(RuntimeError, match="killed"), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError("killed")
    assert json.loads(path.read_text(encoding="utf-8")) == {"success": "ü"}
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_two_who_replace_a_file_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    """As shards do that write one manifest: under one name for both, the second found nothing to rename."""
    path = tmp_path / "manifest.json"
    with atomic_file(path) as one:
        with atomic_file(path) as other:
            other.write(b"the same")
        one.write(b"the same")
    assert path.read_text() == "the same" and len(list(tmp_path.iterdir())) == 1


def test_rows_are_put_in_order_without_a_torn_line_and_only_where_they_are_not(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl", needs=("i",))
    lines.append_lines(*(f'{{"i": {i}, "text": "{"x" * i}"}}' for i in (2, 0, 1)))
    with lines.path.open("ab") as file:
        file.write(b'{"i": 7')
    lines.arrange(lambda row: row["i"])
    assert [row["i"] for row in lines] == [0, 1, 2] and [len(row["text"]) for row in lines] == [0, 1, 2]
    before = lines.path.stat()
    lines.arrange(lambda row: row["i"])
    assert lines.path.stat().st_ino == before.st_ino
    JsonLines(tmp_path / "none.jsonl").arrange(lambda row: row["i"])
    assert not (tmp_path / "none.jsonl").exists()
