"""Leakage where it matters: what a collection or GRPO plays, what SFT learns from, what an evaluation measures.

manifest.json   the tasks of a run (`envs.manifest`)
leakage.json    what was checked for them, and whether it is clean: true, false, or null where nothing could be
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.leakage import BankAudit, LeakageError, Verdict, audit_bank, check, shared_values
from envs.base import EnvironmentFailure
from envs.manifest import Manifest, ManifestError
from envs.registry import DEFAULT, find
from memory.bank import open_bank

if TYPE_CHECKING:
    from agent.episode import EpisodeSpec
    from envs.base import Task
    from envs.environments import Environments
    from memory.bank import MemoryBank

MANIFEST, LEAKAGE = "manifest.json", "leakage.json"


@dataclass(frozen=True, slots=True)
class Audit:
    """Tasks against the held-out splits together, and the bank that serves them against those splits' tasks."""

    train_sha256: str
    verdict: Verdict | None = None  # None where no held-out split is there
    unchecked: Mapping[str, str] = field(default_factory=dict)  # split -> why
    bank: BankAudit | None = None  # entries of held-out tasks, where a bank was given

    @property
    def leaks(self) -> list[str]:
        """What is shared and must not be, one line each."""
        found = [] if self.verdict is None or self.verdict.clean else [self.verdict.summary]
        if self.bank is not None and self.bank.own_entries:
            found.append(f"the bank holds {self.bank.own_entries} entries of {self.bank.own_tasks} held-out tasks")
        return found

    @property
    def clean(self) -> bool | None:
        return False if self.leaks else True if self.verdict else None

    @property
    def summary(self) -> str:
        unchecked = [f"not checked against {split}: {why}" for split, why in self.unchecked.items()]
        isolated = [self.verdict.summary] if self.verdict and self.verdict.clean else []
        return "; ".join([*isolated, *self.leaks, *unchecked]) or "there is no held-out split to check against"

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean, "train_sha256": self.train_sha256, "unchecked": dict(self.unchecked),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "bank": None if self.bank is None else self.bank.to_json(),
        }  # fmt: skip


# training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeakageCheck:
    """What may be learnt from: tasks to play, those whose episodes fill the bank, and how that was found."""

    tasks: list[Task]
    experience: list[Task]
    audit: Audit
    dropped: int = 0

    @property
    def summary(self) -> str:
        left_out = f"{self.dropped} tasks left out that share something with evaluation; " if self.dropped else ""
        return left_out + self.audit.summary


def guard_training(
    config: CollectConfig | GrpoConfig, tasks: list[Task], experience: list[Task], envs: Environments, run: RunFolder
) -> LeakageCheck:
    """Write down what is learnt from and whether it may be, before anything is played; with `leakage.drop`, without
    what may not.

    Raises:
        ConfigError: they leak. The message names the overlap; both files stay for reading.
    """
    held_out, unchecked = held_out_tasks(config, envs)
    number = len(tasks) + len(experience)
    if config.leakage.drop:
        forbidden = shared_values(config.env.name, held_out)
        tasks, experience = ([t for t in some if not forbidden.hits(t)] for some in (tasks, experience))
    dropped = number - len(tasks) - len(experience)
    manifest = Manifest.of(config.env.name, [*tasks, *experience])
    audit = audit_training(config, manifest, held_out, unchecked)
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, {**audit.to_json(), "dropped": dropped})
    if audit.leaks:
        raise ConfigError(
            "training on these tasks would leak. " + "; ".join(audit.leaks) + f". See {run.path / LEAKAGE}. "
            "Choose another split, leave the shared tasks out (leakage.drop=true), or name the splits you will "
            "evaluate on: leakage.held_out=[...]"
        )
    return LeakageCheck(tasks, experience, audit, dropped)


def audit_training(
    config: CollectConfig | GrpoConfig, manifest: Manifest, held_out: Sequence[Task], unchecked: Mapping[str, str]
) -> Audit:
    """Raises: LeakageError, for tasks that do not say what must not be shared."""
    evaluation = Manifest.of(config.env.name, held_out) if held_out else None
    verdict = check(manifest, evaluation) if evaluation else None
    bank = None
    if config.memory.bank is not None and evaluation:
        bank = audit_bank(open_bank(config.memory, Path(config.memory.bank)).origins(), evaluation.ids)
    return Audit(manifest.sha256, verdict, unchecked, bank)


