"""The one table: deliveries side by side, controls below a rule, for the terminal and for Markdown.

Both are drawn from the same rows, so that a README and a terminal never disagree. Names come from data, so nothing is
interpreted as markup. Nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eval.format import DASH, emission_mix, escape, interval, markdown_table, milliseconds, percent, points, sizes
from eval.metrics import CLOCKS, compared_pairs, display_name, families, is_control, ordered
from runtime.errors import FAILURES

WIDTH = 120  # what every terminal table of ours must fit into
COST_FROM = "executor\ntok/step"  # the first column of what a delivery takes, as against what it reaches


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table. Without a terminal (a file, CI) it is laid out for WIDTH columns instead of rich's 80."""
    console = console or Console()
    if not console.is_terminal and console.width < WIDTH:
        console.width = WIDTH
    console.print(results_table(results, console.width))


def results_table(results: Mapping[str, Any], width: int = WIDTH) -> RenderableType:
    """Table, paired differences and notes from the dict of `results.json`, as one rich renderable.

    In a terminal too narrow for all columns the table comes in two parts: what was reached, then what it took.
    """
    heads, rows = headings(results), [row(results, delivery) for delivery in ordered(results["results"])]
    tables = [_table(results, heads, rows)]
    if width < _width(tables[0]):
        cut = heads.index(COST_FROM)
        parts = (range(cut), [0, *range(cut, len(heads))])
        tables = [
            _table(results, [heads[i] for i in part], [[cells[i] for i in part] for cells in rows]) for part in parts
        ]
    notes = [Text(line) for line in (*difference_lines(results), *notes_lines(results))]
    return Group(Text(_title(results), style="bold"), *tables, *(Padding(note, (0, 0, 0, 1)) for note in notes))


def to_markdown(results: Mapping[str, Any]) -> str:
    """The same rows as a GitHub table, controls in italics because Markdown tables have no rules."""
    rows = []
    for delivery in ordered(results["results"]):
        name, *cells = map(escape, row(results, delivery))
        rows.append([f"*{name}*" if is_control(delivery) else name, *cells])
    lines = markdown_table([escape(head) for head in headings(results)], rows)
    notes = [escape(line) for line in (*difference_lines(results), *notes_lines(results))]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def headings(results: Mapping[str, Any]) -> list[str]:
    """Column heads; one per task family where the tasks have families."""
    reached = ["success %\n[95 % interval]", *(f"{family}\n%" for family in families(results)), "progress"]
    return ["delivery", *reached, COST_FROM, "emission mix\n%", "parse\nerr. %", "ms/step\nc/e/env"]


def row(results: Mapping[str, Any], delivery: str) -> list[str]:
    """One delivery's cells, in the order of `headings`."""
    summary = results["results"][delivery]
    of_family = [summary["by_family"].get(family) for family in families(results)]
    return [
        display_name(delivery),
        interval(summary["success"]),
        *(percent(entry["success"]["mean"]) if entry else DASH for entry in of_family),
        f"{summary['progress']['mean']:.2f}",
        f"{summary['executor_tokens_per_step']:.0f}",
        emission_mix(summary["emission_mix"]),
        percent(summary["parse_error_rate"]),
        "/".join(milliseconds(summary["seconds_per_step"][clock]) for clock in CLOCKS),
    ]


def difference_lines(results: Mapping[str, Any]) -> list[str]:
    """`compiled - none: +10.0 points [...]`, one line per pair of deliveries that was compared."""
    return [f"{display_name(a)} − {display_name(b)}: {points(pair)}" for a, b, pair in compared_pairs(results)]


def notes_lines(results: Mapping[str, Any]) -> list[str]:
    """How to read the table, and every episode that broke."""
    counts = sizes([summary["success"]["n"] for summary in results["results"].values()])
    lines = [f"{counts} episodes per delivery; [95% Wilson intervals], differences by paired bootstrap over tasks."]
    if any(summary["emission_mix"] for summary in results["results"].values()):
        lines.append("Emissions: E experience, B brief, H hybrid, N no action. Times: compiler/executor/environment.")
    return lines + failure_lines(results)


def failure_lines(results: Mapping[str, Any]) -> list[str]:
    """One line that names every broken episode by delivery; [] when nothing broke."""
    broken = {name: broken_episodes(results["results"][name]) for name in ordered(results["results"])}
    parts = [f"{display_name(name)}: {counts}" for name, counts in broken.items() if counts]
    return [f"Broken episodes, counted as failed: {'; '.join(parts)}."] if parts else []


def broken_episodes(summary: Mapping[str, Any]) -> str:
    """`2 environment failure, 1 compiler failure`, or "" """
    stops = summary["stop_reasons"]
    return ", ".join(f"{stops[name]} {name.replace('_', ' ')}" for name in map(str, FAILURES) if stops.get(name))


def _table(results: Mapping[str, Any], heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i == 0 else "right", no_wrap=True, vertical="bottom")
    controls = [is_control(delivery) for delivery in ordered(results["results"])]
    for i, cells in enumerate(rows):
        table.add_row(*map(Text, cells), end_section=controls[i : i + 2] == [False, True])
    return table


def _width(table: Table) -> int:
    """Columns that the table takes when every cell stays on its line."""
    return Console(width=10 * WIDTH).measure(table).maximum


def _title(results: Mapping[str, Any]) -> str:
    return f"{results['environment']}, split {results['split']}, seed {results['seed']}"
