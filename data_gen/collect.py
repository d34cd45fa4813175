"""Collection (paper C.2): a teacher plays the training tasks and leaves SFT rows.

expert    the environment's expert fills the bank first (`data_gen.experience`); then the teacher made from its plans
          plays with what the bank holds
endpoint  a model behind an endpoint plays while the bank grows

Both play in rounds, each recorded when it is over, and rows come from the record. `prepare` says what is to be played,
`play` plays what the record does not hold yet (`data_gen.crew`: workers do), `write_rows` makes the rows and what goes
with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.deliveries import Delivery
from agent.episode import Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.gated_teacher import GatedTeacher
from agent.records import Episode, episode_from_json, read_episodes
from configs.collect import CollectConfig
from configs.run_folder import RunFolder
from data_gen.dataset import describe_rows, filtered
from data_gen.endpoint_teacher import EndpointTeacher
from data_gen.experience import ROUND, Views, bank_facts, explain, filled_bank, kept_views, traces_of
from data_gen.lifetime import play_round
from data_gen.memories import growing_memory, renew_memory
from data_gen.rows import SftRow, rows_of, save_rows
from data_gen.tasks import guarded_tasks, specs_for
from envs.base import Environment, Task
from envs.registry import Environments, executor_told
from executor.records import Executor, Grounding
from memory.entry import MemoryEntry
from memory.protocol import BankError, Kept, MemorySystem
from runtime.attempts import ATTEMPTS, Attempts, broken_facts, broken_line
from runtime.errors import is_failure
from runtime.progress import progress
from runtime.store import JsonLines, RecordError, to_json

EPISODES = "episodes.jsonl"
ENDPOINT_ROUND = 16  # tasks of an endpoint's round, where settings do not say: its bank grows after each
Teacher = ExpertTeacher | EndpointTeacher
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Collection:
    """What is to be played. The bank stays as it is within a round, and grows between rounds if at all, so that the
    result does not depend on which episode ends first."""

    tasks: Sequence[Task]
    bank: MemorySystem
    record: Path  # file of the episodes, in the order of `tasks`; where the bank grows, whole rounds at a time
    size: int  # tasks of a round, which are played side by side
    k: int  # entries retrieved for a task
    limits: Limits
    brief_state: bool  # whether the teacher has one
    sparing: float  # share of the episodes in which only what is guided changes it
    seeded: int  # episodes that a bank which grows held before the first round
    grows: bool  # every round's episodes go to the bank, each with why it went so
    views: Views  # that their entries keep
    attempts: int = ATTEMPTS  # at an episode that machinery breaks, over all resumes

    def rows(self) -> Attempts[str]:
        """Open the record, by task."""
        return open_record(self.record, self.attempts)


def open_record(path: Path, attempts: int) -> Attempts[str]:
    """Open a collection's episodes by task; the caller loads them."""
    return Attempts(JsonLines(path, ("task_id", "steps", "stop_reason")), itemgetter("task_id"), attempts)


# -- what is played ---------------------------------------------------------------------------------------------------


def prepare(config: CollectConfig, envs: Environments, run: RunFolder) -> Collection:
    """Choose tasks, check that they share nothing with evaluation, and have a bank ready for them.

    Raises:
        ConfigError: they would leak. Nothing has been played then.
        ValueError: there are no tasks, or none for this shard.
    """
    grows = config.teacher == "endpoint"
    tasks, experience = guarded_tasks(config, envs, run, experienced=not grows)
    first, step = map(int, config.shard.split("/"))
    if not (mine := tasks[first::step]):
        raise ValueError(f"shard {config.shard} of {len(tasks)} tasks is empty: choose fewer shards")
    record = run.path / EPISODES
    if grows:
        (rows := open_record(record, config.episode_attempts)).load()
        if rows.due:  # what came after learned without them
            renew_memory(run.path / "bank")
        bank, seeded = growing_memory(config.memory, run.path / "bank")
    else:
        bank, seeded = filled_bank(config, envs, experience, run.path), 0
    size = config.concurrency or (ENDPOINT_ROUND if grows else ROUND)
    limits = Limits(config.max_steps, config.seed)
    views = kept_views(config)
    k, states = config.memory.k, (config.brief_state, config.sparing)
    return Collection(mine, bank, record, size, k, limits, *states, seeded, grows, views, config.episode_attempts)


