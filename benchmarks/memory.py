"""Measure memory systems: time as they grow and at one size, KARMA's hit rates, and recall of evidence.

memcompiler bench memory growth --out out/growth env=alfworld
memcompiler bench memory size --out out/size --systems trajectory,amem,gmemory --episodes 10000
memcompiler bench memory hit-rate --stream drifting --objects 40 --capacity 10 --policy wtinylfu --window 9
memcompiler bench memory recall --data locomo.json --memory s3mem fill=true
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor
from configs.collect import MemoryConfig, MemoryModels
from configs.evaluation import EvalConfig
from configs.load import load_config, read_overrides
from configs.run_folder import output_folder
from data_gen.experience import EXPERT_STEPS, ROUND, episode_traces
from data_gen.memory_factory import initialise_memory, open_memory
from envs.base import Task
from envs.registry import Environments
from eval.qa.recall import run_recall
from eval.table import markdown_table
from memory.karma.cache import Cache, make_cache
from memory.karma.settings import KarmaSettings
from memory.protocol import MemorySystem, Query, Trace
from runtime.progress import progress

app = typer.Typer(no_args_is_help=True, help="Measure memory systems.")

# -- growth -----------------------------------------------------------------------------------------------------------

NOISE, BLOCK = 0.2, 256  # share of random actions after the first round; episodes per commit between sizes


@app.command()
def growth(
    settings: Annotated[list[str] | None, typer.Argument(help="Evaluation settings as a.b=c.")] = None,
    systems: Annotated[str, typer.Option(help="Memory systems, separated by commas.")] = "trajectory,brainmem",
    sizes: Annotated[str, typer.Option(help="Numbers of episodes.")] = "100,1000,10000",
    times: Annotated[int, typer.Option(min=1, help="Timed recalls and commits per size.")] = 30,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the memories.")] = Path("out/growth"),
) -> None:
    """Measure milliseconds of a recall, and of a commit with a recall after it, as a memory grows.

    The expert plays the train tasks; later rounds repeat them under other ids with a fifth of the actions random. Ends
    with the ratio of the largest to the smallest size.
    """
    config, wanted = load_config(EvalConfig, None, settings or []), sorted(map(int, sizes.split(",")))
    with Environments(config.env) as envs:
        tasks = envs.tasks("train")[: config.limit]
        opened = lambda name: open_memory(MemoryConfig(system=name), out / name, config.env.name)
        memories = {name: opened(name) for name in systems.split(",")}
        for memory in memories.values():
            initialise_memory(memory, config.env.name)
        stream, held, rows = expert_traces(envs, tasks, EXPERT_STEPS), 0, list[list[str]]()
        medians: dict[str, list[tuple[float, float]]] = {name: [] for name in memories}
        with progress("episodes", wanted[-1]) as advance:
            for size in wanted:
                while held < size - times:
                    block = list(itertools.islice(stream, min(BLOCK, size - times - held)))
                    held += len(block)
                    for memory in memories.values():
                        memory.commit(block)
                    for _ in block:
                        advance("")
                timed = list(itertools.islice(stream, times))
                held += times
                for name, memory in memories.items():
                    recalls, writes = recall_and_write_ms(memory, timed, tasks, size)
                    cells = [f"{np.quantile(ms, share):.3f}" for ms in (recalls, writes) for share in (0.5, 0.95)]
                    rows.append([name, str(size), *cells])
                    medians[name].append((float(np.median(recalls)), float(np.median(writes))))
    heads = ["system", "episodes", "recall, median ms", "95 %", "commit and recall, median ms", "95 %"]
    typer.echo("\n".join(markdown_table(heads, rows)))
    for name, of in medians.items():
        recall, write = (large / small for large, small in zip(of[-1], of[0], strict=True))
        typer.echo(
            f"{name}, {wanted[0]} to {wanted[-1]} episodes: commit ratio: {write:.2f}, recall ratio: {recall:.2f}"
        )


def expert_traces(envs: Environments, tasks: Sequence[Task], steps: int) -> Iterator[list[Trace]]:
    """Yield the expert's episodes without end."""
    for turn in itertools.count():
        for start in range(0, len(tasks), ROUND):
            specs = [EpisodeSpec(task) for task in tasks[start : start + ROUND]]
            actor = ExpertExecutor(NOISE if turn else 0.0, turn)
            played = run_episodes(
                envs.lease,
                specs,
                delivery=Delivery("expert", "none"),
                executor=actor,
                limits=EpisodeLimits(steps),
                concurrency=ROUND,
            )
            for [trace] in episode_traces(played):
                own = trace.task
                yield [replace(trace, task=replace(own, id=f"{own.id} {turn}" if turn else own.id))]


