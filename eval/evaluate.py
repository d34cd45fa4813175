"""`memcompiler eval`: deliveries compared on the same tasks, memory and executor; one cell, or a matrix of cells.

    OUT/                        one cell
      episodes.jsonl            every episode, written when it ends
      results.json              written when all episodes are there; docs/guides/results-format.md
      report.html
    OUT/                        a matrix
      cells/NAME/               each cell as above; cells share their banks (`data_gen.experience`)
      results.json, report.html of all cells

The same command resumes a killed run and plays no episode twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from agent.deliveries import find
from agent.episode import EpisodeSpec
from agent.records import Episode
from compiler import checkpoint
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.run_folder import ENVIRONMENT, RunFolder, RunFolderError
from data_gen.experience import bank_facts, open_experience_bank
from data_gen.leakage import record_evaluation
from data_gen.memory_factory import writing_facts
from data_gen.tasks import select_tasks
from envs.base import TaskSequence
from envs.registry import environment_version, evaluation_split
from eval import memories
from eval.error_analysis import chance, lookup
from eval.living import REFERENCE, LivingEvaluation, living_results, pool_sequences
from eval.matrix import ORDER_AXIS, SEED_AXIS, Cell, axes, baseline_of, cells, check_baseline, varying
from eval.metrics import HIGHER_IS_BETTER, grouped, joined, results
from eval.model_cache import ModelCache, needs_checkpoint
from eval.online import OnlineEvaluation, count_leaks, order_tasks, pool_streams, summarise_stream
from eval.provenance import identity, identity_of_models, training_of
from eval.report import write_run_report
from eval.rollouts import Evaluation, EvalWorker, Job, models_on_ray, play_on_ray, specs_of
from eval.runs import RESULTS, EpisodeRecord, episodes_of
from eval.table import print_results
from lm.device import describe_placement
from memory.protocol import MemorySystem, SupportsWorldSessions
from runtime.attempts import failure_summary
from runtime.cluster import MAY_CHANGE_ON_RESUME, require_ray
from runtime.errors import is_failure
from runtime.store import read_json

console = Console(width=120)
Episodes = Mapping[str, Sequence[Episode]]  # by delivery
MAY_CHANGE = (*MAY_CHANGE_ON_RESUME, "episode_attempts")  # settings that a resume may change


def run_eval(config: EvalConfig, out: Path, on_exists: str = "resume") -> dict[str, Any]:
    """Evaluate a configuration, cell by cell if it is a matrix, and return the content of results.json.

    Raises:
        ConfigError: a cell is invalid; nothing has been loaded, played or deleted.
        RunFolderError: OUT holds another run, or data, models or prompts changed since the run started.
    """
    all_cells = cells(config)
    check_baseline(config, all_cells)
    _check_checkpoints(all_cells)
    if any(cell.config.cluster == "ray" for cell in all_cells):
        require_ray()
    with ModelCache() as models:
        if not config.matrix:
            return evaluate(all_cells[0], out, models, on_exists)
        with RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE) as run:
            return _run_matrix(config, all_cells, run, models)


def _check_checkpoints(all_cells: Sequence[Cell]) -> None:
    """Raise ConfigError or CheckpointError if a checkpoint is missing."""
    for cell in all_cells:
        if not (names := needs_checkpoint(cell.config)) or cell.config.compiler.engine == "http":
            continue
        if cell.config.compiler.checkpoint is None:
            where = f"cell {cell.name}: " if cell.name else ""
            raise ConfigError(f"{where}delivery {names[0]} needs a trained compiler: set compiler.checkpoint")
        found = checkpoint.find(Path(cell.config.compiler.checkpoint))
        for name in names:
            try:
                find(name).check_text(checkpoint.writes_text(found), cell.config.compiler.checkpoint)
            except ValueError as error:
                raise ConfigError(f"{f'cell {cell.name}: ' if cell.name else ''}{error}") from None


# one cell -------------------------------------------------------------------------------------------------------------


def evaluate(cell: Cell, out: Path, models: ModelCache, on_exists: str, shared: Path | None = None) -> dict[str, Any]:
    """Play the episodes that a cell lacks, then write results.json and report.html.

    Args:
        shared: folder beside which new banks are filled (default: OUT).
    """
    with RunFolder.create(out, cell.config, on_exists=on_exists, ignore=MAY_CHANGE) as run:
        record = EpisodeRecord(out, cell.levels, cell.config.episode_attempts)
        record.load()
        if (out / RESULTS).exists() and not record.due:
            summary = read_json(out / RESULTS)
            console.print(f"  {out} is complete already")
        else:
            summary = _evaluate(cell, run, models=models, record=record, shared=shared)
            run.write_json(RESULTS, summary)
            write_run_report(out)
    print_results(summary, console)
    return summary


@dataclass(frozen=True, slots=True)
class CellTasks:
    """Tasks of a cell: their split, their specs with the retrieved entries, and with the best entry only (if a delivery
    uses it), the memory, and the task sequences of living worlds."""

    split: str
    specs: Sequence[EpisodeSpec]
    top_specs: Sequence[EpisodeSpec]
    memory: MemorySystem
    sequences: Sequence[TaskSequence]


def _choose_tasks(config: EvalConfig, models: ModelCache, out: Path, shared: Path | None) -> CellTasks:
    """Choose the tasks, open or fill the memory, and retrieve the entries."""
    envs = models.environments(config)
    split = config.split or evaluation_split(config.env)
    filled = config.memory.protocol == "frozen" or config.memory.warm_start
    sequences = envs.sequences(split)[: config.limit] if config.memory.living else []
    tasks, experience = select_tasks(config, envs, split, filled)
    tasks = [task for sequence in sequences for task in sequence.tasks] or order_tasks(tasks, config)
    memory = open_experience_bank(config, envs, experience=experience, out=out, beside=shared)
    return CellTasks(split, *specs_of(config, tasks, memory, config.deliveries), memory, sequences)


def _evaluate(
    cell: Cell, run: RunFolder, models: ModelCache, record: EpisodeRecord, shared: Path | None
) -> dict[str, Any]:
    config = cell.config
    chosen = _choose_tasks(config, models, run.path, shared)
    tasks, memory = [spec.task for spec in chosen.specs], chosen.memory
    play: Callable[[], Mapping[str, OnlineEvaluation]]
    if config.cluster == "ray":
        job = Job(config, cell.levels, memory.path.resolve(), memory.snapshot())
        workers = models.workers(config, EvalWorker)
        model_facts, devices = models_on_ray(workers, job), {}
        play = lambda: play_on_ray(workers, job, tasks, record) or {}
    else:
        evaluation = Evaluation.of(config, models, specs=chosen.specs, top_specs=chosen.top_specs, title=cell.name)
        compiler, executor = evaluation.compiler, evaluation.executor
        model_facts = identity_of_models(config, executor, compiler, evaluation.gate)
        devices = {"devices": describe_placement(compiler=compiler, executor=executor)}
        play = lambda: _play_here(config, evaluation, chosen=chosen, out=run.path, record=record)
    depends_on = identity(config, chosen.specs, model_facts)
    memory_facts = bank_facts(config, memory)
    about = {
        "environment": config.env.model_dump(),
        "split": chosen.split,
        "tasks": len(tasks),
        **memory_facts,
        **devices,
    }
    if changed := sorted(set(run.record(**about, **depends_on)) & depends_on.keys()):
        raise RunFolderError(
            f"{run.path} was started with other {', '.join(changed)}: its episodes and new ones would not compare. "
            "Evaluate into another folder (--out), or start anew (--on-exists overwrite)"
        )
    record_evaluation(run, config, chosen.specs, memory)
    (run.path / RESULTS).unlink(missing_ok=True)  # it is outdated if broken episodes are played again
    _drop_interrupted(record, len(tasks))
    online = play()
    episodes = record.episodes(config.deliveries, [task.id for task in tasks])
    _check_any_worked(config, run, episodes)
    if any(find(name).needs_expert for name in config.deliveries):
        memory_facts |= {"teacher_level": config.teacher_level}
    facts = {**memory_facts, "max_steps": config.max_steps, "broken_due": len(record.due), **depends_on}
    facts["trained"] = training_of(config)
    summary = _results(cell, run, episodes=episodes, chosen=chosen, facts=facts)
    if config.memory.online:
        for name, of_delivery in summary["results"].items():
            of_delivery["stream"] = summarise_stream(episodes[name])
        for name, stream in online.items():
            summary["results"][name]["stream"]["leaked"] = count_leaks(episodes[name], stream.tasks, stream.memory)
    if not config.memory.living or isinstance(memory, SupportsWorldSessions):
        for name in filter(lambda name: find(name).recalls, config.deliveries):
            written = online[name].memory if name in online else memory
            summary["results"][name]["writing"] = writing_facts(config.memory, written)
    if config.memory.living:
        for name, of in living_results(chosen.sequences, episodes, memory, config.max_steps).items():
            summary["results"][name]["living"] = of
    return summary


def _play_here(
    config: EvalConfig, evaluation: Evaluation, chosen: CellTasks, out: Path, record: EpisodeRecord
) -> dict[str, OnlineEvaluation]:
    """Play in this process what the record lacks, one delivery after another. Returns online evaluations by
    delivery."""
    played, online = record.played(), dict[str, OnlineEvaluation]()
    tasks, make_env, executor = [spec.task for spec in chosen.specs], evaluation.make_env, evaluation.executor
    for name in config.deliveries:
        if config.memory.online and find(name).recalls:
            online[name] = OnlineEvaluation(
                config, tasks, delivery=evaluation.delivery(name), out=out, initial=chosen.memory, record=record
            )
            online[name].play(make_env, executor)
        elif config.memory.living:
            delivery = evaluation.delivery(name)
            LivingEvaluation(
                config, chosen.sequences, delivery=delivery, out=out, initial=chosen.memory, record=record
            ).play(make_env, executor)
        else:
            evaluation.run(name, record.append, set(played.get(name, ())))
    return online


def _drop_interrupted(record: EpisodeRecord, tasks: int) -> None:
    """Drop incomplete deliveries whose episodes depend on each other: a resumed run plays them again."""
    interrupted = {name for name, done in record.played().items() if find(name).interdependent and len(done) < tasks}
    record.keep(lambda key: key[0] not in interrupted)


def _check_any_worked(config: EvalConfig, run: RunFolder, episodes: Episodes) -> None:
    """Raise ValueError if every episode failed for technical reasons."""
    played = [episode for of in episodes.values() for episode in of]
    if all(is_failure(episode.stop_reason) for episode in played):
        outcomes = [(f"{e.task_id} under {e.delivery}", e.failure, e.broken) for e in played]
        broke = failure_summary(outcomes, config.episode_attempts, "episode_attempts")
        raise ValueError(f"no results for {run.path}: {broke}")


def _results(
    cell: Cell, run: RunFolder, episodes: Episodes, chosen: CellTasks, facts: Mapping[str, Any]
) -> dict[str, Any]:
    config, levels, protocol = cell.config, dict(cell.levels), cell.config.memory.protocol
    specs = chosen.specs
    started = read_json(run.path / ENVIRONMENT)
    guided = [name for name in episodes if find(name).needs_checkpoint and find(name).text]
    looked_up = guided if protocol == "frozen" else []
    meta = {
        "environment": config.env.name,
        "split": chosen.split,
        "seed": config.seed,
        "scene_seed": config.env.seed,
        "n_tasks": len(specs),
        **facts,
        **({"chance_lookup": chance(specs)} if protocol == "frozen" else {"memory_protocol": protocol}),
        "lookup": {name: lookup(episodes[name], specs) for name in looked_up},
        "complete": True,
        "levels": levels,
        "baseline": config.baseline,
        "higher_is_better": HIGHER_IS_BETTER,
        "git": started["git"],
        "versions": started["packages"],
        "environment_version": environment_version(config.env.name, started["packages"]),
        "config": config.model_dump(mode="json"),
    }
    pairs = [(name, base) for name in episodes if (base := baseline_of(config, cell, name))]
    summary = results(episodes, meta, pairs, dict.fromkeys(episodes, config.budgets))
    for name, of_delivery in summary["results"].items():
        of_delivery |= {"delivery": name, "levels": levels}
    return summary


# matrix ---------------------------------------------------------------------------------------------------------------


def _run_matrix(config: EvalConfig, all_cells: Sequence[Cell], run: RunFolder, models: ModelCache) -> dict[str, Any]:
    """Evaluate the cells one after another, each resumable, then write results and report of all of them."""
    out = run.path
    done: dict[str, dict[str, Any]] = {}
    described: dict[str, dict[str, Any]] = {}  # each finished cell's path and metadata
    for number, cell in enumerate(all_cells, start=1):
        console.rule(f"cell {number}/{len(all_cells)}: {cell.name}", align="left")
        done[cell.name] = evaluate(cell, out / "cells" / cell.name, models=models, on_exists="resume", shared=out)
        about = {k: v for k, v in done[cell.name].items() if k not in ("results", "paired_difference")}
        described[cell.name] = {"path": f"cells/{cell.name}", "group": cell.group, **about}
        missing = [other.name for other in all_cells[number:]]
        run.write_json(RESULTS, {"complete": False, "missing": missing, "cells": described})
    first = described[all_cells[0].name]
    meta = {
        **{key: varying(cell[key] for cell in described.values()) for key in ("environment", "split", "seed")},
        "complete": True,
        "baseline": config.baseline,
        "broken_due": sum(cell["broken_due"] for cell in described.values()),
        "axes": {axis: list(levels) for axis, levels in axes(config).items()},
        "cells": described,
        "higher_is_better": HIGHER_IS_BETTER,
        "git": first["git"],
        "versions": first["versions"],
    }
    pooled = _pool_cells(config, all_cells, done=done, episodes=episodes_of(out, meta)(False), meta=meta)
    run.write_json(RESULTS, pooled)
    write_run_report(out)
    console.rule(f"all {len(all_cells)} cells", align="left")
    print_results(pooled, console)
    return pooled


def _pool_cells(
    config: EvalConfig,
    all_cells: Sequence[Cell],
    done: Mapping[str, Any],
    episodes: Iterable[Episode],
    meta: dict[str, Any],
) -> dict[str, Any]:
    """Return the results of a matrix: cells that differ in seed or order only are pooled."""
    played = [(cell, name, joined(cell.group, name)) for cell in all_cells for name in cell.config.deliveries]
    pairs = [(column, base) for cell, name, column in played if (base := baseline_of(config, cell, name))]
    budgets = {column: cell.config.budgets for cell, _, column in played}
    by_column = grouped(episodes, lambda episode: episode.delivery)
    pooled = results(by_column, meta, pairs, budgets)
    for column, members in grouped(played, lambda one: one[2]).items():
        summaries = [(cell, done[cell.name]["results"][delivery]) for cell, delivery, _ in members]
        pooled["results"][column] |= {"delivery": members[0][1], **_of_column(summaries)}
        if living := [(cell.name, of["living"]) for cell, of in summaries if "living" in of]:
            reference = [(c.name, done[c.name]["results"].get(REFERENCE, {}).get("living")) for c, _ in summaries]
            pooled["results"][column]["living"] = pool_sequences(living, [each for each in reference if each[1]])
    if memories.AXIS in meta["axes"]:
        trained = {cell.group: (done[cell.name]["trained"] or {}).get("memory") for cell in all_cells}
        configs = {cell.group: cell.config for cell in all_cells}
        pooled["memories"] = memories.compare_memories(pooled["results"], by_column, trained, configs)
    return pooled


def _of_column(members: Sequence[tuple[Cell, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what differs among the pooled cells of a column: success by seed and by order; the pooled stream; and what
    the first one's memory cost."""

    def success_by(axis: str, otherwise: str) -> dict[str, float]:
        levels = grouped(members, lambda member: member[0].levels.get(axis, otherwise))
        return {level: fmean(of["success"]["mean"] for _, of in summaries) for level, summaries in levels.items()}

    cell, streams = members[0][0], [of["stream"] for _, of in members if "stream" in of]
    about: dict[str, Any] = {
        "levels": cell.own_levels,
        "success_by_seed": success_by(SEED_AXIS, str(cell.config.seed)),
    }
    if ORDER_AXIS in cell.levels:
        about["success_by_order"] = success_by(ORDER_AXIS, "")
    if streams:
        about["stream"] = pool_streams(streams)
    if "writing" in members[0][1]:
        about["writing"] = members[0][1]["writing"]
    return about
