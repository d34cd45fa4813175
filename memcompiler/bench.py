"""`memcompiler bench`: the benchmark programs, imported when they are called."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from memcompiler.options import command_group

PROGRAMS = {  # modules of benchmarks/ with a Typer `app`
    "environment": "Measure environments and rollouts.",
    "rollout": "Compare continuous with lockstep batching of rollouts.",
    "overlap": "Measure how GRPO's rollouts and updates overlap.",
    "training": "Measure SFT beside transformers.Trainer.",
    "prefixes": "Compare training with and without shared prefixes.",
    "trl": "Compare a training step with TRL's on the same rows.",
    "serving": "Measure serving: deliveries, compile speed, load.",
    "chaos": "Kill commands at random moments and compare what they end with.",
    "soak": "Play many episodes in workers that crash, hang and answer garbage.",
    "numerics": "Compare the losses of SFT in bfloat16 with float32.",
    "memory": "Measure memory systems: growth, hit rate, recall.",
}


class BenchmarkGroup(TyperGroup):
    """Import a benchmark program when it is called, so that --help does not."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in PROGRAMS:
            command = get_command(import_module(f"benchmarks.{name}").app)
            command.name = name
        return name, command, rest


bench_app = command_group("Measure speed, memory, cost and robustness.", BenchmarkGroup)
for name, text in PROGRAMS.items():
    bench_app.command(name, help=text)(lambda: None)


@bench_app.command("cost")
def bench_cost(
    run: Annotated[Path, typer.Argument(help="Run folder of `memcompiler eval`.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per episode that count (default: all).")] = None,
    delivery: Annotated[str, typer.Option(help="Numerator of the ratio.")] = "compiled",
    over: Annotated[str, typer.Option(help="Denominator of the ratio.")] = "static",
    compiler_parameters: Annotated[float | None, typer.Option(min=1, help="Default: counted from the run.")] = None,
    executor_parameters: Annotated[float | None, typer.Option(min=1, help="Default: counted from the run.")] = None,
) -> None:
    """Measure tokens, seconds and FLOPs per solved task of an evaluation, failed episodes included."""
    from eval.cost import run_cost

    parameters = {"compiler": compiler_parameters, "executor": executor_parameters}
    run_cost(run, steps, delivery=delivery, over=over, parameters=parameters)