def held_out_tasks(config: CollectConfig | GrpoConfig, envs: Environments) -> tuple[list[Task], dict[str, str]]:
    """All tasks of the held-out splits, and for default splits that are not there why not.

    Raises:
        ConfigError: a split that was asked for by name does not exist, or its data is not there.
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


# rows -----------------------------------------------------------------------------------------------------------------


def guard_rows(rows: Path, task_ids: Iterable[str], allow: bool) -> list[str]:
    """What speaks against learning from these rows; nothing, where their collection was checked and is clean.

    Raises:
        ConfigError: anything does, and `allow` is not set.
    """
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
        audit = json.loads((folder / LEAKAGE).read_text(encoding="utf-8"))
        clean, sha256, verdict = audit["clean"], audit["train_sha256"], audit["verdict"]
    except ManifestError as error:
        return [str(error)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"no verdict in {folder / LEAKAGE} ({type(error).__name__}: {error})"]
    problems = []
    if sha256 != manifest.sha256:
        problems.append(f"the verdict in {LEAKAGE} is about other tasks than {MANIFEST}")
    if unknown := sorted(task_ids - manifest.ids):
        problems.append(f"{len(unknown)} tasks of the rows are not in {MANIFEST} ({', '.join(unknown[:3])})")
    if clean is False:
        overlaps = verdict["overlaps"] if verdict else ()
        shared = [f"{o['shared']} shared {o['dimension']}" for o in overlaps if not o["clean"]]
        problems.append(f"they leak ({', '.join(shared) or 'the bank holds entries of held-out tasks'})")
    return problems


def record_rows(run: RunFolder, rows: Sequence[Path], problems: Sequence[str]) -> None:
    """Manifest and verdict of the rows go with what is learnt from them; those of several folders together.

    Raises:
        ConfigError: rows of several benchmarks, which no evaluation could be compared with.
    """
    runs = [folder.parent for folder in rows]
    if len(runs) > 1:
        _record_together(run, runs)
    else:
        for name in (MANIFEST, LEAKAGE):
            if (runs[0] / name).is_file():
                shutil.copyfile(runs[0] / name, run.path / name)
    run.record(leakage={"problems": list(problems), "allowed": bool(problems)})


def rows_instructions(rows: Sequence[Path]) -> str:
    """Return what the executor is told about the environment that these rows are of, by their manifests.

    Rows without a manifest (`allow_leakage`) do not say it: they count as the household's, which every executor was
    told before environments had instructions of their own.
    """
    for folder in rows:
        if (folder.parent / MANIFEST).is_file():
            return find(Manifest.read(folder.parent / MANIFEST).benchmark).instructions
    return find(DEFAULT).instructions


def _record_together(run: RunFolder, runs: Sequence[Path]) -> None:
    """One manifest of all tasks, none where one is missing (what was trained on is unknown then). Tasks of other seeds
    may share an id: each stays."""
    audits = [_json(folder / LEAKAGE) for folder in runs]
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


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# eval -----------------------------------------------------------------------------------------------------------------


def record_evaluation(
    run: RunFolder, config: EvalConfig, specs: Sequence[EpisodeSpec], bank: MemoryBank
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
        "bank": {**audit_bank(bank.origins(), manifest.ids).to_json(), "retrieved_own": own},
    }
    manifest.write(run.path / MANIFEST)
    run.write_json(LEAKAGE, facts)
    return facts


def _training_verdict(config: EvalConfig, evaluated: Manifest) -> tuple[Verdict | None, str]:
    """The checkpoint's training tasks against those evaluated; None, and why, where that cannot be said."""
    if config.compiler.checkpoint is None:
        return None, "no trained compiler"
    checkpoint = Path(config.compiler.checkpoint)
    runs = (checkpoint, *checkpoint.resolve().parents[:2])  # the run itself, or one of its checkpoints
    found = next((run / MANIFEST for run in runs if (run / MANIFEST).is_file()), None)
    if found is None:
        return None, f"no {MANIFEST} beside {checkpoint}: which tasks it was trained on is unknown"
    try:
        return check(Manifest.read(found), evaluated), ""
    except (ManifestError, LeakageError) as error:
        return None, str(error)
