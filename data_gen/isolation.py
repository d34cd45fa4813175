"""Comparison of training and evaluation tasks by their isolation dimensions, and audits of memory banks (paper C.1).

`Task.isolation` lists by dimension what training and evaluation must not share; the environment's spec gives the rule
of each dimension. A dimension without a rule must exist on both sides and be disjoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from envs.manifest import Manifest
from envs.registry import known
from envs.spec import Rule

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = 5  # shared values that a verdict lists


class LeakageError(ValueError):
    """Two task lists cannot be compared, which does not count as a pass."""


# -- task lists --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DimensionOverlap:
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
class IsolationCheck:
    """Result of comparing two task lists, which the hashes identify."""

    benchmark: str
    train: str
    evaluation: str
    train_sha256: str
    evaluation_sha256: str
    overlaps: tuple[DimensionOverlap, ...]

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


def check(train: Manifest, evaluation: Manifest) -> IsolationCheck:
    """Compare two task lists of one benchmark.

    Raises:
        LeakageError: the benchmarks differ, there is no dimension, or a task lacks a value for one.
    """
    if train.benchmark != evaluation.benchmark:
        raise LeakageError(f"cannot compare tasks of {train.benchmark} with tasks of {evaluation.benchmark}")
    rules = isolation_rules(train.benchmark)
    named = {name for side in (train, evaluation) for task in side.tasks for name in task.isolation} | set(rules)
    if not named:
        raise LeakageError(f"the tasks of {train.benchmark} have no isolation dimensions: fill in Task.isolation")
    overlaps = tuple(_overlap(name, rules.get(name, "disjoint"), train, evaluation) for name in sorted(named))
    return IsolationCheck(
        train.benchmark,
        train=train.split,
        evaluation=evaluation.split,
        train_sha256=train.sha256,
        evaluation_sha256=evaluation.sha256,
        overlaps=overlaps,
    )


def _overlap(dimension: str, rule: Rule, train: Manifest, evaluation: Manifest) -> DimensionOverlap:
    ours, theirs = _values(dimension, train), _values(dimension, evaluation)
    shared = ours & theirs
    touched = sum(not shared.isdisjoint(task.isolation[dimension]) for task in evaluation.tasks)
    clean = not shared if rule == "disjoint" else len(theirs) > len(shared)
    examples = tuple(sorted(shared)[:EXAMPLES])
    return DimensionOverlap(
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


def isolation_rules(benchmark: str) -> Mapping[str, Rule]:
    """Return the rule of each dimension; none for an unknown benchmark."""
    spec = known(benchmark)
    return spec.isolation if spec else {}


# -- memory banks ------------------------------------------------------------------------------------------------------


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
