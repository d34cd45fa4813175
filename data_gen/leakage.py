"""What training and evaluation share, and whether they may (paper C.1): "zero leakage", checked instead of claimed.

Every task says by dimension what must not be shared (`Task.isolation`); the environment's spec says how that is read.
What a spec does not list (other benchmarks, further dimensions) must be on both sides and disjoint.
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

    from envs.base import Task

EXAMPLES = 5  # shared values that a verdict names


@dataclass(frozen=True, slots=True)
class Shared:
    """What a training task must not name: the values of held-out tasks, by dimension that must be disjoint."""

    values: Mapping[str, frozenset[str]]

    def hits(self, task: Task) -> bool:
        return any(not values.isdisjoint(task.isolation.get(name, ())) for name, values in self.values.items())


def shared_values(benchmark: str, held_out: Iterable[Task]) -> Shared:
    """For leaving tasks out before training (paper C.1: EB-ALFRED's pairs, ScienceWorld's variations)."""
    rules = _rules(benchmark)
    values: dict[str, set[str]] = {}
    for task in held_out:
        for name, labels in task.isolation.items():
            if rules.get(name, "disjoint") == "disjoint":
                values.setdefault(name, set()).update(labels)
    return Shared({name: frozenset(labels) for name, labels in values.items()})


def _rules(benchmark: str) -> Mapping[str, Rule]:
    spec = known(benchmark)
    return spec.isolation if spec else {}


class LeakageError(ValueError):
    """Two task lists that cannot be compared: that is not a pass. The message is ready to print."""


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

    @property
    def clean(self) -> bool:
        return self.shared == 0 if self.rule == "disjoint" else self.evaluation > self.shared


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
        return f"{pair} leak: " + "; ".join(_told(o) for o in self.overlaps if not o.clean)

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(overlap), "clean": overlap.clean} for overlap in self.overlaps]
        return {**asdict(self), "overlaps": rows, "clean": self.clean}

    def table(self) -> Table:
        """One row per dimension, for a terminal."""
        from rich.table import Table

        table = Table(title=self.summary, title_justify="left")
        for name in ("dimension", "must be", self.train, self.evaluation, "shared", "tasks", "examples", ""):
            table.add_column(
                name, justify="right" if name in (self.train, self.evaluation, "shared", "tasks") else "left"
            )
        for o in self.overlaps:
            numbers = (str(n) for n in (o.train, o.evaluation, o.shared, o.tasks))
            table.add_row(o.dimension, o.rule, *numbers, ", ".join(o.examples), "ok" if o.clean else "LEAK")
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
    overlaps = [_overlap(name, rules.get(name, "disjoint"), train, evaluation) for name in sorted(named)]
    return Verdict(
        train.benchmark, train.split, evaluation.split, train.sha256, evaluation.sha256, tuple(overlaps)
    )  # fmt: skip


def _overlap(dimension: str, rule: Rule, train: Manifest, evaluation: Manifest) -> Overlap:
    ours, theirs = _values(dimension, train), _values(dimension, evaluation)
    shared = ours & theirs
    touched = sum(not shared.isdisjoint(task.isolation[dimension]) for task in evaluation.tasks)
    return Overlap(dimension, rule, len(ours), len(theirs), len(shared), touched, tuple(sorted(shared)[:EXAMPLES]))


def _values(dimension: str, manifest: Manifest) -> set[str]:
    """Raises: LeakageError, where a task does not have the dimension, or no task has a value in it."""
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


def _told(overlap: Overlap) -> str:
    if overlap.rule == "novel":
        return f"evaluation has no {overlap.dimension} that training lacks"
    more = ", ..." if overlap.shared > len(overlap.examples) else ""
    return f"{overlap.shared} shared {overlap.dimension} ({', '.join(overlap.examples)}{more})"


# Memory ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BankAudit:
    """What a memory bank knows of the tasks that are evaluated."""

    entries: int
    by_split: Mapping[str, int]
    own_entries: int  # written by episodes of the very tasks that are evaluated
    own_tasks: int  # tasks that have such entries

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit_bank(origins: Mapping[tuple[str, str], int], tasks: Iterable[str]) -> BankAudit:
    """`origins`: entries by (task id, split), as `MemoryBank.origins` counts them; `tasks`: ids that are evaluated."""
    ids, by_split, own = set(tasks), Counter[str](), Counter[str]()
    for (task_id, split), n in origins.items():
        by_split[split] += n
        if task_id in ids:
            own[task_id] += n
    return BankAudit(by_split.total(), dict(sorted(by_split.items())), own.total(), len(own))
