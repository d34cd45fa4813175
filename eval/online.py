"""Online evaluation (`memory.protocol: online`): the evaluated tasks form a stream over which memory grows.

Each delivery that recalls entries has its own memory in OUT/memory/DELIVERY. A round of tasks is played with what
memory learned from earlier rounds, recorded, and then committed to memory, with further attempts where memory requests
them; only first attempts are scored. Memory follows from the record: a resume commits the missing episodes and plays
none twice. Where an episode failed for technical reasons, a resume plays the stream again from its round on, with
rebuilt memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from agent.deliveries import Delivery, find
from agent.records import Episode, read_episodes
from configs.evaluation import EvalConfig
from data_gen.experience import ViewSelection, episode_traces, view_selection
from data_gen.memory_factory import clear_memory, open_memory_from
from data_gen.rounds import play_round
from data_gen.tasks import episode_specs
from envs.base import Environment, Task
from eval.intervals import wilson
from eval.metrics import ROLES, succeeded, usage
from eval.rollouts import limits_of
from eval.runs import EpisodeRecord
from executor.records import Executor
from memory.protocol import BankError, Isolation, MemorySystem
from runtime.progress import progress

FOLDER, QUARTERS = "memory", 4


def order_tasks(tasks: Sequence[Task], config: EvalConfig) -> list[Task]:
    """Shuffle the tasks of an online evaluation if `memory.order_seed` is set."""
    seed, stream = config.memory.order_seed, list(tasks)
    if config.memory.online and seed is not None:
        Random(f"order {seed}").shuffle(stream)
    return stream


class OnlineEvaluation:
    """One delivery over the stream of tasks, with its memory and its part of the record.

    Args:
        tasks: in the order of the stream.
        out: the cell's run folder.
        initial: memory whose copy the delivery starts with.
    """

    def __init__(
        self,
        config: EvalConfig,
        tasks: Sequence[Task],
        delivery: Delivery,
        out: Path,
        initial: MemorySystem,
        record: EpisodeRecord,
    ) -> None:
        self.tasks, self.delivery, self.record = tasks, delivery, record
        self.k = find(delivery.name).entries(config.memory.k)
        self.isolation: Isolation = config.memory.isolation
        self.limits, self.size = limits_of(config), config.memory.round
        self.views: ViewSelection = view_selection(config)
        self._finished = set(record.played().get(delivery.name, ()))
        if any(name == delivery.name for name, _ in record.due):  # later episodes learned without these
            clear_memory(out / FOLDER / delivery.name)
        folder = out / FOLDER / delivery.name
        self.memory, self._initial = open_memory_from(config.memory, folder, config.env.name, initial)

    def play(self, make_env: Callable[[], Environment], executor: Executor) -> None:
        """Play the rest of the stream.

        Raises:
            BankError: memory holds more episodes than the record accounts for.
        """
        done = self._restore()
        with progress(f"online {self.delivery.name}", len(self.tasks), done) as advance:
            for start in range(done, len(self.tasks), self.size):
                specs = episode_specs(self.tasks[start : start + self.size], self.memory, self.k, self.isolation)
                played = play_round(
                    make_env,
                    specs,
                    delivery=self.delivery,
                    executor=executor,
                    limits=self.limits,
                    concurrency=self.size,
                )
                for episode in played:
                    self.record.append(episode)
                    advance(episode)
                self.memory.commit(episode_traces(played, self.views))

    def _restore(self) -> int:
        """Return the number of finished tasks: whole rounds, up to the first task to play again. Drops later episodes
        from the record and commits to memory what it lacks."""
        own = self.delivery.name
        missing = (n for n, task in enumerate(self.tasks) if task.id not in self._finished)
        whole = next(missing, len(self.tasks))
        done = whole if whole == len(self.tasks) else whole // self.size * self.size
        finished = {task.id for task in self.tasks[:done]}
        self.record.keep(lambda key: key[0] != own or key[1] in finished)
        recorded = read_episodes(self.record.lines.path) if finished else ()
        played = [episode for episode in recorded if episode.delivery == own and episode.task_id in finished]
        rounds = [episode_traces(played[start : start + self.size], self.views) for start in range(0, done, self.size)]
        for traces in rounds:
            self.memory.commit(traces)
        expected, held = self._initial + sum(map(len, rounds)), self.memory.origins().total()
        if held > expected:
            raise BankError(
                f"{self.memory.path} holds {held} episodes, and the record accounts for {expected}: something else "
                "wrote to it. Evaluate into another folder (--out), or start anew (--on-exists overwrite)"
            )
        return done


# summaries ------------------------------------------------------------------------------------------------------------


def summarise_stream(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Summarise one delivery's episodes, given in the order of the stream: success by quarter; success on tasks whose
    scene and goal occurred before, and on the others; and the further attempts, which are not scored."""
    first, repeats, seen = list[Episode](), list[Episode](), set[tuple[str, str]]()
    for episode in episodes:
        pair = (episode.scene, episode.goal)
        (repeats if pair in seen else first).append(episode)
        seen.add(pair)
    ends = [len(episodes) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    retries = [retry for episode in episodes for retry in episode.retries]
    steps = [step for retry in retries for step in retry.steps]
    used = {role: usage(steps, role) for role in ROLES}
    return {
        "quarters": [_success(episodes[start:end]) for start, end in pairwise(ends)],
        "first": _success(first),
        "repeats": _success(repeats),
        "retries": {
            "attempts": len(retries),
            "solved": sum(map(succeeded, retries)),
            "steps": len(steps),
            "tokens": {role: used[role]["tokens_in"] + used[role]["tokens_out"] for role in ROLES},
        },
    }


def _success(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    return asdict(wilson(sum(map(succeeded, episodes)), len(episodes))) if episodes else None


def pool_streams(streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the summaries of one stream played in several orders; intervals are those of one stream, because the
    tasks are the same."""
    retries = [stream["retries"] for stream in streams]
    return {
        "quarters": [_mean([stream["quarters"][quarter] for stream in streams]) for quarter in range(QUARTERS)],
        **{name: _mean([stream[name] for stream in streams]) for name in ("first", "repeats")},
        "retries": {
            **{key: sum(of[key] for of in retries) for key in ("attempts", "solved", "steps")},
            "tokens": {role: sum(of["tokens"][role] for of in retries) for role in ROLES},
        },
    }


def _mean(intervals: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    present = [interval for interval in intervals if interval is not None]
    if not present:
        return None
    n = min(interval["n"] for interval in present)
    return asdict(wilson(Fraction(fmean(interval["mean"] for interval in present)) * n, n))


def count_leaks(episodes: Sequence[Episode], tasks: Sequence[Task], memory: MemorySystem) -> int:
    """Count recalled entries that come from the episode's own task or a later one of `tasks`; a valid run has none."""
    position = {task.id: number for number, task in enumerate(tasks)}
    newest = {entry.id: entry for entry in memory}

    def recalled(episode: Episode) -> list[str]:
        shown = (episode.memory_ids if step.memory_ids is None else step.memory_ids for step in episode.steps)
        stored = [newest.get(id) or memory[id] for ids in shown for id in ids if id not in episode.made]
        return [entry.provenance.task_id for entry in (*stored, *episode.made.values())]

    return sum(position.get(origin, -1) >= position[e.task_id] for e in episodes for origin in recalled(e))
