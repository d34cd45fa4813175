"""Settings of KARMA (arXiv 2409.14908): the paper's values where it gives any, and a switch for what it leaves open."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from runtime.settings import Settings


class KarmaSettings(Settings):
    # Which memories there are (Table 2).
    long: bool = True
    short: bool = True
    # Short-term memory: what leaves it when it is full (section 3.6).
    policy: Literal["wtinylfu", "fifo", "lru", "unlimited"] = "wtinylfu"
    capacity: int = Field(default=10, ge=1)  # units
    window: int | None = Field(default=None, ge=1)  # units of the window, of wtinylfu (default: all but one)
    merge: Literal["always", "when_full", "off"] = "always"  # fifo: a unit of the same object makes way for a new one
    refresh: bool = False  # fifo: which then becomes the latest
    victim: Literal["pool", "duel"] = "pool"  # wtinylfu: the paper's choice among window and elimination, or TinyLFU's
    sketch: Literal["exact", "count_min"] = "exact"  # what counts uses
    doorkeeper: bool = False
    age_on: Literal["write", "use"] = "write"  # what the global counter counts
    sample: int | None = Field(default=None, ge=2)  # W, at which all counts are halved (default: 10 x capacity)
    # What is written, and what is recalled of it.
    write: Literal["used+ooi", "used", "all_seen"] = "used+ooi"  # ooi: things in view that the instruction names
    states: Literal["rules", "vlm"] = (
        "rules"  # who says in which state a thing is; vlm: the model that memory.api names
    )
    k: int = Field(default=1, ge=1)  # units that are recalled
    gate: Literal["always", "object_overlap"] = "always"  # object_overlap: where an earlier instruction shares a word
    feedback: bool = True  # a unit that a view contradicts is dropped; the paper's open loop never notices
    # Long-term memory.
    build: Literal["given", "explored"] = "given"  # all places from the start, or each when it is first visited
    grid: int = Field(default=3, ge=1)  # areas a side
    radius: float | None = Field(
        default=None, gt=0
    )  # metres around an area's centre beyond which nothing belongs to it

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.window is not None and self.window > self.capacity:
            raise ValueError(f"a window of {self.window} units does not fit a capacity of {self.capacity}")
        return self

    @property
    def segments(self) -> tuple[int, int]:
        """Return the units of window and main segment."""
        window = self.window or max(1, self.capacity - 1)
        return window, self.capacity - window
