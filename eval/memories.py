"""Memory systems of a matrix side by side: what each gives pasted and compiled, what it costs, where compiling helps.

The matrix has an axis `memory`; its level `none` plays the delivery without memory. Its other axes are conditions
(environment, protocol, recall size, ...). Under the same tasks, a memory is the worse the fewer tasks its pasted
entries solve. The gain by compiling is success compiled minus success pasted: pasted success is a part of it, so
chance alone would let the worst memory gain most. Therefore quality and gain are never measured on the same tasks
(`by_quality`) or on the same memory (`by_task`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby
from statistics import fmean
from typing import Any

from agent.records import Episode
from eval.intervals import bootstrap_mean
from eval.metrics import ROLES, joined, paired_difference, split_name, success_by_task

AXIS, NONE = "memory", "none"
PASTED, COMPILED = "static", "compiled"
Successes = Mapping[str, Mapping[str, Fraction]]  # of each memory: task -> success


def compare_memories(
    results: Mapping[str, Any], played: Mapping[str, Sequence[Episode]], trained: Mapping[str, str | None]
) -> dict[str, Any]:
    """Compare the memories of a matrix.

    Args:
        results: `results` of results.json, with `delivery` and `levels` of each name.
        played: episodes by the same names.
        trained: by group, the memory systems that the compiler was trained with; None: none, or not known.

    Returns:
        `rows` (one for each memory under each condition) and `helps` (one for each condition with two memories or
        more that are played pasted and compiled).
    """
    groups = list(dict.fromkeys(split_name(name)[0] for name in results if AXIS in results[name]["levels"]))
    rows = [{**_row(group, results, played), "trained_with": trained.get(group)} for group in groups]
    return {
        "rows": [row for row in rows if row["memory"] != NONE],
        "helps": [found for condition, some in _by_condition(rows) if (found := _helps(condition, some, played))],
    }


def _row(group: str, results: Mapping[str, Any], played: Mapping[str, Sequence[Episode]]) -> dict[str, Any]:
    """Describe one memory under one condition."""
    names = [name for name in results if split_name(name)[0] == group]
    levels = dict(results[names[0]]["levels"])
    memory = levels[AXIS]
    bare = ",".join(f"{axis}={NONE if axis == AXIS else level}" for axis, level in levels.items())
    none = results.get(joined(bare, NONE))
    pasted, compiled = joined(group, PASTED), joined(group, COMPILED)
    both = pasted in results and compiled in results
    return {
        "memory": memory,
        "group": group,
        "condition": ", ".join(f"{axis}={level}" for axis, level in levels.items() if axis != AXIS),
        "none": none and none["success"],
        "deliveries": {results[name]["delivery"]: _delivered(results[name]) for name in names},
        "gain": asdict(paired_difference(played[compiled], played[pasted])) if both else None,
        "writing": {
            results[name]["delivery"]: results[name]["writing"] for name in names if "writing" in results[name]
        },
    }


def _delivered(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return success, and tokens and seconds of both models per solved task (null without a success)."""
    cost = summary["cost_per_success"]
    per_success = {what: sum(cost[role][what] for role in ROLES) for what in ("tokens", "seconds")} if cost else None
    return {"success": summary["success"], "per_success": per_success}


def _by_condition(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    condition = lambda row: row["condition"]
    return [(name, list(some)) for name, some in groupby(sorted(rows, key=condition), key=condition)]


def _helps(
    condition: str, rows: Sequence[Mapping[str, Any]], played: Mapping[str, Sequence[Episode]]
) -> dict[str, Any] | None:
    """Say where compiling helps among the memories of a condition; None with fewer than two."""
    of_both = {row["memory"]: row["group"] for row in rows if row["gain"]}
    if len(of_both) < 2:
        return None
    pasted, compiled = (
        {memory: success_by_task(played[joined(group, delivery)]) for memory, group in of_both.items()}
        for delivery in (PASTED, COMPILED)
    )
    return {
        "condition": condition,
        "memories": len(of_both),
        "by_quality": by_quality(pasted, compiled),
        "by_task": by_task(pasted, compiled),
    }


# does compiling help more where memory is worse? ----------------------------------------------------------------------


def by_quality(pasted: Successes, compiled: Successes) -> dict[str, Any]:
    """Rank memories by pasted success on one half of the tasks, and correlate that with their gains on the other.

    Returns:
        `rank_correlation` of quality and gain (Spearman's, mean over both ways round; negative: compiling helps more
        where memory is worse; null where all are equal), and `points`: each memory's quality and gain, means of both.
    """
    halves = [{task for of in pasted.values() for task in of if _half(task) == half} for half in (0, 1)]
    points, ranks = dict[str, list[tuple[float, float]]](), list[float]()
    for here, there in (halves, halves[::-1]):
        pairs = {
            memory: (_mean(pasted[memory], here), _mean(compiled[memory], there) - _mean(pasted[memory], there))
            for memory in pasted
            if here & pasted[memory].keys() and there & pasted[memory].keys() & compiled[memory].keys()
        }
        for memory, pair in pairs.items():
            points.setdefault(memory, []).append(pair)
        if (found := rank_correlation(list(pairs.values()))) is not None:
            ranks.append(found)
    means = {
        memory: {"quality": fmean(q for q, _ in some), "gain": fmean(g for _, g in some)}
        for memory, some in points.items()
    }
    return {"rank_correlation": fmean(ranks) if ranks else None, "points": means}


def by_task(pasted: Successes, compiled: Successes) -> list[dict[str, Any]]:
    """Return the gain by how many of the *other* memories solve a task when they are pasted: none, some or all.

    Each entry has `others`, `pairs` (a task with a memory) and `gain`, with a bootstrap interval over tasks.
    """
    found: dict[str, dict[str, list[Fraction]]] = {"none": {}, "some": {}, "all": {}}
    for memory, of in pasted.items():
        for task in of.keys() & compiled[memory].keys():
            others = [pasted[other][task] for other in pasted if other != memory and task in pasted[other]]
            if others:
                solved = "all" if min(others) == 1 else "some" if max(others) > 0 else "none"
                found[solved].setdefault(task, []).append(compiled[memory][task] - of[task])
    return [
        {"others": name, "pairs": sum(map(len, tasks.values())), "gain": asdict(bootstrap_mean(_means(tasks)))}
        for name, tasks in found.items()
        if tasks
    ]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Compute Spearman's rank correlation; None for fewer than three pairs, or where one side is constant."""
    from scipy.stats import spearmanr

    if len(pairs) < 3 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    return float(spearmanr(pairs).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def _half(task: str) -> int:
    return hashlib.sha256(task.encode("utf-8", "surrogatepass")).digest()[0] % 2


def _mean(successes: Mapping[str, Fraction], tasks: set[str]) -> float:
    return float(fmean(value for task, value in successes.items() if task in tasks))


def _means(tasks: Mapping[str, Sequence[Fraction]]) -> list[Fraction]:
    return [sum(values, Fraction(0)) / len(values) for values in tasks.values()]
