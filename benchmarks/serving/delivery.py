"""Measure the cost of a step without memory, with memory in the prompt (static), and compiled, at every step or gated.

    memcompiler bench serving delivery                                      # small random weights, PyTorch
    memcompiler bench serving delivery --shapes paper --engine vllm         # 7B and 14B: a GPU, 45 GB of disk
    memcompiler bench serving delivery --compiler DIR --executor DIR --lengths out/eval

Whole scripted episodes are played (`benchmarks.serving.scripted`): a growing chat (`--context`), four raw entries in
memory, and a prefix cache in both models (vLLM's own; PyTorch's: `--prefix-mib`). The first step, with empty caches, is
reported apart from the steady state after it. The parts of a step, in seconds of an episode that moves in step with its
batch:

emission       the compiler reads M, b_t and o_t, and writes
second pass    the compiler reads the memory tokens (Hugging Face: from the same cache; vLLM: as a separate request)
executor       the executor reads its prompt and writes an action
lower bound    of both models on this machine, for uncached tokens read and tokens written (`lower_bound.py`)
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from unittest.mock import patch

import torch
import typer
from transformers import AutoConfig, LogitsProcessorList

from agent.records import Episode
from benchmarks.measurement import Stopwatch
from benchmarks.serving.lower_bound import lower_bound
from benchmarks.serving.scripted import (
    DEFAULT_RECORD,
    ForcedTokens,
    Script,
    ScriptedCompiler,
    ScriptedDecoder,
    ScriptedExecutor,
    ScriptedGate,
    decoding_by,
    force_lengths,
    play,
    read_script,
)
from benchmarks.serving.shapes import MODELS, Shapes, create_pair
from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.records import soft_is_read
from configs.models import CompilerConfig, Dtype, ExecutorConfig, Soft, Speed, VllmEngine, model_path
from configs.run_folder import RunFolder
from envs.household.environment import INSTRUCTIONS
from envs.spec import ExecutorInstructions
from eval.table import markdown_table
from executor.build import load_executor
from executor.prompt import Context
from runtime.progress import disable_library_progress_bars, progress
from runtime.settings import Settings

COMPILED, GATED = "compiled", "compiled_gated"
DELIVERIES = ("none", "static", COMPILED, GATED)
ROOM = 1024  # tokens of instructions, history and observation beside the memory
Engine = Literal["hf", "vllm"]


class DeliveryBench(Settings):
    """Settings of a measurement, for the run folder."""

    COMMAND: ClassVar[str] = "bench serving delivery"
    compiler: str  # names or folders; "" for shapes
    executor: str
    shapes: Shapes | None
    lengths: str
    memory_tokens: int
    steps: int
    concurrency: tuple[int, ...]
    engines: tuple[Engine, ...]
    dtype: Dtype
    n_soft: int
    prefix_mib: float
    context: Context
    compiled_share: float


def measure_delivery(
    compiler: Annotated[str | None, typer.Option(help="Name or folder (default: as the executor).")] = None,
    executor: Annotated[str | None, typer.Option(help="Name or folder (default: as the compiler).")] = None,
    shapes: Annotated[Shapes, typer.Option(help="Shapes of random weights, when no model is given.")] = "small",
    memory_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an episode's memory; 1500: four raw entries.")
    ] = 1500,
    context: Annotated[str, typer.Option(help="executor.context: turns or rebuilt.")] = "turns",
    steps: Annotated[int, typer.Option(min=10, help="Steps per episode.")] = 12,
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent episodes, such as 1,4,16.")] = "1,4,16",
    engine: Annotated[str, typer.Option(help="hf, vllm or both.")] = "hf",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on a GPU.")] = "auto",
    n_soft: Annotated[int, typer.Option(min=1, help="Number of soft tokens.")] = 16,
    prefix_mib: Annotated[float, typer.Option(min=0, help="Prefix cache of each model with engine hf.")] = 1024,
    lengths: Annotated[
        Path, typer.Option(help="Run of eval, or file, that supplies emissions and actions.", show_default=False)
    ] = DEFAULT_RECORD,
    compiled_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of steps that the compile gate lets compile.")
    ] = 0.35,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder for results.json.")] = None,
) -> None:
    """Compare the cost of a step by delivery, as a ratio over static for each case; the last line is that of compiled
    in the first case of the last engine."""
    disable_library_progress_bars()
    if engine not in ("hf", "vllm", "both"):
        raise ValueError(f"--engine is hf, vllm or both; received {engine!r}")
    if context not in ("turns", "rebuilt"):
        raise ValueError(f"--context is turns or rebuilt; received {context!r}")
    named, auto = compiler or executor, "bfloat16" if torch.cuda.is_available() else "float32"
    config = DeliveryBench(
        compiler=compiler or executor or "",
        executor=executor or compiler or "",
        shapes=None if named else shapes,
        lengths=str(lengths),
        memory_tokens=memory_tokens,
        steps=steps,
        n_soft=n_soft,
        concurrency=_numbers(concurrency),
        engines=("hf", "vllm") if engine == "both" else (engine,),  # type: ignore[arg-type]
        prefix_mib=prefix_mib,
        context=context,  # type: ignore[arg-type]
        compiled_share=compiled_share,
        dtype=auto if dtype == "auto" else dtype,  # type: ignore[arg-type]
    )
    episodes = read_script(lengths)
    run = RunFolder.create(out, config) if out else None
    with _model_pair(config) as pair:
        script = Script(*pair, memory_tokens, episodes)
        rows = _measure_all(config, pair, script)
        bounds = {role: lower_bound(name, config.dtype) for role, name in zip(MODELS, pair, strict=True)}
    for row in rows:
        tokens = {name: of["mean"] for name, of in row["tokens"].items()}
        uncached = {role: tokens[f"{role}_in"] - tokens[f"{role}_cached"] for role in bounds if tokens[f"{role}_in"]}
        row["lower_bound"] = sum(
            bounds[role].step_seconds(read, tokens[f"{role}_out"], row["episodes"]) for role, read in uncached.items()
        )
    typer.echo("\n".join(_table(rows)))
    emissions, actions = (f"{statistics.fmean(of):.1f} (at most {max(of)})" for of in script.output_lengths())
    notes = [
        f"{config.dtype}; emissions of {emissions} and actions of {actions} tokens, as in {config.lengths}",
        "tokens and ms are means of the steps after the first; tokens from a cache in brackets",
        *(f"lower bound of the {role}: {bound}" for role, bound in bounds.items()),
    ]
    ratios = {name: _ratios_to_static(rows, name, _mean_seconds) for name in (COMPILED, GATED)}
    least = {name: _ratios_to_static(rows, name, lambda row: row["lower_bound"]) for name in (COMPILED, GATED)}
    for note in notes:
        typer.echo(f"  {note}")
    for name, at in ((name, at) for at in ratios[COMPILED] for name in ratios):
        typer.echo(f"{name} over static, {at} (lower bounds {least[name][at]:.2f}) ratio: {ratios[name][at]:.2f}")
    if run is not None:
        found = {"settings": config.model_dump(), "notes": notes, "ratio": ratios, "least": least, "rows": rows}
        run.write_json("results.json", found)
    typer.echo(f"ratio: {ratios[COMPILED][f'{config.engines[-1]} x{config.concurrency[0]}']:.2f}")


@contextmanager
def _model_pair(config: DeliveryBench) -> Iterator[tuple[str, str]]:
    """Yield the folders or names of compiler and executor; folders of random weights are deleted at the end."""
    if config.shapes is None:
        yield model_path(config.compiler), model_path(config.executor)
        return
    with tempfile.TemporaryDirectory(prefix="memcompiler-shapes-") as folder:
        yield create_pair(config.shapes, Path(folder), config.dtype)


def _measure_all(config: DeliveryBench, pair: tuple[str, str], script: Script) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for engine in config.engines:
        cases = [(episodes, delivery) for episodes in config.concurrency for delivery in DELIVERIES]
        with _loaded_pair(engine, config, pair, script) as models, progress(engine, len(cases)) as advance:
            for episodes, delivery in cases:
                rows.append(row := _measure(models, delivery, episodes=episodes, script=script, config=config))
                advance(f"{delivery} x{episodes}: {row['seconds']['total']['mean']:.2f} s a step")
    return rows


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Both models in one engine."""

    engine: Engine
    compiler: ScriptedCompiler
    executor: ScriptedExecutor
    cache_block: int = 0  # tokens per block of the prefix cache; 0 without one


