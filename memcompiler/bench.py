"""Measurements: what they take; all end with a ratio or a table."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memcompiler.env import bench_env
from memcompiler.options import MemoryModelsOption, Out, command_group, with_settings

if TYPE_CHECKING:
    from configs.training import GrpoConfig

bench_app = command_group("Measure side by side; the last line is the ratio.")
bench_app.command("env")(bench_env)


@bench_app.command("rollout")
@with_settings("configs.training:GrpoConfig", "grpo/quickstart")
def bench_rollout(
    settings: "GrpoConfig",
    out: Out = Path("out/bench-rollout"),
    updates: Annotated[int, typer.Option(min=1, help="Updates whose rollouts are played, each way.")] = 2,
) -> None:
    """Rollouts with all episodes batched against one episode at a time."""
    from benchmarks.rollout import run_bench_rollout

    run_bench_rollout(settings, out, updates)


@bench_app.command("delivery")
def bench_delivery(
    compiler: Annotated[str | None, typer.Option(help="Name or folder (default: as the executor).")] = None,
    executor: Annotated[str | None, typer.Option(help="Name or folder (default: as the compiler).")] = None,
    shapes: Annotated[
        Literal["small", "paper"], typer.Option(help="Where neither is named: random weights in these proportions.")
    ] = "small",
    memory_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an episode's task memory.")] = 1500,
    steps: Annotated[int, typer.Option(min=10, help="Steps of each episode.")] = 12,
    concurrency: Annotated[str, typer.Option(help="Episodes side by side, such as 1,4,16.")] = "1,4,16",
    engine: Annotated[str, typer.Option(help="hf, vllm or both.")] = "hf",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on a GPU.")] = "auto",
    n_soft: Annotated[int, typer.Option(min=1, help="Soft tokens.")] = 16,
    prefix_mib: Annotated[float, typer.Option(min=0, help="compiler.speed.prefix_mib, of engine hf.")] = 0,
    lengths: Annotated[
        Path | None, typer.Option(help="What is written: a run of eval, or a file (default: the shipped pair's).")
    ] = None,
    needed: Annotated[
        float, typer.Option(min=0, max=1, help="Share of steps that need compiling (default: the shipped pair's).")
    ] = 0.35,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder, for results.json.")] = None,
) -> None:
    """Measure what a step costs in whole episodes, with no memory, a pasted and a compiled one: tokens, latency and
    where it goes, throughput. The last line is compiled over static, after the first step."""
    from benchmarks.delivery import run_bench_delivery

    run_bench_delivery(
        compiler,
        executor,
        shapes,
        memory_tokens,
        steps,
        concurrency,
        engine,
        dtype,
        n_soft,
        prefix_mib,
        lengths,
        needed,
        out,
    )


@bench_app.command("cost")
def bench_cost(
    run: Annotated[Path, typer.Argument(help="Run folder of `memcompiler eval`.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Of every episode (default: all of them).")] = None,
    delivery: Annotated[str, typer.Option(help="Whose cost is divided.")] = "compiled",
    over: Annotated[str, typer.Option(help="By whose it is divided.")] = "static",
    compiler_parameters: Annotated[float | None, typer.Option(min=1, help="Default: of the run's model.")] = None,
    executor_parameters: Annotated[float | None, typer.Option(min=1, help="Default: of the run's model.")] = None,
) -> None:
    """Divide what an evaluation took, failed episodes included, by its solved tasks: tokens, seconds, FLOPs."""
    from benchmarks.cost import run_bench_cost

    run_bench_cost(run, steps, delivery, over, compiler_parameters, executor_parameters)


@bench_app.command("recall")
def bench_recall(
    data: Annotated[Path, typer.Option(help="LoCoMo's JSON, or another file of questions with evidence.")],
    memory: Annotated[str, typer.Option(help="A memory system, or a baseline: bm25, windows, oracle, ...")] = "s3mem",
    tokens: Annotated[str, typer.Option(help="Budgets, such as 500,1000,2000.")] = "500,1000,2000",
    facts: Annotated[bool, typer.Option("--facts", help="Read the file's notes of the records instead.")] = False,
    models: MemoryModelsOption = None,
    settings: Annotated[list[str] | None, typer.Argument(help="The memory's own settings, as a.b=c.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for recall.json.")] = None,
) -> None:
    """Measure the share of each question's evidence that a memory packs within a budget; no model is needed."""
    from configs.collect import MemoryModels
    from configs.run_folder import output_folder
    from eval.qa.recall import run_recall
    from memcompiler.options import own_settings

    budgets, used = [int(budget) for budget in tokens.split(",")], MemoryModels.model_validate(own_settings(models))
    mine = (("recall.json",), "recall", [("--data", data)])
    with output_folder(out, "bench recall", *mine) if out else nullcontext():
        run_recall(
            data,
            memory=memory,
            budgets=budgets,
            settings=own_settings(settings),
            facts=facts,
            out=out,
            models=used,
        )


@bench_app.command("fuzz")
def bench_fuzz(
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    inputs: Annotated[int, typer.Option(min=1, help="Inputs of all targets together.")] = 20_000,
    target: Annotated[list[str] | None, typer.Option(help="Only this target; may be given several times.")] = None,
    only: Annotated[str | None, typer.Option(help="Only one input, as TARGET:NUMBER.")] = None,
) -> None:
    """Read generated and damaged answers, texts, files, settings and requests; exit 1 where one shows a fault."""
    from benchmarks.fuzz.run import run_bench_fuzz

    if run_bench_fuzz(seed, inputs, target or (), only):
        raise typer.Exit(1)


@bench_app.command("hit-rate")
def bench_hit_rate(
    stream: Annotated[Literal["uniform", "skewed", "drifting"], typer.Option(help="How objects are drawn.")],
    objects: Annotated[int, typer.Option(min=1, help="Objects that may be asked for.")] = 40,
    capacity: Annotated[int, typer.Option(min=1, help="Units that short-term memory holds.")] = 10,
    policy: Annotated[Literal["fifo", "lru", "wtinylfu"], typer.Option(help="Which unit leaves.")] = "wtinylfu",
    window: Annotated[int | None, typer.Option(min=1, help="Of wtinylfu (default: all units but one).")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Objects that are asked for.")] = 20_000,
    drift: Annotated[int, typer.Option(min=1, help="Queries for which favourites of drifting last.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the stream.")] = 0,
) -> None:
    """How often KARMA's short-term memory holds what is asked for, by replacement policy, on a trace."""
    from benchmarks.hit_rate import run_bench_hit_rate

    run_bench_hit_rate(stream, objects, capacity, policy, window, queries, seed, drift)
