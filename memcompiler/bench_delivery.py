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
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from configs.compiler import CompilerConfig, Soft
from configs.engines import VllmEngine
from configs.executor import ExecutorConfig
from memcompiler import build
from runtime.progress import progress
from runtime.settings import Settings

if TYPE_CHECKING:
    from agent.deliveries import Delivery
    from compiler.hf import MemoryCompiler
    from compiler.records import Compilation, CompileRequest
    from executor.hf import FrozenExecutor
    from executor.prompt import ExecutorRequest
    from executor.records import Action
    from executor.vllm import VllmExecutor
    from memory.entry import MemoryEntry
    from soft_mem.projector import Projector

console = Console(width=150)
EMISSION_TOKENS = 48  # written at every step; the end-of-turn token follows
ACTION_TOKENS = 8
DELIVERIES = ("static", "compiled")
REASON = "in home 17 the mug was in cabinet 2, behind the plates, after both shelves and the first drawer were empty"
GUIDANCE = "go to cabinet 2, open it, take the mug, heat it with microwave 1 and put it in cabinet 5"


class DeliveryBench(Settings):
    """What was asked, for the run folder."""

    model: str
    memory_tokens: int
    steps: int
    concurrency: tuple[int, ...]
    engines: tuple[Literal["hf", "vllm"], ...]
    dtype: Literal["float32", "bfloat16", "float16"]
    n_soft: int
    seed: int = 0
    emission_tokens: int = EMISSION_TOKENS
    action_tokens: int = ACTION_TOKENS


def run_bench_delivery(
    model: str, memory_tokens: int, steps: int, concurrency: str, engine: str, dtype: str, n_soft: int, out: Path | None
) -> None:
    """One table; results.json in `out`, if it is given; then `ratio: R`, compiled over static latency of a step.

    Raises:
        ValueError: numbers that are none or not positive, an unknown engine or dtype, or a model whose window is
            smaller than the prompts.
    """
    import torch

    from configs.run_folder import RunFolder

    build.quiet()
    auto = "bfloat16" if torch.cuda.is_available() else "float32"
    config = DeliveryBench(
        model=model, memory_tokens=memory_tokens, steps=steps, concurrency=_numbers(concurrency), n_soft=n_soft,
        engines=_engines(engine), dtype=auto if dtype == "auto" else dtype,  # type: ignore[arg-type]
    )  # fmt: skip
    run = RunFolder.create(out, config, on_exists="overwrite") if out else None
    script = Script(config)
    rows: list[Row] = []
    for name in config.engines:
        with _players(name, config, script) as players, progress(name, 2 * len(config.concurrency)) as advance:
            for episodes in config.concurrency:
                for delivery in DELIVERIES:
                    rows.append(_measure(players, delivery, episodes, script))
                    advance(rows[-1].line())
    ratios = _ratios(rows)
    console.print(_table(config, script, rows))
    for note in script.notes():
        console.print(f"  {note}", highlight=False)
    for (name, episodes), ratio in ratios.items():
        console.print(f"  compiled / static, {name}, {episodes} at a time: {ratio:.2f}", highlight=False)
    if run is not None:
        run.write_json("results.json", results(config, script, rows))
    console.print(f"ratio: {ratios[config.engines[-1], config.concurrency[0]]:.2f}", highlight=False)


# -- episodes ---------------------------------------------------------------------------------------------------------


