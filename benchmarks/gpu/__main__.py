"""What a machine with CUDA does with this code: `python -m benchmarks.gpu --out DIR` (docs/gpu.md).

Ends with exit status 1 where a part failed or was left out for want of time; run again, it goes on with what is
missing.
"""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Annotated, cast

import typer

from benchmarks.gpu.kit import ARCHIVE, RECORD, TABLE, Kit
from benchmarks.gpu.parts import PARTS, Device, Setup, Size, largest_pair, run_inside


def main(
    out: Annotated[Path, typer.Option(help=f"Folder of {RECORD} and {TABLE}.")],
    part: Annotated[list[str] | None, typer.Option(help="A part by name; may be given again. Default: all.")] = None,
    size: Annotated[str, typer.Option(help="paper, or tiny: a look at whether all parts run.")] = "paper",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    minutes: Annotated[float, typer.Option(help="For all parts together.")] = 25.0,
    again: Annotated[bool, typer.Option(help="Run also what is recorded.")] = False,
    processes: Annotated[int, typer.Option(help="That share a model; 0: one for each GPU.")] = 0,
    pair: Annotated[int, typer.Option(hidden=True, help="Index of the models; -1: the largest that fit.")] = -1,
    inside: Annotated[str, typer.Option(hidden=True, help="Run module:function here, rows into OUT.")] = "",
) -> None:
    """Measure what is not recorded yet."""
    if size not in ("tiny", "paper") or device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter("--size is tiny or paper, --device cuda, cpu or auto")
    if inside:
        logging.basicConfig(level=logging.INFO)
        good = run_inside(inside, Setup(cast(Device, device), cast(Size, size), processes, pair), out)
        raise typer.Exit(0 if good else 1)
    free = free_gib()
    if device == "auto":
        device = "cuda" if free else "cpu"
    found = processes or (len(free) if device == "cuda" else 1)
    if pair < 0 and size == "paper":
        pair = largest_pair(min(free) if device == "cuda" and free else 0.0)
    out.mkdir(parents=True, exist_ok=True)
    kit = Kit(out, Setup(cast(Device, device), cast(Size, size), max(1, found), max(0, pair)), PARTS)
    try:
        good = kit.run(part or (), minutes, again)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"\n{kit.summary()}\n\n{out / RECORD}, {out / TABLE}, {out / ARCHIVE}")
    raise typer.Exit(0 if good else 1)


def free_gib() -> list[float]:
    """Ask the driver for the free memory (GiB) of each GPU, so that this process holds none of it; none where there is
    no driver."""
    asked = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        return [float(line) / 1024 for line in answer.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


if __name__ == "__main__":
    typer.run(main)