# -- rounds -----------------------------------------------------------------------------------------------------------


def play(of: Collection, make_env: Callable[[], Environment], teacher: Teacher, actor: Executor) -> None:
    """Play what the record does not hold yet, here. A round is recorded when all of it is over, and then goes to a bank
    that grows: a killed run plays at most one round again, in which every model call that was answered comes from the
    cache. Broken episodes are played again once per call, up to `of.attempts` times in all; where the bank grows, with
    all rounds from theirs on, which learned without them.

    Raises:
        EndpointStop: a budget is spent, or an endpoint is gone. All whole rounds are kept.
        RecordError, BankError: record or bank are of another collection.
    """
    (record, left), delivery = what_is_left(of), taught(teacher, of.brief_state, of.sparing)
    rounds = play_round if of.grows else run_episodes  # with further attempts where there is something that learns
    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:
        for start in range(0, len(left), of.size):
            specs = specs_for(left[start : start + of.size], of.bank, of.k)
            episodes = rounds(make_env, specs, delivery, actor, of.limits, of.size, advance)
            explain(episodes, teacher)
            record.add((episode.task_id, line_of(episode)) for episode in episodes)
            if of.grows:
                of.bank.commit(traces_of(episodes, of.views))
    arrange(record, of)


def taught(teacher: Teacher, brief_state: bool, sparing: float = 0.0) -> Delivery:
    """Return the delivery under which a teacher plays."""
    compiler = GatedTeacher(teacher, sparing) if sparing else teacher
    return Delivery("teacher", "compiled", compiler, soft=False, brief_state=brief_state)


def expert_actor(config: CollectConfig) -> ExpertExecutor:
    """Return who acts where the expert teaches: the expert, on what its teacher says."""
    return ExpertExecutor(config.noise, config.seed, obeys=True)


def line_of(episode: Episode) -> str:
    """Write an episode as the record holds it."""
    return to_json(episode.to_json(images=True), ascii=True)


def what_is_left(of: Collection) -> tuple[Attempts[str], list[Task]]:
    """Return the record, and the tasks whose episodes it does not hold, or holds broken with attempts left. Raises:
    RecordError, BankError: it is of another collection, or the bank that grew with it."""
    record = of.rows()
    done = set([task.id for task in of.tasks[: restore(of, record)]] if of.grows else _recorded(of, record))
    if done or record.due:
        again = f", {len(record.due)} broken ones are played again" if record.due else ""
        console.print(f"  resumed at task {len(done)} of {len(of.tasks)}{again}")
    return record, [task for task in of.tasks if task.id not in done]


def arrange(record: Attempts[str], of: Collection) -> None:
    """Drop the attempts that were replaced, and put the record in the order of the tasks."""
    order = {task.id: number for number, task in enumerate(of.tasks)}
    record.load()
    record.lines.arrange(lambda row: order[row["task_id"]])


def _recorded(of: Collection, record: Attempts[str]) -> set[str]:
    """Return the ids of the tasks that are done, in whatever order."""
    known, done = {task.id for task in of.tasks}, set[str]()
    record.lines.drop_torn_line()
    for number, id in enumerate(record.load()):
        if id not in known or id in done:
            raise _of_another(of, number, id)
        done.add(id)
    return done


def _of_another(of: Collection, number: int, id: str) -> RecordError:
    return RecordError(
        f"{of.record}, line {number + 1}: the episode of {id!r} is not the one that this collection would have played; "
        "collect into another folder (--out)"
    )


def restore(of: Collection, record: Attempts[str]) -> int:
    """Return how many tasks are done whose episodes a growing bank has learned from: whole rounds, up to the first that
    is to be played again. Cut the record there and bring the bank to that state.

    Raises:
        RecordError, BankError: they are of another collection.
    """
    finished = _recorded(of, record)
    whole = next((n for n, task in enumerate(of.tasks) if task.id not in finished), len(of.tasks))
    beyond = next((task.id for task in of.tasks[whole:] if task.id in finished), None)
    if beyond and not record.due:
        raise _of_another(of, whole, beyond)
    done = whole if whole == len(of.tasks) else whole // of.size * of.size
    kept = {task.id for task in of.tasks[:done]}
    record.keep(kept.__contains__)
    learned = (episode_from_json(row) for row in record.lines if row["task_id"] in kept)
    traces = [attempts for episode in learned for attempts in traces_of([episode], of.views)]
    of.bank.commit(traces)
    if (held := of.bank.origins().total()) > of.seeded + len(traces):
        raise BankError(
            f"{of.bank.path} holds {held} episodes, and {of.record} accounts for {len(traces)} only: something else "
            "wrote to it. Collect into another folder (--out), or start this one over (--on-exists overwrite)"
        )
    return done


