"""Measure environments: the native ALFWorld engine beside TextWorld, the drop-in vector environment, and rollouts.

    memcompiler bench environment engine --games $ALFWORLD_DATA
    memcompiler bench environment drop-in --games $ALFWORLD_DATA/json_2.1.1/valid_seen --batch 1 --batch 64
    memcompiler bench environment rollout

Every measurement ends with a ratio. Imports are local, because `drop-in` measures the memory of a fresh process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure environments and rollouts.")
Games = Annotated[Path, typer.Option(help="Folder with game.tw-pddl files, e.g. $ALFWORLD_DATA.")]
MIB = 2**20
MEMORY_SHARE = 0.7  # largest share of the free memory that a batch of the original may use


@app.command()
def engine(
    games: Games,
    number: Annotated[int, typer.Option(min=1, help="Number of games, alternating splits and task types.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps per game.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of games and of the commands.")] = 0,
) -> None:
    """Compare resets/s and steps/s of TextWorld and of the native engine on the same games and commands."""
    from envs.alfworld.parity import choose_games, find_games, measure
    from eval.table import markdown_table

    found = find_games(games)
    textworld, native = measure(choose_games(found, number, seed), steps, seed)
    rows = [
        [name, f"{1e3 * timing.load:.2f}", f"{1 / timing.reset:,.1f}", f"{1 / timing.step:,.1f}"]
        for name, timing in (("TextWorld", textworld), ("native", native))
    ]
    heads = ["", "loading a game, ms", "resets/s of a loaded game", "steps/s with admissible commands"]
    typer.echo("\n".join(markdown_table(heads, rows)))
    typer.echo(f"ratio: {textworld.step / native.step:.0f}")


@app.command()
def drop_in(
    games: Games,
    batch: Annotated[list[int], typer.Option(help="Games per batch; repeatable.")] = [1, 64, 512],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, max=49, help="Timed steps of every game per round.")] = 10,
    seconds: Annotated[float, typer.Option(help="Start new rounds for this many seconds.")] = 10.0,
    limit_s: Annotated[float, typer.Option(help="Time limit of one process in seconds.")] = 1200.0,
    play: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare steps/s and memory of alfworld's own `AlfredTWEnv` and of the drop-in, by batch size (Linux).

    Each plays the same random commands in a fresh process. A round is a reset and `steps` timed steps of every game.
    The native engine uses one core, the original one process per game. Memory is the proportional set size (PSS) of
    all processes at the end, swap included. A batch of the original that would not fit is skipped.
    """
    if play:
        typer.echo(json.dumps(_play(play, games, size=batch[0], steps=steps, seconds=seconds)))
        return
    mib_per_game = 0.0  # of the original, measured at the largest batch so far
    for size in sorted(batch):
        options = {"games": games, "batch": size, "steps": steps, "seconds": seconds}
        native = _run_in_process("native", options, limit_s)
        if (needed := mib_per_game * size) > MEMORY_SHARE * _free_mib():
            typer.echo(f"original, batch {size}: skipped, it would take about {needed / 1024:,.0f} GiB")
            continue
        original = _run_in_process("original", options, limit_s)
        mib_per_game = original["mib"] / size
        faster, less = native["steps_s"] / original["steps_s"], original["mib"] / native["mib"]
        typer.echo(f"ratio at batch {size}: {faster:,.0f} times the steps/s, 1/{less:,.1f} of the memory")


