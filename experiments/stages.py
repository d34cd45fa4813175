"""Run `memcompiler` commands as the stages of an experiment; finished stages are not repeated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def run_once(out: Path, name: str, *command: str) -> None:
    """Run `memcompiler COMMAND` with output in OUT/NAME.log, unless OUT/.NAME.done marks it as finished."""
    mark = out / f".{name}.done"
    if mark.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.log").open("w") as log:
        subprocess.run([sys.executable, "-m", "memcompiler", *command], check=True, stdout=log, stderr=log)
    mark.touch()


def seeds_and_settings(arguments: Sequence[str]) -> tuple[list[int], list[str]]:
    """Split command line arguments into seeds and settings (a.b=c)."""
    return [int(x) for x in arguments if "=" not in x], [x for x in arguments if "=" in x]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Configuration names of an environment's stages, and settings on top of them. Files of a seed are in ROOT/SEED."""

    config: str  # in configs/collect, sft, grpo and eval
    seeded_scenes: bool = False  # whether a seed also selects the scenes
    collect_settings: Sequence[str] = ()
    grpo_settings: Sequence[str] = ()
    eval_settings: Sequence[str] = ()
    grpo_max_steps: int = 12  # of held-out episodes between GRPO updates

    def seed_settings(self, seed: int) -> dict[str, int]:
        return {"seed": seed, **({"env.seed": seed} if self.seeded_scenes else {})}

    def seed_overrides(self, seed: int) -> list[str]:
        return [f"{key}={value}" for key, value in self.seed_settings(seed).items()]

    def collect(self, root: Path, seed: int, *settings: str, name: str = "collect") -> None:
        """Collect the expert's rows in ROOT/SEED/NAME."""
        out = root / str(seed)
        own = [*self.seed_overrides(seed), *self.collect_settings, *settings]
        run_once(out, name, "collect", "-c", f"collect/{self.config}", *own, "--out", f"{out}/{name}")

    def sft(self, root: Path, seed: int, name: str, *settings: str, rows: Sequence[str] = ("collect",)) -> None:
        """Train on the rows of the collections `rows`; the checkpoint is ROOT/SEED/sft-NAME."""
        out = root / str(seed)
        folders = [f"{out}/{collection}/rows" for collection in rows]
        own = [f"rows=[{','.join(folders)}]", f"seed={seed}", *settings]
        run_once(out, f"sft-{name}", "train", "sft", "-c", f"sft/{self.config}", *own, "--out", f"{out}/sft-{name}")


PIPELINES = {
    "household": Pipeline("quickstart", seeded_scenes=True),
    "alfworld": Pipeline(
        "alfworld",
        collect_settings=("limit=1200", "memory.pictures=0"),
        eval_settings=("memory.pictures=0",),
        grpo_max_steps=15,
    ),
}
