"""`memcompiler collect`: a teacher plays the training tasks and leaves a memory bank and SFT rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from configs.collect import CollectConfig
from configs.run_folder import RunFolder
from memcompiler import build
from memcompiler.environments import Environments
from runtime.progress import progress

if TYPE_CHECKING:
    from data_gen.collect import Rounds, Teacher
    from envs.base import Task
    from executor.records import Executor
    from memory.bank import MemoryBank

console = Console(width=120)


def run_collect(config: CollectConfig, out: Path, on_exists: str = "resume") -> None:
    """Bank and SFT rows of a split: OUT/bank, OUT/rows."""
    run = RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME)  # type: ignore[arg-type]
    if (out / "collect.json").exists():
        console.print(f"{out} is complete already: {(out / 'collect.json').read_text()}")
        return
    from data_gen.collect import EPISODES, rows_from_record
    from data_gen.dataset import apply_filters, row_filters
    from data_gen.rows import save_rows
    from eval.episodes import read_episodes
    from memcompiler.data import describe_rows

    with Environments(config.env) as envs:
        teach = _ask_endpoint if config.teacher == "endpoint" else _ask_expert
        bank, tasks, facts = teach(config, envs, run)
    steps, episodes = rows_from_record(read_episodes(run.path / EPISODES), bank, config.actor != "expert")
    rows, dropped = apply_filters(steps, row_filters(config))
    build.quiet()
    save_rows(rows, out / "rows")
    summary = {
        "tasks": len(tasks), "episodes": len(episodes), "successes": sum(e.success for e in episodes),
        "shard": config.shard, "rows": len(rows), "dropped": dropped, "bank_entries": len(bank),
        "bank_version": bank.snapshot(),
        "stop_reasons": _share(str(episode.stop_reason) for episode in episodes),
        "emissions": _share(e.emission_kind for episode in episodes for e in episode.steps),
        "malformed": sum(step.parse_error is not None for episode in episodes for step in episode.steps),
        "misapplied": sum(bool(step.op_errors) for episode in episodes for step in episode.steps),
        **facts,
    }  # fmt: skip
    describe_rows(run, rows, summary)
    run.write_json("collect.json", summary)
    console.print(
        f"  {summary['bank_entries']} memory entries, {len(rows)} rows from "
        f"{summary['successes']} of {len(episodes)} teacher episodes"
    )


# What a collection that is continued may change: it bears on how the endpoints are asked, not on what.
MAY_CHANGE_ON_RESUME = tuple(
    f"{block}.{name}"
    for block in ("api", "executor.api")
    for name in (
        "base_url", "key_env", "price_in", "price_out", "budget", "budget_tokens", "rpm", "tpm", "concurrency",
        "timeout_s", "retries", "backoff_s",
    )
)  # fmt: skip


def _ask_expert(
    config: CollectConfig, envs: Environments, run: RunFolder
) -> tuple[MemoryBank, list[Task], dict[str, Any]]:
    """The expert fills the bank, then teaches. Bank, tasks, and what collect.json says of its work."""
    from agent.episode import Limits
    from agent.expert import ExpertExecutor, ExpertTeacher
    from data_gen.collect import Rounds, shard_of
    from data_gen.tasks import training_tasks_and_bank

    bank, tasks = training_tasks_and_bank(config, envs, run)
    tasks = shard_of(tasks, config.shard)
    rounds = Rounds(config.round_size, config.memory.k, Limits(config.max_steps, config.seed), len(bank), grows=False)
    _play(envs, run, tasks, bank, ExpertTeacher(), ExpertExecutor(config.noise, config.seed), rounds)
    return bank, tasks, {"teacher": "the environment's expert"}


def _ask_endpoint(
    config: CollectConfig, envs: Environments, run: RunFolder
) -> tuple[MemoryBank, list[Task], dict[str, Any]]:
    """A model behind an endpoint teaches while the bank grows. Bank, tasks, and what collect.json says of its work."""
    from agent.episode import Limits
    from data_gen.collect import Rounds, shard_of
    from data_gen.endpoint_teacher import EndpointTeacher
    from data_gen.tasks import chosen_tasks
    from memcompiler.leakage import guard_training

    tasks, _ = chosen_tasks(config, envs, config.split)
    guarded = guard_training(config, tasks, [], envs, run)
    console.print(f"  {guarded.summary}")
    tasks = shard_of(guarded.tasks, config.shard)
    bank, seeded = build.growing_bank(config.memory, run.path / "bank")
    endpoint = build.open_endpoint(config.api, run.path / build.RESPONSES)
    teacher = EndpointTeacher(endpoint, config.attempts, config.max_new_tokens)
    actor, endpoints = build.load_actor(config, endpoint, run.path / build.RESPONSES)
    rounds = Rounds(config.round_size, config.memory.k, Limits(config.max_steps, config.seed), seeded, grows=True)
    try:
        _play(envs, run, tasks, bank, teacher, actor, rounds)
    finally:
        accounts = {name: endpoint.account() for name, endpoint in endpoints.items()}
        run.write_json("endpoints.json", accounts)
        for name, account in accounts.items():
            console.print(f"  {name}: {account['requests']} requests, {account['price']:.4f} spent")
    return bank, tasks, {"teacher": config.api.model, "actor": config.actor, "endpoints": accounts}


def _play(
    envs: Environments, run: RunFolder, tasks: Sequence[Task], bank: MemoryBank, teacher: Teacher,
    actor: Executor, rounds: Rounds,
) -> None:  # fmt: skip
    """What the record does not hold yet, into the record."""
    from data_gen.collect import EPISODES, play_rounds, restore

    record = run.path / EPISODES
    if done := restore(record, tasks, bank, rounds):
        console.print(f"  resumed at task {done} of {len(tasks)}")
    with progress("teacher", len(tasks), done) as advance:
        play_rounds(envs.lease, tasks, bank, teacher, actor, rounds, record, done, advance)


def _share(kinds: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(kinds).items()))
