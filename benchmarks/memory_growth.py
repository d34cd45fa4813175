"""Time of recall and commit as a memory grows.

    python -m benchmarks.memory_growth --out out/growth                        # generated homes
    python -m benchmarks.memory_growth --out out/growth -- env=alfworld        # real games ($ALFWORLD_DATA)
    python -m benchmarks.memory_growth --out out/growth --systems trajectory --sizes 100000 -- env=alfworld

The expert's episodes of the train tasks, and then of the same tasks under other names with a fifth of its actions
replaced by random ones, fill each memory. At each size are told, in milliseconds: the median and the 95th percentile of
recalls for random tasks, one at a time, and of writing an episode and then recalling (by when it has to be understood);
last, what each costs at the largest size against the smallest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor
from configs.collect import MemoryConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import EXPERT_STEPS, ROUND, traces_of
from data_gen.memories import make_memory, open_memory
from envs.base import Task
from envs.registry import Environments
from eval.table import markdown_table
from memory.protocol import MemorySystem, Query, Trace
from runtime.progress import progress

NOISE, BLOCK = 0.2, 256  # of later rounds; episodes that are committed together on the way to a size


def episodes(envs: Environments, tasks: Sequence[Task], steps: int) -> Iterator[list[Trace]]:
    """Yield episodes without end."""
    for turn in itertools.count():
        for start in range(0, len(tasks), ROUND):
            specs = [EpisodeSpec(task) for task in tasks[start : start + ROUND]]
            actor = ExpertExecutor(NOISE if turn else 0.0, turn)
            played = run_episodes(envs.lease, specs, Delivery("expert", "none"), actor, Limits(steps), ROUND)
            for [trace] in traces_of(played):
                own = trace.task
                yield [replace(trace, task=replace(own, id=f"{own.id} {turn}" if turn else own.id))]


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that it takes."""
    started = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - started)


def measured(
    memory: MemorySystem, stream: Sequence[list[Trace]], tasks: Sequence[Task], size: int, times: int
) -> dict[str, float]:
    """Time recalls, and commits of one episode with a recall behind each, at a size."""
    rng = random.Random(size)
    ask = lambda: memory.recall([Query(rng.choice(tasks))])
    ask()  # what was written before is read once
    write = lambda episode: (memory.commit([episode]), ask())
    written = sorted(timed(partial(write, episode)) for episode in stream)
    recalled = sorted(timed(ask) for _ in range(times))
    at = lambda values, share: round(values[int(share * (len(values) - 1))], 3)
    return {
        "recall_p50": at(recalled, 0.5),
        "recall_p95": at(recalled, 0.95),
        "write_p50": at(written, 0.5),
        "write_p95": at(written, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", nargs="+", default=["trajectory", "brainmem"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--times", type=int, default=30, help="recalls and commits that are timed at each size")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    a = parser.parse_args()
    config = load_config(EvalConfig, None, a.overrides)
    rows = list[dict[str, object]]()
    with Environments(config.env) as envs:
        tasks = envs.tasks("train")[: config.limit]
        memories = {name: open_memory(MemoryConfig(system=name), a.out / name) for name in a.systems}
        for memory in memories.values():
            make_memory(memory)
        stream, held = episodes(envs, tasks, EXPERT_STEPS), 0
        with progress("episodes", max(a.sizes)) as advance:
            for size in sorted(a.sizes):
                while held < size - a.times:
                    block = list(itertools.islice(stream, min(BLOCK, size - a.times - held)))
                    held += len(block)
                    for memory in memories.values():
                        memory.commit(block)
                    for _ in block:
                        advance("")
                timed_ones = list(itertools.islice(stream, a.times))
                held += a.times
                for name, memory in memories.items():
                    cost = measured(memory, timed_ones, tasks, size, a.times)
                    rows.append({"system": name, "episodes": size, **cost})
                    (a.out / "growth.json").write_text(json.dumps(rows, indent=1))
    print(*markdown_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]), sep="\n")
    for name in a.systems:
        mine = [row for row in rows if row["system"] == name]
        for kind in ("recall_p50", "write_p50"):
            ratio = float(str(mine[-1][kind])) / max(float(str(mine[0][kind])), 1e-3)
            print(f"{name} {kind}: ratio {ratio:.2f} from {mine[0]['episodes']} to {mine[-1]['episodes']} episodes")


if __name__ == "__main__":
    main()
