"""Numbers and tables as every page, table and terminal shows them; and the one table of a run, deliveries side by side,
controls below a rule.

The terminal's table and Markdown's are drawn from the same rows, so that a README and a terminal never disagree. Names
come from data, so nothing is interpreted as markup. Nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eval.metrics import CLOCKS, compared_pairs, display_name, groups_of, is_control, ordered
from runtime.errors import FAILURES

DASH = "–"
WIDTH = 120  # what every terminal table of ours must fit into
COST_FROM = "executor\ntok/step"  # the first column of what a delivery takes, as against what it reaches


# numbers --------------------------------------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}"


def interval(of: Mapping[str, Any], form: str = "{:.1f}", scale: float = 100.0) -> str:
    """`52.5 [44.8, 60.1]`: a mean and the ends of its interval, in percent unless `scale` says otherwise."""
    mean, low, high = (form.format(scale * of[key]) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def points(pair: Mapping[str, Any]) -> str:
    """Say a paired difference in percentage points, with the tasks that only one of the two solved."""
    low, high = (f"{100 * pair[end]:+.1f}" for end in ("low", "high"))
    better = f"better on {pair['wins']}, worse on {pair['losses']} of {pair['n']} tasks"
    return f"{100 * pair['mean']:+.1f} points [{low}, {high}], {better}"


def sizes(numbers: Sequence[int]) -> str:
    """`96`, or `90 to 96`; a dash where there are none."""
    distinct = sorted(set(numbers))
    return DASH if not distinct else f"{distinct[0]}" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def milliseconds(seconds: float) -> str:
    """Show about two digits: the environment takes microseconds, a large model seconds."""
    value = 1000 * seconds
    if value == 0 or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Write the lines of a GitHub table, whose first `left` columns are aligned to the left. Cells stand as they are:
    `escape` what comes from data."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def escape(text: str) -> str:
    """Escape a cell's data for Markdown: a pipe would split the cell, a newline the row; HTML, links and emphasis would
    be rendered."""
    escaped = "".join("\\" + c if c in "\\`*_|~" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.replace("](", "]\\(").split())


# the table ------------------------------------------------------------------------------------------------------------


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the dict of `results.json`: table, paired differences, notes.

    Without a terminal (a file, CI) it is laid out for WIDTH columns instead of rich's 80. In a terminal too narrow for
    all columns the table comes in two parts: what was reached, then what it took.
    """
    console = console or Console()
    if not console.is_terminal and console.width < WIDTH:
        console.width = WIDTH
    heads, rows = _headings(results), [_row(results, delivery) for delivery in ordered(results["results"])]
    tables = [_table(results, heads, rows)]
    if console.width < Console(width=10 * WIDTH).measure(tables[0]).maximum:
        cut = heads.index(COST_FROM)
        parts = (range(cut), [0, *range(cut, len(heads))])
        tables = [
            _table(results, [heads[i] for i in part], [[cells[i] for i in part] for cells in rows]) for part in parts
        ]
    title = Text(f"{results['environment']}, split {results['split']}, seed {results['seed']}", style="bold")
    console.print(Group(title, *tables, *(Padding(Text(line), (0, 0, 0, 1)) for line in _notes(results))))


def to_markdown(results: Mapping[str, Any]) -> str:
    """Write the same rows as a GitHub table, controls in italics because Markdown tables have no rules."""
    rows = []
    for delivery in ordered(results["results"]):
        name, *cells = map(escape, _row(results, delivery))
        rows.append([f"*{name}*" if is_control(delivery) else name, *cells])
    lines = markdown_table([escape(head) for head in _headings(results)], rows)
    return "\n".join([*lines, "", *(f"- {escape(note)}" for note in _notes(results))]) + "\n"


def _headings(results: Mapping[str, Any]) -> list[str]:
    families = groups_of(results["results"], "by_family")
    reached = ["success %\n[95 % interval]", *(f"{family}\n%" for family in families), "progress"]
    return ["delivery", *reached, COST_FROM, "emission mix\n%", "parse\nerr. %", "ms/step\nc/e/env"]


def _row(results: Mapping[str, Any], delivery: str) -> list[str]:
    summary = results["results"][delivery]
    of_family = [summary["by_family"].get(family) for family in groups_of(results["results"], "by_family")]
    return [
        display_name(delivery),
        interval(summary["success"]),
        *(percent(entry["success"]["mean"]) if entry else DASH for entry in of_family),
        f"{summary['progress']['mean']:.2f}",
        f"{summary['executor_tokens_per_step']:.0f}",
        " ".join(f"{kind[:1]} {100 * share:.0f}" for kind, share in summary["emission_mix"].items()) or DASH,
        percent(summary["parse_error_rate"]),
        "/".join(milliseconds(summary["seconds_per_step"][clock]) for clock in CLOCKS),
    ]


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Every pair of deliveries that was compared, how to read the table, and every episode that broke."""
    lines = [f"{display_name(a)} − {display_name(b)}: {points(pair)}" for a, b, pair in compared_pairs(results)]
    summaries = results["results"]
    counts = sizes([summary["success"]["n"] for summary in summaries.values()])
    lines.append(f"{counts} episodes per delivery; [95% Wilson intervals], differences by paired bootstrap over tasks.")
    if any(summary["emission_mix"] for summary in summaries.values()):
        lines.append("Emissions: E experience, B brief, H hybrid, N no action. Times: compiler/executor/environment.")
    broken = {name: broken_episodes(summaries[name]) for name in ordered(summaries)}
    if parts := [f"{display_name(name)}: {counts}" for name, counts in broken.items() if counts]:
        lines.append(f"Broken episodes, counted as failed: {'; '.join(parts)}.")
    return lines


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
