"""HTML report of a run, one file that opens offline: results, figures, replays of the same tasks under each delivery.

Everything from episodes is data: Jinja2 escapes it, replays travel as JSON to the player (eval/player.py), and a
content security policy allows only our own script (by its hash). eval/compare.py writes the page that compares runs."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from PIL import Image

from agent.records import Episode
from eval import table
from eval.error_analysis import KINDS as ERROR_KINDS
from eval.metrics import EMISSION_KINDS, budgets_of, compared_pairs, display_name, groups_of, is_control, ordered
from eval.player import content_policy, script_json, source_of, task_json, templates
from eval.plots import DPI, family_title, read_metrics, results_plots, training_plot
from eval.replays import MAX_BYTES, REPLAYS, Replays, compared, load_chosen, named, select, utf8
from eval.runs import EpisodeSource, load_run
from runtime.store import atomic_file

SHORT_HASH = 12  # characters of a hash in the report
SCREEN_DPI = 96
CAPTIONS = {"deliveries": "Success by delivery", "steps": "Success against steps", "training": "Training losses"}
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def write_report(
    results: Mapping[str, Any],
    episodes: Sequence[Episode],
    out_path: Path,
    plots: Sequence[Path] = (),
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the report of results and episodes in memory, with PNG files as figures."""
    page, replays = _page(results, plots), Replays(max_bytes=max_bytes)
    return write_page(
        "report.html.j2", page, episodes=episodes, source=lambda pictures: episodes, out_path=out_path, replays=replays
    )


def write_run_report(run_dir: Path, out_path: Path | None = None, replays: Replays = REPLAYS) -> Path:
    """Write the report of a run folder (default: to its report.html), with training curves if it has metrics.jsonl.

    Raises:
        FileNotFoundError: the run's episodes are missing.
        ValueError: results are incomplete, episodes.jsonl is damaged, or a task was not played.
    """
    results, source = load_run(run_dir)
    plots = results_plots(results, run_dir / "plots")
    metrics_path = run_dir / "metrics.jsonl"
    if metrics_path.exists() and read_metrics(metrics_path):
        plots.append(training_plot(metrics_path, run_dir / "plots" / "training.png"))
    out_path = out_path or run_dir / "report.html"
    return write_page(
        "report.html.j2",
        _page(results, plots),
        episodes=source(False),
        source=source,
        out_path=out_path,
        replays=replays,
    )


def write_page(
    template: str,
    page: Mapping[str, Any],
    episodes: Iterable[Episode],
    source: EpisodeSource,
    out_path: Path,
    replays: Replays,
) -> Path:
    """Render a page with as many of the selected replays as fit.

    Args:
        template: a template that extends `base.html.j2`.
        page: its variables; `deliveries` and `compared` select the replays.
        episodes: episodes to select from.
        source: reads the same episodes with steps and pictures.
    """
    heads = [replace(episode, steps=[]) for episode in episodes]
    only, wanted = replays.only, len(replays.only) or replays.tasks
    tasks = load_chosen(source, select(named(heads, only), wanted, page["deliveries"], page["compared"]))
    style, script = source_of("player.css") + source_of("report.css"), source_of("player.js")
    render = partial(
        _environment().get_template(template).render,
        **page,
        style=style,
        script=script,
        policy=content_policy(style, script),
        played=len({head.task_id for head in heads}),
        only=only,
        max_megabytes=replays.max_bytes / 1e6,
    )
    empty = render(player=_player_json(page, []), shown=0, left_out=len(tasks))
    fitting = _fitting(tasks, replays.max_bytes - len(utf8(empty)))
    html = render(player=_player_json(page, fitting), shown=len(fitting), left_out=len(tasks) - len(fitting))
    if out_path.exists() and b"MemCompiler" not in out_path.read_bytes():
        raise FileExistsError(f"{out_path} was not written by this command: choose another file (--out)")
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out_path) as file:
        file.write(utf8(html))
    return out_path


def _fitting(tasks: Sequence[Sequence[Episode]], budget: int) -> list[Markup]:
    """Write tasks as JSON in order while they fit into `budget` bytes; of the first task, as many deliveries as fit."""
    written: list[Markup] = []
    for episodes in tasks:
        left = list(episodes)
        text = task_json(left)
        while not written and len(text) > budget and len(left) > 1:
            left.pop()
            text = task_json(left)
        if len(text) + 1 > budget:
            break
        written.append(text)
        budget -= len(text) + 1  # and a comma
    return written


def _player_json(page: Mapping[str, Any], tasks: Sequence[Markup]) -> Markup:
    """Write the player's data: the tasks, the deliveries, and the two that are shown side by side at first."""
    main, baseline = page["compared"]
    facts = {
        "live": False,
        "kinds": EMISSION_KINDS,
        "lanes": list(dict.fromkeys((baseline, main))),
        "deliveries": [{"name": name, "label": display_name(name)} for name in page["deliveries"]],
        "families": [{"name": name, "label": family_title(name)} for name in page["families"]],
        "types": list(page["kinds"]),
        "tasks": [],
    }
    head, tail = script_json(facts).rsplit("[]", 1)
    return Markup(f"{head}[{','.join(tasks)}]{tail}")  # all of it is escaped


def _page(results: Mapping[str, Any], plots: Sequence[Path]) -> dict[str, Any]:
    deliveries = ordered(results["results"])
    meta = {k: v for k, v in results.items() if k not in ("results", "paired_difference")}
    return {
        "results": results,
        "deliveries": deliveries,
        "compared": compared(deliveries),
        "families": groups_of(results["results"], "by_family"),
        "kinds": groups_of(results["results"], "by_kind"),
        "budgets": budgets_of(results["results"].values()),
        "informative": table.informative_budgets(results["results"]),
        "broken": [*table.broken_notes(results), *table.memory_notes(results)],
        "facts": {k: short(v) for k, v in meta.items() if isinstance(v, str | int | float) and k != "complete"},
        "meta": json.dumps(meta, indent=2, ensure_ascii=False, default=str),
        "pairs": [{"a": a, "b": b, "all": pair} for a, b, pair in compared_pairs(results)],
        "plots": [_plot(path) for path in plots],
        "memories": results.get("memories"),
    }


def short(value: object) -> str:
    """Format a value: hashes by their first characters, floats with four digits, other values as JSON."""
    if isinstance(value, str):
        return f"{value[:SHORT_HASH]}…" if _HASH.fullmatch(value) else value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _plot(path: Path) -> dict[str, Any]:
    """Embed a figure, scaled so that its text has the size of the page's text."""
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        width, height = (round(pixels * SCREEN_DPI / DPI) for pixels in image.size)
    caption = CAPTIONS.get(path.stem, path.stem.replace("_", " "))
    return {"caption": caption, "data": base64.b64encode(content).decode(), "width": width, "height": height}


def _environment() -> Environment:
    """Create the template environment of reports."""
    environment = templates()
    environment.globals.update(
        display_name=display_name,
        family_title=family_title,
        is_control=is_control,
        broken_episodes=table.broken_episodes,
        p_value=table.p_value,
        emission_kinds=EMISSION_KINDS,
        error_kinds=ERROR_KINDS,
    )
    environment.filters.update(percent=table.percent, milliseconds=table.milliseconds, two_digits=table.two_digits)
    environment.filters["written"] = table.written
    return environment
