"""An environment of your own in one file: register it, and every command knows it (seconds on a CPU).

    python examples/own_environment.py

In every pantry one of four shelves holds the mug, always the same one: where an earlier episode found it, memory says.
"""

from __future__ import annotations

import tempfile
from typing import Any

import memcompiler as mc

SHELVES = ("1", "2", "3", "4")


class Pantry:
    """A pantry; satisfies `mc.Environment`."""

    name = "pantry"

    def __init__(self, pantries: int) -> None:
        self._pantries, self._shelf, self._at = pantries, "", ""

    def tasks(self, split: str) -> list[mc.Task]:
        """List a task for each pantry; `past` has the same pantries, whose episodes fill the memory bank."""
        if split not in ("past", "test"):
            raise ValueError(f"no split {split!r}: choose past or test")
        return [
            mc.Task(
                f"{split}/{n}",
                "put some mug on countertop",
                f"home {n}",
                split,
                "fetch",
                data={"shelf": SHELVES[n % len(SHELVES)]},
            )
            for n in range(self._pantries)
        ]

    def reset(self, task: mc.Task) -> mc.Observation:
        self._shelf, self._at = task.data["shelf"], ""
        return self._view(
            "You are in the middle of a room. Looking quickly around you, you see "
            "a shelf 1, a shelf 2, a shelf 3, and a shelf 4."
        )

    def step(self, action: str) -> mc.Transition:
        if action == f"take mug 1 from shelf {self._shelf}" and self._at == self._shelf:
            return mc.Transition(mc.Observation("You take the mug.", None, ()), progress=1.0, success=True, done=True)
        if action in (f"go to shelf {shelf}" for shelf in SHELVES):
            self._at = action[-1]
        found = "a mug 1" if self._at == self._shelf else "nothing"
        view = self._view(f"On the shelf {self._at}, you see {found}." if self._at else "Nothing happens.")
        return mc.Transition(view, progress=0.0, success=False, done=False)

    def expert(self) -> list[str] | None:
        """Return the commands from here to success; memory and SFT rows come from them."""
        way = [] if self._at == self._shelf else [f"go to shelf {self._shelf}"]
        return [*way, f"take mug 1 from shelf {self._shelf}"]

    def close(self) -> None:
        pass

    def _view(self, text: str) -> mc.Observation:
        commands = [f"go to shelf {shelf}" for shelf in SHELVES if shelf != self._at]
        if self._at == self._shelf:
            commands.append(f"take mug 1 from shelf {self._shelf}")
        return mc.Observation(text, None, tuple(commands))


class PantrySettings(mc.EnvSettings):
    """Settings of the pantry, as `env={name: pantry, pantries: 6}`."""

    name: str = "pantry"
    pantries: int = 6


PANTRY = mc.EnvSpec(
    name="pantry",
    settings=PantrySettings,
    construct=lambda settings: mc.WorkerSpec(f"{__name__}:Pantry", {"pantries": settings.pantries}),
    splits=lambda _: mc.Splits(evaluation="test", experience=lambda _: "past", related="scene"),
    refusals=("Nothing happens",),
    instructions="You stand in a pantry. Answer with one command, for example: go to shelf 1.",
)


def main() -> dict[str, Any]:
    """Register the environment, evaluate two deliveries on it, and return the results.

    `mc.collect` and `mc.train_sft` with `env=pantry` would train a compiler for it.
    """
    mc.register_environment(PANTRY)
    with tempfile.TemporaryDirectory() as folder:
        return mc.evaluate(
            "eval/alfworld",  # the small models that ship
            "env=pantry",
            "split=test",
            "deliveries=[none, static]",
            "max_steps=4",
            out=folder,
        )


if __name__ == "__main__":
    main()
