"""One HTML file per run that opens offline: results with intervals, figures, replays of the same tasks side by side.
eval/compare.py makes the page that sets several runs side by side.

Everything that comes from episodes is data, never markup: Jinja2 escapes it, no value is ever put into a script or a
style, and a content security policy lets only our own script (by its hash) run, whatever a model may have written.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from agent.records import Episode, StepRecord, png_base64, read_episodes
from eval import table
from eval.episodes import read_matrix
from eval.errors import KINDS as ERROR_KINDS
from eval.metrics import (
    EMISSION_KINDS,
    compared_pairs,
    display_name,
    families,
    is_control,
    ordered,
    succeeded,
)  # fmt: skip
from eval.paper.tables import read_results
from eval.plots import DPI, deliveries_plot, family_title, read_metrics, training_plot
from runtime.errors import is_failure

MAX_BYTES = 15_000_000  # a phone opens this; more tasks are left out, and the page says so
TASKS = 12  # replayed tasks, each under every delivery
SHORT_HASH = 12  # characters of a hash that a reader compares
SCREEN_DPI = 96
PICTURE_PIXELS = 256  # longer sides are reduced: rendered benchmarks would fill the page with a few episodes
SIDE_BY_SIDE = ("none", "static", "compiled")  # what a reader sees first
CAPTIONS = {"deliveries": "Success by delivery", "training": "Training losses"}
_TEMPLATES = Path(__file__).parent / "templates"
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

EpisodeSource = Callable[[bool], Iterable[Episode]]  # called with whether pictures are wanted: numbers need none


@dataclass(frozen=True, slots=True)
class Head:
    """What the choice of replays looks at. `seed` tells several episodes of one task apart."""

    delivery: str
    task_id: str
    seed: int
    family: str
    success: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a Brief State line: `change` is "same", "added" or "removed"."""

    change: str
    text: str


@dataclass(frozen=True, slots=True)
class StateLine:
    """One line of the Brief State, e.g. label `know` with its beliefs as pieces. `change` as in Piece."""

    change: str
    label: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Replays:
    """How many tasks a page replays, and how large it may be. `only`: these task ids and no others, in any number."""

    tasks: int = TASKS
    only: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES


REPLAYS = Replays()


