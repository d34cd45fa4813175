"""Commands of ours as the stages of a long benchmark: what has run to its end is not run again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def run(out: Path, log: str, *command: str) -> float:
    """`memcompiler COMMAND` with its output in OUT/LOG.log, unless a mark in OUT says that it has been run to its end.

    Returns its seconds, then or now.
    """
    mark = out / f".{log}.done"
    if not mark.exists():
        out.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with (out / f"{log}.log").open("w") as file:
            subprocess.run([sys.executable, "-m", "memcompiler", *command], check=True, stdout=file, stderr=file)
        mark.write_text(f"{time.perf_counter() - started:.1f}")
    return float(mark.read_text())


@dataclass(frozen=True, slots=True)
class World:
    """What is played: the configurations of its stages (in `configs/collect`, `sft`, `grpo` and `eval`), and settings
    beside them. What is made of a seed lies in ROOT/SEED."""

    stage: str
    scenes: bool = False  # a seed is another set of scenes; else the tasks are the same under all seeds
    collected: Sequence[str] = ()
    trained: Sequence[str] = ()  # of GRPO
    played: Sequence[str] = ()  # of an evaluation
    budget: int = 12  # steps of a held-out episode while GRPO is measured

    def of_seed(self, seed: int) -> dict[str, int]:
        return {"seed": seed, **({"env.seed": seed} if self.scenes else {})}

    def seeded(self, seed: int) -> list[str]:
        return [f"{key}={value}" for key, value in self.of_seed(seed).items()]

    def task(self, seed: int, task_id: str) -> str:
        """Name a task of a seed: of the same scenes it is the same one."""
        return f"{seed}/{task_id}" if self.scenes else task_id

    def collect(self, root: Path, seed: int, *settings: str, rows: str = "collect") -> float:
        """Collect the expert's rows, in ROWS."""
        out = root / str(seed)
        own = [*self.seeded(seed), *self.collected, *settings]
        return run(out, rows, "collect", "-c", f"collect/{self.stage}", *own, "--out", f"{out}/{rows}")

    def sft(self, root: Path, seed: int, name: str, *settings: str, rows: str = "collect") -> float:
        """Train on those rows, in sft-NAME."""
        out = root / str(seed)
        own = [f"rows={out}/{rows}/rows", f"seed={seed}", *settings]
        return run(out, f"sft-{name}", "train", "sft", "-c", f"sft/{self.stage}", *own, "--out", f"{out}/sft-{name}")


HOUSEHOLD = World("quickstart", scenes=True)
ALFWORLD = World("alfworld", collected=("limit=1200", "memory.pictures=0"), played=("memory.pictures=0",), budget=15)
WORLDS = {"household": HOUSEHOLD, "alfworld": ALFWORLD}
