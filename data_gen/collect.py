"""Collection of SFT rows (paper C.2): a teacher plays the training tasks.

expert    the environment's expert first fills the bank (`data_gen.experience`); then the expert teacher plays with it
endpoint  a model behind an endpoint plays while the bank grows

Both play in rounds; each finished round is recorded. `plan_collection` selects tasks and bank,
`play_collection` plays the tasks that the record lacks (on Ray: `data_gen.ray_collect`), and `write_rows` converts the
record into rows, statistics and a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.command_teacher import CommandTeacher, Teaching, load_teacher
from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.gated_teacher import GatedTeacher
from agent.records import Episode, episode_from_json, read_episodes
from configs.collect import CollectConfig, MemoryConfig
from configs.run_folder import RunFolder
from data_gen.dataset import describe_rows, filter_rows
from data_gen.endpoint_teacher import EndpointTeacher
from data_gen.experience import (
    ROUND,
    ViewSelection,
    add_rationales,
    bank_facts,
    episode_traces,
    open_experience_bank,
    view_selection,
)
from data_gen.first_states import first_state_rows
from data_gen.memory_factory import clear_memory, open_growing_memory
from data_gen.recall_mix import RecallMix, recall_mix
from data_gen.rounds import play_round
from data_gen.rows import SftRow, episode_rows, save_rows
from data_gen.tasks import select_isolated_tasks
from envs.base import Environment, Task
from envs.registry import Environments, command_reader_for, executor_instructions_for
from executor.records import Executor, Grounding
from memory.protocol import BankError, EntryStore, MemorySystem
from runtime.attempts import ATTEMPTS, RetriedResults, failure_counts, failure_summary
from runtime.errors import is_failure
from runtime.progress import progress
from runtime.store import JsonLines, RecordError, to_json

EPISODES = "episodes.jsonl"
ENDPOINT_ROUND = 16  # default number of tasks in an endpoint's round, after which its bank grows
Teacher = ExpertTeacher | CommandTeacher | EndpointTeacher
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """The tasks of a collection, their bank and their settings.

    The bank grows only between rounds, so results do not depend on which episode ends first.
    """

    tasks: Sequence[Task]
    bank: MemorySystem
    record: Path  # file of the episodes, in the order of `tasks`
    size: int  # tasks of a round, played concurrently
    memory: MemoryConfig  # says how entries are retrieved
    mix: RecallMix  # says what each task may recall
    limits: EpisodeLimits
    brief_state: bool  # the teacher has a Brief State
    gated_teacher: float  # share of the episodes in which only guided steps change it
    seeded: int  # episodes that a growing bank held before the first round
    grows: bool  # commit every round's episodes to the bank
    views: ViewSelection  # selects the pictures of their entries
    attempts: int = ATTEMPTS  # at a broken episode, over all resumes


def open_record(path: Path, attempts: int) -> RetriedResults[str]:
    """Open a collection's record by task id, without loading it."""
    return RetriedResults(JsonLines(path, ("task_id", "steps", "stop_reason")), itemgetter("task_id"), attempts)


# -- tasks and bank ----------------------------------------------------------------------------------------------------


def plan_collection(config: CollectConfig, envs: Environments, run: RunFolder) -> CollectionPlan:
    """Select tasks, check them for leakage, and open their bank.

    Raises:
        ConfigError: the tasks leak into evaluation.
        ValueError: there are no tasks, or none for this shard.
    """
    grows = config.teacher == "endpoint"
    tasks, experience = select_isolated_tasks(config, envs, run, experienced=not grows)
    first, step = map(int, config.shard.split("/"))
    if not (mine := tasks[first::step]):
        raise ValueError(f"shard {config.shard} of {len(tasks)} tasks is empty: choose fewer shards")
    record = run.path / EPISODES
    if grows:
        (rows := open_record(record, config.episode_attempts)).load()
        if rows.due:  # later rounds learned without these episodes
            clear_memory(run.path / "bank")
        bank, seeded = open_growing_memory(config.memory, run.path / "bank", config.env.name)
    else:
        bank, seeded = open_experience_bank(config, envs, experience, run.path), 0
    size = config.concurrency or (ENDPOINT_ROUND if grows else ROUND)
    limits = EpisodeLimits(config.max_steps, config.seed)
    views = view_selection(config)
    return CollectionPlan(
        mine,
        bank,
        record,
        size=size,
        memory=config.memory,
        mix=recall_mix(config),
        limits=limits,
        brief_state=config.brief_state,
        gated_teacher=config.gated_teacher,
        seeded=seeded,
        grows=grows,
        views=views,
        attempts=config.episode_attempts,
    )


# -- rounds ------------------------------------------------------------------------------------------------------------


