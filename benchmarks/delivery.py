"""`memcompiler bench delivery`: what a step costs where memory is pasted (static) and where it is compiled.

One model plays all parts: executor of both deliveries and, with a fresh LoRA and projector, compiler. Episodes are
scripted, for cost is all that is measured. An untrained compiler's words mean nothing, hence emissions and actions have
a fixed length, and the executor reads a scripted guidance; the soft tokens that it reads are the compiler's own.

Where time goes, as one episode sees it that moves in step with the others of its batch:
emission       the compiler reads M, b_t and o_t, and writes
second pass    the memory tokens are read (Hugging Face: over the same cache; vLLM: as a request of their own)
executor       the executor reads its prompt and writes an action
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.scripted import ACTION_TOKENS, EMISSION_TOKENS, Script, ScriptedCompiler, ScriptedExecutor, play
from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from configs.models import CompilerConfig, Dtype, ExecutorConfig, Soft, Speed, VllmEngine
from configs.run_folder import RunFolder
from envs.household.environment import INSTRUCTIONS
from envs.spec import Told
from executor.build import load_executor
from lm.backbone import model_path, quiet
from runtime.progress import progress
from runtime.settings import Settings

console = Console(width=150)
DELIVERIES = ("static", "compiled")
ENGINES: dict[str, tuple[Literal["hf", "vllm"], ...]] = {"hf": ("hf",), "vllm": ("vllm",), "both": ("hf", "vllm")}


class DeliveryBench(Settings):
    """What was asked, for the run folder."""

    model: str
    memory_tokens: int
    steps: int
    concurrency: tuple[int, ...]
    engines: tuple[Literal["hf", "vllm"], ...]
    dtype: Dtype
    n_soft: int
    seed: int = 0
    emission_tokens: int = EMISSION_TOKENS
    action_tokens: int = ACTION_TOKENS


def run_bench_delivery(
    model: str, memory_tokens: int, steps: int, concurrency: str, engine: str, dtype: str, n_soft: int, out: Path | None
) -> None:
    """Print one table; write results.json into `out`, if it is given; end with `ratio: R`, compiled over static latency
    of a step.

    Raises:
        ValueError: numbers that are none or not positive, an unknown engine or dtype, or a model whose window is
            smaller than the prompts.
    """
    quiet()
    if engine not in ENGINES:
        raise ValueError(f"--engine is hf, vllm or both; received {engine!r}")
    auto = "bfloat16" if torch.cuda.is_available() else "float32"
    config = DeliveryBench(
        model=model, memory_tokens=memory_tokens, steps=steps, concurrency=_numbers(concurrency), n_soft=n_soft,
        engines=ENGINES[engine], dtype=auto if dtype == "auto" else dtype,  # type: ignore[arg-type]
    )  # fmt: skip
    run = RunFolder.create(out, config, on_exists="overwrite") if out else None
    script = Script(model_path(model), memory_tokens, n_soft, config.seed)
    rows: list[dict[str, Any]] = []
    for name in config.engines:
        with _players(name, config, script) as players, progress(name, 2 * len(config.concurrency)) as advance:
            for episodes in config.concurrency:
                for delivery in DELIVERIES:
                    rows.append(row := _measure(players, delivery, episodes, script, steps))
                    advance(f"{delivery} x{episodes}: {row['seconds']['total']['median']:.2f} s a step")
    ratios = _ratios(rows)
    console.print(_table(config, rows))
    notes = [
        f"emissions are {EMISSION_TOKENS} tokens and actions {ACTION_TOKENS}, forced: the compiler is untrained; "
        f"the executor reads a scripted guidance and {config.n_soft} soft tokens of the compiler's",
        "each episode has a memory of its own; before each row its size of batch is warmed up with other episodes; "
        "ms: median (p95) of steps; in, cached: prompt tokens, and those out of the prefix cache, mean of steps",
    ]
    compared = [f"compiled / static, {name}, {n} at a time: {ratio:.2f}" for (name, n), ratio in ratios.items()]
    for line in (*notes, *compared):
        console.print(f"  {line}", highlight=False)
    if run is not None:
        named = {f"{name} {episodes}": ratio for (name, episodes), ratio in ratios.items()}
        made = {"settings": config.model_dump(), "notes": notes, "ratio": named, "rows": rows}
        run.write_json("results.json", made)
    console.print(f"ratio: {ratios[config.engines[-1], config.concurrency[0]]:.2f}", highlight=False)


@dataclass(frozen=True, slots=True)
class Players:
    """The two models in one engine."""

    engine: str
    compiler: ScriptedCompiler
    executor: ScriptedExecutor
    cache_block: int = 0  # tokens of a block of the prefix cache; 0 where there is none


@contextlib.contextmanager
def _players(engine: Literal["hf", "vllm"], config: DeliveryBench, script: Script) -> Iterator[Players]:
    """Load both models, clocked, with forced lengths; give them up again at the end."""
    needed = script.longest(DELIVERIES, config.steps)
    window = AutoConfig.from_pretrained(model_path(config.model)).get_text_config().max_position_embeddings
    if needed > window:
        raise ValueError(f"prompts of {needed} tokens, but {config.model} reads {window}: lower --memory-tokens")
    eager = not torch.cuda.is_available()  # compiling for a CPU takes minutes and gains little
    vllm = VllmEngine(max_model_len=needed, max_num_seqs=max(config.concurrency), enforce_eager=eager)
    common: dict[str, Any] = {"model": config.model, "dtype": config.dtype, "vllm": vllm}
    executor = ExecutorConfig(**common, engine=engine, mode="generate", max_new_tokens=ACTION_TOKENS)
    soft = Soft(n_tokens=config.n_soft, emb_std="auto")
    own = Speed(drafts=0)  # an untrained compiler repeats itself, which is guessed too well
    compiler = CompilerConfig(**common, max_new_tokens=EMISSION_TOKENS, soft=soft, speed=own)
    players = (_hf_players if engine == "hf" else _vllm_players)(executor, compiler, config, needed)
    encoder = players.compiler.model.encoder  # type: ignore[attr-defined]
    encoder.suppressed = sorted({*encoder.suppressed, encoder.end_id})  # emissions run into their limit
    yield players
    del players
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _hf_players(executor: ExecutorConfig, compiler: CompilerConfig, config: DeliveryBench, needed: int) -> Players:
    acting: Any = load_executor(executor, Told(INSTRUCTIONS))
    acting.model.generation_config.min_new_tokens = ACTION_TOKENS
    model = load_compiler(compiler, acting, config.seed)
    compiling = ScriptedCompiler(model)
    columns = model.n_tokens + 2  # the last token, the end of turn, the memory tokens
    model.backbone.hidden = compiling.clocked(  # type: ignore[method-assign]
        model.backbone.hidden, lambda batch, cache=None: cache is not None and batch.tokens.shape[1] == columns
    )
    return Players("hf", compiling, ScriptedExecutor(acting))


def _vllm_players(executor: ExecutorConfig, compiler: CompilerConfig, config: DeliveryBench, needed: int) -> Players:
    """Have the compiler's fresh LoRA and projector made by the Hugging Face model, which then goes."""
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib(config, needed)))
    acting: Any = load_executor(executor, Told(INSTRUCTIONS))
    with tempfile.TemporaryDirectory(prefix="memcompiler-bench-") as folder:
        on_cpu = compiler.model_copy(update={"device": "cpu"})
        checkpoint.save_weights(Path(folder), load_compiler(on_cpu, acting, config.seed))
        served = load_served_compiler(compiler.model_copy(update={"checkpoint": folder}), config.seed)
    compiling = ScriptedCompiler(served)
    served._hidden = compiling.clocked(served._hidden)  # type: ignore[method-assign]
    _write_at_least(acting.llm, ACTION_TOKENS)
    block = served.llm.llm_engine.vllm_config.cache_config.block_size
    return Players("vllm", compiling, ScriptedExecutor(acting), block)


