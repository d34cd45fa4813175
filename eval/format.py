"""Numbers and tables as every page, table and terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}"


def interval(of: Mapping[str, Any], form: str = "{:.1f}", scale: float = 100.0) -> str:
    """`52.5 [44.8, 60.1]`: a mean and the ends of its interval, in percent unless `scale` says otherwise."""
    mean, low, high = (form.format(scale * of[key]) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def points(pair: Mapping[str, Any]) -> str:
    """A paired difference in percentage points, with the tasks that only one of the two solved."""
    low, high = (f"{100 * pair[end]:+.1f}" for end in ("low", "high"))
    better = f"better on {pair['wins']}, worse on {pair['losses']} of {pair['n']} tasks"
    return f"{100 * pair['mean']:+.1f} points [{low}, {high}], {better}"


def sizes(numbers: Sequence[int]) -> str:
    """`96`, or `90 to 96`; a dash where there are none."""
    distinct = sorted(set(numbers))
    return DASH if not distinct else f"{distinct[0]}" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def emission_mix(mix: Mapping[str, float]) -> str:
    """`E 40 B 10 H 20 N 30`: shares in percent by the kinds' first letters."""
    return " ".join(f"{kind[:1]} {100 * share:.0f}" for kind, share in mix.items()) or DASH


def milliseconds(seconds: float) -> str:
    """Milliseconds in about two digits: the environment takes microseconds, a large model seconds."""
    value = 1000 * seconds
    if value == 0 or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a GitHub table, whose first `left` columns are aligned to the left. Cells stand as they are: `escape`
    what comes from data."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def escape(text: str) -> str:
    """A cell's data in Markdown: a pipe would split the cell, a newline the row; HTML, links and emphasis would be
    rendered."""
    escaped = "".join("\\" + c if c in "\\`*_|~" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.replace("](", "]\\(").split())
