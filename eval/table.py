"""Formatting of numbers, and the results table: one row per delivery, controls below a rule.

The terminal and Markdown tables come from the same rows. Names are data and never interpreted as markup.
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
from runtime.errors import FAILURE_REASONS

DASH = "–"
WIDTH = 120  # characters of a table without a terminal
Column = tuple[str, Callable[[Mapping[str, Any]], str]]  # head, and summary -> text


# numbers --------------------------------------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}"


def interval(of: Mapping[str, Any], form: str = "{:.1f}", scale: float = 100.0, unit: str = "") -> str:
    """Format a mean and its interval, in percent by default: `52.5 [44.8, 60.1]`."""
    mean, low, high = (form.format(scale * of[key]) for key in ("mean", "low", "high"))
    return f"{mean}{unit} [{low}, {high}]"


def points(pair: Mapping[str, Any]) -> str:
    """Format a paired difference in percentage points, with the tasks on which the two differ."""
    differing = f"better on {pair['wins']}, worse on {pair['losses']} of {pair['n']} tasks"
    return f"{interval(pair, '{:+.1f}', unit=' points')}, {differing}, {p_value(pair)}"


def p_value(pair: Mapping[str, Any]) -> str:
    """Format the p value of a paired difference."""
    return "p < 0.001" if pair["p"] < 0.001 else f"p = {pair['p']:.3f}"


def sizes(numbers: Sequence[int]) -> str:
    """Format a range of numbers: `96`, `90 to 96`, or a dash if there are none."""
    distinct = sorted(set(numbers))
    return DASH if not distinct else f"{distinct[0]}" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def milliseconds(seconds: float) -> str:
    return two_digits(1000 * seconds)


def two_digits(value: float) -> str:
    """Format with about two digits, because times range from microseconds to seconds."""
    if value == 0 or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def written(writing: Mapping[str, Any], key: str) -> str:
    """Format what writing a memory took (`data_gen.memory_factory.writing_facts`): a key, `tokens` read and written, or
    `unusable` answers of writing and of recalls."""
    if key == "tokens":
        return f"{writing['tokens_in']:,} + {writing['tokens_out']:,}"
    if key == "unusable":
        return f"{sum(writing['failures'].values())} + {sum(writing.get('recall_failures', {}).values())}"
    value = writing.get(key)
    return "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a GitHub table whose first `left` columns are left-aligned. Cells are not escaped: use
    `escape` for data."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def escape(text: str) -> str:
    """Escape data for a Markdown table cell: pipes, newlines, HTML, links and emphasis."""
    escaped = "".join("\\" + c if c in "\\`*_|~" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.replace("](", "]\\(").split())


# the table ------------------------------------------------------------------------------------------------------------


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the content of results.json: table, paired differences, notes.

    A table too wide for the terminal (without one: WIDTH characters) is split into parts: success, cost per success,
    cost per step.
    """
    console = console or Console()
    if not console.is_terminal and console.width < WIDTH:
        console.width = WIDTH
    title = f"{results['environment']}, split {results['split']}, seed {results['seed']}"
    lines = (Padding(Text(line), (0, 0, 0, 1)) for line in _notes(results))
    console.print(Group(Text(title, style="bold"), *_tables(results, console.width), *lines))


def to_markdown(results: Mapping[str, Any]) -> str:
    """Format results as a GitHub table with notes; controls are in italics."""
    columns, rows = [column for part in _parts(results) for column in part], []
    for delivery in ordered(results["results"]):
        name, *cells = map(escape, _row(results, columns, delivery))
        rows.append([f"*{name}*" if is_control(delivery) else name, *cells])
    lines = markdown_table(["delivery", *(escape(head) for head, _ in columns)], rows)
    return "\n".join([*lines, "", *(f"- {escape(note)}" for note in _notes(results))]) + "\n"


def informative_budgets(summaries: Mapping[str, Any]) -> list[int]:
    """Return the step budgets within which some delivery's success differs from its final success."""
    every = summaries.values()
    differs = lambda steps: any(of["success_at"].get(str(steps), of["success"]) != of["success"] for of in every)
    return list(filter(differs, budgets_of(every)))


