"""Results that machinery broke: a resume makes them again, up to a number of attempts, and the record says how often.

A row that broke counts as missing while attempts are left. It stays in the file until a later row of the same key
replaces it, whose `broken` lists the earlier failures, so that a kill loses no count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from textwrap import shorten
from typing import Any, Generic, TypeVar

from runtime.errors import first_failure
from runtime.store import JsonLines, Row, to_json

ATTEMPTS = 3  # at a result that machinery breaks, where settings do not say
CAUSE_LENGTH = 400  # characters of a cause in messages and tables
K = TypeVar("K", bound=Hashable)
Outcome = tuple[str, str, Sequence[str]]  # a result's name, what broke it ("": nothing), what broke earlier attempts


def failure_of(row: Row) -> str:
    """Say what broke a recorded episode or one of its further attempts; "" where nothing did."""
    return first_failure((e["stop_reason"], e["error"]) for e in (row, *row.get("retries", ())))


class Attempts(Generic[K]):
    """A file of results, at most one finished row per key.

    Args:
        lines: the file.
        key: what a row is the result of.
        most: attempts at a result that breaks, over all runs of the command.
        cause: what broke a row; "" for one that is a result.
    """

    def __init__(
        self, lines: JsonLines, key: Callable[[Row], K], most: int = ATTEMPTS, cause: Callable[[Row], str] = failure_of
    ) -> None:
        self.lines, self.key, self.most, self.cause = lines, key, most, cause
        self._earlier: dict[K, tuple[str, ...]] = {}  # what broke the attempts so far
        self.due: set[K] = set()  # broken, with attempts left

    def load(self) -> list[K]:
        """Drop rows that a later one replaced; return the keys of finished rows in the order of the file."""
        rows = [(self.key(row), self.cause(row), tuple(row.get("broken", ()))) for row in self.lines]
        last = {key: len(earlier) for key, _, earlier in rows}
        replaced = lambda key, cause, earlier: bool(cause) and len(earlier) < last[key]
        if any(replaced(*row) for row in rows):
            self.lines.keep(lambda row: not replaced(self.key(row), self.cause(row), row.get("broken", ())))
        left = [row for row in rows if not replaced(*row)]
        self._earlier = {key: (*earlier, cause) if cause else earlier for key, cause, earlier in left}
        self.due = {key for key, cause, earlier in left if cause and len(earlier) + 1 < self.most}
        return [key for key, _, _ in left if key not in self.due]

    def keep(self, wanted: Callable[[K], bool]) -> None:
        """Drop the other finished rows, which are to be made again; rows that are due stay until they are replaced."""
        self.lines.keep(lambda row: wanted(key := self.key(row)) or key in self.due)

    def add(self, rows: Iterable[tuple[K, str]]) -> None:
        """Append JSON texts of rows with their keys, and what broke earlier attempts at them."""
        self.lines.append_lines(*(self._with_earlier(key, text) for key, text in rows))

    def _with_earlier(self, key: K, text: str) -> str:
        earlier = self._earlier.get(key)
        return to_json({**json.loads(text), "broken": earlier}, ascii=True) if earlier else text


def broken_facts(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Count results that stayed broken and those that were made again, and give the first cause."""
    known = list(outcomes)
    broken = [f"{name}: {cause}" for name, cause, _ in known if cause]
    again = sum(bool(earlier) for _, _, earlier in known)
    return {"n": len(broken), "played_again": again, "first": shorten(broken[0], CAUSE_LENGTH) if broken else None}


def broken_line(outcomes: Sequence[Outcome], most: int, setting: str) -> str:
    """Say in one line how many episodes broke, the first cause, and how they are played again; "" where none broke.

    Args:
        most: attempts at one.
        setting: its name.
    """
    if not (facts := broken_facts(outcomes))["n"]:
        return ""
    due = sum(bool(cause) and len(earlier) + 1 < most for _, cause, earlier in outcomes)
    left = f"{due} have attempts left ({setting}={most}): run the same command again, --on-exists resume"
    last = left if due else f"None has an attempt left: raise {setting}={most}"
    return f"{facts['n']} of {len(outcomes)} episodes broke, the first {facts['first']}. {last}"
