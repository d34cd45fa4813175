"""Result files that retry failed results on resume, up to a number of attempts.

A failed row counts as missing while attempts are left. It remains in the file until a later row with its key replaces
it and lists the earlier failures under `broken`, so that a kill loses no count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from textwrap import shorten
from typing import Any, Generic, TypeVar

from runtime.errors import first_failure
from runtime.store import JsonLines, Row, to_json

ATTEMPTS = 3  # default number of attempts per result
CAUSE_LENGTH = 400  # characters of a cause in messages and tables
K = TypeVar("K", bound=Hashable)
Outcome = tuple[str, str, Sequence[str]]  # name, failure ("": none), failures of earlier attempts


def failure_of(row: Row) -> str:
    """Return the first failure of a recorded episode and its retries; "" without one."""
    return first_failure((e["stop_reason"], e["error"]) for e in (row, *row.get("retries", ())))


class RetriedResults(Generic[K]):
    """A result file with at most one finished row per key.

    Args:
        lines: the file.
        key: returns a row's key.
        most: attempts per result over all runs of the command.
        cause: returns a row's failure; "" for a valid result.
    """

    def __init__(
        self, lines: JsonLines, key: Callable[[Row], K], most: int = ATTEMPTS, cause: Callable[[Row], str] = failure_of
    ) -> None:
        self.lines, self.key, self.most, self.cause = lines, key, most, cause
        self._earlier: dict[K, tuple[str, ...]] = {}  # failures so far
        self.due: set[K] = set()  # failed keys with attempts left

    def load(self) -> list[K]:
        """Drop replaced rows; return the keys of finished rows in the order of the file."""
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
        """Drop finished rows with unwanted keys. Rows that are due remain until they are replaced."""
        self.lines.keep(lambda row: wanted(key := self.key(row)) or key in self.due)

    def add(self, rows: Iterable[tuple[K, str]]) -> None:
        """Append (key, JSON text) rows, with the failures of earlier attempts."""
        self.lines.append_lines(*(self._with_earlier(key, text) for key, text in rows))

    def _with_earlier(self, key: K, text: str) -> str:
        earlier = self._earlier.get(key)
        return to_json({**json.loads(text), "broken": earlier}, ascii=True) if earlier else text


def failure_counts(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Count failed results and retried ones, and name the first failure."""
    known = list(outcomes)
    broken = [f"{name}: {cause}" for name, cause, _ in known if cause]
    again = sum(bool(earlier) for _, _, earlier in known)
    return {"n": len(broken), "played_again": again, "first": shorten(broken[0], CAUSE_LENGTH) if broken else None}


def failure_summary(outcomes: Sequence[Outcome], most: int, setting: str) -> str:
    """Describe failed episodes and how to retry them in one line; "" without failures.

    Args:
        most: attempts per episode.
        setting: name of the setting of `most`.
    """
    if not (facts := failure_counts(outcomes))["n"]:
        return ""
    due = sum(bool(cause) and len(earlier) + 1 < most for _, cause, earlier in outcomes)
    left = f"{due} have attempts left ({setting}={most}): run the same command again, --on-exists resume"
    last = left if due else f"None has an attempt left: raise {setting}={most}"
    return f"{facts['n']} of {len(outcomes)} episodes broke, the first {facts['first']}. {last}"