# -- rows -------------------------------------------------------------------------------------------------------------


def write_rows(
    config: CollectConfig, of: Collection, run: RunFolder, facts: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Make rows of what was played, and write them with their statistics and card; last, collect.json says that the
    collection is whole. Returns what it says, `facts` among it, and a line about broken episodes ("": there are none).
    Raises: ValueError, where there are no rows."""
    listed = executor_told(config.env).lists_commands
    steps, episodes = rows_from_record(read_episodes(of.record), of.bank, config.acts != "expert", listed)
    if not of.brief_state:
        steps = [replace(row, state="") for row in steps]
    outcomes = [(e.task_id, e.failure, e.broken) for e in episodes]
    broken, broke = broken_facts(outcomes), broken_line(outcomes, of.attempts, "episode_attempts")
    if all(is_failure(episode.stop_reason) for episode in episodes):
        raise ValueError(f"there is nothing to make rows of: {broke}")
    rows, dropped = filtered(steps, config)
    if broke and not rows:
        raise ValueError(f"there are no rows to save, and {broke}")
    save_rows(rows, run.path / "rows")
    played = [step for episode in episodes for step in episode.steps]
    summary = {
        "tasks": len(of.tasks),
        "episodes": len(episodes),
        "successes": sum(e.success for e in episodes),
        "success_filter": success_filter(config),
        "shard": config.shard,
        "rows": len(rows),
        "dropped": dropped,
        **bank_facts(config, of.bank),
        "stop_reasons": _counts(str(episode.stop_reason) for episode in episodes),
        "broken": broken,
        "emissions": _counts(step.emission_kind for step in played),
        "malformed": sum(step.parse_error is not None for step in played),
        "misapplied": sum(bool(step.op_errors) for step in played),
        **facts,
    }
    describe_rows(run, rows, summary)
    run.write_json("collect.json", summary)
    return summary, broke


def rows_from_record(
    episodes: Iterable[Episode], bank: Iterable[MemoryEntry], own_label: bool, commands: bool = False
) -> tuple[list[SftRow], list[Episode]]:
    """Make rows of recorded episodes (pictures included) that did not break; return these and all episodes without
    their pictures."""
    entries = {entry.id: entry for entry in bank}
    rows, kept = [], []
    for episode in episodes:
        if not is_failure(episode.stop_reason):
            rows += sound_rows(episode, entries, own_label, commands)
        for step in episode.steps:
            step.image = None
        kept.append(episode)
    return rows, kept


def sound_rows(episode: Episode, kept: Kept, own_label: bool, commands: bool = False) -> list[SftRow]:
    """Make one row per step, without those whose emission could not be read, or not be applied to the Brief State.

    Args:
        own_label: the action to learn is what was done (a model acted: a step whose answer fits no command gives no
            row), not what the expert says.
        commands: rows hold the possible commands, for executors that are shown them.
    """
    steps = {step.t: step for step in episode.steps}
    flawed = {t for t, step in steps.items() if step.parse_error or step.op_errors}
    if own_label:
        flawed |= {t for t, step in steps.items() if step.grounding == Grounding.FAILED}
    rows = [row for row in rows_of(episode, kept, commands) if row.t not in flawed]
    return [replace(row, action=steps[row.t].action) for row in rows] if own_label else rows


def success_filter(config: CollectConfig) -> str:
    """Say what it means that an episode succeeded: nothing, where the expert acts whatever an endpoint says."""
    if config.teacher == "expert":
        return "says little of the teacher: the environment's expert acts, on guidance where that is a command"
    if config.acts == "expert":
        return "says nothing of the teacher: the environment's expert acts, whatever is compiled"
    acts = "the teacher's model" if config.acts == "teacher" else "the executor"
    kept = "rows are of these episodes only" if config.successful_only else "rows are of all episodes"
    return f"{acts} acted on what was compiled; {kept}"


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
