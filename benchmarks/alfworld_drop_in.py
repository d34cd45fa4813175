"""The drop-in `AlfredTWEnv` beside alfworld's own: steps per second and memory, by size of the batch.

    python -m benchmarks.alfworld_drop_in --games $ALFWORLD_DATA/json_2.1.1/valid_seen [--batch 1 --batch 64]

Each of both plays in a fresh process, the same games and commands in the same order: rounds of a reset and `--steps`
random possible commands in every game, the first of which is not timed, until `--seconds` have passed. So the native
engine comes to many rounds, in which games are met again, and reads each once; the original reads it every time. The
original starts a process per game and takes all cores; the native engine takes one. Memory is what all of their
processes hold at the end, swap included, pages that they share counted once (PSS, Linux). A batch of the original that
would not fit is left out, and said.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

MIB = 2**20
SHARE = 0.7  # of the memory that is free may a batch of the original take


def main(
    games: Annotated[Path, typer.Option(help="A folder with games: a split of $ALFWORLD_DATA/json_2.1.1.")],
    batch: Annotated[list[int], typer.Option(help="Games at a time; may be given often.")] = [1, 64, 512],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, max=49, help="Timed steps in every game of a round.")] = 10,
    seconds: Annotated[float, typer.Option(help="Rounds are begun for so long.")] = 10.0,
    limit_s: Annotated[float, typer.Option(help="Seconds that one process may take.")] = 1200.0,
    play: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure both at every size and print their ratios."""
    if play:
        typer.echo(json.dumps(measured(play, games, batch[0], steps, seconds)))
        return
    per_game = 0.0  # MiB of the original, as the largest batch so far took
    for size in sorted(batch):
        native = in_a_process("native", games, size, steps, seconds, limit_s)
        if (needed := per_game * size) > SHARE * free():
            typer.echo(f"original, batch {size}: left out, it would take about {needed / 1024:,.0f} GiB")
            continue
        original = in_a_process("original", games, size, steps, seconds, limit_s)
        per_game = original["mib"] / size
        faster, less = native["steps_s"] / original["steps_s"], original["mib"] / native["mib"]
        typer.echo(f"ratio at batch {size}: {faster:,.0f} times the steps/s, 1/{less:,.1f} of the memory")


def in_a_process(name: str, games: Path, size: int, steps: int, seconds: float, limit_s: float) -> dict[str, float]:
    """Measure one of both; prints what it did."""
    arguments = {"games": games, "batch": size, "steps": steps, "seconds": seconds, "play": name}
    options = [part for option, value in arguments.items() for part in (f"--{option}", str(value))]
    command = [sys.executable, "-m", "benchmarks.alfworld_drop_in", *options]
    played = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    if played.returncode:
        sys.exit(f"{name}, batch {size}, failed: {played.stderr[-2000:]}")
    took = json.loads(played.stdout.splitlines()[-1])
    typer.echo(
        f"{name}, batch {size}: {took['steps_s']:,.1f} steps/s (n = {took['steps']:,}), {took['resets_s']:,.2f} "
        f"resets/s (n = {took['resets']:,}), {took['mib']:,.0f} MiB"
    )
    return took


def measured(name: str, games: Path, size: int, steps: int, seconds: float) -> dict[str, float]:
    """Play rounds; returns numbers of steps and resets, how many a second, and MiB."""
    env, draw = environment(name, games).init_env(size), random.Random(0)
    begun, rounds, resetting, stepping = time.perf_counter(), 0, 0.0, 0.0
    while not rounds or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        _, infos = env.reset()
        resetting += time.perf_counter() - started
        for step in range(steps + 1):
            commands = [draw.choice(possible) for possible in infos["admissible_commands"]]
            started = time.perf_counter()
            *_, infos = env.step(commands)
            stepping += (time.perf_counter() - started) * (step > 0)
        rounds += 1
    resets, stepped = size * rounds, size * rounds * steps
    return {
        "steps": stepped,
        "steps_s": stepped / stepping,
        "resets": resets,
        "resets_s": resets / resetting,
        "mib": memory() / MIB,
    }


def environment(name: str, games: Path) -> Any:
    if name == "original":
        from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv
    else:
        from envs.alfworld.drop_in import AlfredTWEnv
    dataset = {"eval_id_data_path": str(games), "num_eval_games": -1}
    env = {
        "task_types": [1, 2, 3, 4, 5, 6],
        "domain_randomization": False,
        "goal_desc_human_anns_prob": 0,
        "expert_type": "handcoded",
    }
    rl = {"training": {"max_nb_steps_per_episode": 50}}
    config = {"dataset": dataset, "env": env, "general": {"training_method": "dqn"}, "rl": rl}
    return AlfredTWEnv(config, "eval_in_distribution")


def memory() -> int:
    """Return the bytes of this process and its children; what they share is counted once."""
    own = Path("/proc/self/task").glob("*/children")
    children = [pid for listed in own for pid in listed.read_text().split()]
    files = [Path(f"/proc/{pid}/smaps_rollup") for pid in ("self", *children)]
    return sum(kib(file, name) for file in files for name in ("Pss:", "SwapPss:")) * 1024


def free() -> float:
    """Return the MiB that a new process could take, swap included."""
    return sum(kib(Path("/proc/meminfo"), name) for name in ("MemAvailable:", "SwapFree:")) / 1024


def kib(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))


if __name__ == "__main__":
    typer.run(main)
