"""A paper's tables: rows as printed and rows measured by runs, each marked.

A measured value is in a column of the paper only if it is of that benchmark and split; other environments and splits
get further columns. Missing values are marked as not measured. The papers' figures are in YAML files (`PAPERS`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from eval.intervals import bootstrap_ratio, wilson
from eval.metrics import ROLES, display_name, grouped, split_name, usage
from eval.paper.specs import ALFWORLD, EFFICIENCY, LIVING, MILLIONS, PAPERS, RULES, Column, Paper, Spec
from eval.runs import episode_files, episodes_of, read_results

MEMCOMPILER = "memcompiler"  # the default paper
MEMORY, PAPERS_MEMORY = "memory", "trajectory"  # axis of memory systems; the system of the paper's own rows
NOT_MEASURED = "not measured"
PAPER, MEASURED = "paper", "measured"
ABOUT = ("environment", "split", "seed", "n_tasks", "executors", "compilers")  # facts of a run under a table


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number in its column's unit, in the paper without interval; `relative`: change against no memory, in %."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the paper or of a run; `cells` by column."""

    executor: str
    method: str
    source: str  # PAPER | MEASURED
    cells: Mapping[str, TableCell]


@dataclass(frozen=True, slots=True)
class Table:
    number: int
    title: str
    columns: tuple[str, ...]
    plotted: Sequence[str]  # columns of the figure: averages, not every subset
    rows: Sequence[Row]
    runs: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    def measured(self, row: Row) -> bool:
        return any(r.source == MEASURED and (r.executor, r.method) == (row.executor, row.method) for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the content of tableN.json; missing cells of measured rows are null."""
        rows = [
            {
                "executor": row.executor,
                "method": row.method,
                "source": row.source,
                **({"measured": self.measured(row)} if row.source == PAPER else {}),
                "cells": {c: asdict(row.cells[c]) if c in row.cells else None for c in self.columns},
            }
            for row in self.rows
        ]
        head = {"table": self.number, "title": self.title, "columns": list(self.columns)}
        return {**head, "rows": rows, "runs": list(self.runs), "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one delivery in one group of cells."""

    delivery: str
    environment: str
    split: str
    executor: str
    levels: Mapping[str, str]
    summary: Mapping[str, Any]
    efficiency: Mapping[str, TableCell] = field(default_factory=dict)
    trained: Mapping[str, Any] | None = None  # of its compiler: checkpoint, and what it was trained on
    system: str = ""  # memory system whose entries are recalled
    by_rules: bool = False  # no language model wrote its memory

    def cell(self, metric: str, family: str) -> TableCell | None:
        if metric in EFFICIENCY:
            return self.efficiency.get(metric)
        if metric in LIVING.values():
            living = self.summary.get("living", {}).get("summary", {}).get(family, {}).get(metric)
            return percent_cell(living) if living else None
        if metric == "tokens":
            used = [self.summary["usage"][role] for role in ROLES if role in self.summary.get("usage", {})]
            return TableCell(sum(of["tokens_in"] + of["tokens_out"] for of in used) / 1e6) if used else None
        summary = self.summary["by_family"].get(family) if family else self.summary
        return percent_cell(summary[metric]) if summary else None


@cache
def paper_numbers(paper: str = MEMCOMPILER) -> dict[str, Any]:
    """Read a paper's figures: `tables`, and for MemCompiler `figures` and `models`."""
    return yaml.safe_load(Path(__file__).with_name(PAPERS[paper].numbers).read_text(encoding="utf-8"))


def paper_table(number: int, runs: Sequence[Path], paper: str = MEMCOMPILER) -> Table:
    """Return table `number` of a paper with the results of evaluations in `runs`.

    Raises:
        ValueError: no such paper or table, incomplete results, or two measurements for one cell.
    """
    if paper not in PAPERS:
        raise ValueError(f"tables are of {', '.join(PAPERS)}; there are none of {paper}")
    if number not in (specs := PAPERS[paper].tables):
        raise ValueError(f"the paper's results are in tables {', '.join(map(str, specs))}; there is no table {number}")
    spec, printed = specs[number], paper_numbers(paper)["tables"][number]
    results = [read_results(run) for run in runs]
    found = [m for run, of_run in zip(runs, results, strict=True) for m in measurements(of_run, run, spec.efficiency)]
    further = _further_columns(spec, found)
    rows = [*paper_rows(printed), *_measured_rows(spec, (*spec.columns, *further), found, printed)]
    columns = (*printed["columns"], *(c.name for c in further))
    plotted = [*printed.get("relative_of", printed["columns"]), *(c.name for c in further if not c.family)]
    about = [_about(run, of_run) for run, of_run in zip(runs, results, strict=True)]
    notes = _notes(spec, PAPERS[paper], relative="relative_of" in printed, found=found, results=results)
    title, ordered = f"Table {number}. {printed['title']}", _ordered(rows, spec, printed)
    return Table(number, title, columns=columns, plotted=plotted, rows=ordered, runs=about, notes=notes)


# measurements ---------------------------------------------------------------------------------------------------------


def measurements(results: Mapping[str, Any], run: Path, efficiency: bool = False) -> list[Measured]:
    """Return the measurements of a run; with `efficiency`, also the columns of Table 5, from its episodes."""
    used, found = _efficiencies(results, run) if efficiency else {}, []
    for name, summary in results["results"].items():
        group, delivery = split_name(name)
        cells = [cell for cell in _cells(results) if cell.get("group", group) == group]
        for key in ("environment", "split"):
            if len({cell[key] for cell in cells}) > 1:
                raise ValueError(f"{name} mixes {key}s: name them in an axis of the matrix")
        found.append(
            Measured(
                summary.get("delivery", delivery),
                cells[0]["environment"],
                split=str(cells[0]["split"]),
                executor=_executor(cells[0], paper_numbers()["models"]),
                levels=summary.get("levels", {}),
                summary=summary,
                efficiency=used.get(name, {}),
                trained=cells[0].get("trained"),
                **_memory_of(cells[0], summary),
            )
        )
    return found


def _memory_of(cell: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the system of a measurement's memory, and whether rules wrote it; nothing where none is recalled."""
    if writing := summary.get("writing"):
        return {"system": writing["system"], "by_rules": writing["written_by"] == "rules"}
    return {}


def _cells(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(results.get("cells", {}).values()) or [results]


def _executor(cell: Mapping[str, Any], names: Mapping[str, str]) -> str:
    settings = cell.get("config", {}).get("executor", {})
    if (engine := settings.get("engine")) == "scripted" or (engine == "program" and not settings["api"]["model"]):
        return f"{engine} planner"
    of = settings.get("api", {}) if settings.get("engine") == "api" else settings
    short = str(of.get("model") or "unknown executor").rstrip("/").rsplit("/", 1)[-1]
    return names.get(short, short)


def _efficiencies(results: Mapping[str, Any], run: Path) -> dict[str, dict[str, TableCell]]:
    """Return Table 5's columns by name in results; without intervals if the run's episodes are missing."""
    taken = {name: [summary["usage"]] for name, summary in results["results"].items() if "usage" in summary}
    if all(path.exists() for path in episode_files(run, results)):
        used = ((e.delivery, {role: usage(e.steps, role) for role in ROLES}) for e in episodes_of(run, results)(False))
        by_name = grouped(used, lambda pair: pair[0])
        taken |= {name: [of_episode for _, of_episode in pairs] for name, pairs in by_name.items()}
    return {name: _per_call(of_name) for name, of_name in taken.items()}


def _per_call(usages: Sequence[Mapping[str, Any]]) -> dict[str, TableCell]:
    """Average over all calls, with 95 % bootstrap intervals over episodes; roles without calls are left out."""
    cells = {}
    for column, (role, keys) in EFFICIENCY.items():
        mean = bootstrap_ratio([(sum(of[role][key] for key in keys), of[role]["calls"]) for of in usages])
        if mean is not None:
            one = len(usages) == 1
            cells[column] = TableCell(mean.mean) if one else TableCell(mean.mean, mean.low, mean.high, mean.n)
    return cells


# rows and columns -----------------------------------------------------------------------------------------------------


def paper_rows(printed: Mapping[str, Any]) -> list[Row]:
    """Return the rows that the paper printed."""
    rows = []
    for executor, methods in printed["executors"].items():
        for method, numbers in methods.items():
            changes = dict(zip(printed.get("relative_of", ()), numbers.get("relative", ()), strict=True))
            pairs = zip(printed["columns"], numbers["values"], strict=True)
            cells = {c: TableCell(float(v), relative=changes.get(c)) for c, v in pairs if v is not None}
            rows.append(Row(executor, method, PAPER, cells))
    return rows


def _further_columns(spec: Spec, found: Sequence[Measured]) -> tuple[Column, ...]:
    """Return columns for environments and splits that the paper's table lacks."""
    columns: set[Column] = set()
    for m in found:
        if any(_in(column, m) for column in spec.columns):
            continue
        families = list(m.summary["by_family"])
        for metric in spec.metrics:
            name = f"{m.environment} {m.split}"
            name += " progress" if metric == "progress" and len(spec.metrics) > 1 else ""
            name += f", {MILLIONS}" if metric == "tokens" else ""
            for family in ("", *(families if len(families) > 1 and spec.families else ())):
                columns.add(
                    Column(
                        f"{name}: {family}" if family else name,
                        m.environment,
                        splits=(m.split,),
                        metric=metric,
                        family=family,
                    )
                )
    return tuple(sorted(columns, key=lambda c: (c.environment, c.splits, spec.metrics.index(c.metric), c.family)))


def _in(column: Column, m: Measured) -> bool:
    return not column.environment or (column.environment == m.environment and m.split in column.splits)


def _measured_rows(
    spec: Spec, columns: Sequence[Column], found: Sequence[Measured], printed: Mapping[str, Any]
) -> list[Row]:
    """Group measurements into rows. Raises: ValueError, for two measurements of one cell."""
    rows = []
    shown = [m for m in found if _method(spec, m)]
    for (executor, method), of_row in grouped(shown, lambda m: (m.executor, _method(spec, m))).items():
        cells = {column.name: _cell(column, of_row, f"{executor}, {method}") for column in columns}
        rows.append(Row(executor, method, MEASURED, {name: cell for name, cell in cells.items() if cell}))
    relative = (*printed.get("relative_of", ()), *(c.name for c in columns if c not in spec.columns))
    return [_against_no_memory(row, rows, spec, relative) for row in rows] if "relative_of" in printed else rows


def _method(spec: Spec, m: Measured) -> str:
    """Return the name of a row: the paper's or the delivery's, with the levels of other axes; "" for no row."""
    variant = m.levels.get(spec.axis) if spec.axis in spec.axes else None
    own = ", ".join(filter(None, (variant, display_name(m.delivery))))
    name = spec.methods.get(f"{variant}/{m.delivery}" if variant else m.delivery, own)
    if not name:
        return ""
    levels = {axis: level for axis, level in m.levels.items() if axis not in spec.axes}
    levels = {axis: level for axis, level in levels.items() if spec.conditions.get(axis) != level}
    if spec.systems:
        name, levels = _of_system(spec, m, name, levels)
    if not any(column.environment for column in spec.columns) and not _in(ALFWORLD, m):
        name += f", {m.environment} {m.split}"  # Table 5 has no column for the environment
    others = ", ".join(f"{axis}={level}" for axis, level in levels.items())
    return f"{name} [{others}]" if others else name


def _of_system(spec: Spec, m: Measured, name: str, levels: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Name the row of a memory system, and return the levels that its name does not say already.

    What rules wrote is no measurement of the published system, and is named so.
    """
    others = {axis: level for axis, level in levels.items() if axis != MEMORY}
    level = levels.get(MEMORY, "")
    if m.delivery in ("none", "memgen", "memgen_gated"):  # nothing is recalled
        return name, others if level in ("", "none") else dict(levels)
    row = spec.systems.get(m.system)
    if row and m.delivery == "static":
        name, said = f"{row}{RULES}" if m.by_rules else row, m.system
    else:
        said = PAPERS_MEMORY
    shown = level if level not in ("", m.system) else m.system
    return name, others if shown in ("", said) else {MEMORY: shown, **others}


def _cell(column: Column, of_row: Sequence[Measured], where: str) -> TableCell | None:
    """Pool all splits of a column; None if a split is missing. Raises: ValueError, for two measurements of a split."""
    parts: dict[str, TableCell] = {}
    for m in of_row:
        if not _in(column, m) or (cell := m.cell(column.metric, column.family)) is None:
            continue
        if m.split in parts:
            raise ValueError(
                f"two measurements for {where}, {column.name}: give one run, or make the difference an axis of a matrix"
            )
        parts[m.split] = cell
    if not parts or set(column.splits) - parts.keys():
        return None
    return next(iter(parts.values())) if len(parts) == 1 else _together(list(parts.values()), column.metric)


def _together(cells: Sequence[TableCell], metric: str) -> TableCell:
    """Pool splits over all their episodes, with a Wilson interval; for progress, with a normal one."""
    n = sum(cell.n or 0 for cell in cells)
    mean = sum(cell.value * (cell.n or 0) for cell in cells) / n
    if metric == "success":
        return percent_cell(asdict(wilson(round(mean * n / 100), n)))
    halves = [((cell.high or 0.0) - (cell.low or 0.0)) / 2 * (cell.n or 0) / n for cell in cells]
    half = sum(h * h for h in halves) ** 0.5
    return TableCell(mean, max(0.0, mean - half), min(100.0, mean + half), n)


def percent_cell(interval: Mapping[str, Any]) -> TableCell:
    """Convert an interval of a share to a cell in percent."""
    return TableCell(100 * interval["mean"], 100 * interval["low"], 100 * interval["high"], interval["n"])


def _against_no_memory(row: Row, rows: Sequence[Row], spec: Spec, columns: Iterable[str]) -> Row:
    """Add the relative change against the same executor's row without memory, if that is not zero."""
    _, bracket, others = row.method.partition(" [")
    wanted = [spec.methods["none"] + bracket + others]
    if spec.systems and others.startswith(f"{MEMORY}="):  # a memory's row is compared with the one without memory
        rest = others.rstrip("]").partition(", ")[2]
        wanted.append(spec.methods["none"] + (f" [{rest}]" if rest else ""))
    found = {r.method: r.cells for r in rows if r.executor == row.executor}
    base = next((found[method] for method in wanted if method in found), {})
    changed = {
        name: replace(cell, relative=100 * (cell.value / base[name].value - 1))
        for name, cell in row.cells.items()
        if name in columns and name in base and base[name].value
    }
    return replace(row, cells={**row.cells, **changed})


def _ordered(rows: Sequence[Row], spec: Spec, printed: Mapping[str, Any]) -> list[Row]:
    """Sort rows in the paper's order, measured rows after the paper's of the same method."""
    executors = list(dict.fromkeys([*printed["executors"], *(row.executor for row in rows)]))
    methods = [*dict.fromkeys(m for of in printed["executors"].values() for m in of), *spec.methods.values()]

    def place(row: Row) -> tuple[Any, ...]:
        known = [i for i, method in enumerate(methods) if row.method.startswith(method)]
        method = max(known, key=lambda i: len(methods[i])) if known else len(methods)
        first = (method, executors.index(row.executor))
        return (*(first if spec.by_method else first[::-1]), row.source != PAPER, row.method)

    return sorted(rows, key=place)


def _about(run: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    cells = _cells(results)
    keys = ("environment", "split", "seed", "scene_seed", "n_tasks", "tasks_sha256", "executor_hash", "compiler_hash")
    return {
        "run": run.name,
        "git": results.get("git"),
        **{key: sorted({str(c[key]) for c in cells if c.get(key) is not None}) for key in keys},
        "executors": sorted({_executor(cell, {}) for cell in cells}),
        "compilers": sorted({_compiler(cell["trained"]) for cell in cells if cell.get("trained")}) or ["none"],
    }


def _compiler(trained: Mapping[str, Any]) -> str:
    """Describe a trained compiler: its checkpoint, and what it was trained on."""
    named = {"soft": "soft tokens", "brief_state": "Brief State", "text": "text and memory"}
    without = [name for key, name in named.items() if not trained.get(key, True)]
    on = f"trained on {trained['environment'] or 'an unknown benchmark'}"
    if trained.get("memory") not in (None, PAPERS_MEMORY):
        on += f" with memory {trained['memory']}"
    return f"{trained['checkpoint']} ({on}{' without ' + ' and '.join(without) if without else ''})"


def _notes(
    spec: Spec, paper: Paper, relative: bool, found: Sequence[Measured], results: Sequence[Mapping[str, Any]]
) -> list[str]:
    notes = [
        f"Rows marked paper: as printed in arXiv {paper.arxiv}. Rows marked measured: this project's runs, with 95 % "
        "intervals in brackets (Wilson for success, bootstrap for progress) and n, the episodes behind a number."
    ]
    notes += filter(None, [paper.note])
    for m in found:
        if m.delivery == "compiled_no_brief" and m.trained and m.trained["brief_state"]:
            notes.append(f"{_method(spec, m)}: the compiler was trained with Brief State, unlike the paper's.")
        if by_order := m.summary.get("success_by_order"):
            scores = [100 * score for score in by_order.values()]
            shown = f"{fmean(scores):.1f} ± {stdev(scores) if len(scores) > 1 else 0.0:.1f}"
            notes.append(f"{_method(spec, m)}: {shown} (mean and standard deviation of {len(scores)} orders).")
    if any(m.by_rules and m.system in spec.systems for m in found):
        notes.append("Memories written by rules measure this project's rules, not the published systems.")
    if relative:
        notes.append("In round brackets: the change against the same executor without memory.")
    if any(len(column.splits) > 1 for column in spec.columns):
        notes.append("A measured average needs all six subsets; it is over all their episodes.")
    if any(cell.get("config", {}).get("concurrency", 1) != 1 for of_run in results for cell in _cells(of_run)):
        batched = "Some episodes were batched: their latencies are shares of a batch's, not what one agent waits."
        notes += [batched] if spec.efficiency else []
    if spec.efficiency:
        notes.append("Means per call; intervals by bootstrap over episodes.")
    if not found:
        notes.append("No run was given.")
    return notes