def _write_at_least(llm: Any, tokens: int) -> None:
    enqueue = llm.enqueue

    def longer(prompts: Any, params: Sequence[Any], **named: Any) -> Any:
        for one in params:
            one.min_tokens = tokens
        return enqueue(prompts, params, **named)

    llm.enqueue = longer


def _cache_gib(config: DeliveryBench, needed: int) -> int:
    """Take room for keys and values of all episodes, GiB: a small cache would throw out what it should keep."""
    text = AutoConfig.from_pretrained(model_path(config.model)).get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    values = 2 * text.num_hidden_layers * text.num_key_value_heads * head * needed * (2 * max(config.concurrency) + 1)
    return max(1, -(-values * (4 if config.dtype == "float32" else 2) // 2**30))


def _measure(players: Players, delivery: str, episodes: int, script: Script, steps: int) -> dict[str, Any]:
    """Play all steps of `episodes` episodes side by side, after a warm-up at this batch size (one step of others).

    Returns:
        A row of results.json. Its lists have a value for each step of the batch: seconds, or tokens as a mean over its
        episodes.
    """
    first = 1000 * episodes
    other, specs = ([script.spec(start + i) for i in range(episodes)] for start in (first + 500, first))
    play(players.compiler, players.executor, delivery, other, 1)
    players.compiler.second_pass.clear()
    played = play(players.compiler, players.executor, delivery, specs, steps)

    def of_step(kind: Literal["seconds", "tokens"], name: str, over: Callable[[list[float]], float]) -> list[float]:
        return [over([getattr(e.steps[t], kind).get(name, 0.0) for e in played]) for t in range(steps)]

    second = players.compiler.second_pass or [0.0] * steps
    executor = of_step("seconds", "executor", sum)  # each episode has its share of the batch's time
    emission = [whole - part for whole, part in zip(of_step("seconds", "compiler", sum), second, strict=True)]
    total = [sum(parts) for parts in zip(emission, second, executor, strict=True)]
    seconds = {"total": total, "emission": emission, "second_pass": list(second), "executor": executor}
    names = [f"{role}_{what}" for role in ("compiler", "executor") for what in ("in", "cached", "out")]
    tokens = {name: of_step("tokens", name, statistics.fmean) for name in names}
    return {
        "engine": players.engine,
        "delivery": delivery,
        "episodes": episodes,
        "n": steps,
        "memory_tokens": statistics.fmean(script.count(episode.memory_text) for episode in played),
        "cache_block": players.cache_block,
        "steps_per_second": episodes * steps / sum(total),
        "second_pass_share": sum(second) / sum(total),
        "seconds": {
            name: {"median": statistics.median(of), "p95": float(np.percentile(of, 95)), "n": steps, "values": of}
            for name, of in seconds.items()
        },
        "tokens": {name: {"mean": statistics.fmean(of), "values": of} for name, of in tokens.items()},
    }


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Divide median latencies of a step, compiled by static, by engine and episodes at a time."""
    medians = {(row["engine"], row["episodes"], row["delivery"]): row["seconds"]["total"]["median"] for row in rows}
    places = dict.fromkeys((row["engine"], row["episodes"]) for row in rows)
    return {place: medians[*place, "compiled"] / medians[*place, "static"] for place in places}


def _table(config: DeliveryBench, rows: Sequence[dict[str, Any]]) -> Table:
    held = statistics.fmean(row["memory_tokens"] for row in rows)
    table = Table(title=f"{config.model}, {config.dtype}; memory {held:.0f} tokens; n = {config.steps} steps a row")
    names = (
        "engine", "episodes", "delivery", "compiler in (cached)", "executor in (cached)", "emission, ms",
        "second pass, ms", "executor, ms", "step, ms", "share of second pass", "steps/s",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        mean = {name: f"{of['mean']:.0f}" for name, of in row["tokens"].items()}
        reads = [f"{mean[f'{role}_in']} ({mean[f'{role}_cached']})" for role in ("compiler", "executor")]
        parts = [_milliseconds(row["seconds"][name]) for name in ("emission", "second_pass", "executor", "total")]
        share = f"{100 * row['second_pass_share']:.1f} %"
        if row["delivery"] == "static":
            reads[0], parts[:2], share = "-", ["-", "-"], "-"
        where = (row["engine"], str(row["episodes"]), row["delivery"])
        table.add_row(*where, *reads, *parts, share, f"{row['steps_per_second']:.2f}")
    return table


def _milliseconds(of: dict[str, Any]) -> str:
    median, p95 = 1e3 * of["median"], 1e3 * of["p95"]
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} ({p95:.{digits}f})"


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if not numbers or len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise ValueError(f"--concurrency is numbers such as 1,4,16; received {text!r}")
    return numbers