@contextmanager
def _loaded_pair(engine: Engine, config: DeliveryBench, pair: tuple[str, str], script: Script) -> Iterator[LoadedPair]:
    """Load both models with forced outputs; release them at the end."""
    window = min(AutoConfig.from_pretrained(name).get_text_config().max_position_embeddings for name in pair)
    if config.memory_tokens + ROOM > window:
        raise ValueError(
            f"a prompt takes {config.memory_tokens + ROOM} tokens, but a model reads {window}: lower --memory-tokens"
        )
    most, gpu = max(config.concurrency), torch.cuda.is_available()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; vLLM reads it when it is imported
    length = min(window, config.memory_tokens + 2 * ROOM)
    # Compiling for a CPU takes minutes.
    vllm = VllmEngine(max_model_len=length, max_num_seqs=most, enforce_eager=not gpu)
    common: dict[str, Any] = {"dtype": config.dtype, "vllm": vllm, "batch_size": most}
    emissions, actions = script.output_lengths()
    acts = ExecutorConfig(
        **common,
        model=pair[1],
        engine=engine,
        mode="generate",
        max_new_tokens=max(actions),
        context=config.context,
        prefix_mib=config.prefix_mib,
    )
    acting: Any = load_executor(acts, ExecutorInstructions(INSTRUCTIONS))
    compiler = CompilerConfig(
        **common,
        model=pair[0],
        max_new_tokens=max(emissions),
        soft=Soft(n_tokens=config.n_soft, emb_std="auto"),
        speed=Speed(prefix_mib=config.prefix_mib),
    )
    with (_hf_pair if engine == "hf" else _vllm_pair)(acting, compiler, script) as models:
        yield models
    del acting, models
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


