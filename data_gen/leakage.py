"""Leakage guards of collection, training and evaluation runs (paper C.1; `data_gen.isolation` compares the tasks).

manifest.json   the tasks of a run (`envs.manifest`)
leakage.json    the checks, and whether they are clean: true, false, or null if nothing could be checked
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, read_yaml
from configs.run_folder import CONFIG, RunFolder
from configs.training import GrpoConfig
from data_gen.isolation import BankAudit, IsolationCheck, LeakageError, audit_bank, check, isolation_rules
from data_gen.memory_factory import open_memory
from envs.base import EnvironmentFailure, Task
from envs.manifest import Manifest, ManifestError
from envs.registry import DEFAULT, find, settings_of
from envs.spec import EnvSpec
from memory.protocol import MemorySystem
from runtime.store import read_json

if TYPE_CHECKING:
    from agent.episode import EpisodeSpec
    from envs.registry import Environments

MANIFEST, LEAKAGE = "manifest.json", "leakage.json"


def file_of(name: str, environment: str = "") -> str:
    """Return the name of an environment's file in a run folder of several, such as manifest-alfworld.json; "": the
    run has one environment."""
    stem, dot, ending = name.partition(".")
    return f"{stem}-{environment}{dot}{ending}" if environment else name


# -- training tasks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeakageAudit:
    """Comparison of training tasks and their bank with the tasks of the held-out splits."""

    train_sha256: str
    verdict: IsolationCheck | None = None  # None without held-out tasks
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


def isolate_training_tasks(
    config: CollectConfig | GrpoConfig,
    tasks: list[Task],
    experience: list[Task],
    *,
    envs: Environments,
    run: RunFolder,
    environment: str = "",
) -> tuple[list[Task], list[Task], LeakageAudit]:
    """Check training tasks for leakage before anything is played, and write manifest.json and leakage.json, or those
    of the named environment (`file_of`).

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
    manifest.write(run.path / file_of(MANIFEST, environment))
    run.write_json(file_of(LEAKAGE, environment), audit.to_json())
    if audit.leaks:
        raise ConfigError(
            "training on these tasks would leak. "
            + "; ".join(audit.leaks)
            + f". See {run.path / file_of(LEAKAGE, environment)}. "
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
) -> LeakageAudit:
    """Compare training tasks and a given bank with the held-out tasks. Raises: LeakageError."""
    if not held_out:
        return LeakageAudit(manifest.sha256, unchecked=unchecked, dropped=dropped)
    evaluation, bank = Manifest.of(config.env.name, held_out), None
    if config.memory.bank is not None:
        bank = audit_bank(open_memory(config.memory, Path(config.memory.bank)).origins(), evaluation.ids)
    verdict = check(manifest, evaluation)
    return LeakageAudit(manifest.sha256, verdict, unchecked=unchecked, bank=bank, dropped=dropped)


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
    rules, values = isolation_rules(benchmark), set[tuple[str, str]]()
    for task in held_out:
        values |= {(name, label) for name, labels in task.isolation.items() for label in labels}
    forbidden = {value for value in values if rules.get(value[0], "disjoint") == "disjoint"}
    return [
        task
        for task in tasks
        if forbidden.isdisjoint((name, label) for name, labels in task.isolation.items() for label in labels)
    ]


# -- rows --------------------------------------------------------------------------------------------------------------


def check_rows(rows: Path, task_ids: Iterable[str], allow: bool) -> list[str]:
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


def copy_rows_manifest(run: RunFolder, rows: Sequence[Path], problems: Sequence[str]) -> None:
    """Copy manifest and verdict of the rows into the run folder: merged for several folders of a benchmark, and for
    each of several benchmarks under its name (`file_of`)."""
    benchmarks = rows_by_environment(rows)
    for name, folders in benchmarks.items():
        runs, environment = [folder.parent for folder in folders], name if len(benchmarks) > 1 else ""
        if len(runs) > 1:
            _record_together(run, runs, environment)
            continue
        for file in (MANIFEST, LEAKAGE):
            if (runs[0] / file).is_file():
                shutil.copyfile(runs[0] / file, run.path / file_of(file, environment))
    run.record(leakage={"problems": list(problems), "allowed": bool(problems)})


