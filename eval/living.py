"""Evaluation in living worlds (`memory.protocol: living`): sequences of tasks, each in one world that is never reset,
and their metrics (KARMA, section 4.2).

Each delivery plays each world with a new memory. A system with world sessions
(`memory.protocol.SupportsWorldSessions`) provides it; episodes are committed to any other system after each task, in
OUT/worlds/DELIVERY/NUMBER. The metrics of memory follow from the record: the recorded steps are replayed through a new
memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent.deliveries import Delivery, find
from agent.episode import EpisodeSpec, run_sequences
from agent.records import Episode
from configs.evaluation import EvalConfig
from data_gen.experience import episode_traces, view_selection
from data_gen.memory_factory import open_memory_from
from envs.base import Environment, Task, TaskSequence
from envs.household.command_reader import HouseholdReader
from envs.household.observation_parser import parse_room
from eval.intervals import Interval, bootstrap_ratio, wilson
from eval.metrics import grouped, succeeded
from eval.rollouts import limits_of
from eval.runs import EpisodeRecord
from executor.records import Executor
from memory.karma.settings import KarmaSettings
from memory.karma.system import HomeMemory
from memory.karma.units import ObjectUnit
from memory.protocol import MemorySystem, ObjectLife, Query, SupportsWorldSessions, WorldSession, open_world_session
from memory.registry import MemoryTools
from runtime.progress import progress

FOLDER, ALL = "worlds", "all"
REFERENCE = "none"  # delivery that RE and RT are relative to
WARM = 0.95  # share of its capacity above which memory is warm (section 4.4)
_ORACLE = KarmaSettings(policy="unlimited", write="all_seen")


# playing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LivingEvaluation:
    """One delivery over all sequences. `initial`: memory whose copy each world starts with."""

    config: EvalConfig
    sequences: Sequence[TaskSequence]
    delivery: Delivery
    out: Path
    initial: MemorySystem
    record: EpisodeRecord

    def play(self, make_env: Callable[[], Environment], executor: Executor) -> None:
        """Play the sequences that are not recorded as a whole; an interrupted or broken sequence starts again."""
        name = self.delivery.name
        done = set(self.record.played().get(name, ()))
        left = [(n, s) for n, s in enumerate(self.sequences) if not all(task.id in done for task in s.tasks)]
        again = {task.id for _, sequence in left for task in sequence.tasks}
        self.record.keep(lambda key: key[0] != name or key[1] not in again)
        lives = {sequence.id: self._life(number, sequence) for number, sequence in left}
        of_task = {task.id: lives[sequence.id] for _, sequence in left for task in sequence.tasks}
        total, views = sum(len(sequence.tasks) for sequence in self.sequences), view_selection(self.config)
        with progress(f"living {name}", total, total - len(again)) as advance:

            def on_episode(episode: Episode) -> None:
                self.record.append(episode)
                advance(episode)
                if (life := of_task[episode.task_id]) is not None:
                    for [trace] in episode_traces([episode], views):
                        life.end(trace)

            specs = [[self._spec(task, lives[s.id]) for task in s.tasks] for _, s in left]
            limits, concurrency = limits_of(self.config), self.config.concurrency
            run_sequences(
                make_env,
                specs,
                delivery=self.delivery,
                executor=executor,
                limits=limits,
                concurrency=concurrency,
                on_episode=on_episode,
            )

    def _life(self, number: int, sequence: TaskSequence) -> WorldSession | None:
        if not find(self.delivery.name).recalls:
            return None
        if isinstance(self.initial, SupportsWorldSessions):
            return open_world_session(sequence, self.initial)
        folder = self.out / FOLDER / self.delivery.name / str(number)
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted sequence
        memory, _ = open_memory_from(self.config.memory, folder, self.config.env.name, self.initial)
        return open_world_session(sequence, memory)

    def _spec(self, task: Task, life: WorldSession | None) -> EpisodeSpec:
        if life is None:
            return EpisodeSpec(task)
        query = Query(task, find(self.delivery.name).entries(self.config.memory.k))
        return EpisodeSpec(task, (), self.initial.snapshot(), partial(life.session, query))


# metrics of a task ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubTask:
    """Outcome of one task of a sequence. A failed task counts with all of its steps, and with every place as explored.
    None: not defined for this executor or memory."""

    solved: bool
    steps: int
    stops: int | None  # explored places; None for an executor that does not report exploration
    needed: bool = False  # an earlier task moved or treated its object
    recalled: bool | None = None  # a correct unit of its object was recalled
    hit: bool | None = None  # memory held a unit of its object when the task began
    first: bool = False  # no earlier task was about its object
    warm: bool = False  # memory was warm when the task began


def sub_tasks_of(
    sequence: TaskSequence, episodes: Sequence[Episode], memory: MemorySystem | None, max_steps: int
) -> list[SubTask]:
    """Return the outcome of each task of a sequence. `memory`: what the delivery recalled from; None if it did not."""
    life = memory.life(sequence) if isinstance(memory, SupportsWorldSessions) else None
    # The oracle knows the current state of everything.
    oracle = HomeMemory(
        sequence.id, sequence.scene, _ORACLE, MemoryTools(), reader=HouseholdReader(), plan=sequence.plan
    )
    earlier, outcomes = set[str](), list[SubTask]()
    for task, episode in zip(sequence.tasks, episodes, strict=True):
        thing = task.data.get("item", "")
        needed = any(unit.type == thing and unit.source == "used" for unit in oracle.short.held())
        found = (
            _memory_metrics(life, task, thing=thing, episode=episode, oracle=oracle)
            if isinstance(life, ObjectLife)
            else {}
        )
        for step in episode.steps:
            oracle.observe(step.to_memory_record(), task)
        outcomes.append(SubTask(*_effort(episode, max_steps), needed=needed, first=thing not in earlier, **found))
        earlier.add(thing)
    return outcomes


def _effort(episode: Episode, max_steps: int) -> tuple[bool, int, int | None]:
    """Return whether the task was solved, its steps and its explored places."""
    solved = succeeded(episode)
    reports = any(step.executor_text.partition(":")[0].endswith(")") for step in episode.steps)
    explored = sum(s.executor_text.startswith("Explore(") and s.action.startswith("go to ") for s in episode.steps)
    places = len(parse_room(episode.steps[0].observation)) if episode.steps else 0
    stops = explored if solved else max(explored, places)
    return solved, len(episode.steps) if solved else max_steps, stops if reports or not episode.steps else None


def _memory_metrics(life: ObjectLife, task: Task, thing: str, episode: Episode, oracle: HomeMemory) -> dict[str, Any]:
    """Replay a task through memory; return what it held and recalled of the task's object."""
    units = life.units
    session = life.session(Query(task))
    recalled = list[ObjectUnit]()
    for t, step in enumerate(episode.steps):
        entries = session.recall(step.observation).entries
        if t == 0:
            ids = {life.unit_of(entry.id) for entry in entries}
            recalled = [unit for unit in units if unit.id in ids and unit.type == thing]
        session.observe(step.to_memory_record())
    for [trace] in episode_traces([episode]):
        life.end(trace)
    return {
        "recalled": any(_is_correct(unit, oracle) for unit in recalled) if life.shows_units else None,
        "hit": any(unit.type == thing for unit in units) if life.shows_units else None,
        "warm": len(units) > WARM * life.capacity,
    }


