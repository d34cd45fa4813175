"""`memcompiler bench delivery`: what a step costs without memory, where memory is pasted (static), and compiled: at
every step, or where a guess says that it is needed (at the share of steps at which `--needed` says that it is).

    memcompiler bench delivery                                           # small shapes, random weights, PyTorch
    memcompiler bench delivery --shapes paper --engine vllm              # the paper's: a GPU, 45 GB of disk
    memcompiler bench delivery --compiler DIR --executor DIR --lengths out/eval

Whole episodes are played, and the first step, which finds nothing in a cache, is told apart from the steady state of
those after it. Cost is all that is measured: episodes are scripted (`benchmarks.scripted`), what is written has the
words of a recorded run, or their number, and the executor reads as the paper's does: soft tokens beside guidance alone.

Where time goes, as one episode sees it that moves in step with the others of its batch:
emission       the compiler reads M, b_t and o_t, and writes
second pass    the memory tokens are read (Hugging Face: over the same cache; vLLM: as a request of their own)
executor       the executor reads its prompt and writes an action
floor          the least that both can take here, reading what no cache held, writing token by token
               (`benchmarks.floor`)
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, LogitsProcessorList

from agent.records import Episode
from benchmarks.floor import Floor, floor_of
from benchmarks.scripted import (
    MEASURED,
    Forced,
    Script,
    ScriptedCompiler,
    ScriptedDecoder,
    ScriptedExecutor,
    play,
    said_in,
    using,
    write_exactly,
)
from benchmarks.shapes import ROLES, Shapes, made_pair
from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.records import Guess, soft_is_read
from configs.models import CompilerConfig, Dtype, ExecutorConfig, Soft, Speed, VllmEngine, model_path
from configs.run_folder import RunFolder
from envs.household.environment import INSTRUCTIONS
from envs.spec import Told
from executor.build import load_executor
from runtime.progress import progress, quiet
from runtime.settings import Settings

console = Console(width=160)
COMPILED, NEEDED = "compiled", "compiled_needed"
DELIVERIES = ("none", "static", COMPILED, NEEDED)
ENGINES: dict[str, tuple[Literal["hf", "vllm"], ...]] = {"hf": ("hf",), "vllm": ("vllm",), "both": ("hf", "vllm")}


class DeliveryBench(Settings):
    """What was asked, for the run folder."""

    COMMAND: ClassVar[str] = "bench delivery"
    compiler: str  # names or folders; "" for shapes
    executor: str
    shapes: Shapes | None
    lengths: str
    memory_tokens: int
    steps: int
    concurrency: tuple[int, ...]
    engines: tuple[Literal["hf", "vllm"], ...]
    dtype: Dtype
    n_soft: int
    prefix_mib: float
    needed: float
    seed: int = 0


def run_bench_delivery(
    compiler: str | None,
    executor: str | None,
    shapes: Shapes,
    memory_tokens: int,
    steps: int,
    concurrency: str,
    engine: str,
    dtype: str,
    n_soft: int,
    prefix_mib: float,
    lengths: Path | None,
    needed: float,
    out: Path | None,
) -> None:
    """Print one table; write results.json into `out`, if it is given; end with `ratio: R`, compiled over static seconds
    of a step in steady state, of the last engine at the first of `concurrency`.

    Args:
        compiler, executor: a pair of models, or one that plays both; without either, `shapes` with random weights.
        lengths: where what is written is taken from (`benchmarks.scripted.said_in`).
        needed: share of the steps after the first that are compiled where a guess says so.

    Raises:
        ValueError: numbers that are none or not positive, an unknown engine or dtype, a record without steps, or a
            model whose window is smaller than the prompts.
    """
    quiet()
    if engine not in ENGINES:
        raise ValueError(f"--engine is hf, vllm or both; received {engine!r}")
    auto = "bfloat16" if torch.cuda.is_available() else "float32"
    named = compiler or executor
    config = DeliveryBench(
        compiler=compiler or executor or "",
        executor=executor or compiler or "",
        shapes=None if named else shapes,
        lengths=str(lengths or MEASURED.name),
        memory_tokens=memory_tokens,
        steps=steps,
        n_soft=n_soft,
        concurrency=_numbers(concurrency),
        engines=ENGINES[engine],
        prefix_mib=prefix_mib,
        needed=needed,
        dtype=auto if dtype == "auto" else dtype,  # type: ignore[arg-type]
    )
    said = said_in(lengths or MEASURED)
    run = RunFolder.create(out, config) if out else None
    with _pair(config) as pair:
        script = Script(*pair, memory_tokens, n_soft, said, config.seed)
        rows = _measured(config, pair, script)
        floors = {role: floor_of(name, config.dtype) for role, name in zip(ROLES, pair, strict=True)}
    for row in rows:
        row["floor"] = _floor(row, floors)
    ratios = _ratios(rows)
    console.print(_table(config, rows))
    notes = [
        f"written is what {config.lengths} says, word by word in hf, token for token in vllm: emissions of "
        f"{_spread([len(script.compiler.ids(s.emission)) + 1 for of in said for s in of])} tokens, actions of "
        f"{_spread([len(script.executor.action_ids(s.action)) for of in said for s in of])} (mean, least to most)",
        "each episode has a memory of its own; before each row its size of batch is warmed up with other episodes; "
        "in, cached, out: tokens of a step, those out of a cache in brackets, and ms (95th percentile in brackets): "
        "means of the steps after the first",
        *(f"floor of the {role}: {floor.words}" for role, floor in floors.items()),
    ]
    where = _ratios(rows, NEEDED)
    compared = [
        f"over static, {name}, {n} at a time: compiled {ratio:.2f}, compiled where needed {where[name, n]:.2f}"
        for (name, n), ratio in ratios.items()
    ]
    for line in (*notes, *compared):
        console.print(f"  {line}", highlight=False)
    if run is not None:
        ratio, ratio_needed = (
            {f"{name} {episodes}": ratio for (name, episodes), ratio in of.items()} for of in (ratios, where)
        )
        facts = {"settings": config.model_dump(), "notes": notes, "ratio": ratio, "ratio_needed": ratio_needed}
        run.write_json("results.json", {**facts, "rows": rows})
    console.print(f"ratio: {ratios[config.engines[-1], config.concurrency[0]]:.2f}", highlight=False)


@contextlib.contextmanager
def _pair(config: DeliveryBench) -> Iterator[tuple[str, str]]:
    """Give the folders or names of compiler and executor; shapes are made, and go at the end."""
    if config.shapes is None:
        yield model_path(config.compiler), model_path(config.executor)
        return
    with tempfile.TemporaryDirectory(prefix="memcompiler-shapes-") as folder:
        yield made_pair(config.shapes, Path(folder), config.dtype)


def _measured(config: DeliveryBench, pair: tuple[str, str], script: Script) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in config.engines:
        turns = [(episodes, delivery) for episodes in config.concurrency for delivery in DELIVERIES]
        with _players(name, config, pair, script) as players, progress(name, len(turns)) as advance:
            for episodes, delivery in turns:
                need = script.need(config.needed)
                rows.append(row := _measure(players, delivery, episodes, script, config.steps, need))
                advance(f"{delivery} x{episodes}: {row['seconds']['total']['mean']:.2f} s a step")
    return rows


@dataclass(frozen=True, slots=True)
class Players:
    """The two models in one engine."""

    engine: str
    compiler: ScriptedCompiler
    executor: ScriptedExecutor
    cache_block: int = 0  # tokens of a block of the prefix cache; 0 where there is none


@contextlib.contextmanager
def _players(
    engine: Literal["hf", "vllm"], config: DeliveryBench, pair: tuple[str, str], script: Script
) -> Iterator[Players]:
    """Load both models, clocked, with what they write forced; give them up again at the end."""
    needed = script.longest([name for name in DELIVERIES if name != NEEDED], config.steps)
    windows = [AutoConfig.from_pretrained(name).get_text_config().max_position_embeddings for name in pair]
    if needed > min(windows):
        raise ValueError(f"prompts of {needed} tokens, but a model reads {min(windows)}: lower --memory-tokens")
    eager = not torch.cuda.is_available()  # compiling for a CPU takes minutes and gains little
    vllm = VllmEngine(max_model_len=needed, max_num_seqs=max(config.concurrency), enforce_eager=eager)
    emission, action = script.longest_said()
    common: dict[str, Any] = {"dtype": config.dtype, "vllm": vllm, "batch_size": max(config.concurrency)}
    executor = ExecutorConfig(**common, model=pair[1], engine=engine, mode="generate", max_new_tokens=action)
    speed = Speed(prefix_mib=config.prefix_mib)
    soft = Soft(n_tokens=config.n_soft, emb_std="auto")
    compiler = CompilerConfig(**common, model=pair[0], max_new_tokens=emission, soft=soft, speed=speed)
    if not torch.cuda.is_available():  # vLLM reads it when it is imported
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib(config, pair, needed)))
    acting: Any = load_executor(executor, Told(INSTRUCTIONS))
    if engine == "hf":
        with _hf_players(acting, compiler, config, script) as players:
            yield players
    else:
        yield _vllm_players(acting, compiler, config, script)
    del acting
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _hf_players(acting: Any, compiler: CompilerConfig, config: DeliveryBench, script: Script) -> Iterator[Players]:
    forced = Forced(acting.end_id)
    acting.model.generate = partial(acting.model.generate, logits_processor=LogitsProcessorList([forced]))

    def says(ids: list[tuple[int, ...]]) -> None:
        Timed.script = ids

    compiling = ScriptedCompiler(load_compiler(compiler, acting, config.seed), script, says)

    class Timed(ScriptedDecoder):
        _read_memory = compiling.clocked(ScriptedDecoder._read_memory)

    with using(Timed):
        yield Players("hf", compiling, ScriptedExecutor(acting, script, lambda ids: setattr(forced, "rows", ids)))


def _vllm_players(acting: Any, compiler: CompilerConfig, config: DeliveryBench, script: Script) -> Players:
    """Have the compiler's fresh LoRA and projector made by the Hugging Face model, which then goes."""
    with tempfile.TemporaryDirectory(prefix="memcompiler-bench-") as folder:
        on_cpu = compiler.model_copy(update={"device": "cpu", "engine": "hf"})
        checkpoint.save_weights(Path(folder), load_compiler(on_cpu, acting, config.seed))
        asked = compiler.model_copy(update={"checkpoint": folder, "engine": "vllm"})
        served: Any = load_served_compiler(asked, config.seed)
    lengths: dict[str, list[int]] = {"compiler": [], "executor": []}

    def force(role: str) -> Callable[[list[tuple[int, ...]]], None]:
        return lambda ids: lengths[role].__setitem__(slice(None), map(len, ids))

    compiling = ScriptedCompiler(served, script, force("compiler"))
    served._hidden = compiling.clocked(served._hidden)
    served.makes_soft = lambda request, *_: soft_is_read(request.soft_on, script.emission(request))
    write_exactly(served.llm, lengths["compiler"])
    write_exactly(acting.llm, lengths["executor"])
    block = served.llm.llm_engine.vllm_config.cache_config.block_size
    return Players("vllm", compiling, ScriptedExecutor(acting, script, force("executor")), block)


