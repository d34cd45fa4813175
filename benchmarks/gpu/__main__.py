"""`python -m benchmarks.gpu --out DIR`: run the GPU check (docs/guides/gpu.md).

Exit status 1 when a part failed or did not run for lack of time; a second call runs the missing parts.
"""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.gpu.kit import ARCHIVE, RECORD, TABLE, Kit, tables
from benchmarks.gpu.parts import PARTS, Device, Setup, Size, largest_pair, run_inside


def main(
    out: Annotated[Path, typer.Option(help=f"Folder of {RECORD} and {TABLE}.")],
    part: Annotated[list[str] | None, typer.Option(help="Part to run (default: all); repeatable.")] = None,
    size: Annotated[Size, typer.Option(help="tiny only checks that all parts run.")] = "paper",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device of the parts.")] = "auto",
    minutes: Annotated[float, typer.Option(help="Time limit of all parts together.")] = 25.0,
    again: Annotated[bool, typer.Option(help="Repeat recorded parts.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that shard a model; 0: one per GPU.")] = 0,
    pair: Annotated[int, typer.Option(hidden=True, help="Index of the models; -1: the largest that fit.")] = -1,
    inside: Annotated[str, typer.Option(hidden=True, help="Run module:function in this process, rows to OUT.")] = "",
) -> None:
    """Measure the parts that are not recorded yet."""
    free = [] if inside else free_gib()
    chosen: Device = "cuda" if device == "cuda" or (device == "auto" and free) else "cpu"
    if inside:
        logging.basicConfig(level=logging.INFO)
        raise typer.Exit(not run_inside(inside, Setup(chosen, size, processes, pair), out))
    if pair < 0:
        pair = largest_pair(min(free) if chosen == "cuda" and free else 0.0) if size == "paper" else 0
    out.mkdir(parents=True, exist_ok=True)
    count = processes or (len(free) if chosen == "cuda" else 1)
    kit = Kit(out, Setup(chosen, size, max(1, count), pair), PARTS)
    try:
        passed = kit.run(part or (), minutes, again)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print("", *tables(kit.record()), "", f"{out / RECORD}, {out / TABLE}, {out / ARCHIVE}", sep="\n")
    raise typer.Exit(not passed)


def free_gib() -> list[float]:
    """Query the free memory of each GPU from the driver, in GiB, without a CUDA context; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return [float(line) / 1024 for line in answer.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


if __name__ == "__main__":
    typer.run(main)