def recall_and_write_ms(
    memory: MemorySystem, episodes: Sequence[list[Trace]], tasks: Sequence[Task], size: int
) -> tuple[list[float], list[float]]:
    """Time recalls, and commits of one episode with a recall after each, in milliseconds."""
    rng = random.Random(size)
    recall = lambda: memory.recall([Query(rng.choice(tasks))])
    recall()  # reads the state that earlier commits wrote
    write = lambda episode: (memory.commit([episode]), recall())
    writes = [_milliseconds(partial(write, episode)) for episode in episodes]
    return [_milliseconds(recall) for _ in episodes], writes


def _cpu_milliseconds(run: Callable[[], object]) -> float:
    """Return the CPU time of all threads."""
    started = time.process_time()
    run()
    return 1000 * (time.process_time() - started)


def _milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - started)


# -- one size ---------------------------------------------------------------------------------------------------------


@app.command()
def size(
    settings: Annotated[list[str] | None, typer.Argument(help="Evaluation settings as a.b=c.")] = None,
    systems: Annotated[str, typer.Option(help="Memory systems, separated by commas.")] = "trajectory,amem,gmemory",
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to commit.")] = 10_000,
    played: Annotated[int, typer.Option(min=1, help="Different episodes, which recur in further homes.")] = 500,
    times: Annotated[int, typer.Option(min=1, help="Timed recalls.")] = 300,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the memories.")] = Path("out/size"),
) -> None:
    """Measure the write rate, the time to open a memory, recalls and the size on disk with one number of episodes.

    The expert plays train tasks; further rounds are the same episodes in homes of other names. The memory is opened
    again before the recalls: opening ends with the first recall. CPU milliseconds are those of all threads.
    """
    config, rows = load_config(EvalConfig, None, settings or []), list[list[str]]()
    with Environments(config.env) as envs:
        tasks = envs.tasks("train")[: min(played, config.limit or played)]
        first = list(itertools.islice(expert_traces(envs, tasks, EXPERT_STEPS), len(tasks)))
    for name in systems.split(","):
        opened = partial(open_memory, MemoryConfig(system=name), out / name, config.env.name)
        rate = write_rate(opened(), first, episodes, config.env.name)
        asked = [trace.task for [trace] in itertools.islice(renamed(first), episodes)]
        opening, spent = opening_and_recalls(opened(), asked, times)
        disk = sum(file.stat().st_size for file in (out / name).rglob("*") if file.is_file())
        figures = [f"{np.quantile(ms, share):.2f}" for ms in spent for share in (0.5, 0.99)]
        rows.append([name, str(episodes), f"{rate:.0f}", f"{opening:.1f}", *figures, f"{disk / 2**20:.1f}"])
        typer.echo(" | ".join(rows[-1]), err=True)
    heads = ["system", "episodes", "written per CPU s", "opening, CPU s"]
    heads += ["recall, median ms", "99 %", "CPU ms", "99 %", "MiB"]
    typer.echo("\n".join(markdown_table(heads, rows)))


def opening_and_recalls(
    memory: MemorySystem, asked: Sequence[Task], times: int
) -> tuple[float, tuple[list[float], list[float]]]:
    """Return the CPU seconds of a memory's first recall, and the milliseconds and CPU milliseconds of further ones."""
    rng = random.Random(times)
    recall = lambda: memory.recall([Query(rng.choice(asked))])
    opening, spent, busy = _cpu_milliseconds(recall) / 1000, list[float](), list[float]()
    for _ in range(times):
        busy.append(_cpu_milliseconds(lambda: spent.append(_milliseconds(recall))))
    return opening, (spent, busy)


def write_rate(memory: MemorySystem, first: Sequence[list[Trace]], episodes: int, env: str) -> float:
    """Fill an empty memory and return the episodes written per CPU second.

    Raises: typer.BadParameter, for a memory that is not empty."""
    initialise_memory(memory, env)
    if memory.origins():
        raise typer.BadParameter(f"{memory.path} holds episodes already: name another folder (--out)")
    stream, spent = itertools.islice(renamed(first), episodes), 0.0
    while block := list(itertools.islice(stream, BLOCK)):
        spent += _cpu_milliseconds(partial(memory.commit, block)) / 1000
    return episodes / spent


def renamed(first: Sequence[list[Trace]]) -> Iterator[list[Trace]]:
    """Yield episodes without end: the given ones, and then again and again as those of further homes."""
    for turn in itertools.count():
        for [trace] in first:
            task, scene = trace.task, f"{trace.task.scene} {turn}" if turn else trace.task.scene
            again = replace(task, id=f"{task.id} {turn}", scene=scene, goal=task.goal.replace(task.scene, scene))
            why = trace.rationale.replace(task.scene, scene) if task.scene else trace.rationale
            yield [replace(trace, task=again, rationale=why) if turn else trace]


# -- hit rate of KARMA's short-term memory (section 4.4) --------------------------------------------------------------

Stream = Literal["uniform", "skewed", "drifting"]
DRIFT = 100  # queries between reshuffles: as long as counts of C = 10 take to age
WARM_SHARE = 0.95  # share of the capacity that counts as warmed up


