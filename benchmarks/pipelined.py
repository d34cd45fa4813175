"""What it brings to have half of the episodes in the compiler while the other half is in the executor.

    python -m benchmarks.pipelined --compile 20 2 --act 20 2 --episodes 16

Compiler and executor are stand-ins that sleep: so many milliseconds for a batch, and so many more for each of its
requests. So this is the most that there is to gain, where each has a device of its own; two models on one device share
it. Halves are smaller batches: where a batch takes as long whatever its size (the second number 0), a step takes as
long as before. Ends with `ratio: R`, seconds of all steps in halves over those in lock-step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from agent.deliveries import find
from agent.episode import EpisodeSpec, Limits, run_episodes
from benchmarks.scripted import ScriptedHome
from compiler.language import Emission
from compiler.records import Compilation, CompileRequest
from envs.base import Task
from executor.prompt import ExecutorRequest
from executor.records import PAPER, Action, Grounding, Reads

console = Console(width=120)


@dataclass(slots=True, eq=False)
class Sleeper:
    """Both roles; each takes (milliseconds of a batch, milliseconds of each request)."""

    compiling: tuple[float, float]
    acting: tuple[float, float]
    accepts_soft: bool = True
    sees_images: bool = False
    reads: Reads = PAPER

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        _sleep(self.compiling, len(requests))
        return [Compilation(".", Emission()) for _ in requests]

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        _sleep(self.acting, len(requests))
        return [Action("look", Grounding.FREE, "look", (), 0, 0) for _ in requests]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for role in ("compile", "act"):
        options.add_argument(
            f"--{role}", type=float, nargs=2, default=(20.0, 2.0), metavar=("BATCH", "REQUEST"), help="milliseconds"
        )
    options.add_argument("--episodes", type=int, default=16)
    options.add_argument("--steps", type=int, default=15)
    asked = options.parse_args()
    sleeper = Sleeper(tuple(asked.compile), tuple(asked.act))
    seconds = {
        name: measure(sleeper, asked.episodes, asked.steps, name == "halves") for name in ("lock-step", "halves")
    }
    for name, taken in seconds.items():
        console.print(f"{name}: {1e3 * taken / asked.steps:.0f} ms a step of {asked.episodes} episodes")
    console.print(f"ratio: {seconds['halves'] / seconds['lock-step']:.2f}", highlight=False)


def measure(sleeper: Sleeper, episodes: int, steps: int, pipelined: bool) -> float:
    """Play so many episodes side by side; the seconds that this takes."""
    specs = [EpisodeSpec(Task(str(i), "wait", "nowhere", "train", "wait")) for i in range(episodes)]
    started = time.perf_counter()
    run_episodes(ScriptedHome, specs, find("compiled").make(sleeper, 0), sleeper, Limits(steps, pipelined=pipelined))
    return time.perf_counter() - started


def _sleep(taken: tuple[float, float], requests: int) -> None:
    time.sleep((taken[0] + taken[1] * requests) / 1e3)


if __name__ == "__main__":
    main()
