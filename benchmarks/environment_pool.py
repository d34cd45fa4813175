"""What a worker costs: its start, and a step through it against a direct one.

    python -m benchmarks.environment_pool [--steps 2000] [--images]

Times are medians of single calls on this machine, one worker, nothing else at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import typer

from envs.base import Environment
from envs.household.environment import HouseholdEnvironment
from envs.pool import EnvironmentPool
from envs.spec import WorkerSpec


def main(steps: int = 2000, images: bool = False) -> None:
    arguments = {"scenes": {"train": 2, "test": 2}, "images": images}
    spec = WorkerSpec("envs.household.environment:HouseholdEnvironment", arguments)
    direct = HouseholdEnvironment(**arguments)  # type: ignore[arg-type]
    task = direct.tasks("test")[0]
    starts = []
    for _ in range(5):
        with EnvironmentPool(spec, 1) as pool:
            starts.append(seconds(lambda pool=pool: pool.lease().reset(task)))
    print(f"start of a worker, with its first reset: {statistics.median(starts):.2f} s")
    with EnvironmentPool(spec, 1) as pool:
        remote = pool.lease()
        for name, measure in (("reset", resets_of), ("step", steps_of)):
            here, there = measure(direct, task, steps), measure(remote, task, steps)
            more = f"+{(there - here) * 1e6:.0f} us"
            print(f"{name}: {here * 1e6:.0f} us direct, {there * 1e6:.0f} us in a worker: {more}")


def resets_of(env: Environment, task, n: int) -> float:
    return statistics.median(seconds(lambda: env.reset(task)) for _ in range(max(1, n // 10)))


def steps_of(env: Environment, task, n: int) -> float:
    commands = env.reset(task).admissible or ("look",)
    return statistics.median(seconds(lambda i=i: env.step(commands[i % len(commands)])) for i in range(n))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
