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

import numpy as np
from numpy.typing import NDArray

from agent.records import Episode
from configs.evaluation import EvalConfig
from configs.models import ExecutorConfig
from eval.intervals import bootstrap_mean
from eval.metrics import ROLES, joined, paired_difference, split_name, success_by_task
from lm.answer_cache import price

AXIS, NONE = "memory", "none"
PASTED, COMPILED = "static", "compiled"
RESAMPLES = 2_000
Successes = Mapping[str, Mapping[str, Fraction]]  # of each memory: task -> success


def compare_memories(
    results: Mapping[str, Any],
    played: Mapping[str, Sequence[Episode]],
    trained: Mapping[str, str | None],
    configs: Mapping[str, EvalConfig],
) -> dict[str, Any]:
    """Compare the memories of a matrix.

    Args:
        results: `results` of results.json, with `delivery` and `levels` of each name.
        played: episodes by the same names.
        trained: by group, the memory systems that the compiler was trained with; None: none, or not known.
        configs: by group, the settings, whose prices the costs are of.

    Returns:
        `rows` (one for each memory under each condition) and `helps` (one for each condition with two memories or
        more that are played pasted and compiled).
    """
    groups = list(dict.fromkeys(split_name(name)[0] for name in results if AXIS in results[name]["levels"]))
    rows = [{**_row(group, results, played, configs[group]), "trained_with": trained.get(group)} for group in groups]
    return {
        "rows": [row for row in rows if row["memory"] != NONE],
        "helps": [found for condition, some in _by_condition(rows) if (found := _helps(condition, some, played))],
    }


def _row(
    group: str, results: Mapping[str, Any], played: Mapping[str, Sequence[Episode]], config: EvalConfig
) -> dict[str, Any]:
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
        "deliveries": {results[name]["delivery"]: _delivered(results[name], config.executor) for name in names},
        "gain": asdict(paired_difference(played[compiled], played[pasted])) if both else None,
        "writing": {
            results[name]["delivery"]: results[name]["writing"] for name in names if "writing" in results[name]
        },
    }


def _delivered(summary: Mapping[str, Any], executor: ExecutorConfig) -> dict[str, Any]:
    """Return success, and per solved task the tokens and seconds of both models and the price of a closed executor (0
    for a local one); null without a success."""
    cost, used = summary["cost_per_success"], summary["usage"]["executor"]
    if cost is None:
        return {"success": summary["success"], "per_success": None}
    per_success = {what: sum(cost[role][what] for role in ROLES) for what in ("tokens", "seconds")}
    paid = price(executor.api, used["tokens_in"], used["tokens_out"]) if executor.engine == "api" else 0.0
    solved = sum(summary["steps_to_success"]["counts"].values())
    return {"success": summary["success"], "per_success": {**per_success, "price": paid / solved}}


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
    gains = {row["memory"]: row["gain"] for row in rows if row["gain"]}
    most = sorted(gains, key=lambda memory: (-gains[memory]["mean"], memory))
    return {
        "condition": condition,
        "memories": len(of_both),
        "gains": [{"memory": memory, "gain": gains[memory]} for memory in most],
        "by_quality": by_quality(pasted, compiled),
        "by_task": by_task(pasted, compiled),
        "tasks": tasks_of(pasted, compiled),
    }


def tasks_of(pasted: Successes, compiled: Successes) -> list[dict[str, Any]]:
    """Return every task's success by memory, [pasted, compiled]; first the tasks to which compiling adds most."""
    tasks = sorted({task for of in pasted.values() for task in of})
    found = list[dict[str, Any]]()
    for task in tasks:
        both = [memory for memory in pasted if task in pasted[memory] and task in compiled[memory]]
        of = {memory: [float(pasted[memory][task]), float(compiled[memory][task])] for memory in both}
        found.append({"task": task, "of": of})
    return sorted(found, key=lambda each: -sum(after - before for before, after in each["of"].values()))


# does compiling help more where memory is worse? ----------------------------------------------------------------------


def by_quality(pasted: Successes, compiled: Successes) -> dict[str, Any]:
    """Rank memories by pasted success on one half of the tasks, and correlate that with their gains on the other.

    Returns:
        `rank_correlation` of quality and gain (Spearman's, mean over both ways round; negative: compiling helps more
        where memory is worse; null where all are equal), `interval`: its 95 % bootstrap interval over tasks (null
        without one), and `points`: each memory's quality and gain, means of both.
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
    interval = rank_interval(pasted, compiled, halves) if ranks else None
    return {"rank_correlation": fmean(ranks) if ranks else None, "interval": interval, "points": means}


def rank_interval(pasted: Successes, compiled: Successes, halves: Sequence[set[str]]) -> list[float] | None:
    """Resample the tasks of both halves and return the 95 % interval of `by_quality`'s rank correlation.

    Only tasks that every memory played both pasted and compiled count. Resamples in which all memories are equal are
    left out; None where fewer than half of the resamples remain.
    """
    from scipy.stats import rankdata

    shared = set.intersection(*(set(of) for of in (*pasted.values(), *compiled.values())))
    rng, means = np.random.default_rng(0), list[tuple[NDArray[np.float64], NDArray[np.float64]]]()
    for half in halves:
        if not (tasks := sorted(half & shared)):
            return None
        weights = rng.multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=RESAMPLES) / len(tasks)
        before, after = (
            weights @ np.array([[float(of[m][task]) for task in tasks] for m in pasted]).T for of in (pasted, compiled)
        )
        means.append((before, np.round(after - before, 12)))
    found = list[NDArray[np.float64]]()
    for here, there in ((0, 1), (1, 0)):
        quality, gain = (rankdata(each, axis=1) for each in (np.round(means[here][0], 12), means[there][1]))
        x, y = (each - each.mean(1, keepdims=True) for each in (quality, gain))
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append((x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1)))
    both = np.mean(found, axis=0)
    both = both[np.isfinite(both)]
    return [float(end) for end in np.quantile(both, (0.025, 0.975))] if 2 * len(both) >= RESAMPLES else None


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
