"""Numbers and tables as every page, table and terminal shows them; and the one table of a run, deliveries side by side,
controls below a rule.

The terminal's table and Markdown's are drawn from the same rows, so that a README and a terminal never disagree. Names
come from data, so nothing is interpreted as markup. Nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eval.metrics import CLOCKS, ROLES, budgets_of, compared_pairs, display_name, groups_of, is_control, ordered
from runtime.errors import FAILURES

DASH = "–"
WIDTH = 120  # what every terminal table of ours must fit into
Column = tuple[str, Callable[[Mapping[str, Any]], str]]  # its head, and what it shows of a summary


# numbers --------------------------------------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}"


def interval(of: Mapping[str, Any], form: str = "{:.1f}", scale: float = 100.0, unit: str = "") -> str:
    """`52.5 [44.8, 60.1]`: a mean and the ends of its interval, in percent unless `scale` says otherwise."""
    mean, low, high = (form.format(scale * of[key]) for key in ("mean", "low", "high"))
    return f"{mean}{unit} [{low}, {high}]"


def points(pair: Mapping[str, Any]) -> str:
    """Say a paired difference in percentage points, with the tasks that only one of the two solved."""
    better = f"better on {pair['wins']}, worse on {pair['losses']} of {pair['n']} tasks"
    return ", ".join(filter(None, (interval(pair, "{:+.1f}", unit=" points"), better, p_value(pair))))


def p_value(pair: Mapping[str, Any]) -> str:
    """Say how likely so large a difference is by chance alone; nothing where results are of before it was tested."""
    p = pair.get("p")
    return "" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def sizes(numbers: Sequence[int]) -> str:
    """`96`, or `90 to 96`; a dash where there are none."""
    distinct = sorted(set(numbers))
    return DASH if not distinct else f"{distinct[0]}" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def milliseconds(seconds: float) -> str:
    return two_digits(1000 * seconds)


def two_digits(value: float) -> str:
    """Show about two digits: the environment takes microseconds, a large model seconds."""
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

    Without a terminal (a file, CI) it is laid out for WIDTH columns instead of rich's 80. Where that is too narrow for
    all columns the table comes in parts: what was reached, what a success took, what a step took.
    """
    console = console or Console()
    if not console.is_terminal and console.width < WIDTH:
        console.width = WIDTH
    title = f"{results['environment']}, split {results['split']}, seed {results['seed']}"
    lines = (Padding(Text(line), (0, 0, 0, 1)) for line in _notes(results))
    console.print(Group(Text(title, style="bold"), *_tables(results, console.width), *lines))


def to_markdown(results: Mapping[str, Any]) -> str:
    """Write the same rows as a GitHub table, controls in italics because Markdown tables have no rules."""
    columns, rows = [column for part in _parts(results) for column in part], []
    for delivery in ordered(results["results"]):
        name, *cells = map(escape, _row(results, columns, delivery))
        rows.append([f"*{name}*" if is_control(delivery) else name, *cells])
    lines = markdown_table(["delivery", *(escape(head) for head, _ in columns)], rows)
    return "\n".join([*lines, "", *(f"- {escape(note)}" for note in _notes(results))]) + "\n"


def counted(summaries: Mapping[str, Any]) -> bool:
    """Tell whether results say what a success took; those of before do not."""
    return any("steps_to_success" in summary for summary in summaries.values())


def telling_budgets(summaries: Mapping[str, Any]) -> list[int]:
    """List the numbers of steps within which some delivery had not yet reached what it reached in the end."""

    def tells(steps: int) -> bool:
        every = summaries.values()
        return any(of.get("success_at", {}).get(str(steps), of["success"]) != of["success"] for of in every)

    return list(filter(tells, budgets_of(summaries.values())))


