"""KARMA's Figures 4 to 7.

    python -m benchmarks.karma_figures --out out/karma-figures                            # 4 to 6, on traces
    memcompiler eval -c eval/karma-figure7 --out out/karma-figure7
    python -m benchmarks.karma_figures --out out/karma-figures --run out/karma-figure7    # 7, in living homes

4 compares policies of ten units, 5 and 6 capacities of FIFO and W-TinyLFU, each on four streams over 40 objects, over
five seeds. 7 asks whether the exploration that memory saves rises in line with its hit rate: one point for each
capacity and seed of the run; its last line is Pearson's r.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from benchmarks.hit_rate import DRIFT, Hits, Stream, named, replay, trace
from eval.intervals import bootstrap_mean
from eval.plots import figure_of, quiet, save_figure, titled
from eval.runs import RESULTS, read_results
from eval.table import markdown_table
from memory.karma.settings import KarmaSettings
from runtime.store import to_json, write_atomically

FASTER = 25  # queries for which favourites last, faster than counts age
STREAMS: Mapping[str, tuple[Stream, int]] = {
    "uniform": ("uniform", DRIFT), "skewed": ("skewed", DRIFT), f"drifting every {DRIFT}": ("drifting", DRIFT),
    f"drifting every {FASTER}": ("drifting", FASTER),
}  # fmt: skip
OBJECTS, QUERIES, SEEDS, SHOWN = 40, 20_000, 5, 400  # the last: queries that a figure shows
WINDOWS = (9, 7, 5, 3, 1)  # of Figure 4, of ten units
CAPACITIES = (5, 10, 15, 20, 25)  # of Figures 5 and 6
DELIVERY = "static"  # of Figure 7


def figure_settings(number: int) -> list[KarmaSettings]:
    """Give the memories that a figure of the paper compares (Figure 4 with LRU and TinyLFU's duel beside them)."""
    if number == 4:
        splits = [{"window": window, "victim": victim} for victim in ("pool", "duel") for window in WINDOWS]
        others = [{"policy": "fifo"}, {"policy": "lru"}]
        return [KarmaSettings.model_validate({"capacity": 10, **each}) for each in (*others, *splits)]
    policy = {5: "fifo", 6: "wtinylfu"}[number]
    return [KarmaSettings.model_validate({"policy": policy, "capacity": c}) for c in CAPACITIES]


def measured(number: int, stream: Stream, drift: int, queries: int, seeds: int) -> dict[str, list[Hits]]:
    """Replay a stream of each seed in each memory of a figure."""
    asked = [trace(stream, OBJECTS, queries, seed, drift) for seed in range(seeds)]
    return {named(settings): [replay(each, settings) for each in asked] for settings in figure_settings(number)}


def _table(found: Mapping[str, Sequence[Hits]]) -> list[list[str]]:
    rows = []
    for name, of_seeds in found.items():
        told = [
            bootstrap_mean([getattr(h, of) for h in of_seeds]) for of in ("rate", "without_first_uses", "warmed_up")
        ]
        rows.append([name, *(f"{100 * i.mean:.1f} [{100 * i.low:.1f}, {100 * i.high:.1f}]" for i in told)])
    return rows


def _draw(found: Mapping[str, Mapping[str, Sequence[Hits]]], number: int, path: Path) -> Path:
    """Draw the hit rate so far against the number of queries, means of all seeds, one panel a stream."""
    figure, panels = figure_of((3.6 * len(found), 3.4), 1, len(found), sharey=True)
    for panel, (stream, of_stream) in zip(panels, found.items(), strict=True):
        for name, of_seeds in of_stream.items():
            if "duel" in name:
                continue
            sums = [list(accumulate(h.hit[:SHOWN])) for h in of_seeds]
            ran = [sum(each) / len(each) / n for n, each in enumerate(zip(*sums, strict=True), start=1)]
            [line] = panel.plot(range(1, len(ran) + 1), ran, label=name, linewidth=1.2)
            warm = sum(h.warm for h in of_seeds) / len(of_seeds)
            panel.axvline(min(warm, SHOWN), color=line.get_color(), linewidth=0.5, linestyle=":")
        titled(panel, stream)
        quiet(panel, grid="y")
        panel.set_xlabel("tasks")
    panels[0].set_ylabel("hit rate so far")
    panels[-1].legend(fontsize=6.5, loc="lower right")
    return save_figure(figure, path, f"KARMA Figure {number}, on traces; dotted: warmed up (over 95 % full)")


def on_traces(number: int, out: Path, queries: int, seeds: int) -> None:
    """Make one of Figures 4 to 6: tables, numbers and plot."""
    found = {name: measured(number, *of, queries, seeds) for name, of in STREAMS.items()}
    for stream, of_stream in found.items():
        print(f"\nFigure {number}, {stream}, hit rate in percent (mean of {seeds} seeds, 95 % bootstrap)\n")
        heads = ["memory", "all queries", "without first uses", "after warm-up"]
        print(*markdown_table(heads, _table(of_stream), left=1), sep="\n")
    rates = {s: {name: [h.rate for h in hits] for name, hits in of.items()} for s, of in found.items()}
    write_atomically(out / f"figure{number}.json", to_json(rates))
    print(_draw(found, number, out / f"figure{number}.png"))


# in living homes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    capacity: int
    seed: str
    hit_rate: float
    saved: float  # RE


def points(run: Path) -> list[Point]:
    """Read a run's points. Raises: ValueError, for one that is no matrix over capacities and seeds in living worlds."""
    found = list[Point]()
    for name, cell in read_results(run).get("cells", {}).items():
        levels = cell["levels"]
        of = json.loads((run / cell["path"] / RESULTS).read_text(encoding="utf-8"))["results"].get(DELIVERY, {})
        told = of.get("living", {}).get("summary", {}).get("all", {})
        if not (levels.keys() >= {"capacity", "seed"} and told.get("mhr") and told.get("re")):
            raise ValueError(f"{run}, cell {name}: no hit rate and RE there (memcompiler eval -c eval/karma-figure7)")
        found.append(Point(int(levels["capacity"]), levels["seed"], told["mhr"]["mean"], told["re"]["mean"]))
    if not found:
        raise ValueError(f"{run} is no matrix: memcompiler eval -c eval/karma-figure7")
    return found


def fit(found: Sequence[Point]) -> tuple[float, float, float]:
    """Return Pearson's r, and slope and intercept of the line of least squares."""
    x, y = (np.array(side) for side in zip(*((p.hit_rate, p.saved) for p in found), strict=True))
    slope, intercept = np.polyfit(x, y, 1)
    return float(np.corrcoef(x, y)[0, 1]), float(slope), float(intercept)


def in_homes(run: Path, out: Path) -> None:
    """Make Figure 7."""
    found = points(run)
    r, slope, intercept = fit(found)
    figure, [panel] = figure_of((4.6, 3.6), 1, 1)
    for capacity in sorted({p.capacity for p in found}):
        mine = [p for p in found if p.capacity == capacity]
        label = named(KarmaSettings(capacity=capacity))
        panel.scatter([p.hit_rate for p in mine], [p.saved for p in mine], s=14, label=label)
        hit_rate, saved = (bootstrap_mean(side) for side in ([p.hit_rate for p in mine], [p.saved for p in mine]))
        told = [f"{name} {i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]" for name, i in (("MHR", hit_rate), ("RE", saved))]
        print(f"{label}: {', '.join(told)} ({len(mine)} seeds)")
    ends = np.array([min(p.hit_rate for p in found), max(p.hit_rate for p in found)])
    panel.plot(ends, slope * ends + intercept, linewidth=0.8, color="black")
    titled(panel, f"RE = {intercept:.2f} + {slope:.2f} x hit rate, r = {r:.3f}")
    quiet(panel, grid="y")
    panel.set_xlabel("memory hit rate")
    panel.set_ylabel("exploration saved (RE)")
    panel.legend(fontsize=6.5)
    numbers = {"r": r, "slope": slope, "intercept": intercept, "points": [[p.hit_rate, p.saved] for p in found]}
    write_atomically(out / "figure7.json", to_json(numbers))
    print(save_figure(figure, out / "figure7.png", "KARMA Figure 7: points are capacities and seeds"))
    print(f"RE = {intercept:.3f} + {slope:.3f} x hit rate\nr: {r:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="of eval/karma-figure7: Figure 7 instead of 4 to 6")
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.run is not None:
        in_homes(a.run, a.out)
        return
    for number in (4, 5, 6):
        on_traces(number, a.out, a.queries, a.seeds)


if __name__ == "__main__":
    main()
