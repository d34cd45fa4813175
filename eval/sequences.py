"""Evaluation in living worlds (`memory.protocol: living`): the split's sequences of tasks, each in one world that is
never reset, and what is counted of them (KARMA, section 4.2).

Each delivery lives in each world anew. A system with a memory for living in one (`memory.protocol.Lasting`) has it; any
other is committed to after each task, in OUT/worlds/DELIVERY/NUMBER, a memory of this world alone. What memory held and
recalled follows from the record: it is told of the recorded steps once more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agent.deliveries import Delivery, DeliverySpec
from agent.episode import EpisodeSpec, run_sequences
from agent.records import Episode
from configs.evaluation import EvalConfig
from data_gen.experience import kept_views, traces_of
from data_gen.memories import grown_from
from envs.base import Environment, Task, TaskSequence
from envs.household.telling import room
from eval.intervals import LEVEL, Interval, wilson
from eval.metrics import grouped, succeeded
from eval.players import limits_of
from eval.runs import EpisodeRecord
from executor.records import Executor
from memory.karma.settings import KarmaSettings
from memory.karma.system import Home, Karma, KarmaLife, object_of
from memory.karma.units import Unit
from memory.protocol import Lasting, Life, MemorySystem, Query, life_in
from memory.registry import Tools
from runtime.progress import progress

FOLDER, REFERENCE, ALL = "worlds", "none", "all"  # the second: the delivery that efficiency is told against
WARM = 0.95  # share of the capacity from which on memory is warmed up (section 4.4)
RESAMPLES = 2_000
_ORACLE = KarmaSettings(policy="unlimited", write="all_seen")


# played ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worlds:
    """One delivery's way through all sequences."""

    config: EvalConfig
    sequences: Sequence[TaskSequence]
    wanted: DeliverySpec
    delivery: Delivery
    out: Path
    given: MemorySystem
    record: EpisodeRecord

    def play(self, make_env: Callable[[], Environment], executor: Executor) -> None:
        """Play the sequences that the record does not hold whole; one that a kill cut short, or in which an episode
        broke, begins again."""
        done = set(self.record.played().get(self.wanted.name, ()))
        left = [(n, s) for n, s in enumerate(self.sequences) if not all(task.id in done for task in s.tasks)]
        again = {task.id for _, sequence in left for task in sequence.tasks}
        self.record.keep(lambda key: key[0] != self.wanted.name or key[1] not in again)
        lives = {sequence.id: self._life(number, sequence) for number, sequence in left}
        of_task = {task.id: lives[sequence.id] for _, sequence in left for task in sequence.tasks}
        total, views = sum(len(sequence.tasks) for sequence in self.sequences), kept_views(self.config)
        with progress(f"living {self.delivery.name}", total, total - len(again)) as advance:

            def on_episode(episode: Episode) -> None:
                self.record.append(episode)
                advance(episode)
                for [trace] in traces_of([episode], views) if of_task[episode.task_id] else ():
                    of_task[episode.task_id].end(trace)  # type: ignore[union-attr]

            specs = [[self._spec(task, lives[s.id]) for task in s.tasks] for _, s in left]
            limits = limits_of(self.config)
            run_sequences(make_env, specs, self.delivery, executor, limits, self.config.concurrency, on_episode)

    def _life(self, number: int, sequence: TaskSequence) -> Life | None:
        if not self.wanted.recalls:
            return None
        if isinstance(self.given, Lasting):
            return life_in(sequence, self.given)
        folder = self.out / FOLDER / self.wanted.name / str(number)
        shutil.rmtree(folder, ignore_errors=True)  # of a world that was left in the middle
        memory, _ = grown_from(self.config.memory, folder, self.given)
        return life_in(sequence, memory)

    def _spec(self, task: Task, life: Life | None) -> EpisodeSpec:
        if life is None:
            return EpisodeSpec(task)
        k = min(1, self.config.memory.k) if self.wanted.memory == "top" else self.config.memory.k
        return EpisodeSpec(task, (), self.given.snapshot(), partial(life.session, Query(task, k)))