@contextmanager
def _hf_pair(acting: Any, config: CompilerConfig, script: Script) -> Iterator[LoadedPair]:
    forced, watch = ForcedTokens(acting.end_id), Stopwatch()
    acting.model.generate = partial(acting.model.generate, logits_processor=LogitsProcessorList([forced]))

    class TimedDecoder(ScriptedDecoder):
        _read_memory = watch.wrap(ScriptedDecoder._read_memory)

    force_emissions = lambda ids: setattr(TimedDecoder, "script", ids)
    compiling = ScriptedCompiler(load_compiler(config, acting, 0), script, force_emissions, watch)
    with decoding_by(TimedDecoder), patch("executor.hf.FreeWalk", forced.walk):
        yield LoadedPair("hf", compiling, ScriptedExecutor(acting, script, forced.force, acting.reads))


@contextmanager
def _vllm_pair(acting: Any, config: CompilerConfig, script: Script) -> Iterator[LoadedPair]:
    """Create a fresh adapter and projector in PyTorch, and serve them by vLLM."""
    with tempfile.TemporaryDirectory(prefix="memcompiler-bench-") as folder:
        on_cpu = config.model_copy(update={"device": "cpu", "engine": "hf"})
        checkpoint.save_weights(Path(folder), load_compiler(on_cpu, acting, 0))
        served: Any = load_served_compiler(config.model_copy(update={"checkpoint": folder, "engine": "vllm"}), 0)
    lengths: dict[str, list[int]] = {"compiler": [], "executor": []}

    def force(role: str) -> Callable[[list[tuple[int, ...]]], None]:
        return lambda ids: lengths[role].__setitem__(slice(None), map(len, ids))

    compiling = ScriptedCompiler(served, script, force("compiler"), watch := Stopwatch())
    served._hidden = watch.wrap(served._hidden)
    served.makes_soft = lambda request, *_: soft_is_read(request.soft_on, script.emission(request))
    force_lengths(served.llm, lengths["compiler"])
    force_lengths(acting.llm, lengths["executor"])
    block = served.llm.llm_engine.vllm_config.cache_config.block_size
    yield LoadedPair("vllm", compiling, ScriptedExecutor(acting, script, force("executor"), acting.reads), block)


