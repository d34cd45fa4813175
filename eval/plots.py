"""Figures of results and of training, written as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.metrics import display_name, grouped, groups_of, is_control, ordered, split_name, success_curve
from runtime.checksums import parse_row

SFT_PANELS: Mapping[str, str] = {  # metrics.jsonl key -> panel title, in the order of the paper's Eq. 9
    "loss": "total loss",
    "loss_text": "text: emission",
    "loss_action": "action through the executor",
    "loss_entropy": "entropy of the latent",
    "loss_latent": "latent alignment",
    "loss_orth": "orthogonality",
    "val_loss": "total loss, held-out rows",
    "eval_success": "success, held-out tasks",
}
GRPO_PANELS: Mapping[str, str] = {
    "reward": "success of sampled episodes",
    "zero_variance_fraction": "groups without variance",
    "entropy_text": "entropy of the text, nats/token",
    "sigma": "sigma of the soft tokens",
    "clip_high": "clipped above",
    "mismatch_kl": "engine against trainer, KL",
    "eval_success": "success, held-out tasks",
}
INK, MUTED, GRID, ACCENT, CONTROL = "#1f2933", "#6b7785", "#e3e7eb", "#2f6f8f", "#9aa5b1"
CURVES = ("#6b7785", "#b3362b", "#c08a1e", "#2f77b5", "#7a55b0", "#1b7a4b")
MARKERS = "osD^vPX*h"
DPI = 160
LABEL_CHARACTERS = 36


def deliveries_plot(results: Mapping[str, Any], path: Path) -> Path:
    """Plot success with its 95 % interval by delivery: one panel over all tasks and one per family."""
    deliveries = ordered(results["results"])
    groups = ["", *groups_of(results["results"], "by_family")]
    size = (3.0 + 2.4 * len(groups), 1.25 + 0.34 * len(deliveries))
    figure, panels = figure_of(size, 1, len(groups), sharey=True)
    heights = _heights(deliveries)
    for panel, family in zip(panels, groups, strict=True):
        summaries = [results["results"][delivery] for delivery in deliveries]
        of_family = [summary["by_family"].get(family) if family else summary for summary in summaries]
        _success_panel(panel, deliveries, heights, [entry and entry["success"] for entry in of_family])
        panel.set_title(plain(family_title(family)), loc="left", fontsize=10, color=INK, fontweight="bold", pad=10)
    panels[0].set_yticks(heights, [plain(display_name(delivery)) for delivery in deliveries], fontsize=9)
    panels[0].set_ylim(max(heights) + 0.7, min(heights) - 0.7)
    return save_figure(figure, path, "success, % of episodes (bar: 95 % interval)")


def results_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Plot success by delivery and against steps; return the files."""
    return [deliveries_plot(results, folder / "deliveries.png"), steps_plot(results, folder / "steps.png")]


def steps_plot(results: Mapping[str, Any], path: Path) -> Path:
    """Plot success within 1, 2, ... steps with its 95 % interval: a curve per delivery (controls dashed) with marks at
    the budgets; in a matrix, a panel per group."""
    groups = grouped(ordered(results["results"]), lambda name: split_name(name)[0])
    deliveries = ordered({split_name(name)[1] for name in results["results"]})
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, panels = figure_of((2.6 + 4.4 * columns, 0.6 + 3.2 * rows), rows, columns, sharey=True)
    for panel, (group, names) in zip(panels, groups.items(), strict=False):
        for name in names:
            _success_against_steps(panel, name, deliveries.index(split_name(name)[1]), results["results"][name])
        titled(panel, plain(group))
        panel.set_ylim(-2, 102)
        quiet(panel, grid="y")
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    shown = [lines[label] for name in deliveries if (label := plain(display_name(name))) in lines]
    figure.legend(handles=shown, loc="outside right upper", fontsize=8, frameon=False)
    return save_figure(figure, path, "steps (% of episodes solved within them; band: 95 % interval)")


def _success_against_steps(panel: Axes, name: str, number: int, summary: Mapping[str, Any]) -> None:
    curve, control = success_curve(summary), is_control(name)
    mean, low, high = ([100 * getattr(point, end) for point in curve] for end in ("mean", "low", "high"))
    steps, color = range(len(curve)), CURVES[number % len(CURVES)]
    panel.fill_between(steps, low, high, color=color, alpha=0.06 if control else 0.16, linewidth=0)
    panel.plot(
        steps,
        mean,
        color=color,
        linewidth=1.0 if control else 1.8,
        linestyle="--" if control else "-",
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        markevery=[int(t) for t in summary["success_at"]],
        label=plain(display_name(split_name(name)[1])),
    )


