"""Commands of ours as the stages of a long benchmark: what has run to its end is not run again."""

from __future__ import annotations

import subprocess
import sys
import time
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


def collect(root: Path, seed: int, *settings: str, config: str = "collect/quickstart", rows: str = "collect") -> float:
    """Collect the expert's rows of a seed, in ROOT/SEED/ROWS."""
    out = root / str(seed)
    return run(out, rows, "collect", "-c", config, f"seed={seed}", *settings, "--out", f"{out}/{rows}")


def sft(
    root: Path, seed: int, name: str, *settings: str, config: str = "sft/quickstart", rows: str = "collect"
) -> float:
    """Train on those rows, in ROOT/SEED/sft-NAME."""
    out = root / str(seed)
    own = [f"rows={out}/{rows}/rows", f"seed={seed}", *settings]
    return run(out, f"sft-{name}", "train", "sft", "-c", config, *own, "--out", f"{out}/sft-{name}")
