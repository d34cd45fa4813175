"""Measure which optimisations make compiling faster: each alone, none and all, on the same scripted requests.

    memcompiler bench serving compile --model MODEL [--checkpoint DIR] [--episodes 4] [--steps 6]

With `--checkpoint`, a trained compiler writes its own emissions; otherwise the model is forced to write the scripted
ones (`benchmarks.serving.scripted`). Emissions must be equal under every optimisation. The first step, with empty
caches, is reported apart. Without a GPU, seconds are processor time, so that other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.serving.lower_bound import LowerBound, lower_bound
from benchmarks.serving.scripted import DEFAULT_RECORD, Script, ScriptedDecoder, decoding_by, read_script
from compiler.build import load_compiler
from compiler.decoding import Decoder
from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest
from configs.models import CompilerConfig, Speed
from eval.table import markdown_table
from lm.prefixes import PrefixCache
from runtime.progress import disable_library_progress_bars

NONE = Speed(drafts=0, prefix_mib=0, second_pass="always")
PREFIX_MIB = 4096.0  # enough for all episodes
OPTIMISATIONS = {
    "none": NONE,
    "drafts": NONE.model_copy(update={"drafts": Speed().drafts}),
    "prefixes": NONE.model_copy(update={"prefix_mib": PREFIX_MIB}),
    "second pass": NONE.model_copy(update={"second_pass": "read"}),
    "all": Speed(prefix_mib=PREFIX_MIB),
}
EXECUTOR_WIDTH = 1024  # of a fresh projector


def measure_compile_speed(
    model: Annotated[str, typer.Option(help="Hugging Face name or folder.")],
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint of a trained compiler.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Concurrent episodes.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Steps per episode.")] = 6,
    memory_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an episode's memory.")] = 1500,
    lengths: Annotated[
        Path, typer.Option(help="Run of eval, or file, that supplies emissions.", show_default=False)
    ] = DEFAULT_RECORD,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.")] = None,
) -> None:
    """Compare compile seconds by optimisation; the last line is all over none, median of the steps after the first."""
    disable_library_progress_bars()
    number = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    config = CompilerConfig(model=model, checkpoint=checkpoint, dtype=number, history=0)  # type: ignore[arg-type]
    executor = SimpleNamespace(embedding_table=torch.zeros(1, EXECUTOR_WIDTH))
    compiler = load_compiler(config, executor).eval()
    script = Script(model, model, memory_tokens, read_script(lengths))
    requests = [script.compile_requests(script.spec(i), steps) for i in range(episodes)]
    batches = [[replace(request, soft_on="guidance") for request in step] for step in zip(*requests, strict=True)]
    bound = lower_bound(model, number)
    results, first = dict[str, dict[str, list[float]]](), None
    with decoding_by(ScriptedDecoder if checkpoint is None else Decoder):
        ScriptedDecoder.script = [script.emission_ids(request) for request in batches[0]]
        compiler.compile(batches[0])  # warm-up
        for name, speed in OPTIMISATIONS.items():
            compiler.speed, compiler._prefixes = speed, PrefixCache(speed.prefix_mib)
            results[name], emissions = compile_all(compiler, batches, script, bound)
            first = first or emissions
            if emissions != first:
                raise RuntimeError(f"emissions under {name} differ from those under none: ties in {number}?")
    later = {name: {key: statistics.median(of[key][1:]) for key in of} for name, of in results.items()}
    rows = []
    for name, of in later.items():
        times = (results[name]["seconds"][0], of["seconds"], of["seconds"] / later["none"]["seconds"])
        counts = f"{of['passes']:.0f}", f"{of['tokens']:.0f}"
        rows.append([name, *(f"{value:.2f}" for value in times), *counts, f"{of['lower_bound']:.2f}"])
    heads = ["optimisation", "first step, s", "later steps, s", "over none", "passes", "tokens read", "lower bound, s"]
    typer.echo("\n".join(markdown_table(heads, rows)))
    typer.echo(f"  lower bound: {bound}")
    typer.echo(f"ratio: {later['all']['seconds'] / later['none']['seconds']:.2f}")


def compile_all(
    compiler: MemoryCompiler, batches: Sequence[list[CompileRequest]], script: Script, bound: LowerBound
) -> tuple[dict[str, list[float]], list[Any]]:
    """Compile every step; return seconds, passes, tokens read and their lower bound by step, and the emissions."""
    gpu = torch.cuda.is_available()
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if gpu else (time.process_time, lambda: None)
    passes: list[Tensor] = []
    hidden = compiler.backbone.hidden
    compiler.backbone.hidden = lambda batch, *rest: passes.append(batch.tokens) or hidden(batch, *rest)  # type: ignore[method-assign]
    found: dict[str, list[float]] = {"seconds": [], "passes": [], "tokens": [], "lower_bound": []}
    emissions = []
    for requests in batches:
        ScriptedDecoder.script = [script.emission_ids(request) for request in requests]
        passes.clear()
        wait()
        started = clock()
        compiled = compiler.compile(requests)
        wait()
        found["seconds"].append(clock() - started)
        found["passes"].append(len(passes))
        found["tokens"].append(sum(tokens.numel() for tokens in passes))
        found["lower_bound"].append(sum(bound.pass_seconds(tokens.numel(), len(tokens)) for tokens in passes))
        emissions.append([c.emission_ids for c in compiled])
    compiler.backbone.hidden = hidden  # type: ignore[method-assign]
    return found, emissions