def _is_correct(unit: ObjectUnit, oracle: HomeMemory) -> bool:
    known = oracle.short.get(unit.id)
    return known is not None and known.place == unit.place and set(unit.states) <= set(known.states)


# summaries ------------------------------------------------------------------------------------------------------------

Columns = Mapping[str, list[Any]]  # field of `SubTask` -> its values over a sequence


def columns(sub_tasks: Sequence[SubTask]) -> dict[str, list[Any]]:
    """Convert the tasks of a sequence to columns, for JSON."""
    rows = [asdict(each) for each in sub_tasks]
    return {name: [row[name] for row in rows] for name in rows[0]}


def summarise_sequences(
    sequences: Mapping[str, Mapping[str, Any]], reference: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, dict[str, Any]]:
    """Summarise sequences (`family` and columns, by id), in all and by family: shares with Wilson intervals, ratios of
    sums with bootstrap intervals over sequences. `reference`: the same sequences without memory."""
    families = {ALL: list(sequences), **grouped(sequences, lambda id: sequences[id]["family"])}
    return {
        family: _summarise([sequences[id] for id in ids], [reference[id] for id in ids] if reference else None)
        for family, ids in families.items()
    }


def _summarise(of: Sequence[Columns], base: Sequence[Columns] | None) -> dict[str, Any]:
    share = lambda name, among: bootstrap_ratio([_count(each, name, among) for each in of])
    found: dict[str, Interval | None] = {
        "sequences": wilson(sum(all(each["solved"]) for each in of), len(of)),
        "sub_tasks": bootstrap_ratio([(sum(each["solved"]), len(each["solved"])) for each in of]),
        "mra": share("recalled", "needed"),
        "mhr": share("hit", None),
        "mhr_without_first": share("hit", "again"),
        "mhr_warm": share("hit", "warm"),
    }
    pairs = list(zip(of, base, strict=True)) if base else []
    for name, key in (("re", "stops"), ("rt", "steps")):
        found[name] = bootstrap_ratio([_saved(one, other, key, False) for one, other in pairs])
        found[f"{name}_solved"] = bootstrap_ratio([_saved(one, other, key, True) for one, other in pairs])
    return {name: value and asdict(value) for name, value in found.items()}