def play_collection(of: CollectionPlan, make_env: Callable[[], Environment], teacher: Teacher, actor: Executor) -> None:
    """Play the tasks that the record lacks, in this process.

    Each finished round is recorded and then committed to a growing bank, so a kill costs at most one round, whose
    answered model calls are cached. Broken episodes are played again once per call, up to `of.attempts` times; with a
    growing bank, so are all later rounds.

    Raises:
        EndpointStop: a budget is spent, or an endpoint is gone. Finished rounds are stored.
        RecordError, BankError: record or bank belong to another collection.
    """
    (record, left), delivery = remaining_tasks(of), teacher_delivery(teacher, of.brief_state, of.gated_teacher)
    rounds = play_round if of.grows else run_episodes  # a growing bank may want retries
    with progress("teacher", len(of.tasks), len(of.tasks) - len(left)) as advance:
        for start in range(0, len(left), of.size):
            specs = of.mix.specs(left[start : start + of.size], of.bank, of.memory)
            episodes = rounds(
                make_env,
                specs,
                delivery=delivery,
                executor=actor,
                limits=of.limits,
                concurrency=of.size,
                on_episode=advance,
            )
            add_rationales(episodes, teacher)
            record.add((episode.task_id, serialise_episode(episode)) for episode in episodes)
            if of.grows:
                of.bank.commit(episode_traces(episodes, of.views))
    sort_record(record, of)


def teacher_delivery(teacher: Teacher, brief_state: bool, gated_teacher: float = 0.0) -> Delivery:
    """Return the delivery with a teacher as compiler."""
    compiler = GatedTeacher(teacher, gated_teacher) if gated_teacher else teacher
    return Delivery("teacher", "compiled", compiler, soft=False, brief_state=brief_state)


def load_collection_teacher(config: CollectConfig) -> ExpertTeacher | CommandTeacher:
    """Create the expert teacher of a collection."""
    teaching = Teaching(config.teacher_level, config.teacher_silence)
    return load_teacher(command_reader_for(config.env), teaching, config.seed)


def expert_teacher_name(config: CollectConfig) -> str:
    """Name the teacher without a model in records and cards."""
    if config.teacher_level == "place":
        return "the environment's expert"
    return f"rules that give {config.teacher_level}s from memory, Brief State and view"


def expert_actor(config: CollectConfig) -> ExpertExecutor:
    """Return the expert as executor, which obeys the expert teacher's guidance."""
    return ExpertExecutor(config.noise, config.seed, obeys=True)


def serialise_episode(episode: Episode) -> str:
    """Serialise an episode for the record."""
    return to_json(episode.to_json(images=True), ascii=True)


def remaining_tasks(of: CollectionPlan) -> tuple[RetriedResults[str], list[Task]]:
    """Return the record, and the tasks without a finished episode in it.

    Raises:
        RecordError, BankError: record or bank belong to another collection.
    """
    record = open_record(of.record, of.attempts)
    done = set([task.id for task in of.tasks[: restore_rounds(of, record)]] if of.grows else _recorded(of, record))
    if done or record.due:
        again = f", {len(record.due)} broken ones are played again" if record.due else ""
        console.print(f"  resumed at task {len(done)} of {len(of.tasks)}{again}")
    return record, [task for task in of.tasks if task.id not in done]


def sort_record(record: RetriedResults[str], of: CollectionPlan) -> None:
    """Drop replaced attempts from the record and sort it by task."""
    order = {task.id: number for number, task in enumerate(of.tasks)}
    record.load()
    record.lines.arrange(lambda row: order[row["task_id"]])


def _recorded(of: CollectionPlan, record: RetriedResults[str]) -> set[str]:
    """Return the ids of the finished tasks."""
    known, done = {task.id for task in of.tasks}, set[str]()
    record.lines.drop_torn_line()
    for number, id in enumerate(record.load()):
        if id not in known or id in done:
            raise _of_another(of, number, id)
        done.add(id)
    return done


def _of_another(of: CollectionPlan, number: int, id: str) -> RecordError:
    return RecordError(
        f"{of.record}, line {number + 1}: the episode of {id!r} is not the next one of this collection; collect into "
        "another folder (--out)"
    )


def restore_rounds(of: CollectionPlan, record: RetriedResults[str]) -> int:
    """Truncate the record to its finished rounds, bring a growing bank to the same state, and return the number of
    finished tasks.

    Raises:
        RecordError, BankError: record or bank belong to another collection.
    """
    finished = _recorded(of, record)
    whole = next((n for n, task in enumerate(of.tasks) if task.id not in finished), len(of.tasks))
    beyond = next((task.id for task in of.tasks[whole:] if task.id in finished), None)
    if beyond and not record.due:
        raise _of_another(of, whole, beyond)
    done = whole if whole == len(of.tasks) else whole // of.size * of.size
    finished = {task.id for task in of.tasks[:done]}
    record.keep(finished.__contains__)
    learned = (episode_from_json(row) for row in record.lines if row["task_id"] in finished)
    traces = [attempts for episode in learned for attempts in episode_traces([episode], of.views)]
    of.bank.commit(traces)
    if (held := of.bank.origins().total()) > of.seeded + len(traces):
        raise BankError(
            f"{of.bank.path} holds {held} episodes, but {of.record} accounts for {len(traces)} only: something else "
            "wrote to the bank. Collect into another folder (--out), or start this one over (--on-exists overwrite)"
        )
    return done