def query_stream(stream: Stream, objects: int, queries: int, seed: int, drift: int = DRIFT) -> list[str]:
    """Draw queried objects: uniformly, by Zipf's weights, or by Zipf's weights reshuffled every `drift` queries."""
    rng, names = random.Random(f"{stream} {objects} {seed}"), [str(number) for number in range(objects)]
    weights = (1.0 if stream == "uniform" else 1 / rank for rank in range(1, objects + 1))
    edges, drawn = list(itertools.accumulate(weights)), list[str]()
    for number in range(queries):
        if stream == "drifting" and number % drift == 0:
            rng.shuffle(names)
        drawn += rng.choices(names, cum_weights=edges)
    return drawn


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares of hits: of all queries, without each object's first query, and from query `warm_from` on."""

    overall: float
    without_first: float
    warm: float
    warm_from: int


def replay(queries: Sequence[str], settings: KarmaSettings) -> HitRates:
    """Query a short-term memory object by object; every queried object is then written."""
    cache: Cache[None] = make_cache(settings)
    hits, first, known, warm_from = list[bool](), list[bool](), set[str](), len(queries)
    for number, name in enumerate(queries):
        if len(cache) > WARM_SHARE * settings.capacity:
            warm_from = min(warm_from, number)
        hits.append(name in cache)
        first.append(name not in known)
        if hits[-1]:
            cache.use(name)
        cache.write(name, None)
        known.add(name)
    repeated = [hit for hit, new in zip(hits, first, strict=True) if not new]
    overall, without_first, warm = (sum(of) / max(1, len(of)) for of in (hits, repeated, hits[warm_from:]))
    return HitRates(overall, without_first, warm, warm_from)


@app.command()
def hit_rate(
    stream: Annotated[Stream, typer.Option(help="Distribution of the queried objects.")],
    objects: Annotated[int, typer.Option(min=1, help="Number of objects.")] = 40,
    capacity: Annotated[int, typer.Option(min=1, help="Units in short-term memory.")] = 10,
    policy: Annotated[Literal["fifo", "lru", "wtinylfu"], typer.Option(help="Replacement policy.")] = "wtinylfu",
    window: Annotated[int | None, typer.Option(min=1, help="Window of wtinylfu (default: all units but one).")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Number of queries.")] = 20_000,
    drift: Annotated[int, typer.Option(min=1, help="Queries between reshuffles of `drifting`.")] = DRIFT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stream.")] = 0,
) -> None:
    """Measure how often KARMA's short-term memory holds the queried object, by replacement policy."""
    if policy == "wtinylfu" and window is not None and window > capacity:
        raise typer.BadParameter(f"a window of {window} units does not fit a capacity of {capacity}")
    own = {"window": window} if policy == "wtinylfu" else {}
    settings = KarmaSettings.model_validate({"policy": policy, "capacity": capacity, **own})
    rates = replay(query_stream(stream, objects, queries=queries, seed=seed, drift=drift), settings)
    name = f"W-TinyLFU {list(settings.segments)}" if policy == "wtinylfu" else f"{policy.upper()} [{capacity}]"
    typer.echo(f"{queries} queries over {objects} objects, {stream}, seed {seed}; {name}")
    typer.echo(f"without first queries: {rates.without_first:.4f}")
    typer.echo(f"after warm-up ({rates.warm_from} queries): {rates.warm:.4f}")
    typer.echo(f"hit rate: {rates.overall:.4f}")


# -- recall of evidence -----------------------------------------------------------------------------------------------


@app.command()
def recall(
    data: Annotated[Path, typer.Option(help="LoCoMo's JSON, or another file of questions with evidence.")],
    memory: Annotated[str, typer.Option(help="Memory system or baseline: bm25, windows, oracle, ...")] = "s3mem",
    tokens: Annotated[str, typer.Option(help="Token budgets, such as 500,1000,2000.")] = "500,1000,2000",
    facts: Annotated[bool, typer.Option("--facts", help="Use the file's notes instead of the records.")] = False,
    models: Annotated[
        list[str] | None,
        typer.Option("--with", help="Model of the memory: embed=NAME, embed_api.model=NAME or api.model=NAME."),
    ] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of the memory as a.b=c.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for recall.json.")] = None,
) -> None:
    """Measure the share of each question's evidence that a memory packs within a token budget, without a model."""
    budgets, with_models = [int(budget) for budget in tokens.split(",")], read_overrides(models or [])
    names = (("recall.json",), "recall", [("--data", data)])
    with output_folder(out, "bench recall", *names) if out else nullcontext():
        used = MemoryModels.model_validate(with_models)
        run_recall(
            data,
            memory=memory,
            budgets=budgets,
            settings=read_overrides(settings or []),
            facts=facts,
            out=out,
            models=used,
        )
