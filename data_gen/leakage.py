"""What training and evaluation share, and whether they may (paper C.1): "zero leakage", checked instead of claimed.

Every task says by dimension what must not be shared (`Task.isolation`); the environment's spec says how that is read.
What a spec does not list (other benchmarks, further dimensions) must be on both sides and disjoint.

manifest.json   the tasks of a run (`envs.manifest`)
leakage.json    what was checked for them, and whether it is clean: true, false, or null where nothing could be
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
EXAMPLES = 5  # shared values that a verdict names


class LeakageError(ValueError):
    """Two task lists that cannot be compared: that is not a pass. The message is ready to print."""


# -- two lists of tasks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overlap:
    """One dimension: how many values each side has and shares, and what follows from it."""

    dimension: str
    rule: Rule
    train: int
    evaluation: int
    shared: int
    tasks: int  # evaluation tasks that name a shared value
    examples: tuple[str, ...]  # of the shared values, the first few
    clean: bool

    @property
    def told(self) -> str:
        if self.rule == "novel":
            return f"evaluation has no {self.dimension} that training lacks"
        more = ", ..." if self.shared > len(self.examples) else ""
        return f"{self.shared} shared {self.dimension} ({', '.join(self.examples)}{more})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` found. The hashes say for which lists it holds."""

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
        """One line; for a leak it names the overlap."""
        pair = f"{self.benchmark}: {self.train} and {self.evaluation}"
        if self.clean:
            return f"{pair} are isolated ({', '.join(o.dimension for o in self.overlaps)})"
        return f"{pair} leak: " + "; ".join(o.told for o in self.overlaps if not o.clean)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean}

    def table(self) -> Table:
        """Show one row per dimension, for a terminal."""
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
    """Compare two lists of tasks of one benchmark.

    Raises:
        LeakageError: other benchmarks, no rule to go by, or a dimension that not every task of both sides has.
    """
    if train.benchmark != evaluation.benchmark:
        raise LeakageError(f"cannot compare tasks of {train.benchmark} with tasks of {evaluation.benchmark}")
    rules = _rules(train.benchmark)
    named = {name for side in (train, evaluation) for task in side.tasks for name in task.isolation} | set(rules)
    if not named:
        raise LeakageError(f"the tasks of {train.benchmark} do not say what must not be shared: fill in Task.isolation")
    overlaps = tuple(_overlap(name, rules.get(name, "disjoint"), train, evaluation) for name in sorted(named))
    return Verdict(train.benchmark, train.split, evaluation.split, train.sha256, evaluation.sha256, overlaps)


def _overlap(dimension: str, rule: Rule, train: Manifest, evaluation: Manifest) -> Overlap:
    ours, theirs = _values(dimension, train), _values(dimension, evaluation)
    shared = ours & theirs
    touched = sum(not shared.isdisjoint(task.isolation[dimension]) for task in evaluation.tasks)
    clean = not shared if rule == "disjoint" else len(theirs) > len(shared)
    examples = tuple(sorted(shared)[:EXAMPLES])
    return Overlap(dimension, rule, len(ours), len(theirs), len(shared), touched, examples, clean)


def _values(dimension: str, manifest: Manifest) -> set[str]:
    where = f"{manifest.benchmark} {manifest.split}"
    without = [task.id for task in manifest.tasks if dimension not in task.isolation]
    if without:
        raise LeakageError(
            f"{len(without)} of {len(manifest.tasks)} tasks of {where} do not name their {dimension} (such as "
            f"{without[0]!r}): fill in Task.isolation[{dimension!r}], otherwise nothing can be said about leakage"
        )
    values = {value for task in manifest.tasks for value in task.isolation[dimension]}
    if not values:
        raise LeakageError(f"no task of {where} has a value for {dimension}: nothing can be said about leakage")
    return values


def _rules(benchmark: str) -> Mapping[str, Rule]:
    spec = known(benchmark)
    return spec.isolation if spec else {}


# -- a bank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BankAudit:
    """What a memory bank knows of the tasks that are evaluated."""

    entries: int
    by_split: Mapping[str, int]
    own_entries: int  # written by episodes of the very tasks that are evaluated
    own_tasks: int  # tasks that have such entries


def audit_bank(origins: Mapping[tuple[str, str], int], tasks: Iterable[str]) -> BankAudit:
    """Audit entries by (task id, split), as memory systems count them, for the ids of the evaluated tasks."""
    ids, by_split, own = set(tasks), Counter[str](), Counter[str]()
    for (task_id, split), n in origins.items():
        by_split[split] += n
        if task_id in ids:
            own[task_id] += n
    return BankAudit(by_split.total(), dict(sorted(by_split.items())), own.total(), len(own))


# -- what is learnt from ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """Tasks against the held-out splits together, and the bank that serves them against those splits' tasks."""

    train_sha256: str
    verdict: Verdict | None = None  # None where no held-out split is there
    unchecked: Mapping[str, str] = field(default_factory=dict)  # split -> why
    bank: BankAudit | None = None  # entries of held-out tasks, where a bank was given
    dropped: int = 0  # tasks that were left out, for they share something with evaluation

    @property
    def leaks(self) -> list[str]:
        """Say what is shared and must not be, one line each."""
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
    """Write down what is learnt from and whether it may be, before anything is played; with `leakage.drop`, without
    what may not.

    Returns:
        The tasks to play, those whose episodes fill the bank, and how that was found.

    Raises:
        ConfigError: they leak. The message names the overlap; both files stay for reading.
    """
    held_out, unchecked = held_out_tasks(config, envs)
    number = len(tasks) + len(experience)
    if config.leakage.drop:
        tasks, experience = (_without_shared(config.env.name, some, held_out) for some in (tasks, experience))
    manifest = Manifest.of(config.env.name, [*tasks, *experience])
    dropped = number - len(tasks) - len(experience)
    audit = audit_training(config, manifest, held_out, unchecked, dropped)
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
    """Compare tasks, and the bank that is given for them, with the held-out tasks. Raises: LeakageError."""
    if not held_out:
        return Audit(manifest.sha256, None, unchecked, None, dropped)
    evaluation, bank = Manifest.of(config.env.name, held_out), None
    if config.memory.bank is not None:
        bank = audit_bank(open_memory(config.memory, Path(config.memory.bank)).origins(), evaluation.ids)
    return Audit(manifest.sha256, check(manifest, evaluation), unchecked, bank, dropped)


