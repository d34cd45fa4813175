"""Compare one optimiser step of ours with TRL's on the same rows and weights: seconds, processor seconds, peak memory.

    memcompiler bench trl sft|grpo [--model DIR] [--batch 8] [--micro 4] [--steps 5] [--common 0] [--checkpointing]

sft: a step of `train sft` with `soft=false` beside `SFTTrainer`. grpo: the update of `train grpo` with
`loss.latent_weight=0` on given completions and advantages beside `GRPOTrainer` with its loss `dapo`, without
generation, rewards or executor on either side. Without --model, the command makes a small model with random weights.

Both sides read the same random tokens with the same LoRA, AdamW, clipping, data type and micro-batches, float32 or
bfloat16 weights without autocast, and TRL's other defaults: no packing, no padding-free batches, fused AdamW. Each side
has a process of its own, warms up with one step, and then they take turns. A step begins with the batch's token ids and
ends after AdamW's update; SFTTrainer's collation of a batch is not counted, ours is.

What differs by design: ours reads N memory tokens behind every emission (--soft-tokens), computes logits at labelled
positions alone (TRL 1.16 does so on GPUs, but on CPUs at every position), pads prompt and emission as one row
(GRPOTrainer pads them apart), and reads once what the rows of a micro-batch begin with in common (--common).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.trl.task import Measured, Sizes, make_models, make_task
from benchmarks.trl.turns import take_turns
from eval.table import markdown_table
from runtime.progress import disable_library_progress_bars

app = typer.Typer()
SIDES = {"MemCompiler": "benchmarks.trl.ours", "TRL": "benchmarks.trl.theirs"}


@app.command()
def trl(
    stage: Annotated[Literal["sft", "grpo"], typer.Argument(help="A step of SFT, or GRPO's update of the text.")],
    model: Annotated[str, typer.Option(help="Folder of a text model; default: random weights of --hidden.")] = "",
    hidden: Annotated[int, typer.Option(min=32, help="Features of the model with random weights.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Its layers.")] = 8,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the frozen weights.")] = "float32",
    batch: Annotated[int, typer.Option(min=2, help="Rows per step.")] = 8,
    micro: Annotated[int, typer.Option(min=1, help="Rows per micro-batch.")] = 4,
    prompt: Annotated[int, typer.Option(min=8, help="Mean tokens of a prompt.")] = 300,
    common: Annotated[int, typer.Option(min=0, help="Further tokens that all prompts of a batch begin with.")] = 0,
    completion: Annotated[int, typer.Option(min=4, help="Mean tokens of a completion.")] = 48,
    soft_tokens: Annotated[int, typer.Option(min=1, help="Memory tokens that ours reads behind it.")] = 16,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing on both sides.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one that warms up.")] = 5,
) -> None:
    """Compare a step of ours with TRL's on the same rows: seconds, processor seconds, peak memory, losses."""
    if batch % micro:
        raise typer.BadParameter("--micro must divide --batch: GRPOTrainer's micro-batches have one size")
    disable_library_progress_bars()
    sizes = Sizes(batch, micro, 1 + steps, prompt=prompt, common=common, completion=completion, soft=soft_tokens)
    with tempfile.TemporaryDirectory() as folder:
        made, stand_in = make_models(Path(folder), hidden=hidden, layers=layers, only_stand_in=bool(model))
        task = make_task(stage, model or made, stand_in, sizes=sizes, dtype=dtype, checkpointing=checkpointing)
        ours, theirs = take_turns(task, SIDES, Path(folder))
    report(stage, sizes, ours=ours, theirs=theirs)


def report(stage: str, sizes: Sizes, ours: list[Measured], theirs: list[Measured]) -> None:
    """Print both sides' medians without the first step, how far their losses are apart, and the ratio of times."""
    table = []
    for name, every in zip(SIDES, (ours, theirs), strict=True):
        median = lambda what, every=every: statistics.median(getattr(step, what) for step in every[1:])
        last = every[-1]
        times = [f"{median('seconds'):.3f}", f"{median('busy'):.3f}"]
        memory = [f"{last.peak_mib:.0f}", f"{last.peak_mib - every[0].loaded_mib:.0f}"]
        table.append([name, *times, f"{median('tokens'):.0f}", *memory, f"{last.loss:.6f}", f"{last.norm:.6f}"])
    columns = ["side", "seconds", "processor seconds", "tokens", "peak MiB", "of the steps", "last loss", "last norm"]
    typer.echo("\n".join(markdown_table(columns, table)))
    pairs = list(zip(ours, theirs, strict=True))
    apart = [max(abs(getattr(a, what) - getattr(b, what)) for a, b in pairs) for what in ("loss", "norm")]
    typer.echo(f"\n{len(pairs)} steps: losses differ by at most {apart[0]:.1e}, gradient norms by {apart[1]:.1e}")
    ratios = [b.busy / a.busy for a, b in pairs[1:]]
    waited = statistics.median(b.seconds / a.seconds for a, b in pairs[1:])
    rows = f"{sizes.batch} rows ({sizes.micro} per micro-batch)"
    typer.echo(f"{stage}, {len(ratios)} timed steps of {rows}; by step from {min(ratios):.2f} to {max(ratios):.2f}")
    typer.echo(f"ratio in wall-clock seconds: {waited:.2f}")
    typer.echo(f"ratio: {statistics.median(ratios):.2f}")
