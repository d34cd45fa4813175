"""Matrix of evaluations: the product of named axes of overrides; each cell is a plain evaluation.

    matrix:
      executor: {small: {executor.model: a/small}, large: {executor.model: a/large}}
      split: [base, spatial]                                        short for {base: {split: base}, ...}
      seed: {0: {seed: 0, env.seed: 0}, 1: {seed: 1, env.seed: 1}}

`select: {split: [base]}` plays some levels of an axis only. A level holds overrides like `a.b=c` on the command line.
`\\${seed}` in a level is the cell's seed (the backslash delays the reference), so that `runs/\\${seed}/linear` is a
checkpoint per seed. Cells that differ only in the axes `seed` and `order` (of an online evaluation) form one group,
whose episodes tables pool."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.deliveries import find
from configs.evaluation import EvalConfig
from configs.load import ConfigError, changed
from envs import registry
from eval.metrics import grouped, joined

SEED_AXIS, ORDER_AXIS = "seed", "order"
POOLED = (SEED_AXIS, ORDER_AXIS)  # axes whose levels are pooled
DELIVERY = "delivery"  # key of `baseline` besides the axes
_OWN = ("matrix", "baseline", "select")  # settings of the matrix, which its cells do not have


@dataclass(frozen=True, slots=True)
class Cell:
    """One evaluation: a level of every axis, and the resulting settings."""

    levels: Mapping[str, str]
    config: EvalConfig

    @property
    def name(self) -> str:
        return _named(self.levels)

    @property
    def group(self) -> str:
        """Name without the pooled axes; cells of a group are pooled."""
        return _named(self.own_levels)

    @property
    def own_levels(self) -> dict[str, str]:
        return {axis: level for axis, level in self.levels.items() if axis not in POOLED}


def axes(config: EvalConfig) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the selected levels of each axis by their names in tables and folders.

    Raises:
        ConfigError: an axis without levels, two levels with the same name, or an unknown axis or level in `select`.
    """
    named: dict[str, dict[str, Mapping[str, Any]]] = {}
    for axis, levels in config.matrix.items():
        pairs = levels.items() if isinstance(levels, Mapping) else [(str(level), {axis: level}) for level in levels]
        by_name: dict[str, Mapping[str, Any]] = {_plain(name): overrides for name, overrides in pairs}
        if not pairs or len(by_name) < len(pairs) or _plain(axis) in (*named, DELIVERY):
            raise ConfigError(f"matrix.{axis}: axes and levels need unique names, and an axis at least one level")
        named[_plain(axis)] = by_name
    for axis, wanted in config.select.items():
        levels = named.get(axis, {})
        if not wanted or set(wanted) - levels.keys():
            known = ", ".join(levels) or f"the axes {', '.join(named)}"
            raise ConfigError(f"select.{axis}={','.join(wanted)}: the matrix has {known}")
        named[axis] = {level: levels[level] for level in dict.fromkeys(wanted)}
    return named


def cells(config: EvalConfig) -> list[Cell]:
    """Return all cells, sorted so that executors, then compilers, then environments change as rarely as possible.
    Without a matrix there is one cell without levels.

    Raises:
        ConfigError: settings of some cells are invalid; the message names each.
    """
    if not config.matrix:
        check_deliveries(config)
        return [Cell({}, config)]
    named = axes(config)
    found, problems = [], []
    for levels in itertools.product(*named.values()):
        chosen = dict(zip(named, levels, strict=True))
        try:
            cell = Cell(chosen, changed(config, *(named[axis][level] for axis, level in chosen.items()), without=_OWN))
            check_deliveries(cell.config)
            found.append(cell)
        except ConfigError as error:
            problems.append(f"matrix, cell {_named(chosen)}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    for role in ("env", "compiler", "executor"):  # the last sort dominates: the executor is the slowest to load
        alike = grouped(found, lambda cell, role=role: str(getattr(cell.config, role)))
        found = [cell for same in alike.values() for cell in same]
    return found


def check_deliveries(config: EvalConfig) -> None:
    """Raise ConfigError for deliveries that are unknown or cannot be played with these settings."""
    for name in config.deliveries:
        try:
            spec = find(name)
        except ValueError as error:
            raise ConfigError(f"deliveries: {error}") from None
        if not spec.playable:
            raise ConfigError(f"deliveries: {name} exists in results only and cannot be played")
        if config.memory.protocol != "frozen" and spec.interdependent:
            raise ConfigError(f"deliveries: {name} needs episodes side by side, which memory.protocol=frozen plays")
        if spec.low_confidence_only and not config.executor.reports_confidence:
            raise ConfigError(f"deliveries: {name} needs an executor that reports its confidence: executor.mode=choice")
        if not spec.text and config.executor.soft_on != "always":
            raise ConfigError(f"deliveries: {name} has no guidance for soft tokens to follow: executor.soft_on=always")
        if spec.needs_expert and not registry.find(config.env.name).expert:
            raise ConfigError(f"deliveries: {name} needs the environment's expert, and {config.env.name} has none")


def baseline_of(config: EvalConfig, cell: Cell, delivery: str) -> str | None:
    """Return the table name of the baseline of `delivery` in `cell`'s group; None if it is its own baseline."""
    name = _baseline_name(config, cell, delivery)
    return None if name == joined(cell.group, delivery) else name


def check_baseline(config: EvalConfig, all_cells: Sequence[Cell]) -> None:
    """Raise ConfigError for a baseline that is not evaluated."""
    if config.baseline is None:
        return
    evaluated = {joined(cell.group, delivery) for cell in all_cells for delivery in cell.config.deliveries}
    wanted = {_baseline_name(config, cell, delivery) for cell in all_cells for delivery in cell.config.deliveries}
    unknown = set() if isinstance(config.baseline, str) else config.baseline.keys() - {*axes(config), DELIVERY}
    if unknown or not wanted & evaluated:
        known = f"axes: {', '.join((*axes(config), DELIVERY))}; evaluated: {', '.join(sorted(evaluated))}"
        raise ConfigError(f"baseline {config.baseline!r} is not evaluated here ({known})")


def _baseline_name(config: EvalConfig, cell: Cell, delivery: str) -> str | None:
    if config.baseline is None:
        return None
    given = {DELIVERY: config.baseline} if isinstance(config.baseline, str) else config.baseline
    levels = {**cell.levels, **{axis: level for axis, level in given.items() if axis != DELIVERY}}
    return joined(Cell(levels, cell.config).group, given.get(DELIVERY, delivery))


def varying(values: Iterable[object]) -> Any:
    """Return the common value, or the distinct values joined by "+"."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else "+".join(map(str, distinct))


def _named(levels: Mapping[str, str]) -> str:
    return ",".join(f"{axis}={level}" for axis, level in levels.items())


def _plain(name: str) -> str:
    """Make a name usable in folder names and before a delivery: `a/b` becomes `a-b`."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".") or "-"
