"""`memcompiler report paper --table 3 RUN ...`: writes a paper's table as OUT/table3.md, .json and .png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from configs.reproduce import RUNS
from configs.run_folder import check_own_files
from eval.paper import s3mem
from eval.paper.chains import chain_in, default_chains, finished_runs, missing_runs
from eval.paper.specs import EFFICIENCY, MILLIONS, SPECS
from eval.paper.tables import ABOUT, MEASURED, MEMCOMPILER, NOT_MEASURED, PAPER, Row, Table, TableCell, paper_table
from eval.plots import MUTED, dot_with_interval, figure_of, quiet, save_figure, titled
from eval.table import DASH, escape, markdown_table, sizes
from runtime.store import to_json, write_atomically


def run_table(number: int, runs: Sequence[Path], out: Path | None, paper: str = MEMCOMPILER) -> None:
    """Print table `number` and write it to OUT (default: `paper` in the first run; without results it is only printed).

    Args:
        runs: run folders; one of a chain (`memcompiler reproduce`) stands for its evaluations. None: of MemCompiler's
            tables, the chains in `runs/`.

    Raises:
        ValueError: no such paper or table, or a run without results.
    """
    if paper == s3mem.NAME:
        table = s3mem.s3mem_table(number, runs)
    elif paper == MEMCOMPILER and number in SPECS:
        table, runs = _own_table(number, runs)
    else:
        table = paper_table(number, runs, paper)
    name = f"table{number}" if paper == MEMCOMPILER else f"{paper}-table{number}"
    target = out or (runs[0] / "paper" if runs else None)
    if target is None:
        typer.echo(to_markdown(table))
        return
    write(target, name, to_markdown(table), table.to_json())
    table_plot(table, target / f"{name}.png")


def _own_table(number: int, runs: Sequence[Path]) -> tuple[Table, list[Path]]:
    """Return a table of MemCompiler, with what chains lack among its notes, and the given or found runs."""
    chains = [chain for run in runs if (chain := chain_in(run))] if runs else default_chains()
    plain = [run for run in runs if chain_in(run) is None]
    found = [run for chain in chains for run in finished_runs(chain, number)]
    missing = [line for chain in chains for line in missing_runs(chain, number, SPECS[number].methods)]
    table = paper_table(number, [*plain, *found])
    given = runs or [RUNS][: len(found)]
    return replace(table, notes=[*table.notes, *missing]), list(given)


def write(out: Path, name: str, text: str, record: Mapping[str, Any]) -> None:
    """Write NAME.json and NAME.md, and print the text."""
    check_own_files(out, (f"{name}.json", f"{name}.md"), "table" if "table" in record else "figure")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{name}.json", to_json(record))
    write_atomically(out / f"{name}.md", text)
    typer.echo(text)
    typer.echo(str(out / f"{name}.md"))


def to_markdown(table: Table) -> str:
    heads = ["executor", "method", "source", *table.columns, "n"]
    about = [
        f"Run {escape(of['run'])}: " + "; ".join(f"{key} {escape(', '.join(map(str, of[key])))}" for key in ABOUT)
        for of in table.runs
    ]
    lines = markdown_table(heads, [_cells(table, row) for row in table.rows], left=3)
    notes = (f"- {note}" for note in (*about, *table.notes))
    return "\n".join([f"### {table.title}", "", *lines, "", *notes]) + "\n"


def _cells(table: Table, row: Row) -> list[str]:
    source = "**measured**" if row.source == MEASURED else PAPER if table.measured(row) else f"paper; {NOT_MEASURED}"
    values = [_text(row.cells.get(column), row.source, column) for column in table.columns]
    n = sizes([cell.n for cell in row.cells.values() if cell.n])
    return [escape(row.executor), escape(row.method), source, *values, n]


def _text(cell: TableCell | None, source: str, column: str) -> str:
    """Format a cell: `52.5 [44.8, 60.1] (+12%)`."""
    if cell is None:
        # efficiency is undefined without a compiler
        return NOT_MEASURED if source == MEASURED and column not in EFFICIENCY else DASH
    digits = 3 if column.endswith(" s") else 2 if column.endswith(MILLIONS) else 1
    shown = f"{cell.value:g}" if source == PAPER else f"{cell.value:.{digits}f}"
    if cell.low is not None and cell.high is not None:
        shown += f" [{cell.low:.{digits}f}, {cell.high:.{digits}f}]"
    return shown if cell.relative is None else f"{shown} ({cell.relative:+.1f}%)"


def table_plot(table: Table, path: Path) -> Path:
    """Plot a panel per column: the paper's values as open diamonds, measured ones as dots with intervals."""
    labels = list(dict.fromkeys((row.executor, row.method) for row in table.rows))
    size = (3.4 + 2.3 * len(table.plotted), 1.3 + 0.24 * len(labels))
    figure, panels = figure_of(size, 1, len(table.plotted), sharey=True)
    for panel, column in zip(panels, table.plotted, strict=True):
        for row in table.rows:
            y, cell = labels.index((row.executor, row.method)), row.cells.get(column)
            if cell is not None and row.source == PAPER:
                panel.plot(cell.value, y, "D", color="white", markeredgecolor=MUTED, markersize=4.5, zorder=2)
            elif cell is not None:
                dot_with_interval(panel, y, mean=cell.value, low=cell.low, high=cell.high)
        titled(panel, column.replace("$", r"\$"))
        quiet(panel, grid="x")
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
        if column not in EFFICIENCY and not column.endswith(MILLIONS):
            shown = [row.cells[column].value for row in table.rows if column in row.cells]
            panel.set_xlim(min([-2.0, *(value - 2 for value in shown)]), 102)
    names = [f"{executor}, {method}".replace("$", r"\$") for executor, method in labels]
    panels[0].set_yticks(range(len(labels)), names, fontsize=7.5)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    return save_figure(figure, path, "diamond: paper    dot: measured, bar: 95 % interval")