# counted --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubTask:
    """What one task of a sequence shows. A task that failed counts with all its steps, and as if every place had been
    explored. None: there is nothing to be told."""

    solved: bool
    steps: int
    stops: int | None  # places that were explored; None for an executor that does not say
    needed: bool = False  # its thing was moved or treated in an earlier task
    recalled: bool | None = None  # a true unit of it was recalled
    hit: bool | None = None  # a unit of it was held as the task began
    first: bool = False  # no earlier task was about it
    warm: bool = False  # memory was warmed up then


def judged(
    sequence: TaskSequence, episodes: Sequence[Episode], memory: MemorySystem | None, most: int
) -> list[SubTask]:
    """Count what the tasks of a sequence show. `memory`: what the delivery recalled from, if it did; `most`: the steps
    that a task was given."""
    life = memory.life(sequence) if isinstance(memory, Karma) else None
    oracle, asked, made = (
        Home(sequence.id, sequence.scene, _ORACLE, Tools(), sequence.plan),
        set[str](),
        list[SubTask](),
    )
    for task, episode in zip(sequence.tasks, episodes, strict=True):
        thing = task.data.get("item", "")
        known = [unit for unit in oracle.short.held() if unit.type == thing and unit.source == "used"]
        about: dict[str, Any] = {"needed": bool(known), "first": thing not in asked}
        if life is not None:
            about |= _remembered(life, task, thing, episode, oracle)
        for step in episode.steps:
            oracle.observe(step.told(), task)
        asked.add(thing)
        made.append(SubTask(*_effort(episode, most), **about))
    return made


def _effort(episode: Episode, most: int) -> tuple[bool, int, int | None]:
    solved = succeeded(episode)
    says = any(step.executor_text.partition(":")[0].endswith(")") for step in episode.steps)
    explored = sum(s.executor_text.startswith("Explore(") and s.action.startswith("go to ") for s in episode.steps)
    places = len(room(episode.steps[0].observation)) if episode.steps else 0
    stops = explored if solved else max(explored, places)
    return solved, len(episode.steps) if solved else most, stops if says or not episode.steps else None


def _remembered(life: KarmaLife, task: Task, thing: str, episode: Episode, oracle: Home) -> dict[str, bool | None]:
    """Have memory live through a task once more; say what of its thing was held and recalled."""
    units, settings = life.home.short.held(), life.home.settings
    session = life.session(Query(task))
    recalled = list[Unit]()
    for t, step in enumerate(episode.steps):
        entries = session.recall(step.observation).entries
        if t == 0:
            ids = {object_of(entry.id) for entry in entries}
            recalled = [unit for unit in units if unit.id in ids and unit.type == thing]
        session.observe(step.told())
    for [trace] in traces_of([episode]):
        life.end(trace)
    true = [unit for unit in recalled if _agrees(unit, oracle)]
    return {
        "recalled": bool(true) if settings.short else None,
        "hit": any(unit.type == thing for unit in units) if settings.short else None,
        "warm": len(units) > WARM * settings.capacity,
    }


def _agrees(unit: Unit, oracle: Home) -> bool:
    known = oracle.short.get(unit.id)
    return known is not None and known.place == unit.place and set(unit.states) <= set(known.states)


# told -----------------------------------------------------------------------------------------------------------------

Columns = Mapping[str, list[Any]]  # of a sequence's sub-tasks, by field
METRICS = (
    "sequences",
    "sub_tasks",
    "mra",
    "mhr",
    "mhr_without_first",
    "mhr_warm",
    "re",
    "rt",
    "re_solved",
    "rt_solved",
)


def columns(sub_tasks: Sequence[SubTask]) -> dict[str, list[Any]]:
    """Turn the sub-tasks of a sequence into lists, for JSON."""
    rows = [asdict(each) for each in sub_tasks]
    return {name: [row[name] for row in rows] for name in rows[0]}