class Script:
    """Synthetic episodes: every number is another home with a memory of its own, step t has t actions behind it."""

    def __init__(self, config: DeliveryBench) -> None:
        from compiler.prompt import INSTRUCTIONS
        from executor.base import TokenExecutor
        from executor.prompt import RULES
        from lm.loading import load_encoder

        self.config, name = config, build.model_path(config.model)
        self.compiler, self._instructions = load_encoder(name), INSTRUCTIONS
        self.executor = TokenExecutor(load_encoder(name), RULES)

    def memory(self, number: int) -> tuple[MemoryEntry, ...]:
        """Entries of one home until they hold `memory_tokens` tokens: the last one may go beyond by its own length."""
        from executor.prompt import memory_text
        from memory.entry import MemoryEntry, Provenance

        draw, entries = random.Random(f"{self.config.seed} {number}"), []
        while self._count(memory_text([entry.text for entry in entries])) < self.config.memory_tokens:
            text = _experience(draw, number)
            entries.append(MemoryEntry(f"{number}-{len(entries)}", text, Provenance("", "", "", "train", True)))
        return tuple(entries)

    def compile_request(self, number: int, t: int, memory: tuple[MemoryEntry, ...]) -> CompileRequest:
        from compiler.brief_state import BriefState, Create
        from compiler.records import CompileRequest

        state = BriefState(self.goal(number)).apply(Create("plan", "find mug; heat mug; put mug in cabinet"))
        for place in range(1, t + 1):
            state = state.apply(Create(f"shelf {place}", "empty, not worth another look"))
        return CompileRequest(self.goal(number), memory, state, self.observation(t), None, self.history(t))

    def executor_request(
        self, number: int, t: int, memory: tuple[MemoryEntry, ...], delivery: Delivery, compiled: Compilation | None
    ) -> ExecutorRequest:
        """As the loop makes it, with the scripted guidance for what the compiler said."""
        from compiler.language import Emission
        from executor.prompt import ExecutorRequest

        said = None if compiled is None else replace(compiled, emission=Emission(GUIDANCE, REASON))
        state = self.compile_request(number, t, memory).state
        assert state is not None
        delivered = delivery.deliver(memory, state, said)
        return ExecutorRequest(self.goal(number), delivered, self.history(t), self.observation(t))

    def goal(self, number: int) -> str:
        return f"in home {number}: put a hot mug in cabinet"

    def history(self, t: int) -> tuple[str, ...]:
        return tuple(command for place in range(1, t + 1) for command in (f"go to shelf {place}",))

    def observation(self, t: int) -> str:
        return f"You arrive at shelf {t + 1}. On the shelf {t + 1}, you see a plate {t + 1}, a book 1 and a pen 3."

    def longest(self) -> int:
        """Tokens of the longest sequence that either model reads or writes, with some room."""
        from compiler.prompt import compiler_parts

        memory, t = self.memory(0), self.config.steps - 1
        prompt = self.compiler.encode(compiler_parts(self.compile_request(0, t, memory)), self._instructions)
        static = self.executor.encode(self.executor_request(0, t, memory, _delivery("static"), None))
        compiler = len(prompt.ids) + EMISSION_TOKENS + 2 + self.config.n_soft
        return max(compiler, len(static.ids) + ACTION_TOKENS) + 128

    def notes(self) -> list[str]:
        config = self.config
        return [
            f"emissions are {EMISSION_TOKENS} tokens and actions {ACTION_TOKENS}, forced: the compiler is untrained; "
            f"the executor reads a scripted guidance and {config.n_soft} soft tokens of the compiler's",
            "each episode has a memory of its own; before each row its size of batch is warmed up with other episodes; "
            "ms: median (p95) of steps; in, cached: prompt tokens, and those out of the prefix cache, mean of steps",
        ]

    def _count(self, text: str) -> int:
        return len(self.executor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _experience(draw: random.Random, number: int) -> str:
    thing, place = draw.choice(("mug", "plate", "book", "apple")), draw.choice(("shelf", "cabinet", "drawer", "desk"))
    visits = [f"go to {draw.choice(('shelf', 'drawer', 'sidetable'))} {draw.randint(1, 9)}" for _ in range(3)]
    found = f"{place} {draw.randint(1, 9)}"
    lines = [*visits, f"go to {found}", f"take {thing} 1 from {found}", f"heat {thing} 1 with microwave 1"]
    return "\n".join([f"in home {number}: put a hot {thing} in cabinet", *lines, f"the {thing} was in {found}"])


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """Of the call under way: seconds of the second pass, and cached tokens of each request."""

    second_pass: float = 0.0
    cached: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Players:
    """The two models in one engine. Meters are read after each call."""

    engine: str
    compile: Callable[[Sequence[CompileRequest]], list[Compilation]]
    act: Callable[[Sequence[ExecutorRequest]], list[Action]]
    compiler_meter: Meter
    executor_meter: Meter
    cache_block: int = 0  # tokens of a block of the prefix cache; 0 where there is none


@dataclass(slots=True)
class Row:
    """One engine, delivery and number of episodes at a time. Each list has a value for each step of the batch: seconds,
    or tokens as a mean over its episodes."""

    engine: str
    delivery: str
    episodes: int
    cache_block: int = 0
    memory_tokens: float = 0.0
    emission: list[float] = field(default_factory=list)
    second_pass: list[float] = field(default_factory=list)
    executor: list[float] = field(default_factory=list)
    compiler_in: list[float] = field(default_factory=list)
    compiler_cached: list[float] = field(default_factory=list)
    compiler_out: list[float] = field(default_factory=list)
    executor_in: list[float] = field(default_factory=list)
    executor_cached: list[float] = field(default_factory=list)
    executor_out: list[float] = field(default_factory=list)

    @property
    def total(self) -> list[float]:
        return [sum(parts) for parts in zip(self.emission, self.second_pass, self.executor, strict=True)]

    @property
    def second_pass_share(self) -> float:
        return sum(self.second_pass) / sum(self.total)

    @property
    def steps_per_second(self) -> float:
        return self.episodes * len(self.total) / sum(self.total)

    def line(self) -> str:
        return f"{self.delivery} x{self.episodes}: {statistics.median(self.total):.2f} s a step"


def _measure(players: Players, delivery: str, episodes: int, script: Script) -> Row:
    """Warm-up at this batch size (one step of other episodes), then all steps of `episodes` episodes side by side."""
    first = 1000 * episodes
    _play(players, delivery, range(first + 500, first + 500 + episodes), 1, script)
    return _play(players, delivery, range(first, first + episodes), script.config.steps, script)


def _play(players: Players, delivery: str, numbers: Sequence[int], steps: int, script: Script) -> Row:
    memories = [script.memory(number) for number in numbers]
    row, how = Row(players.engine, delivery, len(numbers), players.cache_block), _delivery(delivery)
    row.memory_tokens = _mean([script._count("\n\n".join(e.text for e in memory)) for memory in memories])
    for t in range(steps):
        compiled: Sequence[Compilation | None] = [None] * len(numbers)
        if delivery == "compiled":
            asked = zip(numbers, memories, strict=True)
            compiled = _compile(players, [script.compile_request(n, t, memory) for n, memory in asked], row)
        else:
            for values in (row.emission, row.second_pass, row.compiler_in, row.compiler_cached, row.compiler_out):
                values.append(0.0)
        known = zip(numbers, memories, compiled, strict=True)
        _act(players, [script.executor_request(n, t, memory, how, made) for n, memory, made in known], row)
    return row


def _compile(players: Players, requests: Sequence[CompileRequest], row: Row) -> list[Compilation]:
    meter = players.compiler_meter
    meter.second_pass, meter.cached = 0.0, []
    started = time.perf_counter()
    made = players.compile(requests)
    row.emission.append(time.perf_counter() - started - meter.second_pass)
    row.second_pass.append(meter.second_pass)
    row.compiler_in.append(_mean([c.tokens_in for c in made]))
    row.compiler_out.append(_mean([c.tokens_out for c in made]))
    row.compiler_cached.append(_mean(meter.cached))
    return made


def _act(players: Players, requests: Sequence[ExecutorRequest], row: Row) -> None:
    meter = players.executor_meter
    meter.cached = []
    started = time.perf_counter()
    actions = players.act(requests)
    row.executor.append(time.perf_counter() - started)
    row.executor_in.append(_mean([a.tokens_in for a in actions]))
    row.executor_out.append(_mean([a.tokens_out for a in actions]))
    row.executor_cached.append(_mean(meter.cached))


def _delivery(name: str) -> Delivery:
    """How the loop words a delivery. Its compiler is not asked through it: the players' is, under the clock."""
    from typing import cast

    from agent.deliveries import Delivery
    from compiler.records import Compiler

    return Delivery(name, "static") if name == "static" else Delivery(name, "compiled", cast(Compiler, object()))


# -- models -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _players(engine: str, config: DeliveryBench, script: Script) -> Iterator[Players]:
    """Both models, metered, with forced lengths; given up again at the end."""
    from transformers import AutoConfig

    needed = script.longest()
    window = AutoConfig.from_pretrained(build.model_path(config.model)).get_text_config().max_position_embeddings
    if needed > window:
        raise ValueError(f"prompts of {needed} tokens, but {config.model} reads {window}: lower --memory-tokens")
    players = _hf_players(config) if engine == "hf" else _vllm_players(config, needed)
    yield players
    del players
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _configs(
    config: DeliveryBench, engine: Literal["hf", "vllm"], device: str, needed: int = 1
) -> tuple[ExecutorConfig, CompilerConfig]:
    import torch

    eager = not torch.cuda.is_available()  # compiling for a CPU takes minutes and gains little
    vllm = VllmEngine(max_model_len=needed, max_num_seqs=max(config.concurrency), enforce_eager=eager)
    common: dict[str, Any] = {"model": config.model, "dtype": config.dtype, "device": device, "vllm": vllm}
    executor = ExecutorConfig(**common, engine=engine, mode="generate", max_new_tokens=ACTION_TOKENS)
    soft = Soft(n_tokens=config.n_soft, emb_std="auto")
    return executor, CompilerConfig(**common, max_new_tokens=EMISSION_TOKENS, soft=soft)


def _hf_players(config: DeliveryBench) -> Players:
    executor_config, compiler_config = _configs(config, "hf", "auto")
    executor: Any = build.load_executor(executor_config)
    executor.model.generation_config.min_new_tokens = ACTION_TOKENS
    compiler = build.load_compiler(compiler_config, executor, config.seed)
    _never_end(compiler)
    meter = Meter()
    _time_memory_tokens(compiler, meter)
    return Players(
        "hf", lambda asked: _nothing_cached(compiler.compile(asked), meter),
        lambda asked: executor.act(asked), meter, Meter(),
    )  # fmt: skip


def _nothing_cached(made: list[Compilation], meter: Meter) -> list[Compilation]:
    meter.cached = [0] * len(made)
    return made


def _time_memory_tokens(compiler: MemoryCompiler, meter: Meter) -> None:
    """Clock the columns that end a decoding: the last token, the end of turn, N memory tokens."""
    import torch

    wait = torch.cuda.synchronize if compiler.backbone.device.type == "cuda" else lambda: None
    hidden, columns = compiler.backbone.hidden, compiler.n_tokens + 2

    def clocked(batch: Any, cache: Any = None) -> Any:
        if cache is None or batch.tokens.shape[1] != columns:
            return hidden(batch, cache)
        wait()
        started = time.perf_counter()
        states = hidden(batch, cache)
        wait()
        meter.second_pass += time.perf_counter() - started
        return states

    compiler.backbone.hidden = clocked  # type: ignore[method-assign]


def _vllm_players(config: DeliveryBench, needed: int) -> Players:
    """The compiler's fresh LoRA and projector are made by the Hugging Face model, which then goes."""
    import torch

    from compiler.vllm import VllmCompiler

    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib(config, needed)))
    executor_config, compiler_config = _configs(config, "vllm", "cpu", needed)
    executor: Any = build.load_executor(executor_config)
    with tempfile.TemporaryDirectory(prefix="memcompiler-bench-") as folder:
        projector = _fresh_adapter(compiler_config, executor, config.seed, Path(folder))
        compiler = VllmCompiler.load(
            build.model_path(config.model), projector, config.dtype, lora_rank=compiler_config.lora.rank,
            engine=compiler_config.vllm.model_dump(), decoding=build._decoding(compiler_config),
            instructions=build._instructions(compiler_config),
            device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
        compiler.load_adapter(Path(folder), 0, projector)
    _never_end(compiler)
    meters = Meter(), Meter()
    _watch_engine(compiler.llm, meters[0])
    _watch_engine(executor.llm, meters[1], least=ACTION_TOKENS)
    block = compiler.llm.llm_engine.vllm_config.cache_config.block_size
    return Players("vllm", compiler.compile, executor.act, *meters, block)


def _fresh_adapter(config: CompilerConfig, executor: FrozenExecutor | VllmExecutor, seed: int, path: Path) -> Projector:
    compiler = build.load_compiler(config, executor, seed)
    compiler.policy.save_pretrained(path, safe_serialization=True, save_embedding_layers=False)  # type: ignore[operator]
    return compiler.projector


def _watch_engine(llm: Any, meter: Meter, least: int = 0) -> None:
    """Clock and count what the engine is asked: requests for one token are the second pass, `take_tails` ends it."""
    generate, rpc = llm.generate, llm.collective_rpc

    def watched(prompts: Any, params: Sequence[Any], **kwargs: Any) -> Any:
        for one in params:
            one.min_tokens = max(one.min_tokens, least)
        started = time.perf_counter()
        outputs = generate(prompts, params, **kwargs)
        if params[0].max_tokens == 1:
            meter.second_pass += time.perf_counter() - started
        else:
            meter.cached += [output.num_cached_tokens or 0 for output in outputs]
        return outputs

    def fetched(method: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        replies = rpc(method, *args, **kwargs)
        meter.second_pass += time.perf_counter() - started
        return replies

    llm.generate, llm.collective_rpc = watched, fetched


def _never_end(compiler: Any) -> None:
    """Emissions run into their limit: the end of turn is one more token that is never sampled."""
    encoder = compiler.encoder
    encoder.suppressed = sorted({*encoder.suppressed, encoder.end_id})


def _cache_gib(config: DeliveryBench, needed: int) -> int:
    """Room for keys and values of all episodes, GiB: a cache that is too small would throw out what it should keep."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(build.model_path(config.model)).get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    values = 2 * text.num_hidden_layers * text.num_key_value_heads * head * needed * (2 * max(config.concurrency) + 1)
    return max(1, -(-values * (4 if config.dtype == "float32" else 2) // 2**30))


# -- reporting --------------------------------------------------------------------------------------------------------


def results(config: DeliveryBench, script: Script, rows: Sequence[Row]) -> dict[str, Any]:
    """What results.json holds: every value, and the summaries that the table shows."""
    seconds = ("total", "emission", "second_pass", "executor")
    tokens = ("compiler_in", "compiler_cached", "compiler_out", "executor_in", "executor_cached", "executor_out")
    return {
        "settings": config.model_dump(),
        "notes": script.notes(),
        "ratio": {f"{name} {episodes}": ratio for (name, episodes), ratio in _ratios(rows).items()},
        "rows": [
            {
                "engine": row.engine, "delivery": row.delivery, "episodes": row.episodes, "n": len(row.total),
                "memory_tokens": row.memory_tokens, "cache_block": row.cache_block,
                "steps_per_second": row.steps_per_second,
                "second_pass_share": row.second_pass_share,
                "seconds": {name: _summary(getattr(row, name)) for name in seconds},
                "tokens": {name: {"mean": _mean(getattr(row, name)), "values": getattr(row, name)} for name in tokens},
            }
            for row in rows
        ],
    }  # fmt: skip


def _ratios(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Median latency of a step, compiled over static, by engine and episodes at a time."""
    medians = {(row.engine, row.episodes, row.delivery): statistics.median(row.total) for row in rows}
    places = dict.fromkeys((row.engine, row.episodes) for row in rows)
    return {place: medians[*place, "compiled"] / medians[*place, "static"] for place in places}


def _table(config: DeliveryBench, script: Script, rows: Sequence[Row]) -> Table:
    held = _mean([row.memory_tokens for row in rows])
    table = Table(title=f"{config.model}, {config.dtype}; memory {held:.0f} tokens; n = {config.steps} steps a row")
    names = (
        "engine", "episodes", "delivery", "compiler in (cached)", "executor in (cached)", "emission, ms",
        "second pass, ms", "executor, ms", "step, ms", "share of second pass", "steps/s",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        compiler = f"{_mean(row.compiler_in):.0f} ({_mean(row.compiler_cached):.0f})"
        parts = [_median(v) for v in (row.emission, row.second_pass, row.executor, row.total)]
        if row.delivery == "static":
            compiler, parts[:2] = "-", ["-", "-"]
        executor = f"{_mean(row.executor_in):.0f} ({_mean(row.executor_cached):.0f})"
        share = f"{100 * row.second_pass_share:.1f} %" if row.delivery == "compiled" else "-"
        rate = f"{row.steps_per_second:.2f}"
        table.add_row(row.engine, str(row.episodes), row.delivery, compiler, executor, *parts, share, rate)
    return table


def _median(values: Sequence[float]) -> str:
    median, p95 = 1e3 * statistics.median(values), 1e3 * _p95(values)
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} ({p95:.{digits}f})"


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "p95": _p95(values), "n": len(values), "values": list(values)}


def _p95(values: Sequence[float]) -> float:
    import numpy

    return float(numpy.percentile(values, 95))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if not numbers or len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise ValueError(f"--concurrency is numbers such as 1,4,16; received {text!r}")
    return numbers


def _engines(name: str) -> tuple[Literal["hf", "vllm"], ...]:
    known: dict[str, tuple[Literal["hf", "vllm"], ...]] = {"hf": ("hf",), "vllm": ("vllm",), "both": ("hf", "vllm")}
    if name not in known:
        raise ValueError(f"--engine is hf, vllm or both; received {name!r}")
    return known[name]
