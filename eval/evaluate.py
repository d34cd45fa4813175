"""`memcompiler eval`: deliveries side by side on the same tasks, bank and executor; one setting, or a matrix of them.

    OUT/                        one setting
      episodes.jsonl            every episode, as soon as it is over
      results.json              when all are there; docs/results-format.md
      report.html
    OUT/                        a matrix
      cells/NAME/               each cell as above; cells share their banks (`data_gen.experience`)
      results.json, report.html of all cells

The same command resumes a run that was killed, and plays no episode twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from data_gen.experience import bank_facts, filled_bank
from data_gen.leakage import record_evaluation
from data_gen.tasks import chosen_tasks
from envs.base import TaskSequence
from envs.registry import environment_version, evaluation_split, reader_of
from eval import stream
from eval.errors import chance, lookup
from eval.matrix import ORDER_AXIS, SEED_AXIS, Cell, axes, baseline_of, cells, check_baseline, varying
from eval.metrics import HIGHER_IS_BETTER, grouped, joined, results
from eval.players import (
    Evaluation,
    ModelCache,
    Part,
    limits_of,
    models_of,
    needed_by,
    needs_checkpoint,
    play_by,
    specs_of,
)
from eval.provenance import identity, identity_of_models
from eval.report import write_run_report
from eval.runs import RESULTS, EpisodeRecord, episodes_of
from eval.sequences import REFERENCE, Worlds, living
from eval.sequences import pooled as sequences_pooled
from eval.table import print_results
from lm.device import placed
from memory.protocol import MemorySystem
from runtime.attempts import broken_line
from runtime.cluster import MAY_CHANGE_ON_RESUME, require_ray
from runtime.errors import is_failure
from runtime.store import read_json

console = Console(width=120)
Episodes = Mapping[str, Sequence[Episode]]  # by delivery
MAY_CHANGE = (*MAY_CHANGE_ON_RESUME, "episode_attempts")  # on resume


# one cell -------------------------------------------------------------------------------------------------------------


def run_eval(config: EvalConfig, out: Path, on_exists: str = "resume") -> dict[str, Any]:
    """Evaluate what the configuration says, cell by cell if it holds a matrix.

    Raises:
        ConfigError: a cell that cannot be; nothing has been loaded, played or deleted then.
        RunFolderError: OUT holds another run, or data, models or prompts are not those that it started with.
    """
    made = cells(config)
    check_baseline(config, made)
    _check_checkpoints(made)
    if any(cell.config.cluster == "ray" for cell in made):
        require_ray()
    with ModelCache() as loaded:
        if config.matrix:
            with RunFolder.create(out, config, on_exists=on_exists, ignore=MAY_CHANGE) as run:
                return _run_matrix(config, made, run, loaded)
        return evaluate(made[0], out, loaded, on_exists)


def evaluate(cell: Cell, out: Path, loaded: ModelCache, on_exists: str, beside: Path | None = None) -> dict[str, Any]:
    """Play what a cell has not played yet, then write results.json and report.html. Banks that are filled for
    it lie beside OUT, or beside the folder that is named."""
    with RunFolder.create(out, cell.config, on_exists=on_exists, ignore=MAY_CHANGE) as run:
        record = EpisodeRecord(out, cell.levels, cell.config.episode_attempts)
        record.load()
        if (out / RESULTS).exists() and not record.due:
            made = read_json(out / RESULTS)
            console.print(f"  {out} is complete already")
        else:
            made = _play(cell, run, loaded, record, beside)
            run.write_json(RESULTS, made)
            write_run_report(out)
    print_results(made, console)
    return made


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is evaluated: tasks with what was retrieved for each, and with the best entry alone (where a delivery asks
    for it); the bank; and the worlds whose tasks they are, where these are lived in."""

    specs: Sequence[EpisodeSpec]
    top_specs: Sequence[EpisodeSpec]
    bank: MemorySystem
    worlds: Sequence[TaskSequence]