@overload
def write_report(results: Path | str, /) -> Path: ...
@overload
def write_report(
    results: Mapping[str, Any],
    episodes: Sequence[Episode],
    out_path: Path,
    plots: Sequence[Path] = (),
    max_bytes: int = MAX_BYTES,
) -> Path: ...
def write_report(
    results: Mapping[str, Any] | Path | str,
    episodes: Sequence[Episode] = (),
    out_path: Path = Path("report.html"),
    plots: Sequence[Path] = (),
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Write the report and return its path: `write_report(run_dir)`, or from results and episodes in hand.

    Args:
        results: the dict of `results.json`, or a run folder (see `write_run_report`).
        episodes: of all deliveries; a few are chosen by rule (see `select`).
        out_path: the HTML file.
        plots: PNG files to embed, in this order.
        max_bytes: the page's size limit; replays are left out until it holds.
    """
    if isinstance(results, Path | str):
        return write_run_report(Path(results))
    return _write(results, lambda pictures: episodes, out_path, plots, Replays(max_bytes=max_bytes))


def write_run_report(run_dir: Path, out_path: Path | None = None, replays: Replays = REPLAYS) -> Path:
    """`report.html` of a run folder, from its `results.json`, `episodes.jsonl` and, if there is one, `metrics.jsonl`.

    Raises:
        FileNotFoundError: when the run's episodes are not there.
        ValueError: when there are no whole results yet (a partial run is not reported as a whole), `episodes.jsonl`
            is damaged, or `replays` names a task that was not played.
    """
    results, source = load_run(run_dir)
    plots = [deliveries_plot(results, run_dir / "plots" / "deliveries.png")]
    metrics_path = run_dir / "metrics.jsonl"
    if metrics_path.exists() and read_metrics(metrics_path):
        plots.append(training_plot(metrics_path, run_dir / "plots" / "training.png"))
    return _write(results, source, out_path or run_dir / "report.html", plots, replays)


def load_run(run_dir: Path) -> tuple[dict[str, Any], EpisodeSource]:
    """A whole run's results and its episodes; of a matrix, those of all cells (see `read_matrix`).

    Raises:
        FileNotFoundError, ValueError: as `write_run_report`.
    """
    results = read_results(run_dir)
    if "cells" in results:
        for cell in results["cells"].values():
            _existing(run_dir / cell["path"] / "episodes.jsonl")
        return results, partial(read_matrix, run_dir, results)
    return results, partial(read_episodes, _existing(run_dir / "episodes.jsonl"))


def _existing(path: Path) -> Path:
    if path.exists():
        return path
    inside = sorted(results.parent.name for results in path.parent.glob("*/results.json"))
    hint = f"; there are runs inside: {', '.join(inside)}" if inside else ""
    raise FileNotFoundError(f"{path} is missing: name a run folder of `memcompiler eval`, which writes it{hint}")


# ---------------------------------------------------------------------------------------------------------------------
# Which episodes are replayed


def select(
    heads: Iterable[Head],
    tasks: int = TASKS,
    columns: Sequence[str] | None = None,
    pair: tuple[str, str] | None = None,
) -> list[list[Head]]:
    """Tasks to replay, each with one episode per delivery: by rule, so that nobody can pick the pretty ones.

    Tasks are sorted into heaps by family and by how the two deliveries of the pair ended. Heaps give one task in turn:
    wins, losses, both failed, both succeeded. Within a heap, tasks that more deliveries played come first, then the
    order of a hash of the task id.

    Args:
        columns: deliveries in the order in which they are shown (default: that of every table).
        pair: whose outcomes sort the tasks (default: see `compared`).
    """
    of_task: dict[str, dict[str, Head]] = defaultdict(dict)
    for head in sorted(heads, key=lambda head: (head.task_id, head.delivery, head.seed)):
        of_task[head.task_id].setdefault(head.delivery, head)
    columns = columns or ordered({delivery for played in of_task.values() for delivery in played})
    pair = pair or (compared(columns) if columns else None)
    heaps: dict[tuple[int, str], list[str]] = defaultdict(list)
    for task, played in of_task.items():
        won, baseline_won = (delivery in played and played[delivery].success for delivery in pair or ())
        turn = {(True, False): 0, (False, True): 1, (False, False): 2, (True, True): 3}[won, baseline_won]
        heaps[turn, next(iter(played.values())).family].append(task)
    piles = [
        sorted(heaps[key], key=lambda task: (-len(of_task[task]), hashlib.sha256(_utf8(task)).digest()))
        for key in sorted(heaps)
    ]
    rounds = max(map(len, piles), default=0)
    turns = [pile[i] for i in range(rounds) for pile in piles if i < len(pile)]
    return [[of_task[task][name] for name in columns if name in of_task[task]] for task in turns[:tasks]]


def compared(deliveries: Sequence[str]) -> tuple[str, str]:
    """The two deliveries whose outcomes sort the replays: `compiled` against `none`, or the last against the first."""
    main = [delivery for delivery in ordered(deliveries) if not is_control(delivery)] or ordered(deliveries)
    return "compiled" if "compiled" in main else main[-1], "none" if "none" in main else main[0]


def head_of(episode: Episode) -> Head:
    return Head(episode.delivery, episode.task_id, episode.seed, episode.family, succeeded(episode))


def named(heads: Sequence[Head], only: Sequence[str]) -> list[Head]:
    """The heads of the tasks that `only` names; all where it names none.

    Raises:
        ValueError: naming the first task that was not played, and ids like it.
    """
    ids = {head.task_id for head in heads}
    for task in only:
        if task not in ids:
            like = difflib.get_close_matches(task, ids, n=3, cutoff=0) or ["none"]
            raise ValueError(f"there is no replay of task {task!r}; ids like it: {', '.join(like)}")
    return [head for head in heads if not only or head.task_id in only]


def load_chosen(source: EpisodeSource, chosen: Sequence[Sequence[Head]]) -> list[list[Episode]]:
    """The chosen episodes, in the chosen order, in one pass over the source."""
    wanted = {(head.delivery, head.task_id, head.seed): None for task in chosen for head in task}
    found: dict[tuple[str, str, int], Episode] = {}
    for episode in source(True):
        key = (episode.delivery, episode.task_id, episode.seed)
        if key in wanted:
            found.setdefault(key, episode)
    return [[found[head.delivery, head.task_id, head.seed] for head in task] for task in chosen]


# ---------------------------------------------------------------------------------------------------------------------
# The page


def _write(
    results: Mapping[str, Any], source: EpisodeSource, out_path: Path, plots: Sequence[Path], replays: Replays
) -> Path:
    heads = [head_of(episode) for episode in source(False)]
    chosen = select(named(heads, replays.only), len(replays.only) or replays.tasks)
    page = {**_page(results, plots), "played": len({head.task_id for head in heads}), "only": replays.only}
    return write_page("report.html.j2", page, load_chosen(source, chosen), out_path, replays.max_bytes)


def write_page(
    template: str, page: Mapping[str, Any], tasks: Sequence[Sequence[Episode]], out_path: Path, max_bytes: int
) -> Path:
    """Render a page with as many of the tasks, in their order, as fit into it.

    Args:
        template: one that extends `base.html.j2`.
        page: what it shows beside the replays.
        tasks: each with its episodes side by side.
    """
    environment = _environment()
    style, script = (_TEMPLATES.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    own = {"style": Markup(style), "script": Markup(script), "policy": _policy(style, script)}
    render = partial(environment.get_template(template).render, **page, **own, max_megabytes=max_bytes / 1e6)
    fitting = _fitting(environment, tasks, max_bytes - len(_utf8(render(tasks=[], left_out=len(tasks)))))
    out_path.parent.mkdir(parents=True, exist_ok=True)
    out_path.write_bytes(_utf8(render(tasks=fitting, left_out=len(tasks) - len(fitting))))
    return out_path


def _fitting(environment: Environment, tasks: Sequence[Sequence[Episode]], budget: int) -> list[Markup]:
    """Rendered tasks, in order, as long as they fit; of the first one at least the deliveries that fit."""
    template, rendered = environment.get_template("task.html.j2"), []
    for number, episodes in enumerate(tasks, start=1):
        html, size = _render_task(template, number, episodes)
        while not rendered and size > budget and len(episodes) > 1:
            episodes = episodes[:-1]
            html, size = _render_task(template, number, episodes)
        if size > budget:
            break
        rendered.append(html)
        budget -= size
    return rendered


def _render_task(template: Any, number: int, episodes: Sequence[Episode]) -> tuple[Markup, int]:
    html = template.render(number=number, task=episodes[0], episodes=[_episode_view(e) for e in episodes])
    return Markup(html), len(_utf8(html))  # our own template's output: its values are escaped already


def _page(results: Mapping[str, Any], plots: Sequence[Path]) -> dict[str, Any]:
    """Everything that the page shows beside the replays."""
    deliveries = ordered(results["results"])
    shown = sorted(deliveries, key=lambda name: name not in SIDE_BY_SIDE)[: len(SIDE_BY_SIDE)]
    meta = {k: v for k, v in results.items() if k not in ("results", "paired_difference")}
    return {
        "results": results,
        "deliveries": deliveries,
        "compared": compared(deliveries),
        "shown": shown,
        "families": families(results),
        "kinds": sorted({kind for summary in results["results"].values() for kind in summary["by_kind"]}),
        "facts": {k: short(v) for k, v in meta.items() if isinstance(v, str | int | float) and k != "complete"},
        "meta": json.dumps(meta, indent=2, ensure_ascii=False, default=str),
        "pairs": _pairs(results),
        "plots": [_plot(path) for path in plots],
    }


def short(value: object) -> str:
    """A value as a reader takes it in: hashes by their first characters, floats in four digits, the rest as JSON."""
    if isinstance(value, str):
        return f"{value[:SHORT_HASH]}…" if _HASH.fullmatch(value) else value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _pairs(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Paired differences for the table of differences."""
    return [{"a": a, "b": b, "all": pair} for a, b, pair in compared_pairs(results)]


def _plot(path: Path) -> dict[str, Any]:
    """A figure at the size at which its text is as large as the page's."""
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        width, height = (round(pixels * SCREEN_DPI / DPI) for pixels in image.size)
    data = base64.b64encode(content).decode("ascii")
    caption = CAPTIONS.get(path.stem, path.stem.replace("_", " "))
    return {"caption": caption, "data": data, "width": width, "height": height}


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, and of what is in the page only our own style and script take effect."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _environment() -> Environment:
    """Autoescape for every template: jinja2's own rule goes by the file name and would leave `.j2` unescaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        display_name=display_name,
        family_title=family_title,
        is_control=is_control,
        points=table.points,
        broken_episodes=table.broken_episodes,
        emission_kinds=EMISSION_KINDS,
        error_kinds=ERROR_KINDS,
    )
    environment.filters.update(percent=table.percent, milliseconds=table.milliseconds)
    return environment


def _utf8(text: str) -> bytes:
    """Model output may hold lone surrogates, which UTF-8 cannot; they are shown as their escapes."""
    return text.encode("utf-8", errors="backslashreplace")


# ---------------------------------------------------------------------------------------------------------------------
# What the templates see of an episode


def _episode_view(episode: Episode) -> dict[str, Any]:
    return {
        "episode": episode,
        "outcome": outcome(episode),
        "steps": list(_step_views(episode.steps)),
        "kinds": [kind for kind in EMISSION_KINDS if any(step.emission_kind == kind for step in episode.steps)],
        "parse_errors": sum(step.parse_error is not None for step in episode.steps),
    }


def outcome(episode: Episode) -> str:
    """ "broken" (a failure of our own machinery), "success" or "failure"."""
    if is_failure(episode.stop_reason):
        return "broken"
    return "success" if succeeded(episode) else "failure"


def _step_views(steps: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    answer, compiles = None, any(step.emission_kind for step in steps)
    for step in steps:
        # A step on which the episode broke has no state after it: that is not a state from which all was removed.
        state = diff_state(step.brief_before, step.brief_after or step.brief_before)
        yield {
            "step": step,
            "picture": _picture(step.image),
            "state": state if compiles else [],  # without a compiler it is the goal and nothing more, at every step
            "changed": any(piece.change != "same" for line in state for piece in line.pieces),
            "seen_before": step.observation == answer,  # the last feedback, word for word
        }
        answer = step.feedback


def diff_state(before: str, after: str) -> list[StateLine]:
    """What an emission changed in the Brief State. Lines are matched by their label, then compared item by item."""
    old, new = ([_split_line(line) for line in text.splitlines()] for text in (before, after))
    matcher = difflib.SequenceMatcher(a=[line[0] for line in old], b=[line[0] for line in new], autojunk=False)
    lines: list[StateLine] = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(old[i:j], new[k:m], strict=True)
            lines += [StateLine("same", label, _diff_items(was, now)) for (label, was), (_, now) in pairs]
            continue
        lines += [StateLine("removed", label, (Piece("removed", " ; ".join(was)),)) for label, was in old[i:j]]
        lines += [StateLine("added", label, (Piece("added", " ; ".join(now)),)) for label, now in new[k:m]]
    return lines


def _split_line(line: str) -> tuple[str, list[str]]:
    """`know: a = 1 ; b = 2` -> ("know", ["a = 1", "b = 2"])"""
    label, mark, body = line.partition(": ")
    return (label, body.split(" ; ")) if mark else ("", [line])


def _diff_items(was: Sequence[str], now: Sequence[str]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(a=was, b=now, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(Piece("same", " ; ".join(was[i:j])))
            continue
        pieces += [Piece("removed", " ; ".join(was[i:j]))] if i < j else []
        pieces += [Piece("added", " ; ".join(now[k:m]))] if k < m else []
    return tuple(pieces)


def _picture(image: Image.Image | None) -> dict[str, Any] | None:
    if image is None:
        return None
    if max(image.size) > PICTURE_PIXELS or image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    return {"data": png_base64(image), "width": image.width, "height": image.height}
