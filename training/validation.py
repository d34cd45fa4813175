"""Which checkpoint of a run is the best one by its validation loss, and when there is no use in going on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Best:
    """The lowest validation loss so far, the step that had it, and how many validations there were since.

    A loss that is not a number is none that is lower.
    """

    loss: float | None = None  # None before the first validation
    step: int = 0
    since: int = 0

    def hear(self, loss: float, step: int) -> bool:
        """Take in the loss after a step; say whether it is the lowest."""
        lower = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if lower:
            self.loss, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return lower

    def facts(self) -> dict[str, Any]:
        """Give what a checkpoint's state holds of it; nothing where nothing was validated."""
        return {"best": asdict(self)} if self.loss is not None or self.since else {}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Best:
        """Read it from a checkpoint's state."""
        return cls(**state.get("best", {}))
