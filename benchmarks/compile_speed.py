"""What makes compiling faster, each lever beside none and beside all: seconds of the same requests in one run.

    python -m benchmarks.compile_speed --model MODEL --rows ROWS --episodes 4 --steps 6

The requests are those of recorded teacher episodes (rows of `memcompiler collect`), step by step with all episodes side
by side. With `--checkpoint`, a trained compiler writes its own emissions. Otherwise the model is made to write the
teacher's: its logits are computed as ever, and then the teacher's token counts as the likeliest, so that lengths, and
what can be guessed, are those of real emissions. Soft tokens are read beside guidance, as by default. Emissions must be
the same under every lever, or the run fails. The first step, which finds nothing in a cache, is told apart from the
others. Without a GPU, seconds are those of the processor: another process beside this one does not count. Beside them
stands the floor of the passes that were made (`benchmarks.floor`). Ends with `ratio: R`, all levers over none, later
steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agent.records import compile_request
from benchmarks.floor import Floor, floor_of
from benchmarks.scripted import ScriptedDecoder, using
from compiler.build import load_compiler
from compiler.decoding import Decoder
from compiler.hf import MemoryCompiler
from compiler.prefixes import Prefixes
from compiler.records import CompileRequest
from configs.models import CompilerConfig, Speed
from configs.run_folder import RunFolder
from data_gen.dataset import episodes_of
from data_gen.rows import SftRow, load_rows
from runtime.progress import quiet
from runtime.settings import PathName, Settings

console = Console(width=150)
NONE = Speed(drafts=0, prefix_mib=0, second_pass="always")
ROOM = 4096.0  # MiB for what is kept: enough for all episodes
LEVERS = {
    "none": NONE,
    "drafts": NONE.model_copy(update={"drafts": Speed().drafts}),
    "prefixes": NONE.model_copy(update={"prefix_mib": ROOM}),
    "second pass": NONE.model_copy(update={"second_pass": "read"}),
    "all": Speed(prefix_mib=ROOM),
}
Step = tuple[list[CompileRequest], list[tuple[int, ...]]]  # of all episodes: what is asked, what a teacher wrote


class SpeedBench(Settings):
    """What was asked, for the run folder."""

    COMMAND: ClassVar[str] = "benchmarks.compile_speed"
    compiler: CompilerConfig
    rows: PathName
    episodes: int
    steps: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="Hugging Face name or folder")
    options.add_argument("--rows", required=True, help="rows of `memcompiler collect`")
    options.add_argument("--checkpoint", help="of a trained compiler, which writes for itself")
    options.add_argument("--episodes", type=int, default=4)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    options.add_argument("--out", type=Path, help="run folder, for results.json")
    asked = options.parse_args()
    quiet()
    compiler = CompilerConfig(model=asked.model, checkpoint=asked.checkpoint, dtype=asked.dtype)
    config = SpeedBench(compiler=compiler, rows=asked.rows, episodes=asked.episodes, steps=asked.steps)
    made, floor = measure(config)
    console.print(table_of(config, made))
    console.print(f"  floor of the passes that were made: {floor.words}", highlight=False)
    if asked.out is not None:
        run = RunFolder.create(asked.out, config)
        run.write_json("results.json", {"settings": config.model_dump(), "levers": made, "floor": floor.words})
    console.print(f"ratio: {later(made['all']) / later(made['none']):.2f}", highlight=False)


def measure(config: SpeedBench) -> tuple[dict[str, dict[str, list[float]]], Floor]:
    """Compile all steps under every lever: by step seconds, the passes of the model, the columns that these read, and
    their floor.

    Raises: RuntimeError, where a lever changed an emission; ValueError, where there are fewer episodes so long.
    """
    anyone = SimpleNamespace(embedding_table=torch.zeros(1, 1024))  # a new projector is as wide as somebody's
    compiler = load_compiler(config.compiler, anyone).eval()
    steps = steps_of(config, compiler)
    found, first = {}, None
    floor = floor_of(config.compiler.model, config.compiler.dtype)
    ScriptedDecoder.script = steps[0][1]
    with using(ScriptedDecoder if config.compiler.checkpoint is None else Decoder):
        compiler.compile(steps[0][0])  # warms up
        for name, speed in LEVERS.items():
            compiler.speed, compiler._prefixes = speed, Prefixes(speed.prefix_mib)
            found[name], emissions = _played(compiler, steps, floor)
            first = first or emissions
            if emissions != first:
                raise RuntimeError(f"emissions under {name} are not those under none: {config.compiler.dtype} ties?")
    return found, floor


def steps_of(config: SpeedBench, compiler: MemoryCompiler) -> list[Step]:
    """Take the first episodes that have so many steps."""
    episodes: list[list[SftRow]] = [of for of in episodes_of(load_rows(config.rows)) if len(of) >= config.steps]
    if len(episodes) < config.episodes:
        raise ValueError(f"{config.rows} has {len(episodes)} episodes of {config.steps} steps: ask for fewer")
    columns = zip(*(of[: config.steps] for of in episodes[: config.episodes]), strict=True)
    return [([_asked(row) for row in rows], [compiler.emission_ids(row.emission) for row in rows]) for rows in columns]


def _asked(row: SftRow) -> CompileRequest:
    return replace(compile_request(row.step_input()), soft_on="guidance")


def later(of: dict[str, list[float]], what: str = "seconds") -> float:
    """Take the median of all steps but the first."""
    return statistics.median(of[what][1:] or of[what])


def table_of(config: SpeedBench, made: dict[str, dict[str, list[float]]]) -> Table:
    clock = "wall" if torch.cuda.is_available() else "processor"
    table = Table(title=f"{config.compiler.model}: {config.episodes} episodes of {config.steps} steps, {clock} seconds")
    for name in ("lever", "first step", "later steps, median", "over none", "passes", "columns read", "floor"):
        table.add_column(name, justify="left" if name == "lever" else "right")
    for name, of in made.items():
        share = f"{later(of) / later(made['none']):.2f}"
        cells = (f"{of['seconds'][0]:.2f}", f"{later(of):.2f}", share, f"{later(of, 'passes'):.0f}")
        table.add_row(name, *cells, f"{later(of, 'columns'):.0f}", f"{later(of, 'floor'):.2f}")
    return table


def _played(compiler: MemoryCompiler, steps: Sequence[Step], floor: Floor) -> tuple[dict[str, list[float]], list[Any]]:
    gpu = torch.cuda.is_available()
    clock: Callable[[], float] = time.perf_counter if gpu else time.process_time
    wait = torch.cuda.synchronize if gpu else lambda: None
    passes: list[Tensor] = []
    hidden = compiler.backbone.hidden
    compiler.backbone.hidden = lambda batch, *rest: passes.append(batch.tokens) or hidden(batch, *rest)  # type: ignore[method-assign]
    found: dict[str, list[float]] = {"seconds": [], "passes": [], "columns": [], "floor": []}
    emissions = []
    for asked, script in steps:
        ScriptedDecoder.script = script
        passes.clear()
        wait()
        started = clock()
        made = compiler.compile(asked)
        wait()
        found["seconds"].append(clock() - started)
        found["passes"].append(float(len(passes)))
        found["columns"].append(float(sum(tokens.numel() for tokens in passes)))
        found["floor"].append(sum(floor.seconds(tokens.numel(), len(tokens)) for tokens in passes))
        emissions.append([c.emission_ids for c in made])
    compiler.backbone.hidden = hidden  # type: ignore[method-assign]
    return found, emissions


if __name__ == "__main__":
    main()