def _parts(results: Mapping[str, Any]) -> list[list[Column]]:
    """List the columns: what was reached, what a success took (where results say it), what a step took."""
    families = groups_of(results["results"], "by_family")
    reached: list[Column] = [
        ("success %\n[95 % interval]", lambda of: interval(of["success"])),
        *((f"{family}\n%", partial(_of_family, family=family)) for family in families),
        *((f"≤ {steps}\n%", partial(_within, steps=steps)) for steps in telling_budgets(results["results"])),
        ("progress", lambda of: f"{of['progress']['mean']:.2f}"),
    ]
    per_success: list[Column] = [
        ("steps to\nsuccess", lambda of: interval(took, scale=1) if (took := of.get("steps_to_success")) else DASH),
        ("tok/success\nc/e", lambda of: _cost(of, "tokens", "{:.0f}".format)),
        ("s/success\nc/e", lambda of: _cost(of, "seconds", two_digits)),
    ]
    per_step: list[Column] = [
        ("executor\ntok/step", lambda of: f"{of['executor_tokens_per_step']:.0f}"),
        ("emission mix\n%", _mix),
        ("parse\nerr. %", lambda of: percent(of["parse_error_rate"])),
        ("ms/step\nc/e/env", lambda of: "/".join(milliseconds(of["seconds_per_step"][clock]) for clock in CLOCKS)),
    ]
    return [reached, per_success, per_step] if counted(results["results"]) else [reached, per_step]


def _of_family(summary: Mapping[str, Any], family: str) -> str:
    entry = summary["by_family"].get(family)
    return percent(entry and entry["success"]["mean"])


def _within(summary: Mapping[str, Any], steps: int) -> str:
    entry = summary.get("success_at", {}).get(str(steps))
    return percent(entry and entry["mean"])


def _cost(summary: Mapping[str, Any], what: str, form: Callable[[float], str]) -> str:
    cost = summary.get("cost_per_success")
    return "/".join(form(cost[role][what]) for role in ROLES) if cost else DASH


def _mix(summary: Mapping[str, Any]) -> str:
    return " ".join(f"{kind[:1]} {100 * share:.0f}" for kind, share in summary["emission_mix"].items()) or DASH


