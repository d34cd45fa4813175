"""From what an executor says to what the environment takes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Grounding(StrEnum):
    CHOICE = "choice"  # chosen among the admissible commands by likelihood
    EXACT = "exact"
    FUZZY = "fuzzy"
    FAILED = "failed"  # nothing close enough: sent as it is, and counted
    FREE = "free"  # the benchmark enumerates no commands


@dataclass(frozen=True, slots=True)
class Match:
    action: str
    how: Grounding


def ground(text: str, admissible: Sequence[str] | None, cutoff: float = 0.8) -> Match:
    """The admissible command that `text` means: equal up to case and white space, else the closest above `cutoff`.

    Args:
        text: the executor's free answer; only its first non-empty line counts.
        cutoff: difflib similarity in [0, 1] below which nothing is matched.
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "").rstrip(".")
    if admissible is None:
        return Match(line, Grounding.FREE)
    folded = {_fold(command): command for command in admissible}
    if _fold(line) in folded:
        return Match(folded[_fold(line)], Grounding.EXACT)
    close = difflib.get_close_matches(_fold(line), list(folded), n=1, cutoff=cutoff)
    return Match(folded[close[0]], Grounding.FUZZY) if close else Match(line, Grounding.FAILED)


def _fold(text: str) -> str:
    return " ".join(text.lower().split())
