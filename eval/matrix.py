"""A matrix of evaluations: named axes of overrides, multiplied out into cells, each a plain evaluation of its own.

    matrix:
      executor: {small: {executor.model: a/small}, large: {executor.model: a/large}}
      split: [base, spatial]                                        short for {base: {split: base}, ...}
      seed: {0: {seed: 0, env.seed: 0}, 1: {seed: 1, env.seed: 1}}

A level is what `a.b=c` would be on the command line. `\\${seed}` in a level is the cell's own seed (the backslash keeps
it from being read with the file): a checkpoint for each variant and seed is `runs/\\${seed}/linear`. Cells that differ
in the axes `seed` and `order` (of an online stream) alone are one group: tables pool their episodes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.deliveries import find
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from envs import registry
from eval.metrics import grouped, joined

SEED_AXIS, ORDER_AXIS = "seed", "order"
POOLED = (SEED_AXIS, ORDER_AXIS)  # axes whose levels are episodes of one and the same thing
DELIVERY = "delivery"  # in `baseline` beside the axes


@dataclass(frozen=True, slots=True)
class Cell:
    """One plain evaluation: a level of every axis, and the settings that follow."""

    levels: Mapping[str, str]
    config: EvalConfig

    @property
    def name(self) -> str:
        return _named(self.levels)

    @property
    def group(self) -> str:
        """Name what it shares with the cells that differ from it in the pooled axes alone."""
        return _named(self.own_levels)

    @property
    def own_levels(self) -> dict[str, str]:
        return {axis: level for axis, level in self.levels.items() if axis not in POOLED}


def axes(config: EvalConfig) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Name the levels of each axis as they stand in tables and folders.

    Raises:
        ConfigError: an axis without levels, or two levels with the same name.
    """
    named: dict[str, dict[str, Mapping[str, Any]]] = {}
    for axis, levels in config.matrix.items():
        pairs = levels.items() if isinstance(levels, Mapping) else [(str(level), {axis: level}) for level in levels]
        by_name: dict[str, Mapping[str, Any]] = {_plain(name): overrides for name, overrides in pairs}
        if not pairs or len(by_name) < len(pairs) or _plain(axis) in (*named, DELIVERY):
            raise ConfigError(f"matrix.{axis}: needs a name of its own, and one level or more with names of their own")
        named[_plain(axis)] = by_name
    return named


def cells(config: EvalConfig) -> list[Cell]:
    """Multiply out all cells, ordered so that executors, then compilers, then environments change as seldom as
    possible. A configuration without a matrix is one cell without levels.

    Raises:
        ConfigError: naming the cells whose settings are wrong, and what is wrong with them.
    """
    if not config.matrix:
        check_deliveries(config)
        return [Cell({}, config)]
    named = axes(config)
    made, problems = [], []
    for levels in itertools.product(*named.values()):
        chosen = dict(zip(named, levels, strict=True))
        try:
            cell = Cell(chosen, _override(config, [named[axis][level] for axis, level in chosen.items()]))
            check_deliveries(cell.config)
            made.append(cell)
        except ConfigError as error:
            problems.append(f"matrix, cell {_named(chosen)}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    for role in ("env", "compiler", "executor"):  # what is slow to load changes slowest
        alike = grouped(made, lambda cell, role=role: str(getattr(cell.config, role)))
        made = [cell for same in alike.values() for cell in same]
    return made


def check_deliveries(config: EvalConfig) -> None:
    """Raise ConfigError for a delivery that is none, that only results have, or that nobody could play here."""
    for name in config.deliveries:
        try:
            spec = find(name)
        except ValueError as error:
            raise ConfigError(f"deliveries: {error}") from None
        if not spec.played:
            raise ConfigError(f"deliveries: {name} is a name in results alone")
        if config.memory.protocol != "frozen" and spec.interdependent:
            raise ConfigError(f"deliveries: {name} needs episodes side by side, and tasks are played one by one")
        if spec.where_unsure and not config.executor.says_how_sure:
            raise ConfigError(
                f"deliveries: {name} asks how sure a model is of its action: executor.mode=choice says it"
            )
        if spec.needs_expert and not registry.find(config.env.name).expert:
            raise ConfigError(f"deliveries: {name} asks the environment's expert, and {config.env.name} has none")


def baseline_of(config: EvalConfig, cell: Cell, delivery: str) -> str | None:
    """Name, as tables do, what `delivery` in `cell`'s group is compared with; None where it is that itself."""
    name = _baseline_name(config, cell, delivery)
    return None if name == joined(cell.group, delivery) else name


def check_baseline(config: EvalConfig, made: Sequence[Cell]) -> None:
    """Raise ConfigError for a baseline that nothing in the evaluation is."""
    if config.baseline is None:
        return
    there = {joined(cell.group, delivery) for cell in made for delivery in cell.config.deliveries}
    wanted = {_baseline_name(config, cell, delivery) for cell in made for delivery in cell.config.deliveries}
    unknown = set() if isinstance(config.baseline, str) else config.baseline.keys() - {*axes(config), DELIVERY}
    if unknown or not wanted & there:
        known = f"axes: {', '.join((*axes(config), DELIVERY))}; there are {', '.join(sorted(there))}"
        raise ConfigError(f"baseline {config.baseline!r} is nothing that is evaluated here ({known})")


def _baseline_name(config: EvalConfig, cell: Cell, delivery: str) -> str | None:
    if config.baseline is None:
        return None
    given = {DELIVERY: config.baseline} if isinstance(config.baseline, str) else config.baseline
    levels = {**cell.levels, **{axis: level for axis, level in given.items() if axis != DELIVERY}}
    return joined(Cell(levels, cell.config).group, given.get(DELIVERY, delivery))


def varying(values: Iterable[object]) -> Any:
    """Give what all have in common, or what there is, joined by "+"."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else "+".join(map(str, distinct))


def _override(config: EvalConfig, levels: Sequence[Mapping[str, Any]]) -> EvalConfig:
    settings = config.model_dump(mode="json", exclude_unset=True, exclude={"matrix", "baseline"})
    # JSON is YAML; what the file's own references stood for is there already, a `${` is none.
    own = [f"{key}={json.dumps(value)}".replace("${", "\\\\${") for key, value in settings.items()]
    return load_config(EvalConfig, None, own + [f"{k}={json.dumps(v)}" for level in levels for k, v in level.items()])


def _named(levels: Mapping[str, str]) -> str:
    return ",".join(f"{axis}={level}" for axis, level in levels.items())


def _plain(name: str) -> str:
    """Make a name that can stand in a folder's name and before a delivery's: `a/b` becomes `a-b`."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".") or "-"