def told(
    found: Mapping[str, Mapping[str, Any]], reference: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, dict[str, Any]]:
    """Summarise sequences (`family` and columns, by id) in all and by family: shares with Wilson's intervals, ratios of
    sums with bootstrap intervals over sequences. `reference`: the same sequences without memory."""
    families = {ALL: list(found), **grouped(found, lambda id: found[id]["family"])}
    return {
        family: _summary([found[id] for id in ids], [reference[id] for id in ids] if reference else None)
        for family, ids in families.items()
    }


def _summary(of: Sequence[Columns], base: Sequence[Columns] | None) -> dict[str, Any]:
    share = lambda name, among: ratio([_counted(each, name, among) for each in of])
    made: dict[str, Interval | None] = {
        "sequences": wilson(sum(all(each["solved"]) for each in of), len(of)),
        "sub_tasks": ratio([(sum(each["solved"]), len(each["solved"])) for each in of]),
        "mra": share("recalled", "needed"),
        "mhr": share("hit", None),
        "mhr_without_first": share("hit", "again"),
        "mhr_warm": share("hit", "warm"),
    }
    for name, key in (("re", "stops"), ("rt", "steps")):
        pairs = list(zip(of, base, strict=True)) if base else []
        made[name] = ratio([_saved(one, other, key, False) for one, other in pairs])
        made[f"{name}_solved"] = ratio([_saved(one, other, key, True) for one, other in pairs])
    return {name: value and asdict(value) for name, value in made.items()}


def _counted(each: Columns, name: str, among: str | None) -> tuple[float, float]:
    """Count how often something held, and how often it was asked for."""
    marks = [not first for first in each["first"]] if among == "again" else each[among] if among else each[name]
    told = [held for held, mark in zip(each[name], marks, strict=True) if held is not None and (mark or not among)]
    return sum(told), len(told)


def _saved(one: Columns, other: Columns, key: str, both: bool) -> tuple[float, float]:
    """Return what was saved against the reference, and what that took; over tasks that `both` solved, or all."""
    solved = zip(one["solved"], other["solved"], strict=True)
    pairs = [
        (mine, theirs)
        for mine, theirs, (a, b) in zip(one[key], other[key], solved, strict=True)
        if mine is not None and theirs is not None and (not both or (a and b))
    ]
    return sum(theirs - mine for mine, theirs in pairs), sum(theirs for _, theirs in pairs)


def ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval | None:
    """Divide a sum by a sum, with its percentile bootstrap interval over the pairs; None where the divisor is zero."""
    above, below = (np.array(side, dtype=float) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
    if not below.sum():
        return None
    picks = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    sums = below[picks].sum(1)
    ratios = above[picks].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(above.sum() / below.sum()), float(low), float(high), len(pairs), float(ratios.std()))


def living(
    sequences: Sequence[TaskSequence],
    episodes: Mapping[str, Sequence[Episode]],
    memories: Mapping[str, MemorySystem],
    most: int,
) -> dict[str, dict[str, Any]]:
    """Say of each delivery what results.json holds of living worlds: the summary, and the sequences behind it."""
    found = dict[str, dict[str, dict[str, Any]]]()
    for name, of_delivery in episodes.items():
        by_id = {episode.task_id: episode for episode in of_delivery}
        found[name] = {
            s.id: {"family": s.family, **columns(judged(s, [by_id[t.id] for t in s.tasks], memories.get(name), most))}
            for s in sequences
        }
    return {name: {"summary": told(of, found.get(REFERENCE)), "by_sequence": of} for name, of in found.items()}


def pooled(members: Sequence[tuple[str, Mapping[str, Any]]], reference: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
    """Put what several cells say of living worlds into one; each with a name that keeps its sequences apart."""
    join = lambda cells: {f"{cell}/{id}": of for cell, each in cells for id, of in each["by_sequence"].items()}
    return {"summary": told(join(members), join(reference) or None)}
