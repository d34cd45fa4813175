"""Leakage checks between training and evaluation tasks (paper C.1).

`Task.isolation` lists by dimension what training and evaluation must not share; the environment's spec gives the
rule of each dimension. A dimension without a rule must exist on both sides and be disjoint.

manifest.json   the tasks of a run (`envs.manifest`)
leakage.json    the checks, and whether they are clean: true, false, or null if nothing could be checked
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.memories import open_memory
from envs.base import EnvironmentFailure, Task
from envs.manifest import Manifest, ManifestError
from envs.registry import DEFAULT, find, known
from envs.spec import EnvSpec, Rule
from memory.protocol import MemorySystem
from runtime.store import read_json

if TYPE_CHECKING:
    from rich.table import Table

    from agent.episode import EpisodeSpec
    from envs.registry import Environments

MANIFEST, LEAKAGE = "manifest.json", "leakage.json"
EXAMPLES = 5  # shared values that a verdict lists


class LeakageError(ValueError):
    """Two task lists cannot be compared, which does not count as a pass."""


# -- two lists of tasks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overlap:
    """Comparison of one dimension: the number of distinct values of each side, and of shared ones."""

    dimension: str
    rule: Rule
    train: int
    evaluation: int
    shared: int
    tasks: int  # evaluation tasks with a shared value
    examples: tuple[str, ...]  # the first shared values
    clean: bool

    @property
    def summary(self) -> str:
        if self.rule == "novel":
            return f"evaluation has no {self.dimension} that training lacks"
        more = ", ..." if self.shared > len(self.examples) else ""
        return f"{self.shared} shared {self.dimension} ({', '.join(self.examples)}{more})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing two task lists, which the hashes identify."""

    benchmark: str
    train: str
    evaluation: str
    train_sha256: str
    evaluation_sha256: str
    overlaps: tuple[Overlap, ...]

    @property
    def clean(self) -> bool:
        return all(overlap.clean for overlap in self.overlaps)

    @property
    def summary(self) -> str:
        """One line, with the overlaps of a leak."""
        pair = f"{self.benchmark}: {self.train} and {self.evaluation}"
        if self.clean:
            return f"{pair} are isolated ({', '.join(o.dimension for o in self.overlaps)})"
        return f"{pair} leak: " + "; ".join(o.summary for o in self.overlaps if not o.clean)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean}

    def table(self) -> Table:
        """Return a terminal table with one row per dimension."""
        from rich.table import Table

        numbers = (self.train, self.evaluation, "shared", "tasks")
        table = Table(title=self.summary, title_justify="left")
        for name in ("dimension", "must be", *numbers, "examples", ""):
            table.add_column(name, justify="right" if name in numbers else "left")
        for o in self.overlaps:
            counts = map(str, (o.train, o.evaluation, o.shared, o.tasks))
            table.add_row(o.dimension, o.rule, *counts, ", ".join(o.examples), "ok" if o.clean else "LEAK")
        return table


def check(train: Manifest, evaluation: Manifest) -> Verdict:
    """Compare two task lists of one benchmark.

    Raises:
        LeakageError: the benchmarks differ, there is no dimension, or a task lacks a value for one.
    """
    if train.benchmark != evaluation.benchmark:
        raise LeakageError(f"cannot compare tasks of {train.benchmark} with tasks of {evaluation.benchmark}")
    rules = _rules(train.benchmark)
    named = {name for side in (train, evaluation) for task in side.tasks for name in task.isolation} | set(rules)
    if not named:
        raise LeakageError(f"the tasks of {train.benchmark} have no isolation dimensions: fill in Task.isolation")
    overlaps = tuple(_overlap(name, rules.get(name, "disjoint"), train, evaluation) for name in sorted(named))
    return Verdict(train.benchmark, train.split, evaluation.split, train.sha256, evaluation.sha256, overlaps)