def held_out_tasks(config: CollectConfig | GrpoConfig, envs: Environments) -> tuple[list[Task], dict[str, str]]:
    """List all tasks of the held-out splits, and for default splits that are not there why not. Raises: ConfigError,
    where a split that was asked for by name is not there."""
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
    """Leave out what names a value of held-out tasks (paper C.1: EB-ALFRED's pairs, ScienceWorld's variations)."""
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
    """Say what speaks against learning from these rows: nothing, where their collection was checked and is clean.
    Raises: ConfigError, where anything does and `allow` is not set."""
    problems = _problems(rows.parent, set(task_ids))
    if problems and not allow:
        raise ConfigError(
            f"{rows}: " + "; ".join(problems) + ". Collect them anew (memcompiler collect), "
            "or say allow_leakage=true: the run folder then records it"
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
        problems.append(f"the verdict in {LEAKAGE} is about other tasks than {MANIFEST}")
    if unknown := sorted(task_ids - manifest.ids):
        problems.append(f"{len(unknown)} tasks of the rows are not in {MANIFEST} ({', '.join(unknown[:3])})")
    if clean is False:
        problems.append(f"they leak ({', '.join(shared) or 'the bank holds entries of held-out tasks'})")
    return problems


def record_rows(run: RunFolder, rows: Sequence[Path], problems: Sequence[str]) -> None:
    """Put manifest and verdict of the rows beside what is learnt from them; those of several folders together. Raises:
    ConfigError, for rows of several benchmarks, which no evaluation could be compared with."""
    runs = [folder.parent for folder in rows]
    if len(runs) > 1:
        _record_together(run, runs)
    else:
        for name in (MANIFEST, LEAKAGE):
            if (runs[0] / name).is_file():
                shutil.copyfile(runs[0] / name, run.path / name)
    run.record(leakage={"problems": list(problems), "allowed": bool(problems)})


def _record_together(run: RunFolder, runs: Sequence[Path]) -> None:
    """Write one manifest of all tasks, none where one is missing (what was trained on is unknown then). Tasks of other
    seeds may share an id: each stays."""
    files = [folder / LEAKAGE for folder in runs]
    audits = [read_json(path) if path.is_file() else {} for path in files]
    cleans = {audit.get("clean") for audit in audits}
    facts = {"clean": False if False in cleans else None if None in cleans else True, "rows": audits}
    if all((folder / MANIFEST).is_file() for folder in runs):
        manifests = [Manifest.read(folder / MANIFEST) for folder in runs]
        if len(benchmarks := sorted({manifest.benchmark for manifest in manifests})) > 1:
            raise ConfigError(f"rows of {' and '.join(benchmarks)}: train on those of one benchmark at a time")
        tasks = {(task.id, task.split, task.digest): task for manifest in manifests for task in manifest.tasks}
        merged = Manifest(benchmarks[0], tuple(tasks[key] for key in sorted(tasks)))
        merged.write(run.path / MANIFEST)
        facts["train_sha256"] = merged.sha256
    run.write_json(LEAKAGE, facts)


def rows_environment(rows: Sequence[Path]) -> EnvSpec:
    """Return the environment that these rows are of, by their manifests: it has what executor and compiler are told.

    Rows without a manifest (`allow_leakage`) do not say it: they count as the household's, which every executor was
    told before environments had instructions of their own.
    """
    for folder in rows:
        if (folder.parent / MANIFEST).is_file():
            return find(Manifest.read(folder.parent / MANIFEST).benchmark)
    return find(DEFAULT)


# -- what is evaluated ------------------------------------------------------------------------------------------------


def record_evaluation(
    run: RunFolder, config: EvalConfig, specs: Sequence[EpisodeSpec], bank: MemorySystem
) -> dict[str, Any]:
    """Write which tasks are evaluated and what compiler and bank know of them. It records and never refuses: seen
    scenes are a legitimate setting, if the table says so."""
    manifest = Manifest.of(config.env.name, (spec.task for spec in specs))
    training, why = _training_verdict(config, manifest)
    own = sum(entry.provenance.task_id == spec.task.id for spec in specs for entry in spec.memory)
    facts = {
        "clean": None if training is None else training.clean and not own,
        "training": None if training is None else training.to_json(),
        "unchecked": why,
        # Entries of an evaluated task are passed over when that task is looked up, so that `retrieved_own` is 0.
        "bank": {**asdict(audit_bank(bank.origins(), manifest.ids)), "retrieved_own": own},
    }
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, facts)
    return facts


def _training_verdict(config: EvalConfig, evaluated: Manifest) -> tuple[Verdict | None, str]:
    """Compare the checkpoint's training tasks with those evaluated; None, and why, where that cannot be said."""
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
