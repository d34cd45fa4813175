"""JSON that others wrote: what is no JSON is a ValueError, and records hold values of their declared types."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from runtime.parsing import check_types, parse_json


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    n: int = 0
    share: float = 0.0
    done: bool = False
    names: tuple[str, ...] = ()
    version: int | None = None
    other: object = None


@pytest.mark.parametrize("text", ["", "{", "\ufeff{}", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    "row",
    [Row("a"), Row("", 1, 1, True, ("a", "\ud800"), 3, [1]), Row("a", share=None)],  # type: ignore[arg-type]
)
def test_a_record_of_declared_types_passes(row: Row) -> None:
    assert check_types(row) is row


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": None}, "name is a NoneType, not a str"),
        ({"n": "1"}, "n is a str"),
        ({"n": True}, "n is a bool"),
        ({"n": 1.0}, "n is a float"),
        ({"share": "x"}, "share"),
        ({"share": True}, "share"),
        ({"done": 1}, "done"),
        ({"names": ["a"]}, "names is a list"),
        ({"names": ("a", 1)}, "names is a int"),
        ({"version": "1"}, "version"),
    ],
)
def test_another_type_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_types(Row(**{"name": "a", **change}))  # type: ignore[arg-type]
