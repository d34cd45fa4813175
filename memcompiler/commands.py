"""What each command does: settings in, run folder out. `cli.py` is their face, `build.py` makes the objects."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.quickstart import QuickstartConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig, SftConfig
from memcompiler import build
from memcompiler.environments import Environments, experience_split
from runtime.progress import progress

if TYPE_CHECKING:
    from agent.records import Episode
    from compiler.hf import MemoryCompiler
    from data_gen.collect import Rounds, Teacher
    from envs.base import Task
    from executor.hf import Executor
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


def run_train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Train (or go on training) and leave checkpoints and metrics in OUT."""
    from training import distributed

    if config.executor.engine != "hf":
        raise ConfigError("SFT's gradient passes through the executor: it needs executor.engine=hf")
    with distributed.group():
        return _train_sft(config, out, on_exists)


def _train_sft(config: SftConfig, out: Path, on_exists: str) -> MemoryCompiler:
    from data_gen.rows import load_rows, row_folders
    from memcompiler.leakage import guard_rows, record_rows
    from training import distributed
    from training.sft import SftTrainer, run_sft

    parts = {folder: load_rows(folder) for folder in row_folders(config.rows)}
    problems = [
        problem
        for folder, part in parts.items()
        for problem in guard_rows(folder, (row.task_id for row in part), config.allow_leakage)
    ]
    run = None
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=distributed.MAY_CHANGE_ON_RESUME)  # type: ignore[arg-type]
        record_rows(run, list(parts), problems)
    distributed.barrier()
    executor = build.load_frozen(config.executor)
    compiler = build.load_compiler(config.compiler, executor, config.seed)
    rows = [row for part in parts.values() for row in part]
    trainer = SftTrainer(config, compiler, executor, rows, out, _bank_facts(list(parts)))
    resumed = trainer.resume()
    if run is not None:  # also where it starts over, having been killed before its first checkpoint
        run.keep_metrics(lambda row: row["step"] <= trainer.step)
    if resumed:
        console.print(f"  resumed at step {trainer.step} of {trainer.total}")
    with progress("sft", trainer.total, trainer.step) as advance:

        def log(metrics: dict[str, float]) -> None:
            assert run is not None  # only rank 0 logs
            run.append_metrics(metrics)
            terms = " ".join(f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("loss_"))
            advance(f"loss {metrics['loss']:.2f}  {terms}")

        run_sft(trainer, log)
    return compiler


def run_quickstart(config: QuickstartConfig, out: Path, on_exists: str = "overwrite") -> None:
    """Collect, train (SFT, then GRPO), evaluate, report; each stage is the command of the same name."""
    from memcompiler.grpo import run_train_grpo

    started, seconds = time.perf_counter(), {}
    run = RunFolder.create(out, config, on_exists=on_exists)  # type: ignore[arg-type]
    with _stage("1/4 collect: the expert plays the training scenes", seconds, "collect"):
        run_collect(config.collect, out / "collect", on_exists)
    sft = config.sft.model_copy(update={"rows": str(out / "collect" / "rows")})
    with _stage("2/4 SFT: LoRA and projector against the frozen executor", seconds, "sft"):
        run_train_sft(sft, out / "sft", on_exists)
        executor = build.load_executor(config.eval.executor)
        frozen = json.loads((_last(out / "sft") / "state.json").read_text())["executor_hash"] == executor.hash()
        console.print(f"  executor unchanged: {frozen} (sha256 {executor.hash()[:16]}...)")
    with _stage("3/4 GRPO: text and soft tokens from success alone", seconds, "grpo"):
        run_train_grpo(_from(config.grpo, out / "sft"), out / "grpo", on_exists)
    with _stage("4/4 evaluation on held-out scenes", seconds, "eval"):
        results, episodes = _before_and_after(config.eval, out, executor, on_exists)
    seconds["total"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results |= {"seconds": seconds, "peak_memory_gib": peak}
    run.write_json("results.json", results)
    _write_page(out, results, episodes)
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"\nwall time: {stages}; peak memory {peak:.1f} GiB")
    console.print(f"results: {out / 'results.json'}   replay: {out / 'report.html'}   plots: {out / 'plots'}")


Starting = TypeVar("Starting", GrpoConfig, EvalConfig)


def _from(config: Starting, checkpoint: Path) -> Starting:
    return config.model_copy(update={"compiler": config.compiler.model_copy(update={"checkpoint": str(checkpoint)})})