def _count(each: Columns, name: str, among: str | None) -> tuple[float, float]:
    """Count how often a mark is set, and among how many tasks it is defined."""
    marks = [not first for first in each["first"]] if among == "again" else each[among] if among else each[name]
    held = [held for held, mark in zip(each[name], marks, strict=True) if held is not None and (mark or not among)]
    return sum(held), len(held)


def _saved(one: Columns, other: Columns, key: str, both: bool) -> tuple[float, float]:
    """Return the amount saved against the reference, and the reference's amount; over tasks that both solved, or
    all."""
    solved = zip(one["solved"], other["solved"], strict=True)
    pairs = [
        (own, reference)
        for own, reference, (a, b) in zip(one[key], other[key], solved, strict=True)
        if own is not None and reference is not None and (not both or (a and b))
    ]
    return sum(reference - own for own, reference in pairs), sum(reference for _, reference in pairs)


def living_results(
    sequences: Sequence[TaskSequence],
    episodes: Mapping[str, Sequence[Episode]],
    memory: MemorySystem,
    max_steps: int,
) -> dict[str, dict[str, Any]]:
    """Return the entry `living` of each delivery in results.json: the summary, and the sequences behind it."""
    found = dict[str, dict[str, dict[str, Any]]]()
    for name, of_delivery in episodes.items():
        by_id = {episode.task_id: episode for episode in of_delivery}
        recalled_from = memory if find(name).recalls else None
        found[name] = {}
        for each in sequences:
            played = [by_id[task.id] for task in each.tasks]
            sub_tasks = sub_tasks_of(each, played, recalled_from, max_steps)
            found[name][each.id] = {"family": each.family, **columns(sub_tasks)}
    reference = found.get(REFERENCE)
    return {name: {"summary": summarise_sequences(of, reference), "by_sequence": of} for name, of in found.items()}


def pool_sequences(
    cells: Sequence[tuple[str, Mapping[str, Any]]], reference: Sequence[tuple[str, Mapping[str, Any]]]
) -> Any:
    """Pool the entries `living` of several cells, given with the cells' names."""
    join = lambda named: {f"{cell}/{id}": of for cell, each in named for id, of in each["by_sequence"].items()}
    return {"summary": summarise_sequences(join(cells), join(reference) or None)}