def prepare(
    config: EvalConfig, loaded: ModelCache, out: Path, title: str = "", beside: Path | None = None
) -> tuple[Evaluation, MemorySystem]:
    """Choose the tasks, open the bank that the settings name or have it filled, and make the models ready."""
    chosen = _choose(config, loaded, out, beside)
    return _evaluation(config, loaded, chosen, title), chosen.bank


def _choose(config: EvalConfig, loaded: ModelCache, out: Path, beside: Path | None) -> Chosen:
    envs = loaded.environments(config)
    filled = config.memory.protocol == "frozen" or config.memory.warm_start
    split = config.split or evaluation_split(config.env)
    worlds = envs.sequences(split)[: config.limit] if config.memory.living else []
    tasks, experience = chosen_tasks(config, envs, split, filled)
    tasks = [task for world in worlds for task in world.tasks] or stream.ordered_stream(tasks, config)
    bank = filled_bank(config, envs, experience, out, beside)
    return Chosen(*specs_of(config, tasks, bank, config.deliveries), bank, worlds)


def _evaluation(config: EvalConfig, loaded: ModelCache, chosen: Chosen, title: str) -> Evaluation:
    executor, compiler = loaded.executor(config), loaded.compiler(config)
    return Evaluation(
        loaded.environments(config).lease,
        chosen.specs,
        executor,
        compiler,
        limits_of(config),
        config.concurrency,
        chosen.top_specs,
        title,
        reader_of(config.env),
        tuple(chosen.worlds),
        needed_by(config),
    )


def _play(cell: Cell, run: RunFolder, loaded: ModelCache, record: EpisodeRecord, beside: Path | None) -> dict[str, Any]:
    config, split = cell.config, cell.config.split or evaluation_split(cell.config.env)
    frozen = config.memory.protocol == "frozen"
    chosen = _choose(config, loaded, run.path, beside)
    specs, bank, read = chosen.specs, chosen.bank, bank_facts(config, chosen.bank)
    evaluation = part = None
    devices = {}
    if config.cluster == "ray":
        part = Part(config, cell.levels, bank.path.resolve(), bank.snapshot())
        models = models_of(loaded.crew(config), part)
    else:
        evaluation = _evaluation(config, loaded, chosen, cell.name)
        models = identity_of_models(config, evaluation.executor, evaluation.compiler, evaluation.need)
        devices = {"devices": placed(compiler=evaluation.compiler, executor=evaluation.executor)}
    depends_on = identity(config, specs, models)
    changed = run.record(
        environment=config.env.model_dump(), split=split, tasks=len(specs), **read, **depends_on, **devices
    )
    if different := sorted(set(changed) & depends_on.keys()):
        raise RunFolderError(
            f"{run.path} was started with other {', '.join(different)}: its episodes and new ones would not compare. "
            "Evaluate into another folder (--out), or start anew (--on-exists overwrite)"
        )
    record_evaluation(run, config, specs, bank)
    (run.path / RESULTS).unlink(missing_ok=True)  # of before broken episodes are played again
    _drop_unfinished(record, len(specs))
    streams = dict[str, stream.Stream]()
    if part is not None:
        play_by(loaded.crew(config), part, [spec.task for spec in specs], record)
    elif evaluation is not None:
        streams = _play_here(config, evaluation, run.path, bank, record)
    episodes = record.episodes(config.deliveries, [spec.task.id for spec in specs])
    played = [episode for of in episodes.values() for episode in of]
    if all(is_failure(episode.stop_reason) for episode in played):
        outcomes = [(f"{e.task_id} under {e.delivery}", e.failure, e.broken) for e in played]
        broke = broken_line(outcomes, config.episode_attempts, "episode_attempts")
        raise ValueError(f"no results for {run.path}: {broke}")
    facts = {
        "environment": config.env.name,
        "split": split,
        "seed": config.seed,
        "scene_seed": config.env.seed,
        "n_tasks": len(specs),
        **read,
        "max_steps": config.max_steps,
        "broken_due": len(record.due),
        **({"chance_lookup": chance(specs)} if frozen else {"memory_protocol": config.memory.protocol}),
        **depends_on,
    }
    made = _results(cell, run, episodes, specs, facts)
    if config.memory.online:
        for name, summary in made["results"].items():
            summary["stream"] = stream.told_by(episodes[name])
        for name, of in streams.items():
            made["results"][name]["stream"]["leaked"] = stream.leaked(episodes[name], of.tasks, of.memory)
    if config.memory.living:
        memories = {name: bank for name in config.deliveries if find(name).recalls}
        for name, of in living(chosen.worlds, episodes, memories, config.max_steps).items():
            made["results"][name]["living"] = of
    return made


