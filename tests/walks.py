"""Random walks through environments, with the true state after each step; EmbodiedBench's hosts over the stand-in."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.base import Task, task_from_json
from envs.embodiedbench import hosted
from envs.embodiedbench.hosted import HostedEmbodiedBench
from envs.registry import find
from memory.protocol import Record

STANDIN = Path(__file__).parent / "envs" / "embodiedbench_standin"
NONSENSE = 0.15  # share of invalid commands
INVALID = ("fly to the moon", "take moon 1 from sky 1", "pick up the Moon", "open moon 1", "put down")


@dataclass(frozen=True)
class Truth:
    """The engine's state: the names of the agent's place, what it holds, and the places of each thing."""

    at: frozenset[str]
    held: tuple[str, ...]
    where: Mapping[str, Sequence[str]]
    opened: bool = False  # the one door of EmbodiedBench's stand-in
    world: object = None  # a snapshot of everything


@dataclass
class Walk:
    """An episode of random commands, with the truth after each."""

    task: Task
    first: str
    records: list[Record] = field(default_factory=list)
    truths: list[Truth] = field(default_factory=list)


def walk(
    start: Walk,
    step: Callable[[str], str],
    commands: Callable[[], Sequence[str]],
    truth: Callable[[], Truth],
    refusals: tuple[str, ...],
    rng: random.Random,
    steps: int,
) -> Walk:
    """Play random commands, some of them invalid."""
    walked, seen = start, start.first
    for t in range(steps):
        command = rng.choice(INVALID if rng.random() < NONSENSE else sorted(commands()))
        answer = step(command)
        walked.records.append(Record(t, seen, command, answer, answer.startswith(refusals)))
        walked.truths.append(truth())
        seen = answer
    return walked


@contextmanager
def standin(benchmark: str) -> Iterator[HostedEmbodiedBench]:
    """Yield a host; its folder, import path and modules are removed afterwards."""
    folder, paths = Path.cwd(), list(sys.path)
    bench = hosted.host(benchmark, home=str(STANDIN), resolution=8)
    try:
        yield bench
    finally:
        bench.close()
        os.chdir(folder)
        sys.path[:] = paths
        for name in [name for name in sys.modules if name.split(".")[0] == "embodiedbench"]:
            del sys.modules[name]


def standin_walks(benchmark: str, episodes: int, steps: int) -> list[Walk]:
    """Walk through the stand-in's toy world, which goes on after success."""
    walks = list[Walk]()
    with standin(benchmark) as bench:
        tasks = bench.tasks("base")
        for number in range(episodes):
            task = tasks[number % len(tasks)]
            start = Walk(task_from_json({**task, "id": str(number)}), bench.reset(task)["text"])
            rng, env = random.Random(number), bench.env
            env._max_episode_steps = env._max_invalid_actions = 10**6

            def step(command: str) -> str:
                bench._done = False
                return bench.step(command)["observation"]["text"]

            def commands(env: Any = env, rng: random.Random = rng) -> Sequence[str]:
                putting = [c for c in env.language_skill_set if env.held and c.startswith(("put", "place"))]
                return putting if putting and rng.random() < 0.3 else env.language_skill_set

            def truth(env: Any = env) -> Truth:
                held = (env.held,) if env.held else ()
                where = {thing: [place] for thing, place in env.where.items()}
                world = (env.at, env.held, str(where), env.open, getattr(env, "on", False))
                return Truth(frozenset({env.at}), held, where, env.open, world)

            walks.append(walk(start, step, commands, truth, find(benchmark).refusals, rng, steps))
    return walks
