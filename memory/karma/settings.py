"""Settings of KARMA (arXiv 2409.14908). Defaults are the paper's values where it gives any."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from runtime.settings import Settings


class KarmaSettings(Settings):
    """Settings of the memory system `karma` (docs/experiments/karma.md)."""

    long: bool = True
    """Use long-term memory (Table 2)."""
    short: bool = True
    """Use short-term memory (Table 2)."""
    policy: Literal["wtinylfu", "fifo", "lru", "unlimited"] = "wtinylfu"
    """Replacement policy of short-term memory (section 3.6)."""
    capacity: int = Field(default=10, ge=1)
    """Maximum number of units in short-term memory."""
    window: int | None = Field(default=None, ge=1)
    """wtinylfu: units of the window; null: `capacity` - 1."""
    victim: Literal["pool", "duel"] = "pool"
    """wtinylfu: rule that chooses the unit to evict. pool: the paper's; duel: TinyLFU's."""
    sample: int | None = Field(default=None, ge=2)
    """wtinylfu: writes between two halvings of the use counts; null: 10 x `capacity`."""
    write: Literal["used+ooi", "used", "all_seen"] = "used+ooi"
    """Objects that short-term memory stores: used ones, also visible ones that the instruction names (ooi), or all
    visible ones."""
    states: Literal["rules", "vlm"] = "rules"
    """Source of object states: rules, or the vision-language model at `memory.api`."""
    k: int = Field(default=1, ge=1)
    """Units per recall."""
    feedback: bool = True
    """Drop units that a view contradicts; the paper's open loop never does."""
    grid: int = Field(default=3, ge=1)
    """Areas of long-term memory per side of the floor plan."""

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
