"""Which checkpoint of a run is the best one, by validation loss or by success, and when there is no use in going on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

By = Literal["loss", "success"]
METRICS: Mapping[By, str] = {"loss": "val_loss", "success": "eval_success"}  # in metrics.jsonl


@dataclass(slots=True)
class Best:
    """The best value so far, the step that had it, and how many there were since.

    A value that is not a number is none that is better.
    """

    value: float | None = None  # None before the first one
    step: int = 0
    since: int = 0
    by: By = "loss"

    def hear(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take in the metrics after a step, which may lack the value; say whether it is the best."""
        if (value := metrics.get(METRICS[self.by])) is None:
            return False
        sign = 1 if self.by == "success" else -1
        better = math.isfinite(value) and (self.value is None or sign * value > sign * self.value)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def facts(self) -> dict[str, Any]:
        """Give what a checkpoint's state holds of it; nothing where nothing was validated."""
        known = {self.by: self.value, "step": self.step, "since": self.since}
        return {"best": known} if self.value is not None or self.since else {}

    @classmethod
    def of(cls, state: Mapping[str, Any], by: By = "loss") -> Best:
        """Read it from a checkpoint's state."""
        known = dict(state.get("best", {}))
        return cls(known.pop(by, None), **known, by=by)