def _measure(models: LoadedPair, delivery: str, episodes: int, script: Script, config: DeliveryBench) -> dict[str, Any]:
    """Play `episodes` episodes side by side, after one warm-up step of as many others.

    Returns:
        A row of results.json. Its series have a value per step: seconds of the batch, or mean tokens of an episode.
    """
    # Gated episodes have homes of their own with the same script, because caches hold the others by then.
    n, steps = len(script.episodes), config.steps
    first = 1000 * episodes + (10**5 // n * n if delivery == GATED else 0)
    warm_up, specs = ([script.spec(start + i) for i in range(episodes)] for start in (first + 500, first))
    gate = ScriptedGate(script, config.compiled_share)
    play(models.compiler, models.executor, delivery=delivery, specs=warm_up, steps=1, gate=gate)
    models.compiler.second_pass.clear()
    played = play(models.compiler, models.executor, delivery=delivery, specs=specs, steps=steps, gate=gate)
    second = [models.compiler.second_pass[t] for t in range(steps)]
    executor, compiler = (_by_step(played, "seconds", role, sum) for role in ("executor", "compiler"))
    emission = [whole - part for whole, part in zip(compiler, second, strict=True)]
    total = [sum(parts) for parts in zip(compiler, executor, strict=True)]
    seconds = {"total": total, "emission": emission, "second_pass": second, "executor": executor}
    names = [f"{role}_{kind}" for role in MODELS for kind in ("in", "cached", "out")]
    later = [step for episode in played for step in episode.steps[1:]]
    return {
        "engine": models.engine,
        "delivery": delivery,
        "episodes": episodes,
        "memory_tokens": statistics.fmean(script.count_tokens(episode.memory_text) for episode in played),
        "cache_block": models.cache_block,
        "compiled": statistics.fmean("compiler" in step.seconds for step in later),
        "noaction": statistics.fmean(step.emission_kind == "NOACTION" for step in later),
        "soft_read": statistics.fmean(step.soft_read for step in later),
        "steps_per_second": episodes * (steps - 1) / sum(total[1:]),
        "seconds": {name: _series(of) for name, of in seconds.items()},
        "tokens": {name: _series(_by_step(played, "tokens", name, statistics.fmean)) for name in names},
    }


def _by_step(
    played: Sequence[Episode], kind: Literal["seconds", "tokens"], name: str, over: Callable[[list[float]], float]
) -> list[float]:
    steps = range(len(played[0].steps))
    return [over([getattr(episode.steps[t], kind).get(name, 0.0) for episode in played]) for t in steps]


def _series(values: list[float]) -> dict[str, Any]:
    return {"first": values[0], "mean": statistics.fmean(values[1:]), "values": values}


def _mean_seconds(row: dict[str, Any]) -> float:
    return row["seconds"]["total"]["mean"]


def _ratios_to_static(
    rows: Sequence[dict[str, Any]], delivery: str, seconds: Callable[[dict[str, Any]], float]
) -> dict[str, float]:
    """Divide the delivery's seconds per step in steady state by those of static, by engine and number of episodes."""
    means = {(f"{r['engine']} x{r['episodes']}", r["delivery"]): seconds(r) for r in rows}
    return {at: mean / means[at, "static"] for (at, name), mean in means.items() if name == delivery}


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    heads = ["engine", "episodes", "delivery", "memory", "compiler in", "out", "executor in", "out", "first step, ms"]
    heads += ["emission, ms", "second pass, ms", "executor, ms", "step, ms", "lower bound, ms"]
    heads += ["compiled, %", "NOACTION, %", "steps/s"]
    cells = []
    for row in rows:
        mean = {name: of["mean"] for name, of in row["tokens"].items()}
        counts = [
            cell
            for role in MODELS
            for cell in (f"{mean[f'{role}_in']:.0f} ({mean[f'{role}_cached']:.0f})", f"{mean[f'{role}_out']:.1f}")
        ]
        parts = [row["seconds"]["total"]["first"]]
        parts += [row["seconds"][name]["mean"] for name in ("emission", "second_pass", "executor", "total")]
        shares = [f"{100 * row[name]:.1f}" for name in ("compiled", "noaction")]
        times = [f"{1e3 * seconds:.1f}" for seconds in (*parts, row["lower_bound"])]
        where = [row["engine"], str(row["episodes"]), row["delivery"], f"{row['memory_tokens']:.0f}"]
        cells.append([*where, *counts, *times, *shares, f"{row['steps_per_second']:.2f}"])
    return markdown_table(heads, cells, left=3)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise ValueError(f"--concurrency is numbers such as 1,4,16; received {text!r}")
    return numbers