def _before_and_after(
    config: EvalConfig, out: Path, executor: build.AnyExecutor, on_exists: str
) -> tuple[dict[str, Any], list[Episode]]:
    """All deliveries after SFT, and the full one again after GRPO (`compiled_grpo`): results and episodes."""
    from eval.episodes import read_episodes
    from eval.matrix import Cell
    from eval.metrics import AFTER_GRPO, difference
    from memcompiler.evaluate import ModelCache, evaluate

    made: dict[str, dict[str, Any]] = {}
    episodes: dict[str, list[Episode]] = {}
    deliveries = {"sft": config.deliveries, "grpo": ("compiled",)}
    for stage, names in deliveries.items():
        cell = _from(config, out / stage).model_copy(update={"deliveries": names})
        folder = out / ("eval" if stage == "sft" else "eval-grpo")
        with ModelCache.holding(cell, executor, build.load_compiler(cell.compiler, executor, cell.seed)) as loaded:
            made[stage] = evaluate(Cell({}, cell), folder, loaded, on_exists)
        episodes[stage] = list(read_episodes(folder / "episodes.jsonl"))
    results = made["sft"]
    if before := [episode for episode in episodes["sft"] if episode.delivery == "compiled"]:
        change = difference(episodes["grpo"], before)
        results["paired_difference"][f"{AFTER_GRPO} - compiled"] = change
        console.print(
            f"  GRPO changed the success of text + soft by {100 * change['mean']:+.1f} points "
            f"[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]: better on {change['wins']}, worse on "
            f"{change['losses']} of {change['n']} tasks"
        )
    results["results"][AFTER_GRPO] = made["grpo"]["results"]["compiled"]
    for episode in episodes["grpo"]:
        episode.delivery = AFTER_GRPO
    return results, episodes["sft"] + episodes["grpo"]


# ---------------------------------------------------------------------------------------------------------------------


def chosen_tasks(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, split: str
) -> tuple[list[Task], list[Task]]:
    """The tasks that a command plays, and those whose episodes fill its bank (none where a bank is given)."""
    from data_gen.collect import experience_tasks

    tasks = envs.tasks(split)[: config.limit]
    if not tasks:
        raise ValueError(f"there are no tasks in {split} of {config.env.name}: check split, limit and the data")
    if config.memory.bank is not None:
        return tasks, []
    source = experience_split(config.env, config.memory.experience_split, split)
    return tasks, experience_tasks(envs.tasks(source), tasks, config.memory.experience_limit)


def filled_bank(
    config: CollectConfig | EvalConfig | GrpoConfig, envs: Environments, experience: Sequence[Task], out: Path
) -> MemoryBank:
    """The bank that the settings name, or OUT/bank with what the expert experiences now."""
    from data_gen.collect import collect_experience, not_experienced

    bank = build.open_bank(config.memory, out / "bank")
    if experience:
        bank.write([])  # there is one, if an empty one
        left = not_experienced(experience, bank)
        with progress("experience", len(experience), len(experience) - len(left)) as advance:
            collect_experience(envs.lease, left, bank, on_episode=advance)
    return bank


def training_tasks_and_bank(
    config: CollectConfig | GrpoConfig, envs: Environments, run: RunFolder
) -> tuple[MemoryBank, list[Task]]:
    """Tasks to learn from and the bank that serves them, after the check that they share nothing with evaluation.

    Raises:
        ConfigError: they do. Nothing has been played then.
    """
    from memcompiler.leakage import guard_training

    guarded = guard_training(config, *chosen_tasks(config, envs, config.split), envs, run)
    console.print(f"  {guarded.summary}")
    return filled_bank(config, envs, guarded.experience, run.path), guarded.tasks


def _share(kinds: Iterable[str]) -> dict[str, int]:
    from collections import Counter

    return dict(sorted(Counter(kinds).items()))


def _bank_facts(rows: Sequence[Path]) -> dict[str, Any]:
    """The bank version that the rows were made from; for several folders a list, in their order."""
    records = [folder.parent / "collect.json" for folder in rows]
    versions = [json.loads(path.read_text())["bank_version"] if path.exists() else None for path in records]
    if len(versions) > 1:
        return {"bank_versions": versions}
    return {"bank_version": versions[0]} if versions[0] is not None else {}


def _last(run: Path) -> Path:
    from training.checkpoint import find

    return find(run)


def _write_page(out: Path, results: dict[str, Any], episodes: list[Episode]) -> None:
    """The quickstart's page: evaluation and training curves together."""
    from eval.plots import deliveries_plot, training_plot
    from eval.report import write_report

    plots = [
        deliveries_plot(results, out / "plots" / "deliveries.png"),
        training_plot(out / "sft" / "metrics.jsonl", out / "plots" / "training.png"),
        training_plot(out / "grpo" / "metrics.jsonl", out / "plots" / "grpo.png"),
    ]
    write_report(results, episodes, out / "report.html", plots)


@contextmanager
def _stage(title: str, seconds: dict[str, float], name: str):
    console.rule(title, align="left")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
