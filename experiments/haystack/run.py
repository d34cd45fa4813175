"""Plot success and executor tokens against the number of memory entries, pasted and compiled.

    python -m experiments.haystack.run --out out/haystack [--pasted-games 35] [--trained MODEL] [a.b=c ...]

plays `eval/alfworld-haystack`, resumes after a kill, prints the table and writes OUT/haystack.png. Prompts with many
pasted entries are slow to read, so pasted memory may play fewer games. With `--trained`, an executor that was trained
to read pasted memory (`experiments/trained_executor`) plays as well; of what is compiled it reads the text, since the
soft tokens were trained through the frozen executor.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.metrics import display_name, split_name
from eval.plots import CURVES, MARKERS, figure_of, plain, quiet, save_figure, titled
from eval.runs import read_results
from eval.table import interval, markdown_table
from experiments.stages import run_once

Curves = dict[str, dict[int, Mapping[str, Any]]]
"""Summaries by what is read and by whom, and by number of entries."""


def curves_of(results: Mapping[str, Any], executor: str = "") -> Curves:
    """Sort the summaries of the matrix by executor's name and delivery, and by number of entries."""
    found: Curves = {}
    for name, summary in results["results"].items():
        group, delivery = split_name(name)
        title = (f"{executor}: " if executor else "") + display_name(delivery)
        found.setdefault(title, {})[int(group.rpartition("=")[2])] = summary
    return {title: dict(sorted(by_size.items())) for title, by_size in found.items()}


def table(curves: Curves) -> list[str]:
    """Format success and tokens a step by delivery and number of entries."""
    rows = [
        [
            title,
            str(entries),
            str(summary["success"]["n"]),
            *(interval(rate) for rate in summary["success_at"].values()),
            f"{summary['executor_tokens_per_step']:.0f}",
        ]
        for title, by_size in curves.items()
        for entries, summary in by_size.items()
    ]
    budgets = next(iter(next(iter(curves.values())).values()))["success_at"]
    return markdown_table(
        ["", "entries", "games", *(f"within {b} steps, %" for b in budgets), "tokens a step"], rows, left=1
    )


def plot(curves: Curves, path: Path) -> None:
    """Plot success within the last budget, with its 95 % interval, and the executor's tokens a step."""
    figure, (success, tokens) = figure_of((8.4, 3.2), 1, 2)
    for i, (title, by_size) in enumerate(curves.items()):
        look: dict[str, Any] = {"color": CURVES[i], "marker": MARKERS[i], "label": plain(title)}
        entries, summaries = list(by_size), by_size.values()
        rates = [list(summary["success_at"].values())[-1] for summary in summaries]
        mean, low, high = ([100 * rate[end] for rate in rates] for end in ("mean", "low", "high"))
        success.fill_between(entries, low, high, color=CURVES[i], alpha=0.16, linewidth=0)
        success.plot(entries, mean, **look)
        tokens.plot(entries, [summary["executor_tokens_per_step"] for summary in summaries], **look)
    for panel, title in ((success, "games solved, %"), (tokens, "executor's tokens a step")):
        panel.set_xscale("log", base=2)
        sizes = sorted({entries for by_size in curves.values() for entries in by_size})
        panel.set_xticks(sizes, [str(entries) for entries in sizes])
        panel.set_ylim(bottom=-2 if panel is success else 0)
        titled(panel, title)
        quiet(panel, grid="y")
    tokens.legend(fontsize=8, frameon=False)
    save_figure(figure, path, "entries in memory (raw trajectories; band: 95 % interval)")


def played(out: Path, runs: Mapping[str, Sequence[str]], executor: str = "") -> Curves:
    """Run each evaluation, given its name and settings, unless it has finished; return the curves of all."""
    curves = Curves()
    for name, settings in runs.items():
        run_once(out, name, "eval", "-c", "eval/alfworld-haystack", *settings, "--out", str(out / name))
        curves |= curves_of(read_results(out / name), executor)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation, such as limit=35")
    parser.add_argument("--out", type=Path, default=Path("out/haystack"))
    parser.add_argument("--pasted-games", type=int, metavar="N", help="games with pasted memory (default: all)")
    parser.add_argument("--trained", metavar="MODEL", help="name or folder of an executor trained on pasted memory")
    a = parser.parse_args()
    pasted = ["deliveries=[static]", *([f"limit={a.pasted_games}"] if a.pasted_games else [])]
    curves = played(a.out, {"pasted": [*a.overrides, *pasted], "compiled": a.overrides})
    if a.trained:
        own = [*a.overrides, f"executor.model={a.trained}"]
        runs = {"trained-pasted": [*own, *pasted], "trained-compiled": [*own, "deliveries=[compiled_text]"]}
        curves |= played(a.out, runs, executor="trained model")
    print(*table(curves), sep="\n")
    plot(curves, a.out / "haystack.png")


if __name__ == "__main__":
    main()