def training_plot(metrics_jsonl_path: Path, path: Path) -> Path:
    """Plot the metrics of SFT by optimiser step or of GRPO by update, a panel each, with moving averages. Raises:
    ValueError, if the file holds neither."""
    rows = read_metrics(metrics_jsonl_path)
    titles = GRPO_PANELS if any("update" in row for row in rows.values()) else SFT_PANELS
    present = [key for key in titles if any(key in row for row in rows.values())]
    if not present:
        raise ValueError(f"{metrics_jsonl_path} holds none of {', '.join(titles)}")
    columns = min(3, len(present))
    lines = -(-len(present) // columns)
    figure, panels = figure_of((0.6 + 3.0 * columns, 0.5 + 2.1 * lines), lines, columns, sharex=True)
    for panel, key in zip(panels, present, strict=False):
        _curve(panel, titles[key], {step: row[key] for step, row in rows.items() if key in row})
    for panel in panels[len(present) :]:
        panel.set_axis_off()
    unit = "update" if titles is GRPO_PANELS else "optimiser step"
    return save_figure(figure, path, f"{unit} (dark line: moving average)")


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of a training run by step (SFT) or update (GRPO). Of repeated rows (after a resume) the last one
    counts; damaged and unrelated lines are skipped."""
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            row = parse_row(line)
            numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
            step = int(numbers.get("step", numbers.get("update", len(rows))))
        except (ValueError, OverflowError, AttributeError):
            continue
        if any(key in row for key in (*SFT_PANELS, *GRPO_PANELS)):
            rows[step] = numbers
    return dict(sorted(rows.items()))


def family_title(family: str) -> str:
    """Return the title of a task family; its name if it is unknown."""
    titles = {
        "": "all tasks",
        "text": "fact in the text",
        "visual": "fact in the picture",
        "remembered": "fact in memory's picture",
    }
    return titles.get(family, family)


def plain(name: str) -> str:
    """Make a name safe for matplotlib: no formula mode, printable characters only, limited length."""
    printable = "".join(c if c.isprintable() else "?" for c in name)
    short = printable if len(printable) <= LABEL_CHARACTERS else printable[: LABEL_CHARACTERS - 1] + "…"
    return short.replace("$", r"\$")


def _heights(deliveries: Sequence[str]) -> list[float]:
    """Return the y positions of deliveries, with gaps before controls and between groups."""
    blocks = [(split_name(delivery)[0], is_control(delivery)) for delivery in deliveries]
    changes = [before != after for before, after in pairwise(blocks)]
    return [i + 0.6 * sum(changes[:i]) for i in range(len(deliveries))]


def _success_panel(
    panel: Axes, deliveries: Sequence[str], heights: Sequence[float], summaries: Sequence[Mapping[str, Any] | None]
) -> None:
    for delivery, y, success in zip(deliveries, heights, summaries, strict=True):
        if success is None:
            continue
        mean, low, high = (100 * success[key] for key in ("mean", "low", "high"))
        dot_with_interval(panel, y, mean=mean, low=low, high=high, color=CONTROL if is_control(delivery) else ACCENT)
        panel.annotate(f"{mean:.1f}", (high, y), (5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    baseline = summaries[deliveries.index("none")] if "none" in deliveries else None
    if baseline is not None:
        panel.axvline(100 * baseline["mean"], color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    panel.set_xlim(0, 116)
    panel.set_xticks([0, 25, 50, 75, 100])
    quiet(panel, grid="x")
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _curve(panel: Axes, title: str, by_step: Mapping[int, float]) -> None:
    steps, values = list(by_step), list(by_step.values())
    reach = len(values) // 20  # a centred window, a tenth of the run: it does not lag behind a falling loss
    smooth = [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
    panel.plot(steps, values, color=ACCENT, linewidth=0.8, alpha=0.3)
    panel.plot(steps, smooth, color=ACCENT, linewidth=1.6)
    titled(panel, title)
    panel.margins(x=0.02)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    quiet(panel, grid="y")


# helpers of all figures ---------------------------------------------------------------------------------------------


def figure_of(size: tuple[float, float], rows: int, columns: int, **shared: bool) -> tuple[Figure, list[Axes]]:
    """Create a figure of `size` inches; return it with its panels row by row."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).ravel())  # type: ignore[arg-type]


def dot_with_interval(
    panel: Axes, y: float, mean: float, low: float | None, high: float | None, color: str = ACCENT
) -> None:
    if low is not None and high is not None:
        panel.plot([low, high], [y, y], color=color, linewidth=5, alpha=0.32, solid_capstyle="butt", zorder=2)
    panel.plot(mean, y, "o", color=color, markersize=6.5, markeredgecolor="white", markeredgewidth=1, zorder=3)


def titled(panel: Axes, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=9.5, color=INK, fontweight="bold")


def quiet(panel: Axes, grid: Literal["x", "y"]) -> None:
    panel.grid(axis=grid, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=MUTED, labelsize=8, length=3, color=GRID)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GRID)
    panel.tick_params(axis="y", labelcolor=INK)


def save_figure(figure: Figure, path: Path, below: str = "") -> Path:
    """Write a PNG with a caption. It holds no dates or versions, so equal numbers give equal bytes."""
    if below:
        figure.supxlabel(below, fontsize=8.5, color=MUTED)
    FigureCanvasAgg(figure)  # pyplot has global state
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})
    return path
