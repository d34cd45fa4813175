"""What a gate is: a share of cases in which a model did what it should, with its interval, and what is asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eval.metrics import Interval, wilson


@dataclass(frozen=True)
class Share:
    """How many of `n` cases are right. Without a threshold it is told, and nothing hangs on it."""

    name: str
    right: int
    n: int
    threshold: float | None = None

    @classmethod
    def of(cls, name: str, cases: Iterable[bool], threshold: float | None = None) -> Share:
        made = list(cases)
        return cls(name, sum(made), len(made), threshold)

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else 0.0

    @property
    def interval(self) -> Interval:
        """95 % (Wilson)."""
        return wilson(self.right, self.n)

    @property
    def passed(self) -> bool:
        """Tell whether it is as large as asked; no cases at all are no pass."""
        return self.threshold is None or (self.n > 0 and self.value >= self.threshold)

    def __str__(self) -> str:
        asked = (
            "" if self.threshold is None else f", asked {self.threshold:.0%}: {'passed' if self.passed else 'FAILED'}"
        )
        if not self.n:
            return f"{self.name}: no cases{asked}"
        low, high = self.interval.low, self.interval.high
        return f"{self.name}: {self.value:.1%} [{low:.1%}, {high:.1%}] of {self.n}{asked}"
