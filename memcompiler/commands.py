"""What each command does: settings in, run folder out. `cli.py` is their face, `build.py` makes the objects."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.schema import CollectConfig, EvalConfig, GrpoConfig, QuickstartConfig, SftConfig
from memcompiler import build
from memcompiler.environments import Environments, default_split, experience_split
from memcompiler.progress import progress

if TYPE_CHECKING:
    from agent.episode import Job
    from agent.records import Episode
    from compiler.model import MemoryCompiler
    from compiler.records import Compiler
    from envs.base import Task
    from executor.frozen import FrozenExecutor
    from executor.served import VllmExecutor
    from memory.bank import MemoryBank

console = Console(width=120)


def run_collect(config: CollectConfig, out: Path, on_exists: str = "resume") -> None:
    """Bank and SFT rows of a split: OUT/bank, OUT/rows."""
    run = RunFolder.create(out, config, on_exists=on_exists)  # type: ignore[arg-type]
    if (out / "collect.json").exists():
        console.print(f"{out} is complete already: {(out / 'collect.json').read_text()}")
        return
    from data_gen.collect import collect_rows, jobs_for
    from data_gen.rows import save_rows

    with Environments(config.env) as envs:
        bank, tasks = training_tasks_and_bank(config, envs, run)
        jobs = jobs_for(tasks, bank, config.memory.k)
        with progress("teacher", len(jobs)) as advance:
            rows, episodes = collect_rows(
                envs.lease, jobs, config.noise, config.max_steps, config.seed, config.keep_noaction, advance
            )
    build.quiet()
    save_rows(rows, out / "rows")
    summary = {
        "tasks": len(tasks), "episodes": len(episodes), "successes": sum(e.success for e in episodes),
        "rows": len(rows), "bank_entries": len(bank), "bank_version": bank.snapshot(),
        "emissions": _share(e.emission_kind for episode in episodes for e in episode.steps),
    }  # fmt: skip
    run.write_json("collect.json", summary)
    console.print(
        f"  {summary['bank_entries']} memory entries, {len(rows)} rows from "
        f"{summary['successes']} of {len(episodes)} teacher episodes"
    )


def run_train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Train (or go on training) and leave checkpoints and metrics in OUT."""
    from data_gen.rows import load_rows
    from memcompiler.leakage import guard_rows, record_rows
    from training import distributed
    from training.sft import SftTrainer, run_sft

    if config.executor.engine != "hf":
        raise ConfigError("SFT's gradient passes through the executor: it needs executor.engine=hf")
    distributed.init()
    rows = load_rows(Path(config.rows))
    problems = guard_rows(Path(config.rows), (row.task_id for row in rows), config.allow_leakage)
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=distributed.HOW)  # type: ignore[arg-type]
        record_rows(run, Path(config.rows), problems)
    distributed.barrier()
    executor = build.load_executor(config.executor)
    compiler = build.load_compiler(config.compiler, executor, config.seed)
    trainer = SftTrainer(config, compiler, executor, rows, out, _bank_facts(Path(config.rows).parent))
    if trainer.resume():
        if distributed.rank() == 0:
            run.keep_metrics(lambda row: row["step"] <= trainer.step)
        console.print(f"  resumed at step {trainer.step} of {trainer.total}")
    with progress("sft", trainer.total, trainer.step) as advance:

        def log(metrics: dict[str, float]) -> None:
            run.append_metrics(metrics)
            terms = " ".join(f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("loss_"))
            advance(f"loss {metrics['loss']:.2f}  {terms}")

        run_sft(trainer, log)
    return compiler


def run_eval(config: EvalConfig, out: Path, on_exists: str = "overwrite") -> dict[str, Any]:
    """All deliveries of the configuration on the same tasks, bank and executor."""
    executor = build.load_executor(config.executor)
    compiler: Compiler | None = None
    if config.compiler.checkpoint and config.compiler.engine == "vllm":
        compiler = build.load_served_compiler(config.compiler, config.seed)
    elif config.compiler.checkpoint:
        compiler = build.load_compiler(config.compiler, executor, config.seed)
    return _evaluate(config, out, executor, compiler, on_exists)


