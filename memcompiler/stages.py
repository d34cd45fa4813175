"""The main line: collect, GRPO with its curves, and the quickstart, which runs all stages once and small."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from agent.deliveries import AFTER_GRPO
from agent.records import Episode, read_episodes
from compiler import checkpoint
from compiler.build import load_compiler
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from envs.registry import Environments, executor_instructions
from eval.evaluate import ModelCache, evaluate
from eval.matrix import Cell
from eval.metrics import difference
from eval.plots import deliveries_plot, training_plot
from eval.report import write_report
from eval.runs import EPISODES
from eval.table import points
from executor.build import AnyExecutor, load_executor

if TYPE_CHECKING:
    from data_gen.collect import Teacher
    from executor.records import Executor
    from lm.endpoint import Endpoint

console = Console(width=120)
RESPONSES = "responses.sqlite"  # a collection's file of endpoints' answers

# What a collection that is continued may change: it bears on how the endpoints are asked, not on what.
MAY_CHANGE_ON_RESUME = tuple(
    f"{block}.{name}"
    for block in ("api", "executor.api")
    for name in (
        "base_url", "key_env", "price_in", "price_out", "budget", "budget_tokens", "rpm", "tpm", "concurrency",
        "timeout_s", "retries", "backoff_s",
    )
)  # fmt: skip


# collect --------------------------------------------------------------------------------------------------------------


def run_collect(config: CollectConfig, out: Path, on_exists: str = "resume") -> None:
    """Have a teacher play a split (or go on), and leave bank and rows in OUT."""
    run = RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE_ON_RESUME)
    if (out / "collect.json").exists():
        console.print(f"{out} is complete already: {(out / 'collect.json').read_text()}")
        return
    from data_gen.collect import play, prepare, write_rows
    from lm.loading import quiet

    facts: dict[str, Any] = {"teacher": "the environment's expert"}
    with Environments(config.env) as envs:
        collection = prepare(config, envs, run)
        teacher, actor, endpoints = _players(config, out / RESPONSES)
        try:
            play(collection, envs.lease, teacher, actor)
        finally:
            if endpoints:
                facts = {"teacher": config.api.model, "actor": config.actor, "endpoints": _account(run, endpoints)}
    quiet()
    summary = write_rows(config, collection, run, facts)
    console.print(
        f"  {summary['bank_entries']} memory entries, {summary['rows']} rows from "
        f"{summary['successes']} of {summary['episodes']} teacher episodes"
    )


def _players(config: CollectConfig, cache: Path) -> tuple[Teacher, Executor, Mapping[str, Endpoint]]:
    """Make who compiles and who acts, with the endpoints that they ask by role."""
    if config.teacher == "expert":
        from agent.expert import ExpertExecutor, ExpertTeacher

        return ExpertTeacher(), ExpertExecutor(config.noise, config.seed), {}
    from data_gen.endpoint_teacher import EndpointTeacher, load_actor
    from lm.endpoint import Endpoint

    endpoint = Endpoint(config.api, cache)
    actor, endpoints = load_actor(config, endpoint, cache)
    return EndpointTeacher(endpoint, config.attempts, config.max_new_tokens), actor, endpoints


def _account(run: RunFolder, endpoints: Mapping[str, Endpoint]) -> dict[str, Any]:
    """Write down what was asked and spent, also where the run ends here: endpoints.json."""
    accounts = {name: endpoint.account() for name, endpoint in endpoints.items()}
    run.write_json("endpoints.json", accounts)
    for name, account in accounts.items():
        console.print(f"  {name}: {account['requests']} requests, {account['price']:.4f} spent")
    return accounts


# train ----------------------------------------------------------------------------------------------------------------


def run_train_grpo(config: GrpoConfig, out: Path, on_exists: str = "resume") -> None:
    """Train (or go on training); OUT gets checkpoints, metrics.jsonl (a line per update), rollouts.jsonl and curves."""
    from training import distributed
    from training.run import train_grpo

    with distributed.group():
        train_grpo(config, out, on_exists)
        if distributed.rank() == 0:
            console.print(f"  curves: {training_plot(out / 'metrics.jsonl', out / 'plots' / 'training.png')}")


# all stages -----------------------------------------------------------------------------------------------------------


def run_quickstart(config: QuickstartConfig, out: Path, on_exists: str = "overwrite") -> None:
    """Collect, train (SFT, then GRPO), evaluate, report; each stage is the command of the same name."""
    from training.run import train_sft

    started, seconds = time.perf_counter(), {}
    run = RunFolder.create(out, config, on_exists=on_exists)
    with _stage("1/4 collect: the expert plays the training scenes", seconds, "collect"):
        run_collect(config.collect, out / "collect", on_exists)
    sft = config.sft.model_copy(update={"rows": str(out / "collect" / "rows")})
    with _stage("2/4 SFT: LoRA and projector against the frozen executor", seconds, "sft"):
        train_sft(sft, out / "sft", on_exists)
        executor = load_executor(config.eval.executor, executor_instructions(config.eval.env))
        state = json.loads((checkpoint.find(out / "sft") / "state.json").read_text())
        frozen = state["executor_hash"] == executor.hash()
        console.print(f"  executor unchanged: {frozen} (sha256 {executor.hash()[:16]}...)")
    with _stage("3/4 GRPO: text and soft tokens from success alone", seconds, "grpo"):
        run_train_grpo(_from(config.grpo, out / "sft"), out / "grpo", on_exists)
    with _stage("4/4 evaluation on held-out scenes", seconds, "eval"):
        results, episodes = _before_and_after(config.eval, out, executor, on_exists)
    seconds["total"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results |= {"seconds": seconds, "peak_memory_gib": peak}
    run.write_json("results.json", results)
    plots = [
        deliveries_plot(results, out / "plots" / "deliveries.png"),
        training_plot(out / "sft" / "metrics.jsonl", out / "plots" / "training.png"),
        training_plot(out / "grpo" / "metrics.jsonl", out / "plots" / "grpo.png"),
    ]
    write_report(results, episodes, out / "report.html", plots)
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    console.print(f"\nwall time: {stages}; peak memory {peak:.1f} GiB")
    console.print(f"results: {out / 'results.json'}   replay: {out / 'report.html'}   plots: {out / 'plots'}")


Starting = TypeVar("Starting", GrpoConfig, EvalConfig)


def _from(config: Starting, start: Path) -> Starting:
    return config.model_copy(update={"compiler": config.compiler.model_copy(update={"checkpoint": str(start)})})


def _before_and_after(
    config: EvalConfig, out: Path, executor: AnyExecutor, on_exists: str
) -> tuple[dict[str, Any], list[Episode]]:
    """Evaluate all deliveries after SFT, and the full one again after GRPO (`compiled_grpo`): results and episodes."""
    made: dict[str, dict[str, Any]] = {}
    episodes: dict[str, list[Episode]] = {}
    for stage, names, folder in (("sft", config.deliveries, out / "eval"), ("grpo", ("compiled",), out / "eval-grpo")):
        cell = _from(config, out / stage).model_copy(update={"deliveries": names})
        with ModelCache.holding(cell, executor, load_compiler(cell.compiler, executor, cell.seed)) as loaded:
            made[stage] = evaluate(Cell({}, cell), folder, loaded, on_exists)
        episodes[stage] = list(read_episodes(folder / EPISODES))
    results = made["sft"]
    if before := [episode for episode in episodes["sft"] if episode.delivery == "compiled"]:
        change = difference(episodes["grpo"], before)
        results["paired_difference"][f"{AFTER_GRPO} - compiled"] = change
        console.print(f"  GRPO changed the success of text + soft by {points(change)}")
    results["results"][AFTER_GRPO] = made["grpo"]["results"]["compiled"]
    for episode in episodes["grpo"]:
        episode.delivery = AFTER_GRPO
    return results, episodes["sft"] + episodes["grpo"]


@contextmanager
def _stage(title: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    console.rule(title, align="left")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