def _play_here(
    config: EvalConfig, evaluation: Evaluation, out: Path, bank: MemorySystem, record: EpisodeRecord
) -> dict[str, stream.Stream]:
    """Play what the record does not hold yet in this process, one delivery after another. Returns the streams of
    those whose memory grew."""
    played, streams = record.played(), dict[str, stream.Stream]()
    for name in config.deliveries:
        if config.memory.online and find(name).recalls:
            streams[name] = stream_of(name, config, evaluation, out, bank, record)
            streams[name].play(evaluation.make_env, evaluation.executor)
        elif config.memory.living:
            lived = Worlds(config, evaluation.worlds, find(name), evaluation.delivery(name), out, bank, record)
            lived.play(evaluation.make_env, evaluation.executor)
        else:
            evaluation.run(name, record.append, set(played.get(name, ())))
    return streams


def stream_of(
    name: str, config: EvalConfig, evaluation: Evaluation, out: Path, given: MemorySystem, record: EpisodeRecord
) -> stream.Stream:
    """Return a delivery's way through the stream of the evaluated tasks."""
    wanted, tasks = find(name), [spec.task for spec in evaluation.specs]
    k = min(1, config.memory.k) if wanted.memory == "top" else config.memory.k
    return stream.Stream(config, tasks, k, evaluation.delivery(name), out, given, record)


def _results(
    cell: Cell, run: RunFolder, episodes: Episodes, specs: Sequence[EpisodeSpec], facts: Mapping[str, Any]
) -> dict[str, Any]:
    config, levels = cell.config, dict(cell.levels)
    ran = read_json(run.path / ENVIRONMENT)
    looked_up = [name for name in episodes if find(name).needs_checkpoint and config.memory.protocol == "frozen"]
    meta = {
        **facts,
        "lookup": {name: lookup(episodes[name], specs) for name in looked_up},
        "complete": True,
        "levels": levels,
        "baseline": config.baseline,
        "higher_is_better": HIGHER_IS_BETTER,
        "git": ran["git"],
        "versions": ran["packages"],
        "environment_version": environment_version(config.env.name, ran["packages"]),
        "config": config.model_dump(mode="json"),
    }
    pairs = [(name, base) for name in episodes if (base := baseline_of(config, cell, name))]
    made = results(episodes, meta, pairs, dict.fromkeys(episodes, config.budgets))
    for name, summary in made["results"].items():
        summary |= {"delivery": name, "levels": levels}
    return made


def _drop_unfinished(record: EpisodeRecord, tasks: int) -> None:
    """Drop a torn line, and what was played of deliveries whose episodes depend on each other."""
    partial = {name for name, done in record.played().items() if find(name).interdependent and len(done) < tasks}
    record.keep(lambda key: key[0] not in partial)


def _check_checkpoints(made: Sequence[Cell]) -> None:
    """Raise ConfigError or CheckpointError, before anything is played, where a checkpoint is missing."""
    for cell in made:
        if not (names := needs_checkpoint(cell.config)) or cell.config.compiler.engine == "http":
            continue
        if cell.config.compiler.checkpoint is None:
            where = f"cell {cell.name}: " if cell.name else ""
            raise ConfigError(f"{where}delivery {names[0]} needs a trained compiler: set compiler.checkpoint")
        checkpoint.find(Path(cell.config.compiler.checkpoint))


