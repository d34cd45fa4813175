"""Collection (paper C.2): a teacher plays the training tasks and leaves SFT rows.

expert    the environment's expert fills the bank first (`collect_experience`); then the teacher made from its plans
          plays with what the bank holds
endpoint  a model behind an endpoint plays while the bank grows

Both play in rounds, each recorded when it is over (`play_rounds`, `restore`), and rows come from the record
(`rows_from_record`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode
from compiler.brief_state import parse_brief_state
from compiler.language import parse
from compiler.records import Compilation, CompileRequest
from data_gen.endpoint_teacher import EndpointTeacher
from data_gen.rows import SftRow, rows_of
from envs.base import Environment, Task
from executor.grounding import Grounding
from executor.records import Executor
from memory.bank import BankError, MemoryBank
from memory.entry import MemoryEntry
from memory.trajectory import entry_from_trajectory, stated_goal
from runtime.errors import is_failure

EPISODES = "episodes.jsonl"
TOGETHER = 64  # episodes of experience that are played side by side, and that a kill may cost
Teacher = ExpertTeacher | EndpointTeacher


def experience_tasks(candidates: Sequence[Task], tasks: Sequence[Task], limit: int | None = None) -> list[Task]:
    """What fills a bank for `tasks`: of `candidates`, those in the same scenes, `limit` of them at most."""
    scenes = {task.scene for task in tasks}
    return [task for task in candidates if task.scene in scenes][:limit]


def collect_experience(
    make_env: Callable[[], Environment], tasks: Sequence[Task], bank: MemoryBank, max_steps: int = 50,
    on_episode: Callable[[Episode], None] | None = None,
) -> None:  # fmt: skip
    """The expert plays `tasks`; every episode becomes an entry (raw trajectory and why it succeeded, paper 4.1). They
    are written when the `TOGETHER` episodes of a round are over."""
    delivery, limits = Delivery("expert", "none"), Limits(max_steps)
    for start in range(0, len(tasks), TOGETHER):
        batch = tasks[start : start + TOGETHER]
        specs = [EpisodeSpec(task) for task in batch]
        episodes = run_episodes(make_env, specs, delivery, ExpertExecutor(), limits, TOGETHER, on_episode)
        bank.write(_entries(batch, _explained(episodes, ExpertTeacher(), images=False)))


def not_experienced(tasks: Sequence[Task], bank: MemoryBank) -> list[Task]:
    """Those of `tasks` of which the bank holds no episode yet."""
    known = bank.origins()
    return [task for task in tasks if (task.id, task.split) not in known]


def specs_for(tasks: Sequence[Task], bank: MemoryBank, k: int) -> list[EpisodeSpec]:
    """M = Retrieve(bank, goal) for every task, without entries of the task itself; the bank's version goes along.

    Entries stand in the order of their ids (hashes), not of their rank: the right one usually ranks first, and a place
    in the prompt that gives it away would make reading the entries unnecessary, for every delivery alike.
    """
    version = bank.snapshot()
    found = bank.retrieve_many(tasks, k) if k else [[] for _ in tasks]
    ordered = [tuple(sorted(entries, key=lambda entry: entry.id)) for entries in found]
    return [EpisodeSpec(task, entries, version) for task, entries in zip(tasks, ordered, strict=True)]


# -- rounds -----------------------------------------------------------------------------------------------------------


class RecordError(ValueError):
    """A record of episodes that does not belong to this collection. The message names the next step."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The bank stays as it is within a round, and grows between rounds if at all, so that the result does not depend on
    which episode ends first.

    Attributes:
        size: tasks of a round, which are played side by side.
        k: entries retrieved for a task.
        seeded: entries that the bank held before the first round.
        grows: every round's episodes go to the bank, each with why it went so.
    """

    size: int
    k: int
    limits: Limits
    seeded: int
    grows: bool


def shard_of(tasks: Sequence[Task], shard: str) -> list[Task]:
    """Tasks i, i + n, i + 2n, ... of shard "i/n" (i from 0): all shards together have each task once.

    Raises:
        ValueError: none are left for it.
    """
    i, n = map(int, shard.split("/"))
    if not (mine := list(tasks[i::n])):
        raise ValueError(f"shard {shard} of {len(tasks)} tasks is empty: choose fewer shards")
    return mine


def play_rounds(
    make_env: Callable[[], Environment], tasks: Sequence[Task], bank: MemoryBank,
    teacher: Teacher, executor: Executor, rounds: Rounds, record: Path, done: int = 0,
    on_episode: Callable[[Episode], None] | None = None,
) -> None:  # fmt: skip
    """Play what `record` does not hold yet. A round is recorded when all of it is over, and then goes to a bank that
    grows: a killed run plays at most one round again, in which every model call that was answered comes from the cache.

    Args:
        done: tasks that are played already, as `restore` says.

    Raises:
        EndpointStop: a budget is spent, or an endpoint is gone. All whole rounds are kept.
    """
    delivery = Delivery("teacher", "compiled", teacher, soft=False)
    for start in range(done, len(tasks), rounds.size):
        batch = tasks[start : start + rounds.size]
        specs = specs_for(batch, bank, rounds.k)
        episodes = run_episodes(make_env, specs, delivery, executor, rounds.limits, rounds.size, on_episode)
        rows = _explained(episodes, teacher)
        _append(record, rows)
        if rounds.grows:
            bank.write(_entries(batch, rows))


def restore(record: Path, tasks: Sequence[Task], bank: MemoryBank, rounds: Rounds) -> int:
    """How many tasks are done. Cuts the record behind its last whole round and brings the bank to that state.

    Raises:
        RecordError, BankError: they are of another collection.
    """
    rows, ends = _whole_lines(record, tasks)
    done = len(rows) if len(rows) == len(tasks) else len(rows) // rounds.size * rounds.size
    if record.exists():
        os.truncate(record, ends[done])
    if not rounds.grows:
        return done
    entries = _entries(tasks[:done], rows[:done])
    bank.write(entries)
    if len(bank) > rounds.seeded + len(entries):
        raise BankError(
            f"{bank.path} holds {len(bank)} entries, and {record} accounts for {len(entries)} only: something else "
            "wrote to it. Collect into another folder (--out), or start this one over (--on-exists overwrite)"
        )
    return done


def rows_from_record(
    episodes: Iterable[Episode], bank: MemoryBank, own_label: bool
) -> tuple[list[SftRow], list[Episode]]:
    """Rows of recorded episodes (pictures included), and the episodes without their pictures."""
    entries = {entry.id: entry for entry in bank}
    rows, kept = [], []
    for episode in episodes:
        rows += sound_rows(_with_requests(episode, entries), own_label)
        for step in episode.steps:
            step.image = step.compilation = None
        kept.append(episode)
    return rows, kept


def sound_rows(episode: Episode, own_label: bool) -> list[SftRow]:
    """One row per step, without those whose emission could not be read, or not be applied to the Brief State.

    Args:
        own_label: the action to learn is what was done (a model acted: a step whose answer fits no command gives no
            row), not what the expert says.
    """
    steps = {step.t: step for step in episode.steps}
    flawed = {t for t, step in steps.items() if step.parse_error or step.op_errors}
    if own_label:
        flawed |= {t for t, step in steps.items() if step.grounding == Grounding.FAILED}
    rows = [row for row in rows_of(episode) if row.t not in flawed]
    return [replace(row, action=steps[row.t].action) for row in rows] if own_label else rows


def _with_requests(episode: Episode, entries: Mapping[str, MemoryEntry]) -> Episode:
    """What the teacher was asked at each step, from the record: as it stood when the episode was played."""
    goal, history = stated_goal(episode.goal, episode.scene), []
    memory = tuple(entries[id] for id in episode.memory_ids)
    for step in episode.steps:
        if step.emission_kind:  # "" where the teacher gave no answer
            state = parse_brief_state(step.brief_before)
            request = CompileRequest(goal, memory, state, step.observation, step.image, tuple(history))
            step.compilation = Compilation(step.emission_text, parse(step.emission_text).emission, request=request)
        history.append(step.action)
    return episode


def _explained(episodes: Sequence[Episode], teacher: Teacher, images: bool = True) -> list[dict[str, Any]]:
    """Episodes ready for JSON, each with why it went so."""
    told = [episode for episode in episodes if not is_failure(episode.stop_reason)]
    whys = dict(zip(map(id, told), teacher.rationales(told), strict=True))
    return [episode.to_json(images=images) | {"rationale": whys.get(id(episode), "")} for episode in episodes]


def _entries(tasks: Sequence[Task], rows: Sequence[Mapping[str, Any]]) -> list[MemoryEntry]:
    """What episodes leave in memory: failures, too, but not those of endpoint or environment, which teach nothing."""
    entries = []
    for task, row in zip(tasks, rows, strict=True):
        if is_failure(row["stop_reason"]):
            continue
        actions = [step["action"] for step in row["steps"]]
        feedback = [step["feedback"] for step in row["steps"]]
        entries.append(entry_from_trajectory(task, actions, feedback, row["success"], row["rationale"]))
    return entries


def _append(record: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """They are on disk when this returns."""
    with record.open("ab") as file:
        for row in rows:
            file.write(json.dumps(row).encode("ascii") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(record: Path, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a record, without pictures, and the bytes before each and behind the last."""
    rows, ends = [], [0]
    if not record.exists():
        return rows, ends
    with record.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # a write that was cut short
                break
            row = json.loads(line)
            for step in row["steps"]:
                step["image"] = None
            if len(rows) == len(tasks) or row["task_id"] != tasks[len(rows)].id:
                raise RecordError(
                    f"{record}, line {len(rows) + 1}: the episode of {row['task_id']!r} is not the one that this "
                    "collection would have played; collect into another folder (--out)"
                )
            rows.append(row)
            ends.append(ends[-1] + len(line))
    return rows, ends