def run_quickstart(config: QuickstartConfig, out: Path, on_exists: str = "overwrite") -> None:
    """Collect, train, roll out, evaluate, report; each stage is the command of the same name."""
    started, seconds = time.perf_counter(), {}
    run = RunFolder.create(out, config, on_exists=on_exists)  # type: ignore[arg-type]
    with _stage("1/4 collect: the expert plays the training scenes", seconds, "collect"):
        run_collect(config.collect, out / "collect", on_exists)
    sft = config.sft.model_copy(update={"rows": str(out / "collect" / "rows")})
    with _stage("2/4 SFT: LoRA and projector against the frozen executor", seconds, "sft"):
        compiler = run_train_sft(sft, out / "sft", on_exists)
        executor = build.load_executor(config.eval.executor)
        frozen = json.loads((_last(out / "sft") / "state.json").read_text())["executor_hash"] == executor.hash()
        console.print(f"  executor unchanged: {frozen} (sha256 {executor.hash()[:16]}...)")
    with _stage("3/4 rollouts: sampled episodes with log-probabilities, ready for GRPO", seconds, "rollouts"):
        _rollouts(config, out, compiler, executor)
    with _stage("4/4 evaluation on held-out scenes", seconds, "eval"):
        evaluation = config.eval.model_copy(
            update={"compiler": config.eval.compiler.model_copy(update={"checkpoint": str(out / "sft")})}
        )
        compiler = build.load_compiler(evaluation.compiler, executor, evaluation.seed)
        results = _evaluate(evaluation, out / "eval", executor, compiler, on_exists)
    seconds["total"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results |= {"seconds": seconds, "peak_memory_gib": peak}
    run.write_json("results.json", results)
    _copy_report(out, results)
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"\nwall time: {stages}; peak memory {peak:.1f} GiB")
    console.print(f"results: {out / 'results.json'}   replay: {out / 'report.html'}   plots: {out / 'plots'}")


# ---------------------------------------------------------------------------------------------------------------------


def _evaluate(
    config: EvalConfig, out: Path, executor: FrozenExecutor | VllmExecutor, compiler: Compiler | None, on_exists: str
) -> dict[str, Any]:
    from agent.episode import Limits
    from data_gen.collect import jobs_for
    from eval.metrics import results as make_results
    from eval.report import write_run_report
    from eval.runner import Evaluation
    from eval.table import print_results
    from memcompiler.leakage import record_evaluation

    run = RunFolder.create(out, config, on_exists=on_exists)  # type: ignore[arg-type]
    split = config.split or default_split(config.env)
    limits = Limits(config.max_steps, config.seed)
    episodes: dict[str, list[Episode]] = {}
    with Environments(config.env) as envs, (out / "episodes.jsonl").open("w", encoding="utf-8") as file:
        tasks, experience = chosen_tasks(config, envs, split)
        bank = filled_bank(config, envs, experience, out)
        jobs = jobs_for(tasks, bank, config.memory.k)
        run.record(environment=config.env.model_dump(), split=split, bank_version=bank.snapshot(), tasks=len(tasks))
        record_evaluation(run, config, jobs, bank)
        evaluation = Evaluation(envs.lease, jobs, executor, compiler, limits, config.concurrency)
        for name in config.deliveries:
            with progress(name, len(jobs)) as advance:
                episodes[name] = evaluation.run(name, advance)
            for episode in episodes[name]:
                file.write(json.dumps(episode.to_json(images=True)) + "\n")
    meta = {
        "environment": config.env.name, "split": split, "seed": config.seed, "scene_seed": config.env.seed,
        "n_tasks": len(tasks), "bank_version": bank.snapshot(), "bank_entries": len(bank),
        "executor_hash": executor.hash(), "max_steps": config.max_steps, "chance_lookup": _chance(jobs),
        "lookup": {name: _lookup(e, jobs) for name, e in episodes.items() if name.startswith("compiled")},
    }  # fmt: skip
    results = make_results(episodes, meta)
    run.write_json("results.json", results)
    write_run_report(out)
    print_results(results, console)
    return results


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
    from data_gen.collect import collect_experience

    bank = build.open_bank(config.memory, out / "bank")
    if experience:
        with progress("experience", len(experience)) as advance:
            collect_experience(envs.lease, experience, bank, on_episode=advance)
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