# matrix ---------------------------------------------------------------------------------------------------------------


def _run_matrix(config: EvalConfig, made: Sequence[Cell], run: RunFolder, loaded: ModelCache) -> dict[str, Any]:
    """Play every cell in turn, each resumed by itself; then put all of them in one table."""
    out = run.path
    done: dict[str, dict[str, Any]] = {}
    described: dict[str, dict[str, Any]] = {}  # what each finished cell's results say about it, and where it lies
    for number, cell in enumerate(made, start=1):
        console.rule(f"cell {number}/{len(made)}: {cell.name}", align="left")
        done[cell.name] = evaluate(cell, out / "cells" / cell.name, loaded, "resume", out)
        about = {k: v for k, v in done[cell.name].items() if k not in ("results", "paired_difference")}
        described[cell.name] = {"path": f"cells/{cell.name}", "group": cell.group, **about}
        missing = [other.name for other in made[number:]]
        run.write_json(RESULTS, {"complete": False, "missing": missing, "cells": described})
    first = described[made[0].name]
    meta = {
        **{key: varying(cell[key] for cell in described.values()) for key in ("environment", "split", "seed")},
        "complete": True,
        "baseline": config.baseline,
        "broken_due": sum(of.get("broken_due", 0) for of in described.values()),
        "axes": {axis: list(levels) for axis, levels in axes(config).items()},
        "cells": described,
        "higher_is_better": HIGHER_IS_BETTER,
        "git": first["git"],
        "versions": first["versions"],
    }
    pooled = _pooled(config, made, done, episodes_of(out, meta)(False), meta)
    run.write_json(RESULTS, pooled)
    write_run_report(out)
    console.rule(f"all {len(made)} cells", align="left")
    print_results(pooled, console)
    return pooled


def _pooled(
    config: EvalConfig, made: Sequence[Cell], done: Mapping[str, Any], episodes: Iterable[Episode], meta: dict[str, Any]
) -> dict[str, Any]:
    played = [(cell, name, joined(cell.group, name)) for cell in made for name in cell.config.deliveries]
    pairs = [(column, base) for cell, name, column in played if (base := baseline_of(config, cell, name))]
    budgets = {column: cell.config.budgets for cell, _, column in played}
    pooled = results(grouped(episodes, lambda episode: episode.delivery), meta, pairs, budgets)
    for name, members in grouped(played, lambda one: one[2]).items():
        summaries = [(cell, done[cell.name]["results"][delivery]) for cell, delivery, _ in members]
        pooled["results"][name] |= {"delivery": members[0][1], **_of_column(summaries)}
        if lived := [(cell.name, of["living"]) for cell, of in summaries if "living" in of]:
            without = [(c.name, done[c.name]["results"].get(REFERENCE, {}).get("living")) for c, _ in summaries]
            pooled["results"][name]["living"] = sequences_pooled(lived, [each for each in without if each[1]])
    return pooled


def _of_column(members: Sequence[tuple[Cell, Mapping[str, Any]]]) -> dict[str, Any]:
    """Say what the summaries of the cells that a column pools say one by one: success by seed, and by order."""

    def by(axis: str, otherwise: str) -> dict[str, float]:
        levels = grouped(members, lambda one: one[0].levels.get(axis, otherwise))
        return {level: fmean(of["success"]["mean"] for _, of in those) for level, those in levels.items()}

    cell, streams = members[0][0], [of["stream"] for _, of in members if "stream" in of]
    about: dict[str, Any] = {"levels": cell.own_levels, "success_by_seed": by(SEED_AXIS, str(cell.config.seed))}
    if ORDER_AXIS in cell.levels:
        about["success_by_order"] = by(ORDER_AXIS, "")
    if streams:
        about["stream"] = stream.pooled(streams)
    return about