def _overlap(dimension: str, rule: Rule, train: Manifest, evaluation: Manifest) -> Overlap:
    ours, theirs = _values(dimension, train), _values(dimension, evaluation)
    shared = ours & theirs
    touched = sum(not shared.isdisjoint(task.isolation[dimension]) for task in evaluation.tasks)
    clean = not shared if rule == "disjoint" else len(theirs) > len(shared)
    examples = tuple(sorted(shared)[:EXAMPLES])
    return Overlap(
        dimension,
        rule,
        train=len(ours),
        evaluation=len(theirs),
        shared=len(shared),
        tasks=touched,
        examples=examples,
        clean=clean,
    )


def _values(dimension: str, manifest: Manifest) -> set[str]:
    where = f"{manifest.benchmark} {manifest.split}"
    without = [task.id for task in manifest.tasks if dimension not in task.isolation]
    if without:
        raise LeakageError(
            f"{len(without)} of {len(manifest.tasks)} tasks of {where} do not name their {dimension} (such as "
            f"{without[0]!r}), so leakage cannot be checked: fill in Task.isolation[{dimension!r}]"
        )
    values = {value for task in manifest.tasks for value in task.isolation[dimension]}
    if not values:
        raise LeakageError(f"no task of {where} has a value for {dimension}: leakage cannot be checked")
    return values


def _rules(benchmark: str) -> Mapping[str, Rule]:
    spec = known(benchmark)
    return spec.isolation if spec else {}


# -- a bank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BankAudit:
    """Entries of a memory bank, and how many of them come from evaluated tasks."""

    entries: int
    by_split: Mapping[str, int]
    own_entries: int  # from episodes of evaluated tasks
    own_tasks: int  # evaluated tasks with such entries


def audit_bank(origins: Mapping[tuple[str, str], int], tasks: Iterable[str]) -> BankAudit:
    """Audit a bank for the ids of evaluated tasks. `origins`: number of entries by (task id, split)."""
    ids, by_split, own = set(tasks), Counter[str](), Counter[str]()
    for (task_id, split), n in origins.items():
        by_split[split] += n
        if task_id in ids:
            own[task_id] += n
    return BankAudit(by_split.total(), dict(sorted(by_split.items())), own.total(), len(own))


# -- training tasks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """Comparison of training tasks and their bank with the tasks of the held-out splits."""

    train_sha256: str
    verdict: Verdict | None = None  # None without held-out tasks
    unchecked: Mapping[str, str] = field(default_factory=dict)  # split -> why
    bank: BankAudit | None = None  # of a given bank
    dropped: int = 0  # tasks left out because they share something with evaluation

    @property
    def leaks(self) -> list[str]:
        """List the leaks, one line each."""
        found = [] if self.verdict is None or self.verdict.clean else [self.verdict.summary]
        if self.bank is not None and self.bank.own_entries:
            found.append(f"the bank holds {self.bank.own_entries} entries of {self.bank.own_tasks} held-out tasks")
        return found

    @property
    def clean(self) -> bool | None:
        return False if self.leaks else True if self.verdict else None

    @property
    def summary(self) -> str:
        left_out = [f"{self.dropped} tasks left out that share something with evaluation"] if self.dropped else []
        unchecked = [f"not checked against {split}: {why}" for split, why in self.unchecked.items()]
        isolated = [self.verdict.summary] if self.verdict and self.verdict.clean else []
        checked = [*isolated, *self.leaks, *unchecked] or ["there is no held-out split to check against"]
        return "; ".join([*left_out, *checked])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean, "verdict": self.verdict.to_json() if self.verdict else None}


def guard_training(
    config: CollectConfig | GrpoConfig, tasks: list[Task], experience: list[Task], envs: Environments, run: RunFolder
) -> tuple[list[Task], list[Task], Audit]:
    """Check training tasks for leakage before anything is played, and write manifest.json and leakage.json.

    Returns:
        The tasks to play and those whose episodes fill the bank (with `leakage.drop`, without leaking ones), and the
        audit.

    Raises:
        ConfigError: the tasks leak.
    """
    held_out, unchecked = held_out_tasks(config, envs)
    number = len(tasks) + len(experience)
    if config.leakage.drop:
        tasks, experience = (_without_shared(config.env.name, some, held_out) for some in (tasks, experience))
    manifest = Manifest.of(config.env.name, [*tasks, *experience])
    dropped = number - len(tasks) - len(experience)
    audit = audit_training(config, manifest, held_out, unchecked=unchecked, dropped=dropped)
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, audit.to_json())
    if audit.leaks:
        raise ConfigError(
            "training on these tasks would leak. " + "; ".join(audit.leaks) + f". See {run.path / LEAKAGE}. "
            "Choose another split, leave the shared tasks out (leakage.drop=true), or name the splits you will "
            "evaluate on: leakage.held_out=[...]"
        )
    return tasks, experience, audit


