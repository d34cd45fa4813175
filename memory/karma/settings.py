"""Settings of KARMA (arXiv 2409.14908). Defaults are the paper's values where it gives any."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from runtime.settings import Settings


class KarmaSettings(Settings):
    # Memories that are used (Table 2).
    long: bool = True
    short: bool = True
    # Replacement policy of short-term memory (section 3.6).
    policy: Literal["wtinylfu", "fifo", "lru", "unlimited"] = "wtinylfu"
    capacity: int = Field(default=10, ge=1)  # units
    window: int | None = Field(default=None, ge=1)  # wtinylfu: units of the window (default: capacity - 1)
    victim: Literal["pool", "duel"] = "pool"  # wtinylfu: the paper's eviction rule, or TinyLFU's
    sample: int | None = Field(default=None, ge=2)  # wtinylfu: writes between two halvings (default: 10 x capacity)
    # What short-term memory stores and recalls.
    write: Literal["used+ooi", "used", "all_seen"] = "used+ooi"  # ooi: visible objects that the instruction names
    states: Literal["rules", "vlm"] = "rules"  # source of object states; vlm: the model in memory.api
    k: int = Field(default=1, ge=1)  # units per recall
    feedback: bool = True  # drop units that a view contradicts; the paper's open loop never does
    # Long-term memory.
    grid: int = Field(default=3, ge=1)  # areas per side

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.window is not None and self.window > self.capacity:
            raise ValueError(f"a window of {self.window} units does not fit a capacity of {self.capacity}")
        return self

    @property
    def segments(self) -> tuple[int, int]:
        """Return the sizes of the window and the main segment in units."""
        window = self.window or max(1, self.capacity - 1)
        return window, self.capacity - window