def _cache_gib(config: DeliveryBench, pair: tuple[str, str], needed: int) -> int:
    """Take room for keys and values of all episodes, GiB: a small cache would throw out what it should keep."""

    def bytes_of(name: str) -> int:
        text = AutoConfig.from_pretrained(name).get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        values = 2 * text.num_hidden_layers * text.num_key_value_heads * head * needed
        return values * (2 * max(config.concurrency) + 1) * (4 if config.dtype == "float32" else 2)

    return max(1, -(-max(map(bytes_of, pair)) // 2**30))


def _measure(players: Players, delivery: str, episodes: int, script: Script, steps: int, need: Guess) -> dict[str, Any]:
    """Play all steps of `episodes` episodes side by side, after a warm-up at this batch size (one step of others).

    Returns:
        A row of results.json. Its lists have a value for each step of the batch: seconds, or tokens as a mean over its
        episodes; `first` is the first of them, `mean` (and `p95`) of all others.
    """
    # What is compiled where needed has homes of its own, in which the same is said: a cache knows the others' by then.
    n = len(script.episodes)
    first = 1000 * episodes + (10**5 // n * n if delivery == NEEDED else 0)
    other, specs = ([script.spec(start + i) for i in range(episodes)] for start in (first + 500, first))
    play(players.compiler, players.executor, delivery, other, 1, need)
    players.compiler.clear()
    played = play(players.compiler, players.executor, delivery, specs, steps, need)
    of_step = partial(_of_step, played, steps)
    second = players.compiler.second_pass_of(steps)
    executor = of_step("seconds", "executor", sum)  # each episode has its share of the batch's time
    emission = [whole - part for whole, part in zip(of_step("seconds", "compiler", sum), second, strict=True)]
    total = [sum(parts) for parts in zip(emission, second, executor, strict=True)]
    seconds = {"total": total, "emission": emission, "second_pass": second, "executor": executor}
    names = [f"{role}_{what}" for role in ("compiler", "executor") for what in ("in", "cached", "out")]
    tokens = {name: of_step("tokens", name, statistics.fmean) for name in names}
    later = [step for episode in played for step in episode.steps[1:]]
    return {
        "engine": players.engine,
        "delivery": delivery,
        "episodes": episodes,
        "n": steps,
        "memory_tokens": statistics.fmean(script.count(episode.memory_text) for episode in played),
        "cache_block": players.cache_block,
        "compiled": statistics.fmean("compiler" in step.seconds for step in later),
        "noaction": statistics.fmean(step.emission_kind == "NOACTION" for step in later),
        "soft_read": statistics.fmean(step.soft_read for step in later),
        "steps_per_second": episodes * (steps - 1) / sum(total[1:]),
        "second_pass_share": sum(second[1:]) / sum(total[1:]),
        "seconds": {
            name: {
                "first": of[0],
                "mean": statistics.fmean(of[1:]),
                "p95": float(np.percentile(of[1:], 95)),
                "values": of,
            }
            for name, of in seconds.items()
        },
        "tokens": {
            name: {"first": of[0], "mean": statistics.fmean(of[1:]), "values": of} for name, of in tokens.items()
        },
    }


def _of_step(
    played: Sequence[Episode],
    steps: int,
    kind: Literal["seconds", "tokens"],
    name: str,
    over: Callable[[list[float]], float],
) -> list[float]:
    return [over([getattr(e.steps[t], kind).get(name, 0.0) for e in played]) for t in range(steps)]


def _floor(row: dict[str, Any], floors: dict[str, Floor]) -> float:
    """Bound a step after the first, seconds."""
    mean = {name: of["mean"] for name, of in row["tokens"].items()}
    return sum(
        floor.step(mean[f"{role}_in"] - mean[f"{role}_cached"], mean[f"{role}_out"], row["episodes"])
        for role, floor in floors.items()
        if mean[f"{role}_in"]
    )


def _ratios(rows: Sequence[dict[str, Any]], delivery: str = COMPILED) -> dict[tuple[str, int], float]:
    """Divide seconds of a step in steady state, this delivery's by static's, by engine and episodes at a time."""
    means = {(row["engine"], row["episodes"], row["delivery"]): row["seconds"]["total"]["mean"] for row in rows}
    places = dict.fromkeys((row["engine"], row["episodes"]) for row in rows)
    return {place: means[*place, delivery] / means[*place, "static"] for place in places}


def _table(config: DeliveryBench, rows: Sequence[dict[str, Any]]) -> Table:
    held = statistics.fmean(row["memory_tokens"] for row in rows if row["delivery"] != "none")
    models = (config.shapes and f"{config.shapes} shapes") or f"{config.compiler} for {config.executor}"
    table = Table(title=f"{models}, {config.dtype}; memory {held:.0f} tokens; episodes of {config.steps} steps")
    names = (
        "engine",
        "episodes",
        "delivery",
        "compiler in (cached)",
        "out",
        "executor in (cached)",
        "out",
        "first step, ms",
        "emission, ms",
        "second pass, ms",
        "executor, ms",
        "step, ms",
        "floor, ms",
        "share of second pass",
        "steps compiled",
        "NOACTION",
        "steps/s",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        mean = {name: f"{of['mean']:.0f}" for name, of in row["tokens"].items()}
        reads = [f"{mean[f'{role}_in']} ({mean[f'{role}_cached']})" for role in ("compiler", "executor")]
        writes = [f"{row['tokens'][f'{role}_out']['mean']:.1f}" for role in ("compiler", "executor")]
        parts = [_milliseconds(row["seconds"][name]) for name in ("emission", "second_pass", "executor", "total")]
        shares = [f"{100 * row[name]:.1f} %" for name in ("second_pass_share", "compiled", "noaction")]
        if row["delivery"] not in (COMPILED, NEEDED):
            reads[0], writes[0], parts[:2], shares = "-", "-", ["-", "-"], ["-", "-", "-"]
        first = f"{1e3 * row['seconds']['total']['first']:.0f}"
        where = (row["engine"], str(row["episodes"]), row["delivery"], reads[0], writes[0], reads[1], writes[1])
        table.add_row(*where, first, *parts, f"{1e3 * row['floor']:.1f}", *shares, f"{row['steps_per_second']:.2f}")
    return table


def _milliseconds(of: dict[str, Any]) -> str:
    mean, p95 = 1e3 * of["mean"], 1e3 * of["p95"]
    digits = 0 if mean >= 100 else 1
    return f"{mean:.{digits}f} ({p95:.{digits}f})"


def _spread(values: Sequence[int]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values)} to {max(values)})"


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if not numbers or len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise ValueError(f"--concurrency is numbers such as 1,4,16; received {text!r}")
    return numbers