def audit_training(
    config: CollectConfig | GrpoConfig,
    manifest: Manifest,
    held_out: Sequence[Task],
    unchecked: Mapping[str, str],
    dropped: int = 0,
) -> Audit:
    """Compare training tasks and a given bank with the held-out tasks. Raises: LeakageError."""
    if not held_out:
        return Audit(manifest.sha256, unchecked=unchecked, dropped=dropped)
    evaluation, bank = Manifest.of(config.env.name, held_out), None
    if config.memory.bank is not None:
        bank = audit_bank(open_memory(config.memory, Path(config.memory.bank)).origins(), evaluation.ids)
    verdict = check(manifest, evaluation)
    return Audit(manifest.sha256, verdict, unchecked=unchecked, bank=bank, dropped=dropped)


def held_out_tasks(config: CollectConfig | GrpoConfig, envs: Environments) -> tuple[list[Task], dict[str, str]]:
    """List all tasks of the held-out splits; also return why default splits are missing.

    Raises:
        ConfigError: a split that the settings name is missing.
    """
    named = config.leakage.held_out
    default = find(config.env.name).splits(config.env).held_out
    tasks: list[Task] = []
    unchecked: dict[str, str] = {}
    for split in default if named is None else named:
        try:
            tasks += envs.tasks(split)
        except (EnvironmentFailure, FileNotFoundError, ValueError) as error:
            if named is not None:
                raise ConfigError(f"leakage.held_out: {split}: {error}") from error
            unchecked[split] = str(error)
    return tasks, unchecked