def _record_together(run: RunFolder, runs: Sequence[Path], environment: str) -> None:
    """Write one merged manifest, or none if a folder lacks its own. Tasks of different seeds may share an id: both
    stay."""
    files = [folder / LEAKAGE for folder in runs]
    audits = [read_json(path) if path.is_file() else {} for path in files]
    cleans = {audit.get("clean") for audit in audits}
    facts = {"clean": False if False in cleans else None if None in cleans else True, "rows": audits}
    if all((folder / MANIFEST).is_file() for folder in runs):
        manifests = [Manifest.read(folder / MANIFEST) for folder in runs]
        tasks = {(task.id, task.split, task.digest): task for manifest in manifests for task in manifest.tasks}
        merged = Manifest(manifests[0].benchmark, tuple(tasks[key] for key in sorted(tasks)))
        merged.write(run.path / file_of(MANIFEST, environment))
        facts["train_sha256"] = merged.sha256
    run.write_json(file_of(LEAKAGE, environment), facts)


def rows_by_environment(rows: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the folders of rows by the name of their environment, in order.

    Rows without a manifest (`allow_leakage`) count as those of the first folder that has one, else the household's.
    """
    named = [_benchmark(folder) for folder in rows]
    unnamed = next(filter(None, named), DEFAULT)
    found: dict[str, list[Path]] = {}
    for folder, name in zip(rows, named, strict=True):
        found.setdefault(name or unnamed, []).append(folder)
    return found


def rows_environments(rows: Sequence[Path]) -> dict[str, EnvSpec]:
    """Return the environments of rows by name, with the instructions of executor and compiler for their settings (of
    several collections in one environment, the first's)."""
    return {name: _worded(find(name), folders) for name, folders in rows_by_environment(rows).items()}


def _benchmark(folder: Path) -> str | None:
    path = folder.parent / MANIFEST
    return Manifest.read(path).benchmark if path.is_file() else None


def _worded(spec: EnvSpec, rows: Sequence[Path]) -> EnvSpec:
    described = next((folder.parent / CONFIG for folder in rows if _benchmark(folder)), None)
    if described is None or not described.is_file():
        return spec
    return spec.worded(settings_of(read_yaml(described)["env"]))


# -- evaluated tasks ---------------------------------------------------------------------------------------------------


def record_evaluation(
    run: RunFolder, config: EvalConfig, specs: Sequence[EpisodeSpec], bank: MemorySystem
) -> dict[str, Any]:
    """Record which tasks are evaluated and what compiler and bank share with them. Nothing is refused: evaluation on
    seen scenes is legitimate if it is reported."""
    manifest = Manifest.of(config.env.name, (spec.task for spec in specs))
    training, why = _training_verdict(config, manifest)
    pairs = [(entry.provenance, spec.task) for spec in specs for entry in spec.memory]
    own = sum(origin.task_id == task.id for origin, task in pairs)
    same_scene = sum(bool(task.scene) and origin.scene == task.scene for origin, task in pairs)
    facts = {
        "clean": None if training is None else training.clean and not own,
        "training": None if training is None else training.to_json(),
        "unchecked": why,
        # Retrieval skips entries of the task itself, so `retrieved_own` is 0; with isolation by scene, so is
        # `retrieved_own_scene`.
        "bank": {
            **asdict(audit_bank(bank.origins(), manifest.ids)),
            "isolation": config.memory.isolation,
            "retrieved": len(pairs),
            "retrieved_own": own,
            "retrieved_own_scene": same_scene,
        },
    }
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, facts)
    return facts


def _training_verdict(config: EvalConfig, evaluated: Manifest) -> tuple[IsolationCheck | None, str]:
    """Compare the checkpoint's training tasks with the evaluated ones; None and the reason if that is impossible."""
    if config.compiler.checkpoint is None:
        return None, "no trained compiler"
    from compiler.checkpoint import run_file

    trained = Path(config.compiler.checkpoint)
    found = run_file(trained, file_of(MANIFEST, config.env.name)) or run_file(trained, MANIFEST)
    if found is None:
        return None, f"no {MANIFEST} beside {config.compiler.checkpoint}: which tasks it was trained on is unknown"
    try:
        return check(Manifest.read(found), evaluated), ""
    except (ManifestError, LeakageError) as error:
        return None, str(error)