def _rollouts(config: QuickstartConfig, out: Path, compiler: MemoryCompiler, executor: FrozenExecutor) -> None:
    """A few sampled episodes (T = 1.2, paper Table 7): what GRPO will train on, with the checks that make it sound."""
    import torch

    from agent.delivery import Delivery
    from agent.episode import Limits, run_episodes
    from compiler.model import Decoding
    from data_gen.collect import jobs_for

    settings = config.collect
    compiler.decoding = Decoding(1.2, config.sft.compiler.max_new_tokens)
    with Environments(settings.env) as envs:
        tasks = envs.tasks(settings.split)[: max(1, config.rollouts // 4)]
        bank = build.open_bank(settings.memory, out / "collect" / "bank")
        jobs = [job for job in jobs_for(tasks, bank, settings.memory.k) for _ in range(4)][: config.rollouts]
        delivery = Delivery("compiled", "compiled", compiler)
        episodes = run_episodes(envs.lease, jobs, delivery, executor, Limits(config.eval.max_steps))
    steps = [s.compilation for e in episodes for s in e.steps if s.compilation is not None][:16]
    compiler.eval()
    with torch.no_grad():
        scored = compiler.score([compiler.encode(c.request) for c in steps], [c.emission_ids for c in steps])  # type: ignore[arg-type]
    again = compiler.logprobs(scored.logits).gather(2, scored.targets.unsqueeze(-1)).squeeze(-1)
    gap = max(
        float((again[i, : len(c.text_logprobs)] - c.text_logprobs).abs().max())  # type: ignore[arg-type]
        for i, c in enumerate(steps)
    )
    rewards = [int(e.success) for e in episodes]
    console.print(
        f"  {len(episodes)} episodes, {sum(len(e.steps) for e in episodes)} (prompt, emission, z) samples, rewards "
        f"{rewards}; re-scored log-probabilities differ by at most {gap:.1e}"
    )


def _lookup(episodes: Iterable[Episode], jobs: Iterable[Job]) -> dict[str, float]:
    """Share of episodes whose first guidance names the place that the right entry holds (where there is one)."""
    named = [_first_place(e) == truth for e, job in zip(episodes, jobs, strict=True) if (truth := _right_place(job))]
    return {"accuracy": sum(named) / max(1, len(named)), "n": len(named)}


def _chance(jobs: Iterable[Job]) -> float:
    """Look-up accuracy of citing a random one of the retrieved entries."""
    from data_gen.teacher import taken

    shares = [
        sum(fact[1] == truth for e in job.memory if (fact := taken(e.provenance.actions))) / len(job.memory)
        for job in jobs
        if (truth := _right_place(job))
    ]
    return sum(shares) / max(1, len(shares))


def _right_place(job: Job) -> str | None:
    """Where the right entry says that the goal's object is; None if no entry says so."""
    from agent.episode import goal_text
    from data_gen.teacher import entry_for_goal, taken

    entry = entry_for_goal(goal_text(job.task), job.memory)
    fact = taken(entry.provenance.actions) if entry else None
    return fact[1] if fact else None


def _first_place(episode: Episode) -> str | None:
    guidance = next((s.guidance for s in episode.steps if s.guidance), "")
    return guidance.removeprefix("go to ") if guidance.startswith("go to ") else None


def _share(kinds: Iterable[str]) -> dict[str, int]:
    from collections import Counter

    return dict(sorted(Counter(kinds).items()))


def _bank_facts(collected: Path) -> dict[str, Any]:
    """The bank version that the rows were made from."""
    path = collected / "collect.json"
    return {"bank_version": json.loads(path.read_text())["bank_version"]} if path.exists() else {}


def _last(run: Path) -> Path:
    from training.checkpoint import find

    return find(run)


def _copy_report(out: Path, results: dict[str, Any]) -> None:
    """The quickstart's page: evaluation and training curves together."""
    from eval.episodes import read_episodes
    from eval.plots import deliveries_plot, training_plot
    from eval.report import write_report

    plots = [
        deliveries_plot(results, out / "plots" / "deliveries.png"),
        training_plot(out / "sft" / "metrics.jsonl", out / "plots" / "training.png"),
    ]
    write_report(results, list(read_episodes(out / "eval" / "episodes.jsonl")), out / "report.html", plots)


@contextmanager
def _stage(title: str, seconds: dict[str, float], name: str):
    console.rule(title, align="left")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