def _without_shared(benchmark: str, tasks: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """Drop tasks that share a forbidden value with held-out tasks (paper C.1: EB-ALFRED's pairs, ScienceWorld's
    variations)."""
    rules, values = _rules(benchmark), set[tuple[str, str]]()
    for task in held_out:
        values |= {(name, label) for name, labels in task.isolation.items() for label in labels}
    forbidden = {value for value in values if rules.get(value[0], "disjoint") == "disjoint"}
    return [
        task
        for task in tasks
        if forbidden.isdisjoint((name, label) for name, labels in task.isolation.items() for label in labels)
    ]


# -- rows -------------------------------------------------------------------------------------------------------------


def guard_rows(rows: Path, task_ids: Iterable[str], allow: bool) -> list[str]:
    """Return the leakage problems of rows; none if their collection was checked and is clean.

    Raises:
        ConfigError: there are problems, and `allow` is not set.
    """
    problems = _problems(rows.parent, set(task_ids))
    if problems and not allow:
        raise ConfigError(
            f"{rows}: " + "; ".join(problems) + ". Collect the rows again (memcompiler collect), "
            "or set allow_leakage=true, which the run folder records"
        )
    return problems


def _problems(folder: Path, task_ids: set[str]) -> list[str]:
    try:
        manifest = Manifest.read(folder / MANIFEST)
        audit = read_json(folder / LEAKAGE)
        clean, sha256, overlaps = audit["clean"], audit["train_sha256"], (audit["verdict"] or {}).get("overlaps", ())
        shared = [f"{o['shared']} shared {o['dimension']}" for o in overlaps if not o["clean"]]
    except ManifestError as error:
        return [str(error)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"no verdict in {folder / LEAKAGE} ({type(error).__name__}: {error})"]
    problems = []
    if sha256 != manifest.sha256:
        problems.append(f"{LEAKAGE} and {MANIFEST} are about different tasks")
    if unknown := sorted(task_ids - manifest.ids):
        problems.append(f"{len(unknown)} tasks of the rows are not in {MANIFEST} ({', '.join(unknown[:3])})")
    if clean is False:
        problems.append(f"they leak ({', '.join(shared) or 'the bank holds entries of held-out tasks'})")
    return problems


def record_rows(run: RunFolder, rows: Sequence[Path], problems: Sequence[str]) -> None:
    """Copy manifest and verdict of the rows into the run folder, merged for several folders.

    Raises:
        ConfigError: the rows are of several benchmarks.
    """
    runs = [folder.parent for folder in rows]
    if len(runs) > 1:
        _record_together(run, runs)
    else:
        for name in (MANIFEST, LEAKAGE):
            if (runs[0] / name).is_file():
                shutil.copyfile(runs[0] / name, run.path / name)
    run.record(leakage={"problems": list(problems), "allowed": bool(problems)})


def _record_together(run: RunFolder, runs: Sequence[Path]) -> None:
    """Write one merged manifest, or none if a folder lacks its own. Tasks of different seeds may share an id: both
    stay."""
    files = [folder / LEAKAGE for folder in runs]
    audits = [read_json(path) if path.is_file() else {} for path in files]
    cleans = {audit.get("clean") for audit in audits}
    facts = {"clean": False if False in cleans else None if None in cleans else True, "rows": audits}
    if all((folder / MANIFEST).is_file() for folder in runs):
        manifests = [Manifest.read(folder / MANIFEST) for folder in runs]
        if len(benchmarks := sorted({manifest.benchmark for manifest in manifests})) > 1:
            raise ConfigError(f"rows of {' and '.join(benchmarks)}: train on rows of one benchmark only")
        tasks = {(task.id, task.split, task.digest): task for manifest in manifests for task in manifest.tasks}
        merged = Manifest(benchmarks[0], tuple(tasks[key] for key in sorted(tasks)))
        merged.write(run.path / MANIFEST)
        facts["train_sha256"] = merged.sha256
    run.write_json(LEAKAGE, facts)


def rows_environment(rows: Sequence[Path]) -> EnvSpec:
    """Return the environment of rows, which has the instructions of executor and compiler.

    Rows without a manifest (`allow_leakage`) count as the household's.
    """
    for folder in rows:
        if (folder.parent / MANIFEST).is_file():
            return find(Manifest.read(folder.parent / MANIFEST).benchmark)
    return find(DEFAULT)


# -- evaluated tasks ------------------------------------------------------------------------------------------------


def record_evaluation(
    run: RunFolder, config: EvalConfig, specs: Sequence[EpisodeSpec], bank: MemorySystem
) -> dict[str, Any]:
    """Record which tasks are evaluated and what compiler and bank share with them. Nothing is refused: evaluation on
    seen scenes is legitimate if it is reported."""
    manifest = Manifest.of(config.env.name, (spec.task for spec in specs))
    training, why = _training_verdict(config, manifest)
    own = sum(entry.provenance.task_id == spec.task.id for spec in specs for entry in spec.memory)
    facts = {
        "clean": None if training is None else training.clean and not own,
        "training": None if training is None else training.to_json(),
        "unchecked": why,
        # Retrieval skips entries of the task itself, so `retrieved_own` is 0.
        "bank": {**asdict(audit_bank(bank.origins(), manifest.ids)), "retrieved_own": own},
    }
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, facts)
    return facts


def _training_verdict(config: EvalConfig, evaluated: Manifest) -> tuple[Verdict | None, str]:
    """Compare the checkpoint's training tasks with the evaluated ones; None and the reason if that is impossible."""
    if config.compiler.checkpoint is None:
        return None, "no trained compiler"
    from compiler.checkpoint import beside

    found = beside(Path(config.compiler.checkpoint), MANIFEST)
    if found is None:
        return None, f"no {MANIFEST} beside {config.compiler.checkpoint}: which tasks it was trained on is unknown"
    try:
        return check(Manifest.read(found), evaluated), ""
    except (ManifestError, LeakageError) as error:
        return None, str(error)
