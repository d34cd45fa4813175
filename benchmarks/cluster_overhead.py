"""What an episode costs more on Ray than in one process.

    python -m benchmarks.cluster_overhead --tasks 192 --played 48

The same episodes on generated homes are played in one process and by one worker on Ray, in turn: those that a
collection's expert plays, which take milliseconds (the worst case), and those that the shipped executor plays under
`static`. Compared is CPU time, of the driver and the worker together. Ray's own processes (raylet, GCS) are not
counted; wall time is told beside it.
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

import data_gen.crew
from agent.expert import ExpertTeacher
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.run_folder import RunFolder
from data_gen.collect import expert_actor, play, prepare, what_is_left
from envs.registry import Environments, reader_of
from eval import evaluate, players
from eval.runs import EPISODES, EpisodeRecord
from runtime.crew import Crew, Unit
from runtime.ray_fleet import ray_crew
from runtime.store import to_json


class _SaysTime:
    """A worker that says how much CPU time its process has had, where it is asked for nothing else."""

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        if unit.what == "cpu":
            done("", str(time.process_time()))
        else:
            super().play(unit, done)  # type: ignore[misc]


class Collector(_SaysTime, data_gen.crew.CollectWorker):
    pass


class Player(_SaysTime, players.EvalWorker):
    pass


def collected(tasks: int, rounds: int, size: int, folder: Path) -> dict[str, Any]:
    """Compare a collection by the expert."""
    asked = [f"env.scenes={{train: {tasks // 2}, test: 1}}", f"limit={tasks}", f"concurrency={size}", "ray.workers=1"]
    config = load_config(CollectConfig, "collect/quickstart", asked)
    with Environments(config.env) as envs:
        of = prepare(config, envs, RunFolder.create(folder / "run", config))
        make = partial(Collector, config, of.bank.path.resolve(), of.bank.snapshot())
        teacher, actor = ExpertTeacher(reader=reader_of(config.env)), expert_actor(config)
        with ray_crew(config.ray, make) as crew:
            return _compared(
                lambda out: play(replace(of, record=out / EPISODES), envs.lease, teacher, actor),
                lambda out: data_gen.crew.play_by(
                    crew, there := replace(of, record=out / EPISODES), what_is_left(there), size
                ),
                crew, tasks, rounds, folder,
            )  # fmt: skip


def evaluated(tasks: int, rounds: int, size: int, folder: Path) -> dict[str, Any]:
    """Compare an evaluation of the shipped executor."""
    asked = ["deliveries=[static]", f"limit={tasks}", f"concurrency={size}", "ray.workers=1"]
    config = load_config(EvalConfig, "eval/quickstart", asked)
    with players.ModelCache() as loaded, ray_crew(config.ray, Player) as crew:
        evaluation, bank = evaluate.prepare(config, loaded, folder)
        part = players.Part(config, {}, bank.path.resolve(), bank.snapshot())
        asked_of = [spec.task for spec in evaluation.specs]
        return _compared(
            lambda out: evaluation.run("static", EpisodeRecord(out, {}).append),
            lambda out: players.play_by(crew, part, asked_of, EpisodeRecord(out, {})),
            crew, len(asked_of), rounds, folder,
        )  # fmt: skip


def _compared(
    here: Callable[[Path], object], there: Callable[[Path], object], crew: Crew, tasks: int, rounds: int, folder: Path
) -> dict[str, Any]:
    """Say the milliseconds of CPU and of wall of an episode, in one process and by one worker on Ray."""
    said: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    fresh = lambda: Path(tempfile.mkdtemp(dir=folder))
    here(fresh())  # whatever is done once only
    there(fresh())
    for _ in range(rounds):
        with _timed(said["local"], tasks):
            here(fresh())
        with _timed(said["ray"], tasks, lambda: float(crew.ask("cpu"))):
            there(fresh())
    cpu = {name: median(of["cpu_ms"] for of in each) for name, each in said.items()}
    return {"tasks": tasks, **said, "cpu_overhead": round(cpu["ray"] / cpu["local"] - 1, 4)}


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
    parser.add_argument("--tasks", type=int, default=192, help="of the expert")
    parser.add_argument("--played", type=int, default=48, help="of the shipped executor; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit", type=int, default=8, help="episodes that are played side by side")
    a = parser.parse_args()
    for name, measure, tasks in (("expert", collected, a.tasks), ("executor", evaluated, a.played)):
        with tempfile.TemporaryDirectory() as folder:
            if tasks:
                print(to_json({"played_by": name, "unit": a.unit, **measure(tasks, a.rounds, a.unit, Path(folder))}))


if __name__ == "__main__":
    main()
