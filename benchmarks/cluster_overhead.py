"""What an episode costs more on Ray than in one process.

    python -m benchmarks.cluster_overhead --tasks 192

The same generated homes are played in one process and by one worker on Ray, in turn. Compared is CPU time, of the
driver and the worker together, of an expert's episodes: they take milliseconds, so that this is the worst case. Ray's
own processes (raylet, GCS) are not counted; wall time is told beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from agent.expert import ExpertTeacher
from configs.collect import CollectConfig
from configs.load import load_config
from configs.run_folder import RunFolder
from data_gen.collect import expert_actor, play, prepare
from data_gen.crew import CollectWorker, play_by
from envs.registry import Environments, reader_of
from runtime.crew import Unit
from runtime.ray_fleet import ray_crew
from runtime.store import to_json


class TimedWorker(CollectWorker):
    """A worker that says how much CPU time its process has had, where it is asked for nothing else."""

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        if unit.what == "cpu":
            done("", str(time.process_time()))
        else:
            super().play(unit, done)


def overhead(tasks: int, rounds: int, size: int, folder: Path) -> dict[str, Any]:
    """Say the milliseconds of CPU and of wall of an episode, in one process and by one worker on Ray."""
    asked = [f"env.scenes={{train: {tasks // 2}, test: 1}}", f"limit={tasks}", "concurrency=8", "ray.workers=1"]
    config = load_config(CollectConfig, "collect/quickstart", asked)
    said: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with Environments(config.env) as envs:
        run = RunFolder.create(folder / "run", config)
        of = prepare(config, envs, run)
        make = partial(TimedWorker, config, of.bank.path.resolve(), of.bank.snapshot())
        with ray_crew(config.ray, make) as crew:
            play_by(crew, replace(of, record=folder / "first"), size)
            for number in range(rounds):
                teacher, actor = ExpertTeacher(reader=reader_of(config.env)), expert_actor(config)
                here, there = (replace(of, record=folder / f"{name}-{number}") for name in said)
                with _timed(said["local"], tasks):
                    play(here, envs.lease, teacher, actor)
                with _timed(said["ray"], tasks, lambda: float(crew.ask("cpu"))):
                    play_by(crew, there, size)
    cpu = {name: median(of["cpu_ms"] for of in each) for name, each in said.items()}
    return {"tasks": tasks, "unit": size, **said, "cpu_overhead": round(cpu["ray"] / cpu["local"] - 1, 4)}


@contextmanager
def _timed(
    into: list[dict[str, float]], episodes: int, others: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:  # fmt: skip
    """Note what a block takes, with the CPU time of `others`."""
    cpu, wall = time.process_time() + others(), time.perf_counter()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() + others() - cpu
    into.append({"cpu_ms": round(1e3 * cpu / episodes, 3), "wall_ms": round(1e3 * wall / episodes, 3)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit", type=int, default=8)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(to_json(overhead(a.tasks, a.rounds, a.unit, Path(folder))))


if __name__ == "__main__":
    main()