def _row(results: Mapping[str, Any], columns: Sequence[Column], delivery: str) -> list[str]:
    return [display_name(delivery), *(shown(results["results"][delivery]) for _, shown in columns)]


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Every pair of deliveries that was compared, how to read the table, and every episode that broke."""
    summaries = results["results"]
    lines = [
        f"{display_name(a)} − {display_name(b)}: {_at_all_budgets(pair, results)}"
        for a, b, pair in compared_pairs(results)
    ]
    lines += _stream_notes(summaries)
    lines += _living_notes(summaries)
    counts = sizes([summary["success"]["n"] for summary in summaries.values()])
    lines.append(f"{counts} episodes per delivery; [95% Wilson intervals]. Differences: paired bootstrap, exact p.")
    if counted(results["results"]):
        lines.append("Per success: steps of successes [95% bootstrap interval]; tokens and seconds of all episodes.")
    if any(summary["emission_mix"] for summary in summaries.values()):
        lines.append("Emissions: E experience, B brief, H hybrid, N no action. Times: compiler/executor/environment.")
    return [*lines, *broken_notes(results)]


def broken_notes(results: Mapping[str, Any]) -> list[str]:
    """Say how many episodes stayed broken, with the first cause, and how many were or will be played again."""
    summaries, lines = results["results"], list[str]()
    broken = {name: broken_episodes(summaries[name]) for name in ordered(summaries)}
    if parts := [f"{display_name(name)}: {counts}" for name, counts in broken.items() if counts]:
        lines.append(f"Broken episodes, counted as failed: {'; '.join(parts)}.")
    facts = [of["broken"] for of in summaries.values() if "broken" in of]  # results of before have none
    if first := next((of["first"] for of in facts if of["first"]), None):
        lines.append(f"The first that broke: {first}")
    if again := sum(of["played_again"] for of in facts):
        lines.append(f"{again} episodes were played again after they had broken.")
    if due := results.get("broken_due"):
        lines.append(f"{due} broken episodes have attempts left: run the same command with --on-exists resume.")
    return lines


def _stream_notes(summaries: Mapping[str, Any]) -> list[str]:
    """Say that memory grew over the stream of these tasks, and what only a stream shows."""
    lines = list[str]()
    for name in ordered(summaries):
        of = summaries[name]
        if (told := of.get("stream")) is None:
            continue
        parts = [f"by quarter {' / '.join(percent(part and part['mean']) for part in told['quarters'])}"]
        if told["repeats"]:
            parts.append(f"first {interval(told['first'])}, scene and goal again {interval(told['repeats'])}")
        if (orders := of.get("success_by_order")) and len(orders) > 1:
            parts.append(f"{spread(list(orders.values()))} over {len(orders)} orders (mean ± sd)")
        if (retries := told["retries"])["attempts"]:
            tokens = "/".join(f"{retries['tokens'][role]}" for role in ROLES)
            parts.append(f"{retries['attempts']} further attempts, not scored ({tokens} tokens c/e, not in this table)")
        if told.get("leaked"):
            parts.append(f"NOT VALID: {told['leaked']} recalls of tasks that were still to come")
        lines.append(f"{display_name(name)}: {'; '.join(parts)}.")
    if lines:
        lines.append("Memory online: it grows over the stream of these tasks. Not to be set beside frozen memory.")
    return lines


def _living_notes(summaries: Mapping[str, Any]) -> list[str]:
    """Say what only sequences of tasks in worlds that go on show."""
    names = {"sequences": "sequences solved whole", "mra": "MRA", "mhr": "MHR", "re": "RE", "rt": "RT"}
    lived = [name for name in ordered(summaries) if "living" in summaries[name]]
    told = {name: summaries[name]["living"]["summary"]["all"] for name in lived}
    lines = [
        f"{display_name(name)}: {'; '.join(f'{word} {interval(of[key])}' for key, word in names.items() if of[key])}."
        for name, of in told.items()
    ]
    return [*lines, "Living worlds: tasks one after another, what one leaves the next one finds."] if lines else []


def spread(shares: Sequence[float]) -> str:
    """`81.6 ± 1.7`: mean and sample standard deviation, in percent."""
    return f"{100 * fmean(shares):.1f} ± {100 * stdev(shares):.1f}"


def _at_all_budgets(pair: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    at = {steps: pair.get("at", {}).get(str(steps)) for steps in telling_budgets(results["results"])}
    within = (f"≤ {steps} steps {interval(of, '{:+.1f}')}, {p_value(of)}" for steps, of in at.items() if of)
    return "; ".join([points(pair), *within])


def broken_episodes(summary: Mapping[str, Any]) -> str:
    """`2 environment failure, 1 compiler failure`, or "" """
    stops = summary["stop_reasons"]
    return ", ".join(f"{stops[name]} {name.replace('_', ' ')}" for name in map(str, FAILURES) if stops.get(name))


def _tables(results: Mapping[str, Any], width: int) -> list[Table]:
    """Put as many parts side by side as fit into so many characters, the others below."""
    wide, tables, columns = Console(width=10 * WIDTH), list[Table](), list[Column]()
    for part in _parts(results):
        table = _table(results, [*columns, *part])
        if tables and wide.measure(table).maximum <= width:
            tables[-1], columns = table, [*columns, *part]
        else:
            tables, columns = [*tables, _table(results, part)], part
    return tables


def _table(results: Mapping[str, Any], columns: Sequence[Column]) -> Table:
    table = Table(box=box.HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(["delivery", *(head for head, _ in columns)]):
        table.add_column(Text(head), justify="left" if i == 0 else "right", no_wrap=True, vertical="bottom")
    deliveries = ordered(results["results"])
    controls = [is_control(delivery) for delivery in deliveries]
    for i, delivery in enumerate(deliveries):
        cells = map(Text, _row(results, columns, delivery))
        table.add_row(*cells, end_section=controls[i : i + 2] == [False, True])
    return table
