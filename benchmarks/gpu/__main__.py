"""What a machine with CUDA does with this code: `python -m benchmarks.gpu --out DIR` (docs/gpu.md).

Ends with exit status 1 where a part failed or was left out for want of time; run again, it goes on with what is
missing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, cast

import typer

from benchmarks.gpu.kit import RECORD, TABLE, Kit
from benchmarks.gpu.parts import PARTS, Device, Setup, Size, run_inside


def main(
    out: Annotated[Path, typer.Option(help=f"Folder of {RECORD} and {TABLE}.")],
    part: Annotated[list[str] | None, typer.Option(help="A part by name; may be given again. Default: all.")] = None,
    size: Annotated[str, typer.Option(help="paper, or tiny: a look at whether all parts run.")] = "paper",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    minutes: Annotated[float, typer.Option(help="For all parts together.")] = 25.0,
    again: Annotated[bool, typer.Option(help="Run also what is recorded.")] = False,
    processes: Annotated[int, typer.Option(help="That share a model; 0: one for each GPU.")] = 0,
    inside: Annotated[str, typer.Option(hidden=True, help="Run module:function here, rows into OUT.")] = "",
) -> None:
    """Measure what is not recorded yet."""
    if size not in ("tiny", "paper") or device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter("--size is tiny or paper, --device cuda, cpu or auto")
    if inside:
        logging.basicConfig(level=logging.INFO)
        good = run_inside(inside, Setup(cast(Device, device), cast(Size, size), processes), out)
        raise typer.Exit(0 if good else 1)
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = processes or (torch.cuda.device_count() if device == "cuda" else 1)
    out.mkdir(parents=True, exist_ok=True)
    kit = Kit(out, Setup(cast(Device, device), cast(Size, size), max(1, found)), PARTS)
    try:
        good = kit.run(part or (), minutes, again)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"{out / RECORD}, {out / TABLE}")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