def _parts(results: Mapping[str, Any]) -> list[list[Column]]:
    """Return the columns in three parts: success, cost per success, cost per step."""
    families = groups_of(results["results"], "by_family")
    success: list[Column] = [
        ("success %\n[95 % interval]", lambda of: interval(of["success"])),
        *((f"{family}\n%", partial(_of_family, family=family)) for family in families),
        *((f"≤ {steps}\n%", partial(_within, steps=steps)) for steps in informative_budgets(results["results"])),
        ("progress", lambda of: f"{of['progress']['mean']:.2f}"),
    ]
    per_success: list[Column] = [
        ("steps to\nsuccess", lambda of: interval(took, scale=1) if (took := of["steps_to_success"]) else DASH),
        ("tok/success\nc/e", lambda of: _cost(of, "tokens", "{:.0f}".format)),
        ("s/success\nc/e", lambda of: _cost(of, "seconds", two_digits)),
    ]
    per_step: list[Column] = [
        ("executor\ntok/step", lambda of: f"{of['executor_tokens_per_step']:.0f}"),
        ("emission mix\n%", _mix),
        ("parse\nerr. %", lambda of: percent(of["parse_error_rate"])),
        ("ms/step\nc/e/env", lambda of: "/".join(milliseconds(of["seconds_per_step"][clock]) for clock in CLOCKS)),
    ]
    return [success, per_success, per_step]


def _of_family(summary: Mapping[str, Any], family: str) -> str:
    entry = summary["by_family"].get(family)
    return percent(entry and entry["success"]["mean"])


def _within(summary: Mapping[str, Any], steps: int) -> str:
    entry = summary["success_at"].get(str(steps))
    return percent(entry and entry["mean"])


def _cost(summary: Mapping[str, Any], what: str, form: Callable[[float], str]) -> str:
    cost = summary["cost_per_success"]
    return "/".join(form(cost[role][what]) for role in ROLES) if cost else DASH


def _mix(summary: Mapping[str, Any]) -> str:
    return " ".join(f"{kind[:1]} {100 * share:.0f}" for kind, share in summary["emission_mix"].items()) or DASH


