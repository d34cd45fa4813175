"""Evaluation over a lifetime (`memory.protocol: online`): the evaluated tasks are a stream, and memory grows with it.

Each delivery that recalls anything has a memory of its own, in OUT/memory/DELIVERY. A task is played with what memory
learned from earlier ones; then the episode goes into the record, and from there to memory, with further attempts where
memory asks for them. Scored are first attempts alone. Memory follows from the record: what a kill kept from it is
committed when the run goes on, and nothing is played twice. Where an episode broke, a resume plays the stream again
from its round on, with memory grown anew up to there: later episodes learned without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from agent.deliveries import Delivery
from agent.records import Episode, read_episodes
from configs.evaluation import EvalConfig
from data_gen.experience import Views, kept_views, traces_of
from data_gen.memories import grown_from, renew_memory
from data_gen.rounds import play_round
from data_gen.tasks import specs_for
from envs.base import Environment, Task
from eval.intervals import wilson
from eval.metrics import ROLES, succeeded, usage
from eval.players import limits_of
from eval.runs import EpisodeRecord
from executor.records import Executor
from memory.protocol import BankError, MemorySystem
from runtime.progress import progress

FOLDER, PARTS = "memory", 4


def ordered_stream(tasks: Sequence[Task], config: EvalConfig) -> list[Task]:
    """Put the tasks of an online stream in their order; those of any other evaluation stay in theirs."""
    seed, stream = config.memory.order_seed, list(tasks)
    if config.memory.online and seed is not None:
        Random(f"order {seed}").shuffle(stream)
    return stream


class Stream:
    """One delivery's way through the stream: its memory, and what the record holds of it.

    Args:
        tasks: in the order of the stream.
        k: entries to recall for a task.
        given: what memory begins with.
    """

    def __init__(
        self,
        config: EvalConfig,
        tasks: Sequence[Task],
        k: int,
        delivery: Delivery,
        out: Path,
        given: MemorySystem,
        record: EpisodeRecord,
    ) -> None:
        self.tasks, self.k, self.delivery, self.record = tasks, k, delivery, record
        self.limits, self.size = limits_of(config), config.memory.round
        self.views: Views = kept_views(config)
        self._finished = set(record.played().get(delivery.name, ()))
        if any(name == delivery.name for name, _ in record.due):  # what came after learned without them
            renew_memory(out / FOLDER / delivery.name)
        self.memory, self._seeded = grown_from(config.memory, out / FOLDER / delivery.name, given)

    def play(self, make_env: Callable[[], Environment], executor: Executor) -> None:
        """Play what is left of the stream.

        Raises:
            BankError: memory holds what the record does not account for.
        """
        done = self._restore()
        with progress(f"online {self.delivery.name}", len(self.tasks), done) as advance:
            for start in range(done, len(self.tasks), self.size):
                specs = specs_for(self.tasks[start : start + self.size], self.memory, self.k)
                played = play_round(make_env, specs, self.delivery, executor, self.limits, self.size)
                for episode in played:
                    self.record.append(episode)
                    advance(episode)
                self.memory.commit(traces_of(played, self.views))

    def _restore(self) -> int:
        """Return how many tasks are done: whole rounds, up to the first that is to be played again. What is recorded of
        later ones is dropped, and memory brought to that state."""
        own, left = self.delivery.name, (n for n, task in enumerate(self.tasks) if task.id not in self._finished)
        whole = next(left, len(self.tasks))
        done = whole if whole == len(self.tasks) else whole // self.size * self.size
        kept = {task.id for task in self.tasks[:done]}
        self.record.keep(lambda key: key[0] != own or key[1] in kept)
        there = read_episodes(self.record.lines.path) if kept else ()
        played = [episode for episode in there if episode.delivery == own and episode.task_id in kept]
        told = [traces_of(played[start : start + self.size], self.views) for start in range(0, done, self.size)]
        for traces in told:
            self.memory.commit(traces)
        known, held = self._seeded + sum(map(len, told)), self.memory.origins().total()
        if held > known:
            raise BankError(
                f"{self.memory.path} holds {held} episodes, and the record accounts for {known}: something else wrote "
                "to it. Evaluate into another folder (--out), or start anew (--on-exists overwrite)"
            )
        return done


# what a stream says -------------------------------------------------------------------------------------------------


def told_by(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Say what only a stream shows, of one delivery's episodes in the order in which they were played: success by
    quarter; of tasks whose scene and goal came before apart from the others; and further attempts, which the score
    does not know, with their tokens."""
    parts = [_success(part) for part in _parts(episodes)]
    seen, again = set[tuple[str, str]](), list[bool]()
    for episode in episodes:
        again.append((episode.scene, episode.goal) in seen)
        seen.add((episode.scene, episode.goal))
    repeats = [episode for episode, known in zip(episodes, again, strict=True) if known]
    first = [episode for episode, known in zip(episodes, again, strict=True) if not known]
    return {
        "quarters": parts,
        "first": _success(first),
        "repeats": _success(repeats),
        "retries": _retried([retry for episode in episodes for retry in episode.retries]),
    }


def _parts(episodes: Sequence[Episode]) -> list[Sequence[Episode]]:
    ends = [len(episodes) * part // PARTS for part in range(PARTS + 1)]
    return [episodes[start:end] for start, end in pairwise(ends)]


def _success(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    return asdict(wilson(sum(map(succeeded, episodes)), len(episodes))) if episodes else None


def _retried(retries: Sequence[Episode]) -> dict[str, Any]:
    steps = [step for retry in retries for step in retry.steps]
    used = {role: usage(steps, role) for role in ROLES}
    tokens = {role: used[role]["tokens_in"] + used[role]["tokens_out"] for role in ROLES}
    return {"attempts": len(retries), "solved": sum(map(succeeded, retries)), "steps": len(steps), "tokens": tokens}


def pooled(streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put streams of the same tasks in several orders into one: means, with the intervals of one stream, for the tasks
    are the same."""
    quarters = [_mean([stream["quarters"][part] for stream in streams]) for part in range(PARTS)]
    retries = [stream["retries"] for stream in streams]
    return {
        "quarters": quarters,
        **{name: _mean([stream[name] for stream in streams]) for name in ("first", "repeats")},
        "retries": {
            **{key: sum(of[key] for of in retries) for key in ("attempts", "solved", "steps")},
            "tokens": {role: sum(of["tokens"][role] for of in retries) for role in ROLES},
        },
    }


def _mean(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    n = min(part["n"] for part in there)
    return asdict(wilson(Fraction(fmean(part["mean"] for part in there)) * n, n))


def leaked(episodes: Sequence[Episode], tasks: Sequence[Task], memory: MemorySystem) -> int:
    """Count what was recalled, in an episode of `tasks` in their order, of that very task or of a later one: none, or
    the result says nothing."""
    at = {task.id: number for number, task in enumerate(tasks)}
    origins = {entry.id: entry.provenance.task_id for entry in memory}

    def recalled(episode: Episode) -> list[str]:
        shown = (episode.memory_ids if step.memory_ids is None else step.memory_ids for step in episode.steps)
        kept = [origins[id] for ids in shown for id in ids if id not in episode.made]
        return [*kept, *(entry.provenance.task_id for entry in episode.made.values())]

    return sum(at.get(origin, -1) >= at[episode.task_id] for episode in episodes for origin in recalled(episode))