# -- rows --------------------------------------------------------------------------------------------------------------


def write_rows(
    config: CollectConfig, of: CollectionPlan, run: RunFolder, facts: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Convert the record into rows; write them with statistics and card, and last collect.json, which marks the
    collection complete.

    Returns:
        The content of collect.json (with `facts`), and a line about broken episodes, "" for none.

    Raises:
        ValueError: there are no rows.
    """
    listed = executor_instructions_for(config.env).lists_commands
    entries = {entry.id: entry for entry in of.bank}
    steps, episodes = rows_from_record(read_episodes(of.record), entries, config.acting_role != "expert", listed)
    steps = [replace(row, teacher_level=config.teacher_level, environment=config.env.name) for row in steps]
    if not of.brief_state:
        steps = [replace(row, state="") for row in steps]
    outcomes = [(e.task_id, e.failure, e.broken) for e in episodes]
    broken, broke = failure_counts(outcomes), failure_summary(outcomes, of.attempts, "episode_attempts")
    if all(is_failure(episode.stop_reason) for episode in episodes):
        raise ValueError(f"every episode broke, so there are no rows: {broke}")
    rows, dropped = filter_rows(steps, config)
    if broke and not rows:
        raise ValueError(f"there are no rows to save, and {broke}")
    asked = _first_states(config, steps, entries) if config.first_states else []
    rows += asked
    save_rows(rows, run.path / "rows")
    played = [step for episode in episodes for step in episode.steps]
    summary = {
        "tasks": len(of.tasks),
        "episodes": len(episodes),
        "successes": sum(e.success for e in episodes),
        "success_filter": success_filter(config),
        "teacher_level": config.teacher_level,
        "history": config.history,
        "recall": _counts(episode.recall for episode in episodes),
        "own_scene": config.own_scene if any(task.scene for task in of.tasks) else "the tasks have no scenes",
        "shard": config.shard,
        "rows": len(rows),
        **({"first_states": len(asked)} if config.first_states else {}),
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


def _first_states(config: CollectConfig, steps: Sequence[SftRow], entries: EntryStore) -> list[SftRow]:
    """Return rows that ask the episodes' memories for the first states of other tasks."""
    teacher = load_collection_teacher(config)
    assert isinstance(teacher, CommandTeacher)  # the settings refuse others
    return first_state_rows(steps, entries, teacher, config.first_states, config.seed)


def rows_from_record(
    episodes: Iterable[Episode], entries: EntryStore, own_label: bool, commands: bool = False
) -> tuple[list[SftRow], list[Episode]]:
    """Convert recorded episodes that did not break into rows; return the rows and all episodes without pictures."""
    rows, played = [], []
    for episode in episodes:
        if not is_failure(episode.stop_reason):
            rows += valid_rows(episode, entries, own_label, commands)
        for step in episode.steps:
            step.image = None
        played.append(episode)
    return rows, played


def valid_rows(episode: Episode, entries: EntryStore, own_label: bool, commands: bool = False) -> list[SftRow]:
    """Convert an episode into rows, without steps whose emission did not parse or did not apply to the Brief State.

    Args:
        own_label: label rows with the executed action instead of the expert's; steps whose action matched no command
            give no row.
        commands: store the possible commands.
    """
    steps = {step.t: step for step in episode.steps}
    flawed = {t for t, step in steps.items() if step.parse_error or step.op_errors}
    if own_label:
        flawed |= {t for t, step in steps.items() if step.grounding == Grounding.FAILED}
    rows = [row for row in episode_rows(episode, entries, commands) if row.t not in flawed]
    return [replace(row, action=steps[row.t].action) for row in rows] if own_label else rows


def success_filter(config: CollectConfig) -> str:
    """Return what an episode's success says about the teacher: nothing if the expert acts."""
    if config.teacher == "expert":
        return "says little of the teacher: the environment's expert acts, on guidance where that is a command"
    if config.acting_role == "expert":
        return "says nothing of the teacher: the environment's expert acts, whatever is compiled"
    acts = "the teacher's model" if config.acting_role == "teacher" else "the executor"
    rows = "rows are of these episodes only" if config.successful_only else "rows are of all episodes"
    return f"{acts} acted on what was compiled; {rows}"


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