def _run_in_process(name: str, options: dict[str, Any], limit_s: float) -> dict[str, float]:
    """Measure the `native` or the `original` environment in a fresh process and print its rates."""
    arguments = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    command = [sys.executable, "-m", "benchmarks.environment", "drop-in", *arguments, "--play", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        sys.exit(f"{name}, batch {options['batch']}, failed: {done.stderr[-2000:]}")
    rates = json.loads(done.stdout.splitlines()[-1])
    typer.echo(
        f"{name}, batch {options['batch']}: {rates['steps_s']:,.1f} steps/s (n = {rates['steps']:,}), "
        f"{rates['resets_s']:,.2f} resets/s (n = {rates['resets']:,}), {rates['mib']:,.0f} MiB"
    )
    return rates


def _play(name: str, games: Path, size: int, steps: int, seconds: float) -> dict[str, float]:
    """Play rounds and return the number and rate of steps and resets, and the memory in MiB."""
    env, draw = _vector_environment(name, games).init_env(size), random.Random(0)
    begun, rounds, resetting, stepping = time.perf_counter(), 0, 0.0, 0.0
    while not rounds or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        _, infos = env.reset()
        resetting += time.perf_counter() - started
        for step in range(steps + 1):
            commands = [draw.choice(possible) for possible in infos["admissible_commands"]]
            started = time.perf_counter()
            *_, infos = env.step(commands)
            stepping += (time.perf_counter() - started) * (step > 0)  # the first step warms up
        rounds += 1
    resets, stepped = size * rounds, size * rounds * steps
    rates = {"steps_s": stepped / stepping, "resets_s": resets / resetting}
    return {"steps": stepped, "resets": resets, **rates, "mib": _memory_mib()}


def _vector_environment(name: str, games: Path) -> Any:
    if name == "original":
        from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv
    else:
        from envs.alfworld.drop_in import AlfredTWEnv
    env = {"task_types": [1, 2, 3, 4, 5, 6], "domain_randomization": False, "expert_type": "handcoded"}
    config = {
        "dataset": {"eval_id_data_path": str(games), "num_eval_games": -1},
        "env": {**env, "goal_desc_human_anns_prob": 0},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    return AlfredTWEnv(config, "eval_in_distribution")


def _memory_mib() -> float:
    """Return the MiB of this process and its children; shared pages count once."""
    children = [pid for listed in Path("/proc/self/task").glob("*/children") for pid in listed.read_text().split()]
    files = [Path(f"/proc/{pid}/smaps_rollup") for pid in ("self", *children)]
    return sum(_kib(file, name) for file in files for name in ("Pss:", "SwapPss:")) / 1024


def _free_mib() -> float:
    """Return the MiB that a new process can allocate, swap included."""
    return sum(_kib(Path("/proc/meminfo"), name) for name in ("MemAvailable:", "SwapFree:")) / 1024


def _kib(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))


@app.command()
def rollout(
    settings: Annotated[list[str] | None, typer.Argument(help="GRPO settings as a.b=c.")] = None,
    config: Annotated[str, typer.Option("--config", "-c", help="GRPO configuration.")] = "grpo/quickstart",
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder, for the memory bank.")] = Path("out/rollout"),
    updates: Annotated[int, typer.Option(min=1, help="Number of updates whose rollouts are played.")] = 2,
) -> None:
    """Compare agent steps/s of GRPO rollouts with all episodes batched and with one episode at a time."""
    from contextlib import ExitStack
    from dataclasses import replace

    from compiler.build import load_compiler
    from configs.load import load_config
    from configs.run_folder import RunFolder
    from configs.training import GrpoConfig
    from envs.registry import Environments
    from executor.build import load_executor
    from training.grpo import rollout_engine, sampling
    from training.grpo_tasks import told_to_compiler, told_to_executor, training_specs

    grpo = load_config(GrpoConfig, config, settings or [])
    executor = load_executor(grpo.executor, told_to_executor(grpo))
    compiler = load_compiler(grpo.compiler, executor, grpo.seed, told_to_compiler(grpo))
    compiler.decoding = sampling(grpo)
    run = RunFolder.create(out, grpo, kind="bench rollout")
    rates: dict[str, list[float]] = {"batched": [], "one at a time": []}
    with ExitStack() as stack:
        envs = {part.env.name: stack.enter_context(Environments(part.env)) for part in grpo.parts}
        specs, _ = training_specs(grpo, envs, run, out)
        batched = rollout_engine(grpo, envs, executor)
        engines = {"batched": batched, "one at a time": replace(batched, concurrency=1)}
        batched.run(compiler, [spec for spec in specs[: grpo.tasks] for _ in range(2)])  # warm-up
        for update in range(updates):
            chosen = [specs[(update * grpo.tasks + i) % len(specs)] for i in range(grpo.tasks)]
            repeated = [spec for spec in chosen for _ in range(grpo.group_size)]
            for name, each in engines.items():
                compiler.generator.manual_seed(update)
                started = time.perf_counter()
                steps = sum(len(episode.steps) for episode in each.run(compiler, repeated))
                rates[name].append(steps / (time.perf_counter() - started))
    for name, values in rates.items():
        typer.echo(f"{name}: {fmean(values):.1f} agent steps/s ({updates} updates of {grpo.tasks} x {grpo.group_size})")
    typer.echo(f"ratio: {fmean(rates['batched']) / fmean(rates['one at a time']):.2f}")


if __name__ == "__main__":
    app()
