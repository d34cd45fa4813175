"""What the evidence router finds in homes that it never saw, and what edges, anchors and each rendering of units are
worth there: template questions about what our own expert did in generated homes of the test split.

    python -m benchmarks.router_transfer --out out/transfer

Packs are filled to equal budgets, and compact (where the pack stops by itself). Differences are paired by question,
their intervals are bootstraps over questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.cases import Case
from data_gen.histories import lived
from data_gen.questions import step_case
from envs.registry import Environments
from eval.intervals import Interval, bootstrap_mean
from eval.table import markdown_table
from memory.s3mem.packing import packed
from memory.s3mem.pool import Asked, Candidate
from memory.s3mem.router import Edges, Router, candidates, scored
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.units import Representation
from runtime.store import to_json, write_atomically
from training.router import NOISE, TASKS, labelled

WORLDS, PER_CATEGORY, BUDGETS = 24, 3, (50, 100, 200, 400)
BM25_ORDER = "BM25's order"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "S3Mem": {}, "w/o edges": {"edges": False}, "w/o anchors": {"anchors": False},
    "order of retrieval": {"router": "retrieval_rank"}, BM25_ORDER: {},
}  # fmt: skip
GROUPS: Mapping[str, tuple[str, ...]] = {
    "count, before, after": ("count", "before", "after"),
    "other multi-hop": ("between", "history", "cause"),
    "step or occurrence": ("step", "nth", "first", "last", "result", "state", "state-before"),
    "where": ("where", "where-first"),
}
TOLD: Mapping[str, tuple[str, ...]] = {  # categories whose answers a unit can say, by what is asked for
    "places and states": ("where", "where-first", "state", "state-before"),
    "actions": ("step", "before", "after", "cause"),
    "feedback": ("result",),
}
Shares = dict[tuple[str, int], list[float]]  # by category of question and budget, in one order


def unseen_cases(worlds: int = WORLDS, seed: int = 0) -> list[Case]:
    """Have the expert live in homes of the test split, and ask about what it did."""
    sequences = f"sequences: {{tasks: R, worlds: {worlds}, length: {TASKS}}}"
    config = load_config(EvalConfig, None, [f"env={{name: household, {sequences}}}"])
    with Environments(config.env) as envs:
        return [step_case(trace, PER_CATEGORY, seed) for trace in lived(envs, "test", NOISE, seed) if trace.records]


def shares(
    cases: Iterable[Case], settings: S3MemSettings, budgets: Sequence[int], router: Router | None = None,
    name: str = "S3Mem",
) -> Shares:  # fmt: skip
    """Return the share of each question's evidence that is packed."""
    found: Shares = {}
    for question, label in (pair for case in cases for pair in labelled(case, settings)):
        asked = label.asked
        nodes, edges = by_words(asked) if name == BM25_ORDER else scored(asked, settings, router)
        for budget in budgets:
            got = {pick.unit.id for pick in packed(asked.anchor, nodes, edges, budget, settings).picks}
            found.setdefault((question.category, budget), []).append(len(got & label.support) / len(label.support))
    return found


def by_words(asked: Asked) -> tuple[list[Candidate], Edges]:
    """Score all units by BM25 alone."""
    found = asked.own / max(float(asked.own.max(initial=0)), 1e-9)
    return candidates(asked, np.flatnonzero(found > 0), found[found > 0], found[found > 0]), {}


def said(cases: Iterable[Case], how: Representation, budget: int, router: Router | None = None) -> Shares:
    """Tell of each question whether a unit that answers it is packed, and says the answer as it is rendered."""
    settings, found = S3MemSettings(fill=True, representation=how), Shares()
    wanted = {category for of in TOLD.values() for category in of}
    for question, label in (pair for case in cases for pair in labelled(case, settings)):
        if question.category in wanted:
            asked = label.asked
            picks = packed(asked.anchor, *scored(asked, settings, router), budget, settings).picks
            texts = (pick.unit.rendered(how) for pick in picks if pick.unit.id in label.support)
            told = any(question.answer.lower() in text.lower() for text in texts)
            found.setdefault((question.category, budget), []).append(float(told))
    return found


def of(found: Shares, categories: Iterable[str], budget: int) -> list[float]:
    return [share for category in categories for share in found.get((category, budget), ())]


def difference(a: Shares, b: Shares, categories: Iterable[str], budget: int) -> Interval:
    """Take the mean of a - b, paired by question."""
    pairs = zip(of(a, names := list(categories), budget), of(b, names, budget), strict=True)
    return bootstrap_mean([x - y for x, y in pairs])


def points(found: Interval, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * found.mean:{sign}.1f} [{100 * found.low:{sign}.1f}, {100 * found.high:{sign}.1f}]"


def table(measured: Mapping[str, Shares], groups: Mapping[str, Sequence[str]], budgets: Sequence[int]) -> str:
    """Write the first one's shares, and what the others differ from it."""
    first, *others = measured
    rows = []
    for group, categories in groups.items():
        for budget in budgets:
            values = of(measured[first], categories, budget)
            gaps = (difference(measured[name], measured[first], categories, budget) for name in others)
            rows.append([group, str(len(values)), str(budget), points(bootstrap_mean(values)),
                         *(points(gap, signed=True) for gap in gaps)])  # fmt: skip
    return "\n".join(markdown_table(["questions", "n", "tokens", first, *others], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worlds", type=int, default=WORLDS)
    options = parser.parse_args()
    cases = unseen_cases(options.worlds)
    told: dict[str, str] = {}
    for title, fill in (("filled", True), ("compact", False)):
        measured = {
            name: shares(cases, S3MemSettings(fill=fill, **switches), BUDGETS, name=name)
            for name, switches in VARIANTS.items()
        }
        everything = {"all": sorted({category for category, _ in measured["S3Mem"]})}
        told[title] = table(measured, {**GROUPS, **everything}, BUDGETS)
        print(f"{title}\n\n{told[title]}\n", flush=True)
    said_of: dict[str, Shares] = {how: said(cases, how, BUDGETS[1]) for how in get_args(Representation)}
    told["representation"] = table(said_of, TOLD, BUDGETS[1:2])
    print(f"answered, by representation\n\n{told['representation']}")
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / "transfer.json", to_json(told, indent=1))


if __name__ == "__main__":
    main()
