"""Play many episodes in worker processes that crash, stop, hang and answer garbage (Linux).

    memcompiler bench soak [--episodes 100000] [--faults 0.01] [--workers 4]

Counts what became of every episode: each is played once, and fails exactly if its worker misbehaved. Reports memory,
file handles and threads of this process and of its workers. Exit status 1 if an episode is lost or fails for another
reason, if a process grew by more than 64 MiB or ten handles or threads, or if a worker remains.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from benchmarks.sizes import HEADS, Sizes, process_sizes
from benchmarks.unsteady import FAULTS
from envs.pool import EnvironmentPool
from envs.spec import PoolLimits, WorkerSpec
from eval.table import markdown_table
from executor.records import PAPER_VIEW, Action, Grounding
from runtime.errors import StopReason

app = typer.Typer()
SIGNS = {  # fault -> what the pool says of it
    "crash": "died (killed by SIGKILL)",
    "stop": "sent no heartbeat",
    "hang": "timed out",
    "garbage": "sent an invalid frame",
}
STEPS, ROUNDS = 4, 20  # of an episode; of a run
PATIENCE_S = 10.0  # for a step and for a heartbeat: longer than a busy machine delays them


class FirstCommand:
    """An executor that does not read."""

    accepts_soft = sees_images = False
    reads = PAPER_VIEW

    def act(self, requests: Sequence[Any]) -> list[Action]:
        return [Action(request.admissible[0], Grounding.CHOICE, "", (), 0, 0) for request in requests]


@dataclass
class SoakResult:
    """What became of the episodes, and the sizes of the processes."""

    ends: Counter[str] = field(default_factory=Counter)  # episodes by stop reason
    faults: Counter[str] = field(default_factory=Counter)  # that the workers recorded
    wrong: list[str] = field(default_factory=list)  # episodes that were lost, or failed without a fault
    parent: Sizes = field(default_factory=Sizes)
    workers: Sizes = field(default_factory=Sizes)  # the largest worker
    left: int = 0  # workers that are alive after the pool's end

    def is_sound(self) -> bool:
        return not (self.wrong or self.left or self.parent.has_grown or self.workers.has_grown)


def soak(episodes: int, workers: int, faults: float, record: Path) -> SoakResult:
    """Play the episodes in rounds."""
    arguments = {"scenes": {"train": 2, "test": 2}, "images": False, "faults": faults, "record": str(record)}
    limits = PoolLimits(beat_s=0.2, unresponsive_s=PATIENCE_S, step_s=2 * PATIENCE_S, restarts=episodes)
    result, ever, played = SoakResult(), set[int](), 0
    record.touch()
    with EnvironmentPool(WorkerSpec("benchmarks.unsteady:UnsteadyHomes", arguments), workers, limits) as pool:
        with contextlib.closing(pool.lease()) as env:
            tasks = env.tasks("test")
        for number in range(min(ROUNDS, episodes)):
            specs = [EpisodeSpec(tasks[i % len(tasks)]) for i in range(played, episodes * (number + 1) // ROUNDS)]
            played += len(specs)
            _play(pool, specs, result)
            ever |= set(pool.pids)
            result.parent.measure(played, [os.getpid()])
            result.workers.measure(played, pool.pids)
    result.faults.update(line.split()[1] for line in record.read_text().splitlines())
    result.left = sum(process_sizes(pid) is not None for pid in ever)
    if (failed := result.ends[str(StopReason.ENVIRONMENT_FAILURE)]) != result.faults.total():
        result.wrong.append(f"{failed} episodes failed, but there were {result.faults.total()} faults")
    return result


def _play(pool: EnvironmentPool, specs: Sequence[EpisodeSpec], result: SoakResult) -> None:
    """Play a round and check that every episode came back once, whole or with the sign of a fault."""
    heard = Counter[str]()
    found = run_episodes(
        pool.lease,
        specs,
        Delivery("none", "none"),
        FirstCommand(),
        EpisodeLimits(STEPS, batching="continuous"),  # in lockstep, all would wait for a worker that hangs
        on_episode=lambda _: heard.update(["one"]),
    )
    if [each.task_id for each in found] != [spec.task.id for spec in specs] or heard.total() != len(specs):
        result.wrong.append(f"{len(specs)} episodes were played: {len(found)} returned, {heard.total()} reported")
    for episode in found:
        result.ends[str(episode.stop_reason)] += 1
        if episode.stop_reason is StopReason.ENVIRONMENT_FAILURE:
            if not any(sign in episode.error for sign in SIGNS.values()):
                result.wrong.append(episode.error)
        elif episode.error or len(episode.steps) != STEPS:
            result.wrong.append(f"{len(episode.steps)} steps {episode.error}")


@app.command()
def main(
    episodes: Annotated[int, typer.Option(min=ROUNDS, help="Number of episodes.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 4,
    faults: Annotated[float, typer.Option(min=0, max=1, help="Share of the episodes whose worker misbehaves.")] = 0.01,
) -> None:
    """Play episodes in workers that crash, stop, hang and answer garbage, and report what became of them."""
    with tempfile.TemporaryDirectory(prefix="memcompiler-soak-") as folder:
        result = soak(episodes, workers, faults, Path(folder) / "faults")
    sizes = [result.parent.row("parent"), result.workers.row("largest worker")]
    typer.echo("\n".join(markdown_table(HEADS, sizes)))
    for reason in sorted(set(result.wrong))[:10]:
        typer.echo(f"  wrong: {reason}")
    named = ", ".join(f"{result.faults[name]} {name}" for name in FAULTS)
    typer.echo(f"episodes: {result.ends.total()} of {episodes}, {dict(result.ends)}; faults: {named}")
    typer.echo(f"wrong: {len(result.wrong)}, workers left: {result.left}")
    raise typer.Exit(not result.is_sound())


if __name__ == "__main__":
    app()