def _row(results: Mapping[str, Any], columns: Sequence[Column], delivery: str) -> list[str]:
    return [display_name(delivery), *(shown(results["results"][delivery]) for _, shown in columns)]


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Return the notes under a table: paired differences, how to read the table, technical failures."""
    summaries = results["results"]
    lines = [
        f"{display_name(a)} − {display_name(b)}: {_at_all_budgets(pair, results)}"
        for a, b, pair in compared_pairs(results)
    ]
    lines += _stream_notes(summaries)
    lines += _living_notes(summaries)
    lines += memory_notes(results)
    counts = sizes([summary["success"]["n"] for summary in summaries.values()])
    lines.append(f"{counts} episodes per delivery; [95% Wilson intervals]. Differences: paired bootstrap, exact p.")
    lines.append("Per success: steps of successes [95% bootstrap interval]; tokens and seconds of all episodes.")
    if any(summary["emission_mix"] for summary in summaries.values()):
        lines.append("Emissions: E experience, B brief, H hybrid, N no action. Times: compiler/executor/environment.")
    return [*lines, *broken_notes(results)]


def broken_notes(results: Mapping[str, Any]) -> list[str]:
    """Return notes on technical failures: their number, the first cause, episodes played again or still due."""
    summaries, lines = results["results"], list[str]()
    broken = {name: broken_episodes(summaries[name]) for name in ordered(summaries)}
    if parts := [f"{display_name(name)}: {counts}" for name, counts in broken.items() if counts]:
        lines.append(f"Broken episodes, counted as failed: {'; '.join(parts)}.")
    facts = [of["broken"] for of in summaries.values()]
    if first := next((of["first"] for of in facts if of["first"]), None):
        lines.append(f"The first that broke: {first}")
    if again := sum(of["played_again"] for of in facts):
        lines.append(f"{again} episodes were played again after they had broken.")
    if due := results.get("broken_due"):
        lines.append(f"{due} broken episodes have attempts left: run the same command with --on-exists resume.")
    return lines


def memory_notes(results: Mapping[str, Any]) -> list[str]:
    """Return a note for each memory: how it was written and read, and which answers could not be used."""
    summaries, notes = results["results"], dict[str, list[str]]()
    for name in filter(lambda name: "writing" in summaries[name], ordered(summaries)):
        of = summaries[name]["writing"]
        counts = [
            *of.get("failures", {}).items(),
            *((f"{k} at recall", n) for k, n in of.get("recall_failures", {}).items()),
        ]
        unusable = ", ".join(f"{n} {role.replace('_', ' ')}" for role, n in counts) or "none"
        text = f"{of['system']}, written by {of['written_by']}, read by {of.get('read_by', 'not stated')}"
        said = f"{text}; unusable answers of models: {unusable}" if of.get("requests") or counts else text
        notes.setdefault(said, []).append(display_name(name))
    return [f"Memory of {', '.join(names)}: {said}." for said, names in notes.items()]


def _stream_notes(summaries: Mapping[str, Any]) -> list[str]:
    """Return the notes of an online evaluation."""
    lines = list[str]()
    for name in ordered(summaries):
        of = summaries[name]
        if (stream := of.get("stream")) is None:
            continue
        parts = [f"by quarter {' / '.join(percent(part and part['mean']) for part in stream['quarters'])}"]
        if stream["repeats"]:
            parts.append(f"first {interval(stream['first'])}, scene and goal again {interval(stream['repeats'])}")
        if (orders := of.get("success_by_order")) and len(orders) > 1:
            parts.append(f"{spread(list(orders.values()))} over {len(orders)} orders (mean ± sd)")
        if (retries := stream["retries"])["attempts"]:
            tokens = "/".join(f"{retries['tokens'][role]}" for role in ROLES)
            parts.append(f"{retries['attempts']} further attempts, not scored ({tokens} tokens c/e, not in this table)")
        if stream.get("leaked"):
            parts.append(f"NOT VALID: {stream['leaked']} recalls of the task itself or of later ones")
        lines.append(f"{display_name(name)}: {'; '.join(parts)}.")
    if lines:
        lines.append("Online memory grows over the stream of these tasks: do not compare it with frozen memory.")
    return lines


def _living_notes(summaries: Mapping[str, Any]) -> list[str]:
    """Return the notes of an evaluation in living worlds."""
    names = {"sequences": "sequences solved whole", "mra": "MRA", "mhr": "MHR", "re": "RE", "rt": "RT"}
    living = {n: summaries[n]["living"]["summary"]["all"] for n in ordered(summaries) if "living" in summaries[n]}
    lines = [
        f"{display_name(name)}: {'; '.join(f'{word} {interval(of[key])}' for key, word in names.items() if of[key])}."
        for name, of in living.items()
    ]
    return [*lines, "Living worlds: each task starts from the state that the previous one left."] if lines else []


def spread(shares: Sequence[float]) -> str:
    """Format mean and sample standard deviation, in percent: `81.6 ± 1.7`."""
    return f"{100 * fmean(shares):.1f} ± {100 * stdev(shares):.1f}"


def _at_all_budgets(pair: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    at = {steps: pair["at"].get(str(steps)) for steps in informative_budgets(results["results"])}
    within = (f"≤ {steps} steps {interval(of, '{:+.1f}')}, {p_value(of)}" for steps, of in at.items() if of)
    return "; ".join([points(pair), *within])


def broken_episodes(summary: Mapping[str, Any]) -> str:
    """Format the technical failures of a delivery: `2 environment failure, 1 compiler failure`, or ""."""
    stops = summary["stop_reasons"]
    return ", ".join(f"{stops[name]} {name.replace('_', ' ')}" for name in map(str, FAILURE_REASONS) if stops.get(name))


def _tables(results: Mapping[str, Any], width: int) -> list[Table]:
    """Return tables no wider than `width` characters, each with as many parts side by side as fit."""
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
